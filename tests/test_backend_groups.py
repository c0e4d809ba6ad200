"""Owns the groups of the backend "pydist": works and futures, subgroups, counters, lifetimes."""

import gc
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from pydist import _C
from ranks import fresh_ranks, get_pool, resource_snapshot


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return get_pool(world_size, backend="pydist").run(function, *args)


def backend_of(group: dist.ProcessGroup | None = None) -> _C.Backend:
    group = group or dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, _C.Backend)
    return backend


# -- works and futures -----------------------------------------------------------------------------


def futures(rank: int, world_size: int) -> None:
    tensor = torch.full((3,), rank + 1.0)
    total = sum(range(1, world_size + 1))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.wait()[0] is not None
    assert torch.equal(future.value()[0], torch.full((3,), float(total)))
    assert future.value()[0].data_ptr() == tensor.data_ptr()
    outputs = [torch.empty(2) for _ in range(world_size)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    work.wait()
    assert work.get_future().done()
    assert [row.tolist() for row in work.get_future().value()] == [
        [r] * 2 for r in range(world_size)
    ]
    assert [row.tolist() for row in work.result()] == [[r] * 2 for r in range(world_size)]
    # A callback may itself start an operation and wait for it.
    tensor, other = torch.ones(2), torch.ones(2)

    def then(future: Any) -> Tensor:
        inner = dist.all_reduce(other, async_op=True).get_future().wait()[0]
        return future.value()[0] + inner

    chained = dist.all_reduce(tensor, async_op=True).get_future().then(then)
    assert chained.wait().tolist() == [2.0 * world_size] * 2
    # What is dropped without a wait still happens, in order.
    late = torch.ones(100_000)
    dist.all_reduce(late, async_op=True)
    dist.barrier()
    assert late.eq(world_size).all()


def test_futures() -> None:
    run(3, futures)


def sequence_numbers(rank: int, world_size: int) -> None:
    backend = backend_of()
    backend._set_sequence_number_for_group()
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 2


def test_sequence_numbers() -> None:
    run(2, sequence_numbers)


# -- groups ----------------------------------------------------------------------------------------


def subgroups(rank: int, world_size: int) -> None:
    for _ in range(2):  # names come again
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 1])]
        for pair in pairs:
            if pair is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=pair)
            assert tensor.item() == sum(dist.get_process_group_ranks(pair))
            root = dist.get_process_group_ranks(pair)[1]
            dist.broadcast(tensor.fill_(rank), root, group=pair)
            assert tensor.item() == root
        for pair in pairs:
            if pair is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(pair)
    local = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier(group=local)
    assert backend_of(local).size() == 1


def test_subgroups() -> None:
    run(3, subgroups)


def split(rank: int, world_size: int) -> None:
    backend = backend_of()
    assert backend.supports_splitting
    part = [0, 2] if rank != 1 else [1]
    group = dist.group.WORLD
    assert group is not None
    half = group.split_group(part, timedelta(seconds=20), None, f"part of {part}", "a part")
    assert half.size() == len(part)
    tensor = torch.tensor([float(rank)])
    half.allreduce([tensor]).wait()
    assert tensor.item() == sum(part)


def test_split() -> None:
    run(3, split)


def timeouts_of_groups(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=17))
    assert backend_of(group).options._timeout == timedelta(seconds=17)
    backend_of(group).set_timeout(timedelta(seconds=3))
    assert backend_of(group).options._timeout == timedelta(seconds=3)


def test_timeouts_of_groups() -> None:
    run(2, timeouts_of_groups)


def lifetime(rank: int, world_size: int) -> None:
    def live() -> None:
        group = dist.new_group()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
        dist.irecv(torch.empty(3), (rank + 1) % world_size, group=group, tag=5)
        dist.send(torch.ones(3), (rank + 1) % world_size, group=group, tag=5)
        dist.barrier(group=group)
        reference = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert reference() is None

    def resources() -> dict[str, int]:
        time.sleep(1.2)  # the threads of callbacks have left by then
        found = resource_snapshot(rank, world_size)
        del found["resident_nbytes"]
        return found

    live()
    dist.barrier()
    before = resources()
    for _ in range(3):
        live()
    dist.barrier()
    assert resources() == before


def test_a_destroyed_group_leaves_nothing() -> None:
    run(2, lifetime)


def restart(rank: int, world_size: int) -> None:
    backend = backend_of()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    del backend
    for _ in range(2):
        dist.init_process_group("cpu:pydist", store=store, rank=rank, world_size=world_size)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world_size
        dist.destroy_process_group()


def test_groups_can_be_made_again() -> None:
    outcomes = fresh_ranks(2, restart, backend="pydist")
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]


# -- counters --------------------------------------------------------------------------------------


def counters(rank: int, world_size: int) -> None:
    pg = dist.new_group()
    backend = backend_of(pg)
    assert not any(count["calls"] for count in backend.counts().values())

    def counted(name: str, nbytes: int, call: Callable[[], Any], calls: int = 1) -> None:
        before = backend.counts()
        call()
        after = backend.counts()
        found = {
            key: {what: after[key][what] - before[key][what] for what in after[key]}
            for key in after
            if after[key] != before[key]
        }
        assert found == {name: {"calls": calls, "nbytes": nbytes}}

    small, parts = torch.ones(10), list(torch.ones(world_size, 10).unbind())
    whole = torch.ones(world_size * 10)
    is_root = rank == 0
    counted("all_reduce", 40, lambda: dist.all_reduce(small, group=pg))
    counted("all_reduce", 80, lambda: pg.allreduce_coalesced([small, small]).wait(), 2)
    counted("reduce", 40, lambda: dist.reduce(small, 0, group=pg))
    counted("broadcast", 40, lambda: dist.broadcast(small, 0, group=pg))
    counted("all_gather", 40, lambda: dist.all_gather(parts, small, group=pg))
    counted("all_gather", 40, lambda: dist.all_gather_into_tensor(whole, small, group=pg))
    counted("gather", 40, lambda: dist.gather(small, parts if is_root else None, group=pg))
    counted(
        "scatter",
        40 * world_size if is_root else 0,
        lambda: dist.scatter(small, parts if is_root else None, group=pg),
    )
    sent = 40 * world_size
    counted("reduce_scatter", sent, lambda: dist.reduce_scatter(small, parts, group=pg))
    counted("reduce_scatter", sent, lambda: dist.reduce_scatter_tensor(small, whole, group=pg))
    counted("all_to_all", sent, lambda: dist.all_to_all_single(whole, whole + 1, group=pg))
    counted("barrier", 0, lambda: dist.barrier(group=pg))
    if is_root:
        counted("send", 40, lambda: dist.send(small, 1, group=pg))
    elif rank == 1:
        counted("recv", 40, lambda: dist.recv(small, 0, group=pg))


def test_counters() -> None:
    run(3, counters)


# -- what else uses such groups --------------------------------------------------------------------


def nothing_of_gloo(rank: int, world_size: int) -> None:
    model = pydist.DataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(3, 4)).sum().backward()
    pydist.all_reduce(torch.ones(3))
    groups = [dist.group.WORLD, dist.new_group()]
    assert [group._get_backend(torch.device("cpu")).name() for group in groups if group] == [
        "pydist",
        "pydist",
    ]
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, dist.ProcessGroupGloo)]


def test_no_gloo_group_on_one_host() -> None:
    run(2, nothing_of_gloo)


@pytest.mark.parametrize("level", ["DETAIL"])
def test_debug_level(level: str) -> None:
    """torch wraps the backend there, in one that checks what ranks call."""
    pool = get_pool(2, backend="pydist", TORCH_DISTRIBUTED_DEBUG=level)
    pool.run(wrapped)


def wrapped(rank: int, world_size: int) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world_size).all()
