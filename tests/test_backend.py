"""Owns the values of the backend "pydist": every operation of torch.distributed, against closed
forms, in both ways to wait, with tensors of every kind."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from ranks import get_pool

Op = dist.ReduceOp
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
BYTES = [torch.uint16, torch.uint64, torch.float8_e4m3fn]  # which the engine only moves
SIZES = [0, 1, 7, 1024, 70_001]
WORLD_SIZES = [1, 2, 3]


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return get_pool(world_size, backend="pydist").run(function, *args)


def values(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small numbers, different by rank and place."""
    real = (torch.arange(size) % 5 + rank + 1).to(torch.float32)
    if dtype == torch.bool:
        return (torch.arange(size) + rank) % 3 == 0
    if dtype.is_complex:
        return torch.complex(real, real.flip(0)).to(dtype)
    return real.to(dtype)


def all_values(world_size: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(rank, size, dtype) for rank in range(world_size)]


def check(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    pair = torch.empty(2, *expected.shape, dtype=expected.dtype)
    pair[0], pair[1] = found, expected
    assert torch.equal(*pair.flatten().view(torch.uint8).view(2, -1))


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def both_ways(start: Callable[[bool], Any]) -> None:
    """Calls the operation, and calls it again and waits."""
    assert start(False) is None
    work = start(True)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()


# -- values ----------------------------------------------------------------------------------------


def reduce_everything(rank: int, world_size: int) -> None:
    combine: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        Op.SUM: torch.add,
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }
    for op, function in combine.items():
        bitwise = op in (Op.BAND, Op.BOR, Op.BXOR)
        dtypes = [*INTEGERS, torch.bool] if bitwise else [*INTEGERS, *FLOATS]
        if op == Op.SUM:
            dtypes = [*dtypes, *COMPLEX]
        for dtype in dtypes:
            expected = functools.reduce(function, all_values(world_size, 70, dtype))
            reduce_with(rank, world_size, op, expected)
    mean = torch.stack(all_values(world_size, 70)).sum(0) * torch.tensor(1 / world_size)
    reduce_with(rank, world_size, Op.AVG, mean)


def reduce_with(rank: int, world_size: int, op: Any, expected: Tensor) -> None:
    mine = values(rank, len(expected), expected.dtype)
    tensors = [mine.clone(), mine.clone()]
    both_ways(lambda wait: dist.all_reduce(tensors[wait], op, async_op=wait))
    for tensor in tensors:
        check(tensor, expected)
    root = world_size - 1
    tensor = mine.clone()
    dist.reduce(tensor, root, op)
    check(tensor, expected if rank == root else mine)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reductions(world_size: int) -> None:
    run(world_size, reduce_everything)


def reduce_scatter_everything(rank: int, world_size: int, size: int) -> None:
    # Rank r sends k * (r + 1) to rank k.
    total = sum(range(1, world_size + 1))
    expected = values(rank, size) * total
    parts = [part * (rank + 1) for part in all_values(world_size, size)]
    output = torch.empty(size)
    both_ways(lambda wait: dist.reduce_scatter(output, parts, async_op=wait))
    check(output, expected)
    output = strided(torch.zeros(size))
    both_ways(lambda wait: dist.reduce_scatter_tensor(output, torch.cat(parts), async_op=wait))
    check(output, expected)
    # Parts of different sizes.
    parts = [torch.full((k + size,), float(rank + 1)) for k in range(world_size)]
    output = torch.empty(rank + size)
    both_ways(lambda wait: dist.reduce_scatter(output, parts, async_op=wait))
    check(output, torch.full((rank + size,), float(total)))
    assert all(part.eq(rank + 1).all() for part in parts)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(size: int) -> None:
    run(3, reduce_scatter_everything, size)


def gather_everything(rank: int, world_size: int, size: int) -> None:
    for dtype in [torch.float32, torch.bool, torch.complex64, *BYTES]:
        mine = values(rank, size, dtype)
        expected = all_values(world_size, size, dtype)
        for make in (torch.empty_like, strided):
            outputs = [make(torch.empty_like(mine)) for _ in range(world_size)]
            both_ways(lambda wait, o=outputs, m=mine: dist.all_gather(o, m, async_op=wait))
            for found, wanted in zip(outputs, expected, strict=True):
                check(found, wanted)
        whole = torch.empty(world_size * size, dtype=dtype)
        both_ways(lambda wait, o=whole, m=mine: dist.all_gather_into_tensor(o, m, async_op=wait))
        check(whole, torch.cat(expected))
        rows = list(torch.empty(world_size, size, dtype=dtype).unbind())
        dist.gather(mine, rows if rank == 0 else None, dst=0)
        if rank == 0:
            check(torch.cat(rows), torch.cat(expected))
        output = torch.empty_like(mine)
        dist.scatter(output, expected if rank == 0 else None, src=0)
        check(output, mine)
        tensor = mine.clone()
        both_ways(lambda wait, t=tensor: dist.broadcast(t, world_size - 1, async_op=wait))
        check(tensor, expected[-1])
    uneven = [torch.empty(k + size) for k in range(world_size)]
    dist.all_gather(uneven, values(rank, rank + size))
    for source, found in enumerate(uneven):
        check(found, values(source, source + size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gathers(world_size: int, size: int) -> None:
    run(world_size, gather_everything, size)


def exchange_everything(rank: int, world_size: int) -> None:
    sent = [torch.full((k + 1,), rank * 10.0 + k) for k in range(world_size)]
    expected = [torch.full((rank + 1,), k * 10.0 + rank) for k in range(world_size)]
    received = [torch.empty(rank + 1) for _ in range(world_size)]
    both_ways(lambda wait: dist.all_to_all(received, sent, async_op=wait))
    for found, wanted in zip(received, expected, strict=True):
        check(found, wanted)
    for dtype in [torch.float32, *BYTES]:  # rows of three
        rows = torch.cat(sent)[:, None].expand(-1, 3).to(dtype)
        output = torch.empty(world_size * (rank + 1), 3, dtype=dtype)
        splits = [rank + 1] * world_size, [k + 1 for k in range(world_size)]
        dist.all_to_all_single(output, rows, *splits)
        check(output, torch.cat(expected)[:, None].expand(-1, 3).to(dtype))
    output = torch.empty(world_size)
    dist.all_to_all_single(output, torch.arange(world_size) * 1.0 + rank)
    check(output, torch.arange(world_size) * 1.0 + rank)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchanges(world_size: int) -> None:
    run(world_size, exchange_everything)


def coalesce_everything(rank: int, world_size: int) -> None:
    tensors = [values(rank, n) for n in (3, 0, 2000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        check(tensor, torch.stack(all_values(world_size, len(tensor))).sum(0))
    inputs = [values(rank, n) for n in (3, 0, 2000)]
    outputs = [torch.empty(world_size * len(tensor)) for tensor in inputs]
    with dist._coalescing_manager():
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    for output, tensor in zip(outputs, inputs, strict=True):
        check(output, torch.cat(all_values(world_size, len(tensor))))
    with dist._coalescing_manager():
        for tensor, output in zip(inputs, outputs, strict=True):
            dist.reduce_scatter_tensor(tensor, output)
    for tensor in inputs:
        check(tensor, values(rank, len(tensor)) * world_size)
    # What is started between the two ends in one work.
    tensor, other = values(rank, 5), values(rank, 7)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(tensor, 0, async_op=True)
        dist.all_reduce(other, async_op=True)
    manager.wait()
    check(tensor, values(0, 5))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_coalesced(world_size: int) -> None:
    run(world_size, coalesce_everything)


def send_everything(rank: int, world_size: int) -> None:
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for dtype in [torch.float32, torch.complex64, *BYTES]:
        for size in SIZES:
            received = strided(torch.zeros(size, dtype=dtype))
            request = dist.irecv(received, before, tag=3)
            dist.send(strided(values(rank, size, dtype)), after, tag=3)
            request.wait()
            check(received, values(before, size, dtype))
    received, tensor = torch.zeros(9), values(rank, 9)
    ops = [dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, received, before)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    check(received, values(before, 9))
    if rank != 0:
        dist.send(values(rank, 4), 0, tag=7)
        return
    sources = set()
    for _ in range(world_size - 1):
        received = torch.zeros(4)
        source = dist.recv(received, tag=7)
        check(received, values(source, 4))
        sources.add(source)
    assert sources == set(range(1, world_size))


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(world_size: int) -> None:
    run(world_size, send_everything)


def barriers(rank: int, world_size: int) -> None:
    both_ways(lambda wait: dist.barrier(async_op=wait))
    group = dist.group.WORLD
    assert group is not None
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world_size)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_barriers(world_size: int) -> None:
    run(world_size, barriers)


def sum_sparse(rank: int, world_size: int) -> None:
    for wait in (False, True):
        indices = torch.arange(rank + 1)[None]  # of another number on each rank
        tensor = torch.sparse_coo_tensor(indices, torch.ones(rank + 1, 2), (world_size, 2))
        work = dist.all_reduce(tensor, async_op=wait)
        if wait:
            work.wait()
        expected = torch.tensor([[float(world_size - row)] * 2 for row in range(world_size)])
        check(tensor.to_dense(), expected)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (5,))
    dist.all_reduce(empty)
    check(empty.to_dense(), torch.zeros(5))
    with pytest.raises(pydist.UsageError, match="can only be summed"):
        dist.all_reduce(empty, Op.MAX)
    dist.barrier()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sparse_sums(world_size: int) -> None:
    run(world_size, sum_sparse)
