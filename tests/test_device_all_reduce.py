"""Owns the tests of means over a device's group: NCCL's own, by a ring and by slices, in every type
and wire type, against their definitions; on an emulated device."""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import emulated
from emulated import emulated_pool
from pydist import UsageError, _C
from reference import draw

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIRES = ["same", "float16", "bfloat16", "float8_e4m3fn"]
BLOCK = 128  # elements of float8 that share a scale, and what parts of a buffer are multiples of
COUNTS = [0, 1, 3, 127, 128, 129, 4 * BLOCK, 1000, 1536, 4099]
SIZES = [1, 2, 3, 4]
# Half a unit in the last place of 1, the rounding's relative error.
UNITS = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
}
_numbers = itertools.count()


def make_communicator(rank: int, size: int) -> _C.NcclCommunicator:
    store = dist.PrefixStore(f"device_all_reduce{next(_numbers)}", _get_default_store())
    return _C.NcclCommunicator(store, rank, size, 0, 20.0, "the test group", "", [])


@functools.cache
def communicator_of(rank: int, size: int) -> _C.NcclCommunicator:
    """One for all tests of a pool."""
    return make_communicator(rank, size)


@functools.cache
def all_reduce_of(rank: int, size: int, algorithm: str) -> _C.DeviceAllReduce:
    return _C.DeviceAllReduce(communicator_of(rank, size), algorithm)


def mean_of(
    rank: int, size: int, tensor: Tensor, algorithm: str, wire: str = "same", divisor: int = 0
) -> Tensor:
    """In place, as a reducer would."""
    communicator = communicator_of(rank, size)
    all_reduce = all_reduce_of(rank, size, algorithm)
    communicator.after_current_stream()
    all_reduce.mean(tensor, wire, "a bucket", divisor)
    communicator.before_current_stream()
    return tensor


# ---- The definitions


def travelling(dtype: torch.dtype, wire: str) -> torch.dtype:
    """The type on the wire: elements that are no wider travel as they are."""
    wanted: torch.dtype = dtype if wire == "same" else getattr(torch, wire)
    return wanted if wanted.itemsize < dtype.itemsize else dtype


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To what the type can hold, in the type that is added in."""
    if dtype != torch.float8_e4m3fn:
        return values.float().to(dtype).float() if dtype != torch.float64 else values.double()
    values = values.float()
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().where(blocks.isfinite(), 0.0).amax(1, keepdim=True).double()
    exponents = torch.ceil(torch.log2(largest / 448)).clamp(min=-126)
    scales = torch.exp2(exponents.nan_to_num(neginf=-126)).float()
    codes = (blocks / scales).where(blocks.isfinite(), torch.nan).to(torch.float8_e4m3fn)
    return (codes.float() * scales).view(-1)[: values.numel()]


def slices_mean(contributions: list[Tensor], wire: torch.dtype, divisor: int) -> Tensor:
    """Each rounded once, added in the order of ranks, the mean rounded once."""
    total = rounded(contributions[0], wire)
    for contribution in contributions[1:]:
        total = total + rounded(contribution, wire)
    scale = torch.tensor(1.0, dtype=total.dtype) / divisor
    return rounded(total * scale, wire).to(contributions[0].dtype)


def ring_mean(contributions: list[Tensor], wire: torch.dtype, divisor: int) -> Tensor:
    """Each slice in the order of ranks that begins with its own, every sum rounded; for what is
    too small to have several segments in flight."""
    size = len(contributions)
    slice_elements = -(-(-(-contributions[0].numel() // size)) // BLOCK) * BLOCK
    result = torch.empty_like(contributions[0])
    for index, target in enumerate(result.split(max(slice_elements, 1))):
        parts = [rounded(c.split(slice_elements)[index], wire) for c in contributions]
        total = parts[index]
        for distance in range(1, size):
            total = total + parts[(index + distance) % size]
            if distance == size - 1:
                total = total * (torch.tensor(1.0, dtype=total.dtype) / divisor)
            total = rounded(total, wire)
        target.copy_(total)
    return result


def error_bound(algorithm: str, contributions: list[Tensor], wire: torch.dtype) -> Tensor:
    """What device_slices.h and device_ring.h state, times the divisor."""
    size = len(contributions)
    magnitudes = torch.stack([c.double().abs() for c in contributions])
    unit = UNITS[wire]
    fine = UNITS[torch.float64] if wire == torch.float64 else UNITS[torch.float32]
    bound = magnitudes.sum(0) * (2 * unit if algorithm == "slices" else (size + 1) * unit)
    bound += (size + 1) * fine * magnitudes.sum(0)
    if wire == torch.float16:
        bound += 2 * size * 2.0**-25 * size
    if wire == torch.float8_e4m3fn:  # also the largest of its block may be the one that is summed
        bound += 2 * size * 2.0**-17 * magnitudes.sum(0).amax(0, keepdim=True)
    return bound * 1.01 if wire != torch.float8_e4m3fn else bound * (1 + unit) ** size


# ---- Values


def contribution(rank: int, seed: int, count: int, dtype: torch.dtype) -> Tensor:
    """Of magnitudes from 2^-8 to 2^8."""
    values = draw(rank, 2 * seed, count, dtype=torch.float64)
    return (values * torch.exp2(8 * torch.sin(draw(rank, 2 * seed + 1, count)))).to(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """All NaNs are one."""
    return found.dtype == expected.dtype and torch.equal(
        found.nan_to_num(7.0, torch.inf, -torch.inf), expected.nan_to_num(7.0, torch.inf, -torch.inf)
    )


def means_of_counts(
    rank: int, size: int, algorithm: str, dtype: torch.dtype, wire: str, counts: list[int]
) -> list[Tensor]:
    results = []
    for seed, count in enumerate(counts):
        results.append(mean_of(rank, size, contribution(rank, seed, count, dtype), algorithm, wire))
    return results


CASES = [
    (algorithm, dtype, wire)
    for algorithm in ("nccl", "ring", "slices")
    for dtype in DTYPES
    for wire in WIRES
    if wire == "same" or (algorithm != "nccl" and travelling(dtype, wire) != dtype)
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("algorithm", "dtype", "wire"), CASES, ids=lambda v: str(v).removeprefix("torch.")
)
def test_means_are_those_of_the_definition(
    size: int, algorithm: str, dtype: torch.dtype, wire: str
) -> None:
    """Any number of elements, also fewer than ranks: within the stated bound of the exact mean, for
    ring and slices in the very bits of their definition, and the same on all ranks."""
    on_wire = travelling(dtype, wire)
    seed = SIZES.index(size) * 100 + CASES.index((algorithm, dtype, wire))
    found = emulated_pool(size).run(
        means_of_counts, algorithm, dtype, wire, COUNTS, seed=seed
    )
    for index, count in enumerate(COUNTS):
        contributions = [contribution(rank, index, count, dtype) for rank in range(size)]
        mean = found[0][index]
        assert all(same_bits(by_rank[index], mean) for by_rank in found)
        if algorithm == "slices" or (algorithm == "ring" and size == 1):
            assert same_bits(mean, slices_mean(contributions, on_wire, size))
        elif algorithm == "ring":
            assert same_bits(mean, ring_mean(contributions, on_wire, size))
        exact = torch.stack([c.double() for c in contributions]).sum(0) / size
        bound = error_bound(algorithm, contributions, on_wire) / size
        if algorithm == "nccl":  # divides first, adds in the type
            bound += 2 * size * UNITS[dtype] * exact.abs() + (dtype == torch.float16) * 2.0**-24
        if count > 0:
            assert ((mean.double() - exact).abs() <= bound).all()
