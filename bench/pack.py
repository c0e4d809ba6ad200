"""Owns the benchmark of packing: many tensors into one bucket, beside torch's copies and memcpy."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import command_line
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import Case, Record
from bench.table import Aim, rate_text, size_text, table, time_text
from pydist import _C

NAME = "pack"

# The copy of one piece of memory of the same size, by libc: the bound.
BOUND = "memcpy"
CONTENDERS = ("fused pack", BOUND, "copy_ each", "_foreach_copy_")


@dataclass(frozen=True)
class Size:
    num_tensors: int
    nbytes: int  # of all of them
    iterations: int
    repetitions: int

    @property
    def num_elements(self) -> int:
        return self.nbytes // torch.float32.itemsize

    def shares(self) -> list[int]:
        """Elements of each tensor: unequal, so that most begin off a cache line."""
        mean = self.num_elements // self.num_tensors
        first = [mean + (-1) ** index * (mean // 3) for index in range(self.num_tensors - 1)]
        return [*first, self.num_elements - sum(first)]


ITERATIONS = {2**20: 20, 8 * 2**20: 4, 64 * 2**20: 1}
FULL = tuple(
    Size(num_tensors, nbytes, iterations, 21)
    for num_tensors in (10, 400, 5000)
    for nbytes, iterations in ITERATIONS.items()
)
QUICK = (Size(10, 2**16, 2, 3), Size(400, 2**16, 2, 3))


def make_out(size: Size) -> Tensor:
    return torch.empty(size.num_elements)


def make_contenders(size: Size, out: Tensor) -> tuple[Tensor, dict[str, Callable[[int], object]]]:
    """What `out` has to be afterwards, and functions that fill it a number of times."""
    flat = torch.arange(size.num_elements, dtype=torch.float32)
    sources = [part.clone() for part in torch.split(flat, size.shares())]
    targets = list(torch.split(out, size.shares()))

    def memcpy(iterations: int) -> None:
        for _ in range(iterations):
            ctypes.memmove(out.data_ptr(), flat.data_ptr(), size.nbytes)

    def copy_each(iterations: int) -> None:
        for _ in range(iterations):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def foreach_copy(iterations: int) -> None:
        for _ in range(iterations):
            torch._foreach_copy_(targets, sources)

    def fused_pack(iterations: int) -> None:
        _C.pack(sources, out, iterations)

    return flat, {
        "fused pack": fused_pack,
        BOUND: memcpy,
        "copy_ each": copy_each,
        "_foreach_copy_": foreach_copy,
    }


def measure_size(rank: Rank, size: Size) -> dict[str, list[tuple[Span, int]]]:
    """Each contender in turn, and that again; the first turn warms up."""
    out = make_out(size)
    expected, contenders = make_contenders(size, out)
    samples: dict[str, list[tuple[Span, int]]] = {name: [] for name in contenders}
    for repetition in range(-1, size.repetitions):
        for name, run in contenders.items():
            one = sample(rank, run, size, out, expected)
            samples[name] += [one] if repetition >= 0 else []
    return samples


def sample(
    rank: Rank, run: Callable[[int], object], size: Size, out: Tensor, expected: Tensor
) -> tuple[Span, int]:
    """One timed sample and its number of wrong elements."""
    out.fill_(-1)
    run(1)  # the caches are as this contender leaves them
    span = rank.timed(lambda: run(size.iterations))
    return span, int((out != expected).sum())


def measure_case(ranks: Ranks, size: Size) -> Case:
    (samples,) = ranks.call(measure_size, size)
    return Case(
        f"{size.num_tensors} tensors, {size_text(size.nbytes)}",
        {
            "num_tensors": size.num_tensors,
            "nbytes": size.nbytes,
            "iterations": size.iterations,
            "dtype": "torch.float32",
        },
        {
            name: [elapsed_s([span]) / size.iterations for span, _ in turns]
            for name, turns in samples.items()
        },
        {name: sum(wrong for _, wrong in turns) for name, turns in samples.items()},
    )


def measure(quick: bool, command: str) -> Record:
    with Ranks(1) as ranks:
        cases = [measure_case(ranks, size) for size in (QUICK if quick else FULL)]
    return Record(NAME, command, "quick" if quick else "full", [1], cases)


def render(record: Record) -> list[str]:
    header = ("tensors", "together", "contender", "time", "GB/s copied", "of memcpy", "wrong")
    rows = []
    for case in record.cases:
        nbytes = int(case.parameters["nbytes"])
        for name in CONTENDERS:
            seconds = case.medians_s[name]
            rows.append(
                (
                    str(case.parameters["num_tensors"]),
                    size_text(nbytes),
                    name,
                    time_text(seconds),
                    rate_text(nbytes / seconds),
                    f"{case.medians_s[BOUND] / seconds:.0%}",
                    str(case.wrong_results[name]),
                )
            )
    return ["One process, one thread:", "", *table(header, rows), ""]


def aims(record: Record) -> list[Aim]:
    shares = [
        (case.medians_s[BOUND] / case.medians_s["fused pack"], case.name) for case in record.cases
    ]
    measured, where = min(shares)
    return [Aim("fused pack, share of memcpy's bandwidth", 0.9, measured, True, "", where)]


if __name__ == "__main__":
    command_line.run_one(NAME)
