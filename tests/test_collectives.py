"""Owns the values of the collectives: every operation, dtype and size, over every transport.

Inputs depend on rank and position, and the expected values are closed forms of both.
"""

import functools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from conftest import Transport
from pydist.collectives import group_engine

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
Op = dist.ReduceOp

# Of float32: none, one, odd, both sides of what fits into a cache line (48 bytes), into the eager
# area (4 KiB) and into one step through the slots of 2 and 4 ranks, and more than all buffers.
SIZES = [0, 1, 7, 12, 13, 1024, 1025, 65536, 65537, 300001]


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Small integers, never zero; complex ones turn with the position."""
    position = torch.arange(size)
    if dtype == torch.bool:
        return (position + rank) % 3 == 0
    real = (position % 5 + rank + 1).to(torch.float64)
    if dtype.is_complex:
        return torch.complex(real, (position % 3 - rank).to(torch.float64)).to(dtype)
    return real.to(dtype)


def reduced(op: Op, world_size: int, size: int, dtype: torch.dtype) -> Tensor:
    """The reduction of everybody's values, in the widest type, rounded once."""
    inputs = [values(rank, size, dtype) for rank in range(world_size)]
    if dtype == torch.bool:
        either = op in (Op.SUM, Op.MAX)
        return functools.reduce(torch.logical_or if either else torch.logical_and, inputs)
    wide = (
        torch.complex128 if dtype.is_complex
        else torch.float64 if dtype.is_floating_point
        else torch.int64
    )  # fmt: skip
    combine: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
        Op.SUM: torch.add,
        Op.AVG: torch.add,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.PRODUCT: torch.mul,
    }
    total = functools.reduce(combine[op], [tensor.to(wide) for tensor in inputs])
    if op == Op.AVG:
        accumulator = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total = total.to(accumulator) * (1.0 / world_size)
    return total.to(dtype)


def is_defined(op: Op, dtype: torch.dtype) -> bool:
    if op == Op.AVG:
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op in (Op.MIN, Op.MAX))


def placed(tensor: Tensor, in_arena: bool) -> Tensor:
    """The same values in symmetric or in ordinary memory."""
    if not in_arena:
        return tensor.clone()
    result = pydist.symmetric_empty(*tensor.shape, dtype=tensor.dtype)
    return result.copy_(tensor)


def places(rank: int) -> Iterator[bool]:
    """Nobody's, everybody's, and every second rank's tensors in symmetric memory."""
    yield from (False, True, rank % 2 == 0)


def check_equal(found: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(found, expected), f"{what}: found {found}, expected {expected}"


def all_reduce_all_dtypes(rank: int, world_size: int) -> None:
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in (Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT):
            if not is_defined(op, dtype):
                continue
            for size in (1, 131, 40001):
                expected = reduced(op, world_size, size, dtype)
                for in_arena in places(rank):
                    tensor = placed(values(rank, size, dtype), in_arena)
                    assert pydist.all_reduce(tensor, op) is None
                    check_equal(tensor, expected, f"all_reduce {op} {dtype} {size}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_of_every_dtype(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(all_reduce_all_dtypes)


def all_reduce_all_sizes(rank: int, world_size: int) -> None:
    for size in SIZES:
        expected = reduced(Op.SUM, world_size, size, torch.float32)
        for in_arena in places(rank):
            tensor = placed(values(rank, size, torch.float32), in_arena)
            pydist.all_reduce(tensor)
            check_equal(tensor, expected, f"all_reduce of {size}")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_of_every_size(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(all_reduce_all_sizes)


def reduce_extremes(rank: int, world_size: int) -> None:
    for dtype, value in ((torch.float16, 40000.0), (torch.float16, 2.0**-24)):
        tensor = torch.full((3,), value, dtype=dtype)
        pydist.all_reduce(tensor, Op.AVG)
        assert tensor.tolist() == [value] * 3
    for op in (Op.MIN, Op.MAX):
        for place in range(2):
            tensor = torch.ones(3)
            tensor[1] = math.nan if rank == place else 5.0
            pydist.all_reduce(tensor, op)
            assert tensor[[0, 2]].tolist() == [1.0, 1.0]
            assert math.isnan(tensor[1])


def test_mean_keeps_range_and_nan_is_kept(transport: Transport) -> None:
    transport.pool(2).run(reduce_extremes)


def scatter_and_gather(rank: int, world_size: int) -> None:
    for size in SIZES:
        part = torch.arange(size) % 1000
        for in_arena in places(rank):
            whole = torch.cat([part + 1000 * target + 7 * rank for target in range(world_size)])
            expected = (part + 1000 * rank) * world_size + 7 * sum(range(world_size))
            source = placed(whole, in_arena)
            target = placed(torch.zeros_like(part), in_arena)
            pydist.reduce_scatter_tensor(target, source)
            check_equal(target, expected, f"reduce_scatter_tensor of {size}")
            check_equal(source, whole, "input of reduce_scatter_tensor")
            pydist.reduce_scatter(
                target, list(whole.chunk(world_size)) if size else [part] * world_size
            )
            check_equal(target, expected, f"reduce_scatter of {size}")

            everything = torch.cat([part + 7 * source for source in range(world_size)])
            source = placed(part + 7 * rank, in_arena)
            target = placed(torch.zeros_like(everything), in_arena)
            pydist.all_gather_into_tensor(target, source)
            check_equal(target, everything, f"all_gather_into_tensor of {size}")
            targets = [torch.zeros_like(part) for _ in range(world_size)]
            pydist.all_gather(targets, source)
            check_equal(torch.cat(targets), everything, f"all_gather of {size}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_and_all_gather(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(scatter_and_gather)


def broadcast_all_sizes(rank: int, world_size: int) -> None:
    for size in SIZES:
        for root in range(world_size):
            expected = values(root, size, torch.float64)
            for in_arena in places(rank):
                tensor = placed(values(rank, size, torch.float64), in_arena)
                pydist.broadcast(tensor, root)
                check_equal(tensor, expected, f"broadcast of {size} from {root}")
    for dtype in (torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64):
        source = (torch.arange(1001) % 7).to(torch.float32).to(dtype)
        tensor = source.clone() if rank == 0 else torch.zeros_like(source)
        pydist.broadcast(tensor, group_src=0)
        check_equal(tensor.view(torch.uint8), source.view(torch.uint8), f"broadcast of {dtype}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_broadcast(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(broadcast_all_sizes)


def broadcast_lists(rank: int, world_size: int) -> None:
    engine = group_engine()
    for scale in (1, 60, 1000):
        expected = [
            torch.arange(3 * scale, dtype=torch.float32).view(3, scale),
            torch.arange(scale * 30.0).view(2, scale, 3, 5).to(memory_format=torch.channels_last),
            torch.tensor(5),
            torch.empty(0),
            torch.arange(scale * 4.0).view(scale, 4)[:, ::2],  # has gaps
        ]  # fmt: skip
        tensors = [t.clone() for t in expected]
        tensors[-1] = torch.empty(scale, 4)[:, ::2].copy_(expected[-1])
        if rank != world_size - 1:
            for tensor in tensors:
                tensor.fill_(-1)
        engine.broadcast_tensors(tensors, world_size - 1)
        for tensor, wanted in zip(tensors, expected, strict=True):
            check_equal(tensor, wanted, "broadcast_tensors")
    texts = [b"x" * rank * 1000 + bytes([r]) for r in range(world_size)]
    assert engine.exchange_bytes(b"rank" * rank) == [b"rank" * r for r in range(world_size)]
    assert len(engine.exchange_bytes(texts[rank])) == world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_broadcast_tensors_and_exchange_bytes(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(broadcast_lists)


def exchange_all(rank: int, world_size: int) -> None:
    for rows in (0, 1, 3, 1000, 30000):
        for in_arena in places(rank):
            # Rank r sends (r + q) % 3 * rows rows of 3 numbers to rank q.
            counts = [(rank + q) % 3 * rows for q in range(world_size)]
            parts = [
                torch.arange(count * 3).view(count, 3) * 100 + 10 * rank + q
                for q, count in enumerate(counts)
            ]
            expected = torch.cat([
                torch.arange((r + rank) % 3 * rows * 3).view(-1, 3) * 100 + 10 * r + rank
                for r in range(world_size)
            ])  # fmt: skip
            source = placed(torch.cat(parts), in_arena)
            target = placed(torch.zeros(sum(counts), 3, dtype=torch.int64), in_arena)
            pydist.all_to_all_single(target, source, counts, counts)
            check_equal(target, expected, f"all_to_all_single of {rows}")
            targets = [torch.zeros_like(part) for part in parts]
            pydist.all_to_all(targets, parts)
            check_equal(torch.cat(targets), expected, f"all_to_all of {rows}")
    even = torch.arange(world_size * 2) + 100 * rank
    target = torch.zeros_like(even)
    pydist.all_to_all_single(target, even)
    assert target.tolist() == [100 * r + 2 * rank + k for r in range(world_size) for k in (0, 1)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_to_all(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(exchange_all)


def use_uneven_and_strided(rank: int, world_size: int) -> None:
    # Sizes that differ by rank, in the list forms.
    mine = torch.arange(rank + 2) + 10 * rank
    targets = [torch.zeros(r + 2, dtype=torch.int64) for r in range(world_size)]
    pydist.all_gather(targets, mine)
    for r, target in enumerate(targets):
        check_equal(target, torch.arange(r + 2) + 10 * r, "uneven all_gather")
    inputs = [torch.arange(r + 1.0) + rank for r in range(world_size)]
    output = torch.zeros(rank + 1)
    pydist.reduce_scatter(output, inputs)
    total = torch.arange(rank + 1.0) * world_size + sum(range(world_size))
    check_equal(output, total, "uneven reduce_scatter")
    # Tensors that are not contiguous, on some ranks.
    base = torch.arange(24.0).view(4, 6) + rank
    tensor = base.t().contiguous().t() if rank == 0 else base.clone()
    gaps = torch.zeros(4, 12)[:, ::2].copy_(base)
    expected = torch.arange(24.0).view(4, 6) * world_size + sum(range(world_size))
    for target in (tensor, gaps):
        pydist.all_reduce(target)
        check_equal(target, expected, "strided all_reduce")
    output = torch.zeros(6, 4 * world_size).t()
    pydist.all_gather_into_tensor(output, base.t().contiguous().t())
    rows = [torch.arange(24.0).view(4, 6) + r for r in range(world_size)]
    check_equal(output, torch.cat(rows), "strided all_gather_into_tensor")
    # Parameters, and tensors that need a gradient.
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    pydist.all_reduce(parameter)
    assert parameter.tolist() == [float(sum(range(world_size)))] * 3
    assert parameter.requires_grad


def test_uneven_and_strided_tensors(transport: Transport) -> None:
    transport.pool(3).run(use_uneven_and_strided)


def send_and_receive(rank: int, world_size: int) -> None:
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    for size in (0, 1, 5000, 1_000_000):
        mine = torch.arange(size) + rank
        theirs = torch.zeros(size, dtype=torch.int64)
        # Rank 0 sends first: a ring that works even where send waits for recv.
        if rank == 0:
            pydist.send(mine, following, tag=4)
            source = pydist.recv(theirs, before, tag=4)
        else:
            source = pydist.recv(theirs, before, tag=4)
            pydist.send(mine, group_dst=following, tag=4)
        assert source == before
        check_equal(theirs, torch.arange(size) + before, f"recv of {size}")
    if rank > 0:
        pydist.send(torch.tensor([float(rank)]).expand(4), 0)
    else:
        sources = set()
        for _ in range(world_size - 1):
            tensor = torch.zeros(2, 4)[:, ::2]
            source = pydist.recv(tensor)
            assert tensor.tolist() == [[source] * 2] * 2
            sources.add(source)
        assert sources == set(range(1, world_size))


def test_send_and_recv(transport: Transport) -> None:
    transport.pool(3).run(send_and_receive)


def exchange_head_on(rank: int, world_size: int) -> None:
    mine = torch.full((3_000_000,), float(rank))
    theirs = torch.empty_like(mine)
    pydist.send(mine, 1 - rank)
    pydist.recv(theirs, 1 - rank)
    assert bool((theirs == 1 - rank).all())
    # Tags may be asked for in another order than sent.
    for tag in (1, 2, 3):
        pydist.send(torch.tensor([10 * rank + tag]), 1 - rank, tag=tag)
    for tag in (2, 3, 1):
        pydist.recv(number := torch.zeros(1, dtype=torch.int64), 1 - rank, tag=tag)
        assert number.item() == 10 * (1 - rank) + tag


def test_senders_do_not_block_each_other() -> None:
    Transport("shared_memory").pool(2).run(exchange_head_on)


def collect_bits(rank: int, world_size: int) -> list[bytes]:
    """The mean of the same random numbers along every way; their bits must agree."""
    size = 30011
    torch.manual_seed(rank)
    numbers = torch.randn(size) * 10 ** (torch.rand(size) * 8 - 4)
    bits = []
    for dtype in FLOATS:
        mine = numbers.to(dtype)
        results = [placed(mine, in_arena) for in_arena in places(rank)]
        for result in results:
            pydist.all_reduce(result, Op.AVG)
        pieces = mine.clone()
        for piece in torch.split(pieces, 1001):
            pydist.all_reduce(piece, Op.AVG)
        padded = torch.cat([mine, torch.zeros(-size % world_size, dtype=dtype)])
        part = torch.empty(padded.numel() // world_size, dtype=dtype)
        pydist.reduce_scatter_tensor(part, padded, Op.AVG)
        pydist.all_gather_into_tensor(padded, part)
        for result in [*results, pieces, padded[:size]]:
            bits.append(result.view(torch.uint8).numpy().tobytes())
            assert bits[-1] == results[0].view(torch.uint8).numpy().tobytes(), dtype
    return bits


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_do_not_depend_on_the_way(world_size: int) -> None:
    bits = Transport("shared_memory").pool(world_size).run(collect_bits)
    assert all(other == bits[0] for other in bits)


def allocate_symmetric(rank: int, world_size: int) -> None:
    for shape in ((), (0,), (3, 4), (1000, 1000)):
        tensor = pydist.symmetric_empty(shape, dtype=torch.float16)
        assert tensor.shape == shape
        assert tensor.dtype == torch.float16
        assert tensor.is_contiguous()
    tensor = pydist.symmetric_empty(2, 3)
    assert tensor.shape == (2, 3)
    assert tensor.dtype == torch.float32
    with pytest.raises((RuntimeError, ValueError)):
        pydist.symmetric_empty(2**62)
    used = [pydist._C.arena_usage()["used_nbytes"] for _ in range(3)]
    for _ in range(100):  # blocks are given back
        pydist.symmetric_empty(1 << 20)
        used.append(pydist._C.arena_usage()["used_nbytes"])
    assert max(used) <= used[0] + (4 << 20) + 64


def test_symmetric_empty(transport: Transport) -> None:
    transport.pool(2).run(allocate_symmetric)


def all_reduce_huge(rank: int, world_size: int) -> None:
    size = 2**31 + 4099
    for in_arena in (True, False):
        tensor = (
            pydist.symmetric_empty(size, dtype=torch.uint8)
            if in_arena
            else torch.empty(size, dtype=torch.uint8)
        )
        tensor.view(-1)[: size - size % 8].view(torch.int64).fill_(0x0102030405060708 * (rank + 1))
        tensor[-3:] = rank + 5
        pydist.all_reduce(tensor)
        words = tensor[: size - size % 8].view(torch.int64)
        assert bool((words == 0x0102030405060708 * 3).all())
        assert tensor[-3:].tolist() == [11] * 3
        del tensor, words


@pytest.mark.slow
def test_more_than_2_gib() -> None:
    Transport("shared_memory").pool(2).run(all_reduce_huge, timeout_s=300)
