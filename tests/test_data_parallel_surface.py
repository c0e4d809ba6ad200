"""Owns the tests of the private names that torch itself, Lightning and Accelerate use."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation, _find_tensors

from conftest import Transport
from models import TwoLayers
from pydist import DataParallel
from ranks import RankPool
from reference import OneProcess, assert_gradients_match, assert_reduced, draw


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(draw(rank, step, 4, 8)).square().sum()  # type: ignore[no-any-return]


def small_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def run_prepare_for_backward(rank: int, world_size: int, outputs: str) -> None:
    module = small_model()
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(3):
        with model.no_sync():
            loss = loss_of(model, rank, step)
        model.reducer.prepare_for_backward(list(_find_tensors(loss)) if outputs == "found" else [])
        loss.backward()
        expected.backward(loss_of, step)
        assert_reduced(model, expected)
    # It is said for one backward only.
    with model.no_sync():
        loss_of(model, rank, 3).backward()
    expected.backward(loss_of, 3, synced=False)
    loss_of(model, rank, 4).backward()
    expected.backward(loss_of, 4)
    assert_reduced(model, expected)


@pytest.mark.parametrize("outputs", ["found", "none"])
def test_prepare_for_backward(transport: Transport, outputs: str) -> None:
    """Lightning, Accelerate and torch's pipeline stages run forwards under no_sync, and say before
    the last backward that it is to be a round; without find_unused_parameters they give no
    outputs."""
    transport.pool(2).run(run_prepare_for_backward, outputs)


class Statistics(nn.Module):
    """Counts its forwards in a buffer, starting from the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.tensor([float(rank)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(self.norm(x))  # type: ignore[no-any-return]


def sum_counts(model: DataParallel, buffers: dict[str, torch.Tensor]) -> list[Any]:
    """A buffer hook: the sum of all ranks' counts, asynchronously."""
    assert set(buffers) == {name for name, _ in model.module.named_buffers()}
    work = dist.all_reduce(buffers["count"], group=model.process_group, async_op=True)
    assert work is not None
    return [work.get_future()]


def sum_counts_now(model: DataParallel, buffers: dict[str, torch.Tensor]) -> None:
    for future in sum_counts(model, buffers):
        future.wait()


def run_buffer_hook(rank: int, world_size: int, location: str) -> list[float]:
    torch.manual_seed(1)
    model = DataParallel(Statistics(rank))
    hook = sum_counts if location == "POST_FORWARD" else sum_counts_now
    model._register_buffer_comm_hook(model, hook, _BufferCommHookLocation[location])
    counts = []
    for step in range(3):
        loss_of(model, rank, step).backward()
        counts.append(model.module.count.item())  # the future is complete by now
    with model.no_sync():
        loss_of(model, rank, 3).backward()  # the forward follows one that was synchronised
        if location == "PRE_FORWARD":
            counts.append(model.module.count.item())
            loss_of(model, rank, 4).backward()  # and this one does not
            counts.append(model.module.count.item())
    return counts


# All ranks start with the first rank's count, 0. Before: double, then add one; after: reversed.
COUNTS = {"PRE_FORWARD": [1, 3, 7, 15, 16], "POST_FORWARD": [2, 6, 14]}


@pytest.mark.parametrize("location", list(COUNTS))
def test_buffer_hooks(pool2: RankPool, location: str) -> None:
    """A buffer hook takes the place of the broadcast, before or after the forwards that torch's
    class would broadcast at; backward ends when the hook's futures are complete."""
    for counts in pool2.run(run_buffer_hook, location):
        assert counts == COUNTS[location]


def failing_hook(state: Any, buffers: dict[str, torch.Tensor]) -> list[Any]:
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("the buffers were lost"))
    return [future]


def run_failing_buffer_hook(rank: int, world_size: int) -> None:
    model = DataParallel(Statistics(rank))
    model._register_buffer_comm_hook(None, failing_hook)
    loss = loss_of(model, rank, 0)
    with pytest.raises(ValueError, match="the buffers were lost"):
        loss.backward()


def test_a_failing_buffer_hook(pool2: RankPool) -> None:
    """What a buffer hook's future raises is raised by backward."""
    pool2.run(run_failing_buffer_hook)


def run_names(rank: int, world_size: int) -> None:
    module = Statistics(rank)
    model = DataParallel(module, bucket_cap_mb=2)
    assert model._distributed_rank == rank
    assert model.bucket_bytes_cap == 2 << 20
    assert list(model.named_module_buffers) == [name for name, _ in module.named_buffers()]
    assert [id(b) for b in model.modules_buffers] == [id(b) for b in module.buffers()]
    parameters, sparse = model._build_params_for_reducer()
    assert [id(p) for p in parameters] == [id(p) for p in module.parameters()]
    assert sparse == [False] * 4
    assert len(list(DataParallel._get_data_parallel_params(model))) == 4
    buffer = torch.tensor([float(rank + 1)])
    model._default_broadcast_coalesced([buffer], model.broadcast_bucket_size, world_size - 1)
    assert buffer.item() == world_size
    (inputs,), (kwargs,) = model.to_kwargs((torch.ones(2),), {"k": 1}, 0)
    assert inputs[0].tolist() == [1, 1]
    assert kwargs == {"k": 1}
    model._check_reducer_finalized()
    finalized: list[str] = []

    def check(_: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="not through with averaging") as found:
            model._check_reducer_finalized()
        finalized.append(str(found.value))

    module.layer.bias.register_hook(check)
    loss_of(model, rank, 0).backward()
    assert len(finalized) == 1
    model._check_reducer_finalized()


def test_names(pool2: RankPool) -> None:
    """Names that torch's class has and that others look at."""
    pool2.run(run_names)


def run_static_graph(rank: int, world_size: int) -> None:
    model = DataParallel(TwoLayers(8), find_unused_parameters=True)
    assert model.reducer._ddp_graph_static()
    with pytest.warns(UserWarning, match="find_unused_parameters"):
        model._set_static_graph()
    assert model.static_graph
    with pytest.warns(UserWarning, match="no need to set it again"):
        model._set_static_graph()
    model = DataParallel(small_model())
    loss_of(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match="before training loop starts"):
        model._set_static_graph()
    assert not model.static_graph


def test_set_static_graph(pool2: RankPool) -> None:
    """_set_static_graph() is the argument static_graph, and comes too late after a backward."""
    pool2.run(run_static_graph)


def run_update_process_group(rank: int, world_size: int) -> None:
    module = small_model()
    model = DataParallel(module)
    loss_of(model, rank, 0).backward()
    pair = dist.new_group([0, 1])
    model._update_process_group(pair)
    expected = OneProcess(module, 2)
    model.zero_grad()
    if rank == 2:
        assert model.process_group == dist.group.WORLD
        return
    assert model.process_group == pair
    for step in range(2):
        loss_of(model, rank, step).backward()
        expected.backward(loss_of, step)
        assert_gradients_match(model, expected.module)
    replica = weakref.ref(model)
    del model
    gc.collect()
    assert replica() is None


def test_update_process_group(transport: Transport) -> None:
    """A smaller group goes on with the same model; the rank that is left out keeps its wrapper."""
    transport.pool(3).run(run_update_process_group)
