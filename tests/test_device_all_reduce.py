"""Owns the tests of means over a device's group: NCCL's own, by a ring and by slices, in every type
and wire type, against their definitions; on an emulated device."""

import contextlib
import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import emulated
from emulated import emulated_pool
from pydist import _C, PeerError, UsageError
from reference import draw

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIRES = ["same", "float16", "bfloat16", "float8_e4m3fn"]
BLOCK = 128  # elements of float8 that share a scale, and what parts of a buffer are multiples of
COUNTS = [0, 1, 3, 127, 128, 129, 4 * BLOCK, 1000, 1536, 4099]
SIZES = [1, 2, 3]
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
    slice_elements = max(1, math.ceil(contributions[0].numel() / size / BLOCK)) * BLOCK
    result = torch.empty_like(contributions[0])
    for index, target in enumerate(result.split(slice_elements)):
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
        found.nan_to_num(7.0, torch.inf, -torch.inf),
        expected.nan_to_num(7.0, torch.inf, -torch.inf),
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
    found = emulated_pool(size).run(means_of_counts, algorithm, dtype, wire, COUNTS, seed=seed)
    for index, count in enumerate(COUNTS):
        contributions = [contribution(rank, index, count, dtype) for rank in range(size)]
        mean = found[0][index]
        assert all(same_bits(by_rank[index], mean) for by_rank in found)
        if algorithm == "slices" or (algorithm == "ring" and size == 1):
            assert same_bits(mean, slices_mean(contributions, on_wire, size))
        elif algorithm == "ring":
            assert same_bits(mean, ring_mean(contributions, on_wire, size))
        if count == 0:
            continue
        exact = torch.stack([c.double() for c in contributions]).sum(0) / size
        bound = error_bound(algorithm, contributions, on_wire) / size
        if algorithm == "nccl":  # divides first, adds in the type
            bound += 2 * size * UNITS[dtype] * exact.abs() + (dtype == torch.float16) * 2.0**-24
        assert ((mean.double() - exact).abs() <= bound).all()


# ---- Extremes


def extremes(rank: int, size: int, algorithm: str, wire: str) -> list[Tensor]:
    """float16: the sum overflows; the smallest subnormal; then what is not finite on one rank."""
    large = mean_of(rank, size, torch.full((300,), 40000.0).half(), algorithm, wire)
    small = mean_of(rank, size, torch.full((300,), 2.0**-24).half(), algorithm, wire)
    values = torch.ones(300, dtype=torch.float32)
    if rank == size - 1:
        values[[0, 130, 299]] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    return [large, small, mean_of(rank, size, values, algorithm, wire)]


@pytest.mark.parametrize("size", SIZES)
def test_a_float16_mean_neither_overflows_nor_underflows(size: int) -> None:
    """40000 on every rank stays 40000 and 2^-24 stays 2^-24, unless an algorithm is forced that
    adds in float16."""
    for algorithm in ("auto", "slices"):
        for large, small, _ in emulated_pool(size).run(extremes, algorithm, "same"):
            assert (large == 40000).all()
            assert (small == 2.0**-24).all()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("algorithm", ["ring", "slices"])
def test_what_is_not_finite_survives(algorithm: str, wire: str) -> None:
    """Infinity and NaN of one rank are in the mean of all, where they were; float8 has no infinity
    and makes NaN of it. Their neighbours are as they would be."""
    for _, _, values in emulated_pool(3).run(extremes, algorithm, wire):
        if wire == "float8_e4m3fn":
            assert values[[0, 130]].isnan().all()
        else:
            assert values[0] == torch.inf
            assert values[130] == -torch.inf
        assert values[299].isnan()
        others = values[values.isfinite()]
        assert others.numel() == 297
        assert torch.allclose(others, torch.tensor(1.0), rtol=0.07)


# ---- Large buffers, many of them, and their order


def several_in_flight(rank: int, size: int, algorithm: str, wire: str, count: int) -> list[bool]:
    """Two buffers at once, one after the other on the stream: integers, whose sum is exact."""
    communicator = communicator_of(rank, size)
    all_reduce = all_reduce_of(rank, size, algorithm)
    tensors = [(torch.arange(count) % 61 + rank * 4 * (1 + i)).float() for i in range(2)]
    expected = [
        sum((torch.arange(count) % 61 + r * 4 * (1 + i)).float() for r in range(size))
        for i in range(2)
    ]
    communicator.after_current_stream()
    for tensor in tensors:
        all_reduce.mean(tensor, wire, "a bucket", 1)
    communicator.before_current_stream()
    return [torch.equal(*pair) for pair in zip(tensors, expected, strict=True)]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("size", "algorithm"), [(2, "ring"), (3, "ring"), (2, "slices")])
def test_segments_in_flight(size: int, algorithm: str, seed: int) -> None:
    """Buffers of which a ring has several segments under way at once, of odd lengths, in whatever
    order the streams run."""
    for wire in ("same", "bfloat16"):
        count = size * 600_000 + 77
        for results in emulated_pool(size).run(
            several_in_flight, algorithm, wire, count, seed=seed
        ):
            assert all(results)


def without_one_wait(rank: int, size: int, nth: int) -> None:
    """Two segments in flight, but one stream of rank 0 does not wait for one event. What that
    breaks is a communicator of its own."""
    communicator = make_communicator(rank, size)
    all_reduce = _C.DeviceAllReduce(communicator, "ring")
    tensor = torch.zeros(size * 300_000)

    def step() -> None:
        communicator.after_current_stream()
        all_reduce.mean(tensor, "same", "a bucket")
        communicator.before_current_stream()

    step()  # scratch memory is there
    emulated.synchronize()
    if rank > 0:
        with contextlib.suppress(PeerError):
            step()
        return
    with emulated.fault("neither comes before the other"):
        emulated.plant("no_wait", nth)
        step()
    communicator.fail("a wait was left out")


@pytest.mark.parametrize("nth", range(1, 5))
def test_every_wait_of_the_ring_is_needed(nth: int) -> None:
    """The first is for the caller's stream; then additions wait for what they add, and what is
    moved for additions."""
    emulated_pool(2).run(without_one_wait, nth)


# ---- The choice


def choices(rank: int, size: int) -> dict[str, list[str]]:
    all_reduce = _C.DeviceAllReduce(make_communicator(rank, size), "auto")
    counts = [1 << n for n in range(0, 34, 2)]
    cases = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    return {
        **{n: [all_reduce.choose(c, d, "same") for c in counts] for n, d in cases.items()},
        "half": [all_reduce.choose(c, torch.float16, "same") for c in counts],
        "wire": [all_reduce.choose(c, torch.float32, w) for c in counts for w in WIRES[1:]],
    }


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_choose_alike(size: int) -> None:
    """Timings of ranks that share cores differ from rank to rank; choices do not. float16, and what
    was given a type to travel in, go by slices."""
    found = emulated_pool(size).run(choices)
    assert all(each == found[0] for each in found)
    assert set(found[0]["half"]) == {"slices"}
    assert set(found[0]["wire"]) == {"slices"}
    assert set(found[0]["float32"]) <= {"nccl", "ring", "slices"}


def forced(rank: int, size: int) -> None:
    for algorithm in ("nccl", "ring", "slices"):
        all_reduce = all_reduce_of(rank, size, algorithm)
        for dtype in DTYPES:
            for wire in WIRES:
                assert all_reduce.choose(1000, dtype, wire) == algorithm
    with pytest.raises(UsageError, match='"nccl" cannot send as bfloat16'):
        mean_of(rank, size, torch.ones(10), "nccl", "bfloat16")
    with pytest.raises(UsageError, match="Long is not a real floating type"):
        mean_of(rank, size, torch.ones(10, dtype=torch.int64), "slices")
    with pytest.raises(UsageError, match='"auto", "nccl", "ring" and "slices", not "tree"'):
        _C.DeviceAllReduce(communicator_of(rank, size), "tree")


def test_an_algorithm_can_be_forced() -> None:
    emulated_pool(2).run(forced)


def auto_means(rank: int, size: int) -> list[Tensor]:
    """Ranks that have not been together before: timed calls come first."""
    communicator = make_communicator(rank, size)
    all_reduce = _C.DeviceAllReduce(communicator, "auto")
    results = []
    for count in (5, 5000):
        tensor = torch.arange(count).float() + 3 * rank
        communicator.after_current_stream()
        all_reduce.mean(tensor, "same", "a bucket", 1)
        communicator.before_current_stream()
        results.append(tensor)
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_auto_gives_the_sum_divided_by_the_divisor(size: int) -> None:
    for results in emulated_pool(size).run(auto_means):
        for tensor in results:
            expected = size * torch.arange(tensor.numel()).float() + 3 * sum(range(size))
            assert torch.equal(tensor, expected)


# ---- CUDA graphs


def captured(rank: int, size: int, algorithm: str, wire: str) -> list[Tensor]:
    """One step, then the same captured and replayed with other values."""
    communicator = make_communicator(rank, size)
    all_reduce = _C.DeviceAllReduce(communicator, algorithm)
    tensor = torch.empty(4000)

    def step() -> None:
        communicator.after_current_stream()
        all_reduce.mean(tensor, wire, "a bucket", 1)
        communicator.before_current_stream()

    tensor.fill_(1.0)
    step()
    graph = emulated.Graph()
    with graph.capture():
        step()
    results = []
    for replay in range(2):
        tensor.fill_(replay + rank)
        graph.replay()
        results.append(tensor.clone())
    return results


@pytest.mark.parametrize("wire", ["same", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["auto", "nccl", "ring", "slices"])
def test_a_captured_mean_is_replayed(algorithm: str, wire: str) -> None:
    if algorithm == "nccl" and wire != "same":
        return
    for results in emulated_pool(3).run(captured, algorithm, wire):
        for replay, tensor in enumerate(results):
            assert (tensor == 3 * replay + 3).all()


def captured_first(rank: int, size: int, algorithm: str) -> Tensor:
    communicator = make_communicator(rank, size)
    all_reduce = _C.DeviceAllReduce(communicator, algorithm)
    tensor = torch.full((1000,), float(rank))
    graph = emulated.Graph()
    with graph.capture():
        communicator.after_current_stream()
        all_reduce.mean(tensor, "same", "a bucket", 1)
        communicator.before_current_stream()
    graph.replay()
    return tensor


@pytest.mark.parametrize("algorithm", ["ring", "slices"])
def test_a_first_mean_can_be_captured(algorithm: str) -> None:
    """Its scratch memory is made then."""
    for tensor in emulated_pool(2).run(captured_first, algorithm):
        assert (tensor == 1).all()
