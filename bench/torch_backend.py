"""Owns the benchmark of the backend "pydist" beside Gloo, both by torch.distributed's functions."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench import command_line, torch_models
from bench.models import WORKLOADS
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import Case, Parameter, Record
from bench.sampling import interleaved
from bench.table import Aim, size_text, table, time_text
from bench.torch_operations import DTYPE, OPERATIONS, Values

NAME = "torch_backend"
BACKENDS = ("pydist", "gloo")
LARGE_NBYTES = 2**20


@dataclass(frozen=True)
class Size:
    """One size. A sample is `iterations` operations in a row, each on buffers of its own."""

    nbytes: int
    iterations: int
    turns: int


FULL = (
    Size(2**10, 20, 15),
    Size(16 * 2**10, 20, 15),
    Size(256 * 2**10, 10, 11),
    Size(2**20, 5, 11),
    Size(16 * 2**20, 1, 9),
    Size(64 * 2**20, 1, 5),
)
QUICK = (Size(2**10, 3, 2), Size(256 * 2**10, 2, 2))
STEP_TURNS = {True: 2, False: 11}


def make_groups(rank: Rank) -> None:
    """A group for each backend, beside the default one; once."""
    if "groups" in rank.kept:
        return
    # Later versions have other names, which earlier ones lack.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    rank.kept["groups"] = {backend: dist.new_group(backend=backend) for backend in BACKENDS}


def set_up_calls(rank: Rank, operation: str, size: Size) -> None:
    values = Values(rank, size.nbytes // DTYPE.itemsize)
    rank.kept["calls"] = [OPERATIONS[operation](values) for _ in range(size.iterations)]


def sample_calls(rank: Rank, backend: str) -> tuple[Span, int]:
    """One sample, and its number of wrong elements."""
    group, calls = rank.kept["groups"][backend], rank.kept["calls"]

    def run() -> None:
        for call in calls:
            call.run(group)

    for call in calls:
        call.reset()
    span = rank.timed(run)
    return span, sum(call.num_wrong() for call in calls)


def measure_operation(rank: Rank, operation: str, size: Size) -> dict[str, list[tuple[Span, int]]]:
    """Runs on every rank."""
    set_up_calls(rank, operation, size)
    samples: dict[str, list[tuple[Span, int]]] = {backend: [] for backend in BACKENDS}
    for turn, backend in interleaved(BACKENDS, size.turns):
        sample = sample_calls(rank, backend)
        samples[backend] += [sample] if turn >= 0 else []
    del rank.kept["calls"]
    return samples


def operation_case(ranks: Ranks, operation: str, size: Size) -> Case:
    by_rank = ranks.call(measure_operation, operation, size)
    samples_s, wrong_results = {}, {}
    for backend in BACKENDS:
        turns = list(zip(*(samples[backend] for samples in by_rank), strict=True))
        samples_s[backend] = [elapsed_s([s for s, _ in turn]) / size.iterations for turn in turns]
        wrong_results[backend] = sum(wrong for turn in turns for _, wrong in turn)
    nbytes = 0 if operation == "barrier" else size.nbytes
    name = f"{operation}, {size_text(nbytes)}, {ranks.size} ranks"
    parameters: dict[str, Parameter] = {
        "operation": operation,
        "nbytes": nbytes,
        "iterations": size.iterations,
        "ranks": ranks.size,
    }
    return Case(name, parameters, samples_s, wrong_results)


def set_up_models(rank: Rank, name: str) -> int:
    """The bytes of the whole model's parameters."""
    for backend in BACKENDS:
        group = rank.kept["groups"][backend]
        rank.kept[backend] = torch_models.Trainee(name, rank.index, group)
    return sum(p.nbytes for p in rank.kept["gloo"].parameters())


def take_steps(rank: Rank, backend: str) -> Span:
    """Some steps in a row, after one more that warms the caches."""
    trainee = rank.kept[backend]

    def run() -> None:
        for _ in range(trainee.workload.steps):
            trainee.step()

    trainee.step()
    return rank.timed(run)


def num_wrong_parameters(rank: Rank) -> int:
    """Parameters that differ, beyond rounding, after the same steps on both backends."""
    pairs = zip(rank.kept["pydist"].parameters(), rank.kept["gloo"].parameters(), strict=True)
    return sum(int((~torch.isclose(a, b, rtol=1e-4, atol=1e-6)).sum()) for a, b in pairs)


def clear_models(rank: Rank) -> None:
    for backend in BACKENDS:
        del rank.kept[backend]


def model_case(ranks: Ranks, name: str, quick: bool) -> Case:
    nbytes = ranks.call(set_up_models, name)[0]
    workload = WORKLOADS[torch_models.PARALLELISMS[name].workload]
    samples_s: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for turn, backend in interleaved(BACKENDS, STEP_TURNS[quick]):
        seconds = elapsed_s(ranks.call(take_steps, backend)) / workload.steps
        samples_s[backend] += [seconds] if turn >= 0 else []
    wrong = {"pydist": sum(ranks.call(num_wrong_parameters))}
    ranks.call(clear_models)
    parameters: dict[str, Parameter] = {
        "ranks": ranks.size,
        "parameter_nbytes": nbytes,
        "steps": workload.steps,
    }
    return Case(name, parameters, samples_s, wrong)


def measure(quick: bool, command: str) -> Record:
    num_ranks = [2] if quick else [2, 4]
    sizes = QUICK if quick else FULL
    cases = []
    for count in num_ranks:
        with Ranks(count) as ranks:
            ranks.call(make_groups)
            for operation in OPERATIONS:
                for size in sizes[:1] if operation == "barrier" else sizes:
                    cases.append(operation_case(ranks, operation, size))
            if count == 2:
                names = torch_models.QUICK if quick else torch_models.FULL
                cases += [model_case(ranks, name, quick) for name in names]
    return Record(NAME, command, "quick" if quick else "full", num_ranks, cases)


def ratio(case: Case) -> float:
    """Gloo's time over ours."""
    return case.medians_s["gloo"] / case.medians_s["pydist"]


def target(case: Case) -> float:
    """What the ratio should be at least."""
    return 3.0 if int(case.parameters.get("nbytes", 0)) >= LARGE_NBYTES else 1.0


def _operations(record: Record, ranks: int) -> list[Case]:
    return [c for c in record.cases if c.parameters["ranks"] == ranks and "nbytes" in c.parameters]


def render(record: Record) -> list[str]:
    lines = [
        "A cell: the time of one operation, and in brackets Gloo's over it. Marked with *: short"
    ]
    lines += ["of the aim, which is 1, and 3 from 1 MiB.", ""]
    for ranks in record.ranks:
        lines += [f"{ranks} ranks:", "", *_operations_table(_operations(record, ranks)), ""]
    cases = [case for case in record.cases if "parameter_nbytes" in case.parameters]
    header = ("step, 2 ranks", "parameters", "Gloo", "pydist", "Gloo / it", "wrong")
    return [*lines, *table(header, [_model_row(case) for case in cases]), ""]


def _operations_table(cases: Sequence[Case]) -> list[str]:
    sizes = sorted({int(case.parameters["nbytes"]) for case in cases})
    by_place: dict[Any, Case] = {
        (case.parameters["operation"], case.parameters["nbytes"]): case for case in cases
    }
    rows = []
    for operation in OPERATIONS:
        row = [by_place.get((operation, size)) for size in sizes]
        wrong = sum(sum(case.wrong_results.values()) for case in row if case)
        rows.append((operation, *(_cell(case) if case else "" for case in row), str(wrong)))
    return table(("", *(size_text(size) if size else "no data" for size in sizes), "wrong"), rows)


def _cell(case: Case) -> str:
    mark = "" if ratio(case) >= target(case) else " *"
    return f"{time_text(case.medians_s['pydist'])} ({ratio(case):.1f}){mark}"


def _model_row(case: Case) -> tuple[str, ...]:
    return (
        case.name,
        size_text(int(case.parameters["parameter_nbytes"])),
        time_text(case.medians_s["gloo"]),
        time_text(case.medians_s["pydist"]),
        f"{ratio(case):.2f}" + ("" if ratio(case) >= 1 else " *"),
        str(case.wrong_results["pydist"]),
    )


def aims(record: Record) -> list[Aim]:
    found = []
    for ranks in record.ranks:
        cases = _operations(record, ranks)
        for text, bound, chosen in (
            ("below 1 MiB", 1.0, [c for c in cases if target(c) == 1.0]),
            ("from 1 MiB", 3.0, [c for c in cases if target(c) == 3.0]),
        ):
            worst = min(chosen, key=ratio)
            label = f"Gloo's time / its own, {text}, {ranks} ranks"
            found.append(Aim(label, bound, ratio(worst), True, "", worst.name))
    steps = [case for case in record.cases if "parameter_nbytes" in case.parameters]
    worst = min(steps, key=ratio)
    return [*found, Aim("Gloo's step / its own", 1.0, ratio(worst), True, "", worst.name)]


if __name__ == "__main__":
    command_line.run_one(NAME)
