"""Owns the benchmark of ranks on several hosts: sums and training steps over limited links."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from bench import command_line, host_cost_model
from bench.data_parallel_options import Trainee, num_beyond
from bench.hosts_report import COMPARED, RATES, Layout, aims, layout_text, rate_text, render
from bench.network import Network, places
from bench.options import LARGE, OPTIONS, TINY, VIEWS, Option, Shape, Wrapping
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import REPOSITORY, RESULTS, Case, Parameter, Record, load
from bench.sampling import interleaved
from bench.table import size_text

__all__ = ["aims", "render"]

NAME = "hosts"
SAMPLES = RESULTS / f"{NAME}.json"
T = TypeVar("T")
PORT = 29500  # each network has its own

NUM_TURNS = {True: 2, False: 9}
NUM_STEP_TURNS = {True: 2, False: 7}

KIB, MIB = 2**10, 2**20
QUICK_SIZES = (4 * KIB, 512 * KIB)
COMPARED_SIZES = (64 * KIB, MIB, 8 * MIB, 32 * MIB)
# For the cost model, with the engine alone; which of them it is fitted on, host_cost_model says.
MODEL_SIZES = tuple(16 * KIB * 2**power for power in range(12))
MODEL_LAYOUTS: tuple[Layout, ...] = ((1, 1), (2, 2), (1, 1, 1), (2, 1), (2, 2, 2))
MODEL_RATES = (1e9, 2.5e9, 1e10)
NUM_MODEL_TURNS = 5


@dataclass
class Site:
    """Ranks on hosts, and the network between them."""

    layout: Layout
    network: Network
    ranks: Ranks

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.network = Network(len(layout), RATES[0])
        try:
            self.ranks = Ranks(sum(layout), None, places(self.network, layout, PORT))
        except BaseException:
            self.network.close()
            raise

    def counted(self, call: Callable[[], list[T]]) -> tuple[list[T], int]:
        """What the ranks answered; the most bytes that a host sent meanwhile, headers included."""
        before = self.network.sent_nbytes()
        answers = call()
        after = self.network.sent_nbytes()
        return answers, max(late - early for early, late in zip(before, after, strict=True))

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.ranks.__exit__(kind, *rest)
        finally:
            self.network.close()


# --- sums ---


class Sum:
    """One contender's buffer. Values stay exact in every type that travels: integers of few bits,
    which grow by a factor of the number of ranks with each further sum."""

    def __init__(self, rank: Rank, nbytes: int, iterations: int) -> None:
        self._rank = rank
        self._iterations = iterations
        self._base = torch.arange(nbytes // 4, dtype=torch.float32) % 13 + 1
        self.tensor = torch.empty_like(self._base)

    def fill(self) -> None:
        torch.add(self._base, float(self._rank.index), out=self.tensor)

    def num_wrong(self) -> int:
        size = self._rank.size
        expected = self._base * size + size * (size - 1) // 2
        expected *= float(size) ** (self._iterations - 1)
        return int((self.tensor != expected).sum())


def gloo(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def engine(tensor: Tensor) -> None:
    pydist.all_reduce(tensor)


SUMS: dict[str, Callable[[Tensor], None]] = {"gloo": gloo, "pydist": engine}


def set_up_sum(rank: Rank, nbytes: int, iterations: int) -> None:
    rank.kept["sum"] = Sum(rank, nbytes, iterations)


def time_sum(rank: Rank, contender: str, iterations: int) -> tuple[Span, int]:
    """Some sums in a row, and the number of wrong elements."""
    work: Sum = rank.kept["sum"]
    reduce = SUMS[contender]

    def run() -> None:
        for _ in range(iterations):
            reduce(work.tensor)

    work.fill()
    span = rank.timed(run)
    return span, work.num_wrong()


def iterations_of(nbytes: int) -> int:
    return 1 if nbytes > MIB else 4


def measure_sum(
    site: Site, rate: float, nbytes: int, contenders: Sequence[str], num_turns: int
) -> Case:
    iterations = iterations_of(nbytes)
    site.ranks.call(set_up_sum, nbytes, iterations)
    samples_s: dict[str, list[float]] = {name: [] for name in contenders}
    wrong = dict.fromkeys(contenders, 0)
    sent = dict.fromkeys(contenders, 0)
    for turn, name in interleaved(contenders, num_turns):
        answers, nbytes_sent = site.counted(partial(site.ranks.call, time_sum, name, iterations))
        spans = [span for span, _ in answers]
        wrong[name] += sum(count for _, count in answers)
        if turn >= 0:
            samples_s[name].append(elapsed_s(spans) / iterations)
            sent[name] += nbytes_sent
    facts: dict[str, Parameter] = {
        f"sent_nbytes, {name}": round(count / num_turns / iterations)
        for name, count in sent.items()
    }
    parameters: dict[str, Parameter] = {
        "kind": "sum",
        "layout": layout_text(site.layout),
        "rate_bit_per_s": rate,
        "nbytes": nbytes,
        "iterations": iterations,
    }
    name = f"{size_text(nbytes)}, {layout_text(site.layout)}, {rate_text(rate)}"
    return Case(name, parameters, samples_s, wrong, facts)


# --- steps ---


# By what travels: DDP's bf16 hook refuses Gloo, so there it is fp16.
STEPS = {
    "fp32": Option("fp32", {"ddp": Wrapping(VIEWS), "pydist": Wrapping()}),
    "bf16": OPTIONS["wire bf16, DDP fp16 hook"],
    "PowerSGD": OPTIONS["powerSGD_hook, rank 1"],
}
COMPUTE = "compute"


def contenders_of(wire: str) -> dict[str, str]:
    """Their names by side."""
    return {"ddp": "ddp, fp16" if wire == "bf16" else f"ddp, {wire}", "pydist": f"pydist, {wire}"}


STEPPERS = (COMPUTE, *(name for wire in STEPS for name in contenders_of(wire).values()))


def set_up_steps(rank: Rank, shape: Shape) -> int:
    """Every contender's model, with the same parameters; the bytes of their gradients."""
    alone = Option(COMPUTE, {COMPUTE: None}, shape)
    rank.kept[COMPUTE] = Trainee(rank, alone, COMPUTE)
    for wire, option in STEPS.items():
        for side, name in contenders_of(wire).items():
            rank.kept[name] = Trainee(rank, replace(option, shape=shape), side)
    return sum(p.numel() * 4 for p in rank.kept[COMPUTE].model.parameters())


def take_step(rank: Rank, contender: str) -> Span:
    return rank.timed(rank.kept[contender].step)


def num_wrong_steps(rank: Rank, shape: Shape) -> dict[str, int]:
    """Of pydist's parameters, those unlike the first rank's, or beyond rounding unlike DDP's."""
    wrong: dict[str, int] = {}
    initial = shape.make_model()
    for wire, option in STEPS.items():
        peer, own = (rank.kept[name].model for name in contenders_of(wire).values())
        count = 0
        for mine, theirs, first in zip(
            own.parameters(), peer.parameters(), initial.parameters(), strict=True
        ):
            shared = mine.detach().clone()
            dist.broadcast(shared, 0)
            count += int((shared.view(torch.int32) != mine.detach().view(torch.int32)).sum())
            if option.tolerance is not None:
                values = mine.detach(), theirs.detach(), first.detach()
                count += num_beyond(option.tolerance, *values)
        wrong[f"pydist, {wire}"] = count
    return wrong


def forget(rank: Rank) -> None:
    rank.kept.clear()


def measure_steps(site: Site, rate: float, shape: Shape, num_turns: int) -> Case:
    gradient_nbytes = site.ranks.call(set_up_steps, shape)[0]
    # Hooks of PowerSGD compress from the second step on; all contenders take as many.
    for _ in range(3):
        for name in STEPPERS:
            site.ranks.call(take_step, name)
    samples_s: dict[str, list[float]] = {name: [] for name in STEPPERS}
    sent = dict.fromkeys(STEPPERS, 0)
    for turn, name in interleaved(STEPPERS, num_turns):
        spans, count = site.counted(partial(site.ranks.call, take_step, name))
        if turn >= 0:
            samples_s[name].append(elapsed_s(spans))
            sent[name] += count
    by_rank = site.ranks.call(num_wrong_steps, shape)
    wrong = {name: sum(counts[name] for counts in by_rank) for name in by_rank[0]}
    site.ranks.call(forget)
    facts: dict[str, Parameter] = {
        f"sent_nbytes, {name}": round(count / num_turns) for name, count in sent.items()
    }
    parameters: dict[str, Parameter] = {
        "kind": "step",
        "layout": layout_text(site.layout),
        "rate_bit_per_s": rate,
        "gradient_nbytes": gradient_nbytes,
    }
    name = f"step, {layout_text(site.layout)}, {rate_text(rate)}"
    return Case(name, parameters, samples_s, wrong, facts)


# --- the record ---


def measure(quick: bool, command: str) -> Record:
    cases: list[Case] = []
    for layout in (COMPARED,) if quick else MODEL_LAYOUTS:
        with Site(layout) as site:
            cases += list(_measure_site(site, quick))
    sizes = sorted({sum(layout) for layout in MODEL_LAYOUTS})
    record = Record(NAME, command, "quick" if quick else "full", sizes, cases)
    if not quick:
        record.cases.sort(key=lambda case: str(case.parameters["kind"]))
    return record


def _measure_site(site: Site, quick: bool) -> Iterable[Case]:
    compared = site.layout == COMPARED
    for rate in MODEL_RATES:
        if quick and rate not in RATES:
            continue
        site.network.limit(rate)
        beside_gloo = compared and rate in RATES
        sizes = MODEL_SIZES if not quick else ()
        for nbytes in sizes:
            if not (beside_gloo and nbytes in COMPARED_SIZES):
                yield measure_sum(site, rate, nbytes, ("pydist",), NUM_MODEL_TURNS)
        if beside_gloo:
            for nbytes in QUICK_SIZES if quick else COMPARED_SIZES:
                yield measure_sum(site, rate, nbytes, tuple(SUMS), NUM_TURNS[quick])
            shape = TINY if quick else LARGE
            yield measure_steps(site, rate, shape, NUM_STEP_TURNS[quick])


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the samples here")
    parser.add_argument(
        "--project", action="store_true", help="no measurement: what the cost model says of more"
    )
    options = parser.parse_args()
    if options.project:
        if not SAMPLES.exists():
            sys.exit(
                f"{SAMPLES} is missing: `{command_line.command_of(f'bench.{NAME}', False)} "
                f"--json {SAMPLES.relative_to(REPOSITORY)}` measures what the model is fitted on"
            )
        print("\n".join(host_cost_model.projection(load(SAMPLES))))
        return
    record = measure(options.quick, command_line.command_of(f"bench.{NAME}", options.quick))
    if options.json:
        record.save(options.json.resolve())
    print("\n".join(command_line.lines_of(record)))
    command_line.check_results(record)


if __name__ == "__main__":
    # By its importable name, under which its functions can be sent to the ranks.
    command_line.module_of(NAME).main()
