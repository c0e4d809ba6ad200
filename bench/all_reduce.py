"""Owns the benchmark of all-reduce: arena and ordinary tensors, beside Gloo and the bound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from bench import bound, command_line
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import Case, Parameter, Record
from bench.table import Aim, rate_text, size_text, table, time_text
from pydist._engine import group_engine

NAME = "all_reduce"

# The bound has no synchronisation and its loop is called from Python: it means nothing below.
SMALLEST_BOUND_NBYTES = 256 * 2**10
CONTENDERS = ("arena", "ordinary", "gloo", "bound", "arena, C++ loop")


@dataclass(frozen=True)
class Size:
    """One message size. A sample is `iterations` operations in a row, timed together."""

    nbytes: int
    iterations: int
    repetitions: int

    @property
    def dtype(self) -> torch.dtype:
        # A sample's values grow by 2^iterations or 4^iterations; this many need fp64's range.
        return torch.float64 if self.iterations > 50 else torch.float32

    @property
    def num_elements(self) -> int:
        return self.nbytes // self.dtype.itemsize


FULL = (
    Size(8, 500, 21),
    Size(2**10, 50, 21),
    Size(16 * 2**10, 50, 21),
    Size(256 * 2**10, 20, 21),
    Size(2**20, 10, 21),
    Size(4 * 2**20, 4, 21),
    Size(25 * 2**20, 1, 21),
    Size(100 * 2**20, 1, 9),
)
QUICK = (Size(8, 20, 3), Size(16 * 2**10, 5, 3), Size(256 * 2**10, 2, 3))


@dataclass(frozen=True)
class Contender:
    tensor: Tensor  # what is filled before and checked after
    run: Callable[[], object]  # one operation
    ends_apart: bool = False  # ranks do not wait for each other: the check has to


class Expected:
    """Values that depend on rank and position, and their closed form after repeated sums.

    Small integers, and a number of ranks that is a power of two: every sum is exact, so that one
    operation too few, too many, or of stale data is a wrong result.
    """

    def __init__(self, rank: Rank, size: Size) -> None:
        if rank.size & (rank.size - 1):
            raise ValueError(f"the closed form needs 1, 2, 4, ... ranks, found {rank.size}")
        self._rank = rank
        self._base = (torch.arange(size.num_elements) % 1021 + 1).to(size.dtype)
        self._scale = float(rank.size) ** (size.iterations - 1)

    def fill(self, tensor: Tensor) -> None:
        torch.add(self._base, 3.0 * self._rank.index, out=tensor)

    def num_wrong(self, tensor: Tensor) -> int:
        size = self._rank.size
        expected = self._base * size
        expected.add_(3.0 * (size * (size - 1) // 2)).mul_(self._scale)
        return int((tensor != expected).sum())


def make_contenders(rank: Rank, size: Size) -> dict[str, Contender]:
    arena = pydist.symmetric_empty(size.num_elements, dtype=size.dtype)
    ordinary = torch.empty(size.num_elements, dtype=size.dtype)
    gloo = torch.empty_like(ordinary)
    contenders = {
        "arena": Contender(arena, lambda: pydist.all_reduce(arena)),
        "ordinary": Contender(ordinary, lambda: pydist.all_reduce(ordinary)),
        "gloo": Contender(gloo, lambda: dist.all_reduce(gloo)),
    }
    if size.nbytes >= SMALLEST_BOUND_NBYTES:
        buffers = bound.shared_buffers(rank, size.num_elements)
        update = bound.updater(rank, buffers)
        contenders["bound"] = Contender(buffers[rank.index], update, ends_apart=True)
    return contenders


def sample(rank: Rank, contender: Contender, size: Size, expected: Expected) -> tuple[Span, int]:
    """One timed sample and its number of wrong elements."""

    def run() -> None:
        for _ in range(size.iterations):
            contender.run()

    expected.fill(contender.tensor)
    span = rank.timed(run)
    if contender.ends_apart:
        rank.barrier()
    return span, expected.num_wrong(contender.tensor)


def engine_loop(tensor: Tensor, iterations: int) -> float:
    communicator = group_engine().communicator
    if communicator is None:
        raise RuntimeError("these ranks do not share memory: there is nothing to measure here")
    return communicator.benchmark_all_reduce(tensor, iterations)


def sample_cpp_loop(rank: Rank, tensor: Tensor, size: Size, expected: Expected) -> tuple[Span, int]:
    """The same without Python's share: the loop is in the engine."""
    expected.fill(tensor)
    rank.barrier()
    seconds = engine_loop(tensor, size.iterations)
    return (0, int(seconds * 1e9)), expected.num_wrong(tensor)


def measure_size(rank: Rank, size: Size) -> dict[str, list[tuple[Span, int]]]:
    """Runs on every rank: each contender in turn, and that again; the first turn warms up."""
    expected = Expected(rank, size)
    contenders = make_contenders(rank, size)
    samples: dict[str, list[tuple[Span, int]]] = {}
    for repetition in range(-1, size.repetitions):
        turn = {
            name: sample(rank, contender, size, expected) for name, contender in contenders.items()
        }
        if size.nbytes == 8:
            arena = contenders["arena"].tensor
            turn["arena, C++ loop"] = sample_cpp_loop(rank, arena, size, expected)
        for name, one in turn.items():
            samples.setdefault(name, []).extend([one] if repetition >= 0 else [])
    return samples


def measure_case(ranks: Ranks, size: Size) -> Case:
    by_rank = ranks.call(measure_size, size)
    samples_s: dict[str, list[float]] = {}
    wrong_results: dict[str, int] = {}
    for name in by_rank[0]:
        turns = list(zip(*(samples[name] for samples in by_rank), strict=True))
        samples_s[name] = [
            elapsed_s([span for span, _ in turn]) / size.iterations for turn in turns
        ]
        wrong_results[name] = sum(wrong for turn in turns for _, wrong in turn)
    parameters: dict[str, Parameter] = {
        "ranks": ranks.size,
        "nbytes": size.nbytes,
        "iterations": size.iterations,
        "dtype": str(size.dtype),
    }
    name = f"{size_text(size.nbytes)}, {ranks.size} ranks"
    return Case(name, parameters, samples_s, wrong_results)


def measure(quick: bool, command: str) -> Record:
    sizes, num_ranks = (QUICK, [2]) if quick else (FULL, [2, 4])
    cases = []
    for count in num_ranks:
        with Ranks(count) as ranks:
            cases += [measure_case(ranks, size) for size in sizes]
    return Record(NAME, command, "quick" if quick else "full", num_ranks, cases)


def render(record: Record) -> list[str]:
    lines: list[str] = []
    for ranks in record.ranks:
        cases = [case for case in record.cases if case.parameters["ranks"] == ranks]
        rows = [row for case in cases for row in _rows(case)]
        lines += [f"{ranks} ranks:", "", *table(HEADER, rows), ""]
    return lines


HEADER = (
    "size",
    "contender",
    "time",
    "algbw GB/s",
    "busbw GB/s",
    "of the bound",
    "Gloo / it",
    "wrong",
)


def _rows(case: Case) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    ranks, nbytes = int(case.parameters["ranks"]), int(case.parameters["nbytes"])
    for name in CONTENDERS:
        if name not in case.medians_s:
            continue
        seconds = case.medians_s[name]
        algbw = nbytes / seconds
        share = f"{case.medians_s['bound'] / seconds:.0%}" if "bound" in case.medians_s else "-"
        rows.append(
            (
                size_text(nbytes),
                name,
                time_text(seconds),
                rate_text(algbw),
                rate_text(algbw * 2 * (ranks - 1) / ranks),
                share,
                f"{case.medians_s['gloo'] / seconds:.1f}",
                str(case.wrong_results[name]),
            )
        )
    return rows


def aims(record: Record) -> list[Aim]:
    """All of them are for 2 ranks."""
    cases = [case for case in record.cases if case.parameters["ranks"] == 2]
    large = [case for case in cases if int(case.parameters["nbytes"]) >= SMALLEST_BOUND_NBYTES]
    upto_64_mib = [case for case in large if int(case.parameters["nbytes"]) <= 2**26]
    above = [case for case in large if int(case.parameters["nbytes"]) > 2**26]
    return [
        *_ratio_aim("arena, Gloo's time / its own, from 256 KiB", 10, large, "gloo", "arena"),
        *_ratio_aim("arena, share of the bound, from 256 KiB", 0.8, large, "bound", "arena"),
        *_ratio_aim(
            "ordinary, Gloo's time / its own, to 64 MiB", 4, upto_64_mib, "gloo", "ordinary"
        ),
        *_ratio_aim("ordinary, Gloo's time / its own, above", 3, above, "gloo", "ordinary"),
        *(
            Aim("8 bytes in a C++ loop", 2, seconds * 1e6, False, " µs", case.name)
            for case in cases
            if (seconds := case.medians_s.get("arena, C++ loop")) is not None
        ),
    ]


def _ratio_aim(text: str, target: float, cases: Sequence[Case], peer: str, own: str) -> list[Aim]:
    if not cases:
        return []
    ratios = [(case.medians_s[peer] / case.medians_s[own], case.name) for case in cases]
    measured, where = min(ratios)
    return [Aim(text, target, measured, True, "", where)]


if __name__ == "__main__":
    command_line.run_one(NAME)
