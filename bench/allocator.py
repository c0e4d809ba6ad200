"""Owns the benchmark of ordinary allocations where pydist is used, beside where it is not."""

import statistics
from contextlib import ExitStack

import torch

import pydist
from bench import command_line
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import Case, Parameter, Record
from bench.table import Aim, size_text, table, time_text

NAME = "allocator"

# nbytes -> allocations in one sample
FULL = {64: 20_000, 4 * 2**10: 20_000, 2**20: 5_000, 16 * 2**20: 2_000}
QUICK = {64: 100, 2**20: 20}
CONTENDERS = ("with", "without")
LARGEST_SMALL_NBYTES = 4 * 2**10

# Two processes differ by some percent for no reason but where their memory lies: several pairs.
NUM_PAIRS = {True: 1, False: 4}
NUM_REPETITIONS = {True: 3, False: 25}


def install(rank: Rank) -> None:
    """The first wrap and the first backward of a process install pydist's allocator."""
    model = pydist.DataParallel(torch.nn.Linear(512, 512))
    for _ in range(2):
        model(torch.ones(4, 512)).sum().backward()
        model.zero_grad()
    rank.kept["model"] = model


def allocate(rank: Rank, nbytes: int, iterations: int) -> tuple[Span, int]:
    """Allocates and frees; also counts the allocations of the wrong size."""
    empty, uint8 = torch.empty, torch.uint8

    def run() -> None:
        for _ in range(iterations):
            empty(nbytes, dtype=uint8)

    span = rank.timed(run)
    return span, int(empty(nbytes, dtype=uint8).fill_(1).sum()) - nbytes


Samples = dict[tuple[str, int], list[tuple[Span, int]]]


def sample_pair(sizes: dict[int, int], repetitions: int, samples: Samples) -> None:
    """A process with pydist and one without, in turn; the first turn warms up."""
    with ExitStack() as stack:
        pair = {name: stack.enter_context(Ranks(1)) for name in CONTENDERS}
        pair["with"].call(install)
        for repetition in range(-1, repetitions):
            for nbytes, iterations in sizes.items():
                for name, ranks in pair.items():
                    one = ranks.call(allocate, nbytes, iterations)
                    samples.setdefault((name, nbytes), []).extend(one if repetition >= 0 else [])


def measure(quick: bool, command: str) -> Record:
    sizes = QUICK if quick else FULL
    samples: Samples = {}
    for _ in range(NUM_PAIRS[quick]):
        sample_pair(sizes, NUM_REPETITIONS[quick], samples)
    cases = []
    for nbytes, iterations in sizes.items():
        own = {name: samples[name, nbytes] for name in CONTENDERS}
        samples_s = {
            name: [elapsed_s([span]) / iterations for span, _ in turns]
            for name, turns in own.items()
        }
        wrong = {name: sum(wrong for _, wrong in turns) for name, turns in own.items()}
        parameters: dict[str, Parameter] = {
            "nbytes": nbytes,
            "iterations": iterations,
            "pairs": NUM_PAIRS[quick],
        }
        cases.append(Case(size_text(nbytes), parameters, samples_s, wrong))
    return Record(NAME, command, "quick" if quick else "full", [1], cases)


def ratio(case: Case) -> float:
    """Median over neighbouring samples, which share the machine's mood."""
    pairs = zip(case.samples_s["with"], case.samples_s["without"], strict=True)
    return statistics.median(own / peer for own, peer in pairs)


def render(record: Record) -> list[str]:
    header = ("torch.empty of", "with pydist", "without", "ratio", "wrong")
    rows = [
        (
            case.name,
            time_text(case.medians_s["with"]),
            time_text(case.medians_s["without"]),
            f"{ratio(case):.3f}",
            str(sum(case.wrong_results.values())),
        )
        for case in record.cases
    ]
    title = "Allocate and free through torch, one thread; the ratio is of neighbouring samples:"
    return [title, "", *table(header, rows), ""]


def aims(record: Record) -> list[Aim]:
    return [
        *_ratio_aims("small allocations, with / without", 1.10, record, small=True),
        *_ratio_aims("large allocations, with / without", 1.02, record, small=False),
    ]


def _ratio_aims(text: str, target: float, record: Record, small: bool) -> list[Aim]:
    ratios = [
        (ratio(case), case.name)
        for case in record.cases
        if (int(case.parameters["nbytes"]) <= LARGEST_SMALL_NBYTES) == small
    ]
    measured, where = max(ratios)
    return [Aim(text, target, measured, False, "", where)]


if __name__ == "__main__":
    command_line.run_one(NAME)
