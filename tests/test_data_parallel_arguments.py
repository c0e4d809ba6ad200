"""Owns the tests of DataParallel's arguments: each fails when its argument is ignored."""

import functools
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from conftest import Transport
from models import Scalar, Scalars, TwoHeads, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_reduced,
    assert_same_on_all_ranks,
    draw,
    expect_error,
    gradients,
)


def loss_of(module: nn.Module, rank: int, step: int, width: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


class Counting(nn.Module):
    """Records its buffer as each forward finds it, and then counts by the rank."""

    count: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.tensor(float(rank)))
        self.register_buffer("table", torch.arange(3) + rank)
        self.step = rank + 1
        self.found: list[float] = []

    def forward(self, x: float) -> Tensor:
        self.found.append(float(self.count))
        self.count += self.step
        return self.weight * x


def watch_buffers(rank: int, world_size: int, options: dict[str, Any]) -> list[list[float]]:
    """What the forwards found, and the integer buffer after construction."""
    module = Counting(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates broadcast_buffers
        model = DataParallel(module, **options)
    table = module.get_buffer("table").tolist()
    for _ in range(3):
        model(2.0).backward()
    model.eval()
    with torch.no_grad():
        model(2.0)  # buffers follow the synchronised forward before this one
        model(2.0)  # and no other
    return [module.found, table]


@pytest.mark.parametrize(
    "options", [{}, {"forward_sync_buffers": True}, {"broadcast_buffers": True}]
)
def test_buffers_follow_rank_0(transport: Transport, options: dict[str, Any]) -> None:
    """Buffers start as rank 0's, and before a forward after a synchronised one, evaluation
    included, become rank 0's again; after a forward without gradients they do not."""
    first, second = transport.pool(2).run(watch_buffers, options)
    assert first == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert second == [[0, 1, 2, 3, 5], [0, 1, 2]]


def test_c49_buffers_may_stay_local(transport: Transport) -> None:
    """With either argument False the first forward finds rank 0's buffers, for they are sent once
    at the start nonetheless, and later forwards find each rank's own."""
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        first, second = transport.pool(2).run(watch_buffers, {name: False})
        assert first == [[0, 1, 2, 3, 4], [0, 1, 2]]
        assert second == [[0, 2, 4, 6, 8], [0, 1, 2]]


def start_apart(rank: int, world_size: int, init_sync: bool) -> None:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100), nn.Linear(100, 3).double())
    own = [parameter.detach().clone() for parameter in module.parameters()]
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100), nn.Linear(100, 3).double())
    model = DataParallel(module, init_sync=init_sync)
    wanted = list(first.parameters()) if init_sync else own
    for found, value in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("init_sync", [True, False])
def test_init_sync(transport: Transport, init_sync: bool) -> None:
    """Ranks that were built from different seeds start from rank 0's parameters, unless told not
    to."""
    transport.pool(2).run(start_apart, init_sync)


def rename_on_rank_1(rank: int, world_size: int) -> None:
    module = Scalars("a" if rank == 0 else "b")
    model = DataParallel(module, init_sync=False)
    model({"a" if rank == 0 else "b": 1.0 + rank}).backward()
    assert [float(g) for g in gradients(model) if g is not None] == [1.5]


def test_init_sync_false_skips_verification(transport: Transport) -> None:
    """Parameters of other names are an error at wrap time, but not with init_sync=False, with
    which the user has taken over."""
    transport.pool(2).run(rename_on_rank_1)


def loss_on_next_rank(module: nn.Module, rank: int, step: int) -> Tensor:
    return loss_of(module, rank + 1, step, 8)


def train_in_subgroup(rank: int, world_size: int) -> None:
    group = dist.new_group([1, 2])
    torch.manual_seed(rank)
    module = mlp(8, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1 * (rank + 1))
    if rank == 0:
        loss_of(module, 0, 0, 8).backward()
    else:
        model = DataParallel(module, process_group=group)
        assert all(bool((parameter == 0.1 * 2).all()) for parameter in module.parameters())
        expected = OneProcess(module, 2)
        for step in range(3):
            model.zero_grad()
            expected.zero_grad()
            loss_of(model, rank, step, 8).backward()
            expected.backward(loss_on_next_rank, step)
            assert_gradients_match(model, expected.module)
            assert_same_on_all_ranks(gradients(model), group)
        assert model.process_group is group
    dist.barrier()


def test_c77_a_subgroup(transport: Transport) -> None:
    """A wrapper on the group of global ranks 1 and 2: parameters come from global rank 1, the
    divisor is 2, and rank 0 trains alone meanwhile."""
    transport.pool(3).run(train_in_subgroup)


def train_in_two_groups(rank: int, world_size: int) -> None:
    """Each half of the model is averaged over another group."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    modules = [Scalar(), Scalar()]
    wrapped = {
        index: DataParallel(modules[index], process_group=pair)
        for index, pair in enumerate(pairs)
        if rank in (index, index + 1)
    }
    for _ in range(2):
        total = torch.zeros(())
        for model in wrapped.values():
            model.zero_grad()
            total = total + model(float(rank))
        total.backward()
    for index in wrapped:
        assert float(modules[index].weight.grad or 0) == index + 0.5


def test_c77_two_groups_in_one_process(transport: Transport) -> None:
    """Two wrappers with overlapping groups in one backward: each gets the mean of its own ranks."""
    transport.pool(3).run(train_in_two_groups)


def count_buckets(rank: int, world_size: int, cap_mb: float | None) -> int:
    model = DataParallel(mlp(32, 20), bucket_cap_mb=cap_mb)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step, 32).backward()
    return int(model.report().num_buckets)


def test_bucket_cap_mb(transport: Transport) -> None:
    """84 kB of small gradients travel in one bucket, or with a smaller cap in several."""
    pool = transport.pool(2)
    found = [pool.run(count_buckets, cap)[0] for cap in (25, 0.03, 0.005)]
    assert found[0] == 1
    assert 3 <= found[1] < found[2] <= 40


def storages(rank: int, world_size: int, as_view: bool, width: int) -> tuple[int, int]:
    """The number of gradients and of different storages under them, in later steps."""
    module = mlp(width, 3)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step, set_to_none in enumerate([True, True, False, False, True, True]):
        optimizer.zero_grad(set_to_none=set_to_none)
        expected.zero_grad()
        loss_of(model, rank, step, width).backward()
        expected.backward(loss_of, step, width)
        assert_reduced(model, expected)
        optimizer.step()
    found = [gradient for gradient in gradients(model) if gradient is not None]
    return len(found), len({gradient.untyped_storage().data_ptr() for gradient in found})


@pytest.mark.parametrize("width", [8, 192])
def test_gradient_as_bucket_view(transport: Transport, width: int) -> None:
    """With it gradients are parts of shared buckets, without it each has memory of its own; the
    values are the same either way."""
    pool = transport.pool(2)
    for num_gradients, num_storages in pool.run(storages, True, width):
        assert num_storages < num_gradients
    for num_gradients, num_storages in pool.run(storages, False, width):
        assert num_storages == num_gradients


def warn_of_check_reduction(rank: int, world_size: int, value: bool) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataParallel(Scalar(), check_reduction=value)
    return sum(
        warning.category is FutureWarning and "check_reduction" in str(warning.message)
        for warning in caught
    )


def test_check_reduction_warns(transport: Transport) -> None:
    """The argument does nothing and says so, as torch's does."""
    assert transport.pool(2).run(warn_of_check_reduction, True) == [1, 1]
    assert transport.pool(2).run(warn_of_check_reduction, False) == [0, 0]


def use_static_graph(rank: int, world_size: int, change: bool) -> list[str]:
    model = DataParallel(Scalars("abc"), static_graph=True)
    assert model.static_graph is True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            model.zero_grad()
            model({"a": 1.0 + rank, **({"b": 2.0} if change and step == 3 else {})}).backward()
            assert float(model.module.a.weight.grad) == 1.5
        model({"a": 1.0}).backward()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_static_graph(transport: Transport) -> None:
    """A static graph may leave parameters unused without a warning; a set of used ones that
    changes after all is right, but warned of."""
    pool = transport.pool(2)
    assert pool.run(use_static_graph, False) == [[], []]
    for messages in pool.run(use_static_graph, True):
        assert len(messages) == 1
        assert "static_graph" in messages[0]


def read_attributes(rank: int, world_size: int) -> None:
    model = DataParallel(TwoHeads(), dim=1)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert model.dim == 1
    assert model.device_ids is None
    assert model.output_device is None
    assert DataParallel(TwoHeads()).dim == 0
    refused: list[dict[str, Any]] = [{"device_ids": [0]}, {"output_device": 1}]
    for options in refused:
        error = expect_error(Exception, functools.partial(DataParallel, TwoHeads(), **options))
        assert isinstance(error, (ValueError, NotImplementedError))
        assert "device_ids" in str(error)


def test_device_arguments(transport: Transport) -> None:
    """On the CPU device ids are refused, as torch refuses them, and dim is only remembered."""
    transport.pool(2).run(read_attributes)


def test_signature_is_torchs() -> None:
    """The arguments of torch's class, in its order and with its defaults, come first."""
    ours = list(inspect.signature(pydist.DataParallel.__init__).parameters.values())
    torchs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters.values()
    for mine, wanted in zip(ours, torchs, strict=False):
        assert (mine.name, mine.default) == (wanted.name, wanted.default)
    assert len(ours) >= len(torchs)
    assert all(mine.kind is inspect.Parameter.KEYWORD_ONLY for mine in ours[len(torchs) :])
