"""Owns reduce, gather and scatter, bitwise reductions, counts and the monitored barrier."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pydist
from conftest import Transport
from pydist.collectives import group_engine
from test_collectives_messages import DTYPES, numbered

SHARED = Transport("shared_memory")
BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def move_with_roots(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for size in (0, 1, 1000, 150_001):
            for root in {0, world_size - 1}:
                for async_op in (False, True):
                    gather_and_scatter(rank, world_size, root, dtype, size, async_op)


def gather_and_scatter(
    rank: int, world_size: int, root: int, dtype: torch.dtype, size: int, async_op: bool
) -> None:
    parts = [numbered(size, dtype, r) for r in range(world_size)]
    found = [torch.zeros(size, dtype=dtype) for _ in parts] if rank == root else None
    work = pydist.gather(parts[rank], found, root, async_op=async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    for tensor, part in zip(found or [], parts, strict=rank == root):
        assert torch.equal(tensor, part)
    mine = torch.zeros(size, dtype=dtype)
    work = pydist.scatter(mine, parts if rank == root else None, root, async_op=async_op)
    if work is not None:
        work.wait()
    assert torch.equal(mine, parts[rank])


@pytest.mark.parametrize("world_size", [1, 3])
def test_gather_and_scatter(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(move_with_roots)


def reduce_everything(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for size in (0, 1, 1000, 150_001):
            for root in range(world_size):
                for async_op in (False, True):
                    mine = numbered(size, dtype, rank)
                    total = mine.clone()
                    pydist.all_reduce(total)
                    tensor = mine.clone()
                    work = pydist.reduce(tensor, root, async_op=async_op)
                    if work is not None:
                        work.wait()
                    assert torch.equal(tensor, total if rank == root else mine), (dtype, size)
    untouched = torch.full((4, 3), float(rank + 1)).t()
    target = untouched.clone(memory_format=torch.preserve_format)
    pydist.reduce(target, group_dst=0, op=dist.ReduceOp.PRODUCT)
    expected = float(torch.arange(1, world_size + 1).prod()) if rank == 0 else rank + 1.0
    assert bool((target == expected).all())


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(reduce_everything)


def reduce_bits(rank: int, world_size: int) -> None:
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        for op, function in BITWISE.items():
            parts = [
                (numbered(2000, torch.int64, 31 * r) - 60).to(dtype) for r in range(world_size)
            ]
            expected = parts[0]
            for part in parts[1:]:
                expected = function(expected, part)
            tensor = parts[rank].clone()
            pydist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected), (dtype, op)
    with pytest.raises(pydist.UsageError, match="bitwise xor of float32"):
        pydist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR)


def test_bitwise(transport: Transport) -> None:
    transport.pool(3).run(reduce_bits)


def call_wrongly_on_rank_0(rank: int, world_size: int) -> None:
    ones = torch.ones(4)
    empty = [torch.empty(4) for _ in range(world_size)]
    wrong = [
        (lambda: pydist.gather(ones, empty[1:]), lambda: pydist.gather(ones)),
        (lambda: pydist.gather(ones), lambda: pydist.gather(ones)),
        (lambda: pydist.gather(ones, [empty[0], torch.empty(5)]), lambda: pydist.gather(ones)),
        (lambda: pydist.gather(ones, [e.double() for e in empty]), lambda: pydist.gather(ones)),
        (lambda: pydist.gather(ones, empty, 1), lambda: pydist.gather(ones, empty, 1)),
        (lambda: pydist.scatter(ones, empty[1:]), lambda: pydist.scatter(ones)),
        (lambda: pydist.scatter(ones, [empty[0], torch.empty(3)]), lambda: pydist.scatter(ones)),
        (lambda: pydist.scatter(ones, empty, 1), lambda: pydist.scatter(ones, empty, 1)),
        (lambda: pydist.reduce(ones.long(), 1, dist.ReduceOp.AVG), lambda: pydist.reduce(ones, 1)),
        (lambda: pydist.reduce(ones, group_dst=5), lambda: pydist.reduce(ones, group_dst=1)),
    ]  # fmt: skip
    for index, (mine, theirs) in enumerate(wrong):
        error = pydist.UsageError if rank == 0 else pydist.MismatchError
        with pytest.raises(error) as raised:
            (mine if rank == 0 else theirs)()
        assert rank == 0 or "invalid call" in str(raised.value), index
        pydist.barrier()
    for call in (
        lambda: pydist.gather(torch.ones(4 + rank), None if rank else [*empty]),
        lambda: pydist.reduce(ones, rank),
        lambda: pydist.reduce(ones, 0) if rank else pydist.gather(ones, empty),
    ):
        with pytest.raises((pydist.MismatchError, pydist.UsageError)):
            call()
        pydist.barrier()


def test_wrong_calls_raise_on_the_peers_too(transport: Transport) -> None:
    transport.pool(2).run(call_wrongly_on_rank_0)


def count_calls(rank: int, world_size: int) -> None:
    group = dist.new_group(list(range(world_size)))
    communicator = group_engine(group).communicator
    assert communicator is not None
    assert communicator.counts() == {}
    pydist.all_reduce(torch.ones(100), group=group)
    pydist.all_reduce(torch.ones(50), group=group, async_op=True).wait()
    pydist.reduce(torch.ones(10), 1, group=group)
    pydist.gather(
        torch.ones(10), [torch.empty(10)] * world_size if rank == 0 else None, group=group
    )
    pydist.scatter(torch.ones(7), [torch.ones(7)] * world_size if rank == 0 else None, group=group)
    pydist.broadcast(torch.ones(3), 0, group)
    communicator.broadcast_many([torch.ones(2), torch.ones(3)], 0)
    pydist.barrier(group)
    if rank == 0:
        pydist.send(torch.ones(5), 1, group)
        pydist.isend(torch.ones(6, dtype=torch.float64), 1, group).wait()
    else:
        pydist.irecv(torch.ones(5), 0, group).wait()
        pydist.recv(torch.ones(6, dtype=torch.float64), 0, group)
    with pytest.raises(pydist.MismatchError):
        pydist.all_reduce(torch.ones(1 + rank), group=group)
    pydist.monitored_barrier(group)
    assert communicator.counts() == {
        "all_reduce": (2, 600),
        "reduce": (1, 40),
        "gather": (1, 40),
        "scatter": (1, 56 if rank == 0 else 0),
        "broadcast": (2, 32),
        "barrier": (1, 0),
        "send" if rank == 0 else "recv": (2, 68),
    }


def test_counts_are_exact() -> None:
    SHARED.pool(2).run(count_calls)


def miss_a_barrier(rank: int, world_size: int, wait_all_ranks: bool) -> str:
    """Ranks 1 and 3 come late."""
    pydist.barrier()
    limit = timedelta(seconds=1)
    pydist.monitored_barrier(timeout=timedelta(seconds=20))
    if rank % 2 == 1:
        time.sleep(2.5)
        problem = ""
        with pytest.raises(pydist.TimeoutError, match="rank 0"):  # that left it long ago
            pydist.monitored_barrier(timeout=limit)
    else:
        began = time.monotonic()
        with pytest.raises(pydist.TimeoutError) as raised:
            pydist.monitored_barrier(timeout=limit, wait_all_ranks=wait_all_ranks)
        assert 0.8 < time.monotonic() - began < 2.3
        problem = str(raised.value)
    pydist.barrier()
    total = torch.ones(3)
    pydist.all_reduce(total)
    assert total[0].item() == world_size
    pydist.monitored_barrier(timeout=timedelta(seconds=20))
    return problem


@pytest.mark.parametrize("wait_all_ranks", [True, False])
def test_monitored_barrier_names_the_missing(wait_all_ranks: bool) -> None:
    texts = SHARED.pool(4).run(miss_a_barrier, wait_all_ranks)
    for text in (texts[0], texts[2]):
        assert "rank 1 (pid" in text
        assert ("rank 3 (pid" in text) == wait_all_ranks
        assert "rank 2 (pid" not in text
