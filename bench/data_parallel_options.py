"""Owns the benchmark of DataParallel's options: each beside the same one of torch DDP over Gloo."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pydist
from bench import command_line
from bench.options import AUDITS, OPTIONS, ROUNDING, TINY, Option, Wrapping
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import Case, Parameter, Record
from bench.sampling import added_ratio, added_ratio_interval, added_s, interleaved
from bench.table import Aim, size_text, table, time_text

NAME = "data_parallel_options"

NUM_TURNS = {True: 3, False: 20}
LEARNING_RATE = 1e-3
AUDIT_EVERY = 100


class Trainee:
    """One contender's model, with the steps that it has taken."""

    def __init__(self, rank: Rank, option: Option, contender: str) -> None:
        self._option = option
        self._rank = rank
        self.model: nn.Module = option.shape.make_model()
        self.hook_state: Any = None
        wrapping = option.wrappings[contender]
        if wrapping is not None:
            self._wrap(contender, wrapping)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        torch.manual_seed(1 + rank.index)
        size = (option.shape.batch_size, option.shape.width)
        self._microbatches = [
            (torch.randn(size), torch.randn(size)) for _ in range(option.num_microbatches)
        ]
        self._num_steps = 0
        self.loss = torch.zeros(())

    def _wrap(self, contender: str, wrapping: Wrapping) -> None:
        wrap = DistributedDataParallel if contender == "ddp" else pydist.DataParallel
        model = wrap(self.model, **wrapping.arguments)
        if wrapping.make_hook is not None:
            self.hook_state, hook = wrapping.make_hook()
            model.register_comm_hook(self.hook_state, hook)
        self.model = model

    def joined(self) -> AbstractContextManager[Any]:
        """Where the option says so, what its steps are taken in."""
        if self._option.joined and isinstance(self.model, DistributedDataParallel):
            context: AbstractContextManager[Any] = self.model.join()
            return context
        return nullcontext()

    def step(self) -> None:
        *accumulated, last = self._microbatches
        with self._without_sync():
            for microbatch in accumulated:
                self._backward(*microbatch)
        self._backward(*last)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_steps += 1

    def _without_sync(self) -> AbstractContextManager[Any]:
        if self._option.num_microbatches > 1 and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def _backward(self, inputs: Tensor, target: Tensor) -> None:
        """Of the squared error summed over features: gradients stay normal numbers in fp16."""
        self.loss = (self.model(inputs, self._skipped()) - target).square().sum() / len(target)
        self.loss.backward()

    def _skipped(self) -> int | None:
        if not self._option.skips:
            return None
        return self._num_steps + (0 if self._option.ranks_skip_alike else self._rank.index)


def set_up(rank: Rank, option: Option, contenders: tuple[str, ...]) -> int:
    """Builds every contender's model with the same parameters; the bytes of their gradients."""
    for contender in contenders:
        rank.kept[contender] = Trainee(rank, option, contender)
    parameters = rank.kept[contenders[0]].model.parameters()
    return int(sum(p.numel() * p.element_size() for p in parameters))


def take_steps(rank: Rank, contender: str, steps: int) -> Span:
    """Some steps in a row, after one more that warms the caches."""
    trainee: Trainee = rank.kept[contender]

    def run() -> None:
        for _ in range(steps):
            trainee.step()

    with trainee.joined():
        trainee.step()
        return rank.timed(run)


def num_wrong(rank: Rank, option: Option) -> int:
    """Elements of pydist's parameters unlike another rank's, or its peer's after the same steps."""
    own: Trainee = rank.kept["pydist"]
    peer: Trainee = rank.kept[option.peer]
    wrong = sum(_num_unlike_rank_0(p.detach()) for p in own.model.parameters())
    if option.tolerance is None:
        wrong += int(own.hook_state.iter != peer.hook_state.iter)
        return wrong + int(not own.loss.isfinite())
    models = own.model, peer.model, option.shape.make_model()
    for same in zip(*(model.parameters() for model in models), strict=True):
        wrong += num_beyond(option.tolerance, *(p.detach() for p in same))
    return wrong


def _num_unlike_rank_0(parameter: Tensor) -> int:
    expected = parameter.clone()
    dist.broadcast(expected, 0)
    return int((expected.view(torch.int32) != parameter.view(torch.int32)).sum())


def num_beyond(tolerance: float, own: Tensor, peer: Tensor, initial: Tensor) -> int:
    """Compared with how far training moved the parameter: its size says nothing of gradients."""
    moved = (peer - initial).abs().max()
    if tolerance > 0:
        bound = tolerance * moved + ROUNDING * peer.abs().max()
        return int((~((own - peer).abs() <= bound)).sum())  # not a number is wrong
    return int((own != peer).sum()) + int(moved == 0)


def num_overlooked(rank: Rank) -> int:
    """Whether the audit says nothing of a bit that one rank flips."""
    trainee: Trainee = rank.kept["audited"]
    if rank.index == rank.size - 1:
        bits = next(trainee.model.parameters()).detach().view(torch.int32)
        bits[0, 0] ^= 1
    try:
        trainee.step()
    except pydist.MismatchError:
        return 0
    return 1


def clear(rank: Rank) -> None:
    rank.kept.clear()


def measure_option(ranks: Ranks, option: Option, quick: bool) -> Case:
    contenders = tuple(option.wrappings)
    nbytes = ranks.call(set_up, option, contenders)[0]
    samples_s: dict[str, list[float]] = {contender: [] for contender in contenders}
    steps = option.shape.steps
    for turn, contender in interleaved(contenders, NUM_TURNS[quick]):
        seconds = elapsed_s(ranks.call(take_steps, contender, steps)) / steps
        samples_s[contender] += [seconds] if turn >= 0 else []
    wrong = {"pydist": sum(ranks.call(num_wrong, option))}
    if "audited" in contenders:
        wrong["audited"] = sum(ranks.call(num_overlooked))
    ranks.call(clear)
    parameters: dict[str, Parameter] = {
        "layers": option.shape.num_layers,
        "width": option.shape.width,
        "gradient_nbytes": nbytes,
        "steps": steps,
        "microbatches": option.num_microbatches,
    }
    return Case(option.name, parameters, samples_s, wrong)


def measure(quick: bool, command: str) -> Record:
    options = [*OPTIONS.values(), *AUDITS.values()]
    if quick:
        options = [replace(option, shape=TINY) for option in options]
    with Ranks(2) as ranks:
        cases = [measure_option(ranks, option, quick) for option in options]
    return Record(NAME, command, "quick" if quick else "full", [2], cases)


HEADER = (
    "option",
    "layers",
    "gradients",
    "compute",
    "DDP, Gloo",
    "pydist",
    "DDP adds",
    "pydist adds",
    "of DDP's",
    "90 % of",
    "wrong",
)
AUDIT_HEADER = (
    "option",
    "layers",
    "step",
    "audited step",
    "one audit",
    f"of {AUDIT_EVERY} steps",
    "wrong",
)


def render(record: Record) -> list[str]:
    lines = ["Two ranks, one thread each; forward, backward and SGD, per step."]
    lines += ["Added: to compute, within a turn.", ""]
    lines += table(HEADER, [_row(case) for case in record.cases if case.name in OPTIONS])
    lines += ["", "An audit of the replicas in every step, beside none:", ""]
    rows = [_audit_row(case) for case in record.cases if case.name in AUDITS]
    return [*lines, *table(AUDIT_HEADER, rows), ""]


def _row(case: Case) -> tuple[str, ...]:
    own, peer, base = (case.samples_s[name] for name in ("pydist", "ddp", "compute"))
    low, high = added_ratio_interval(own, peer, base)
    return (
        case.name,
        f"{case.parameters['layers']} x {case.parameters['width']}",
        size_text(int(case.parameters["gradient_nbytes"])),
        *(time_text(case.medians_s[name]) for name in ("compute", "ddp", "pydist")),
        time_text(added_s(peer, base)),
        time_text(added_s(own, base)),
        f"{added_ratio(own, peer, base):.3f}",
        f"{low:.3f} to {high:.3f}",
        str(case.wrong_results["pydist"]),
    )


def _audit_row(case: Case) -> tuple[str, ...]:
    return (
        case.name,
        f"{case.parameters['layers']} x {case.parameters['width']}",
        *(time_text(case.medians_s[name]) for name in ("pydist", "audited")),
        time_text(added_s(case.samples_s["audited"], case.samples_s["pydist"])),
        f"{audit_share(case):.3%}",
        str(sum(case.wrong_results.values())),
    )


def audit_share(case: Case) -> float:
    """One audit's time, of as many steps as it is made once in."""
    audit_s = added_s(case.samples_s["audited"], case.samples_s["pydist"])
    return audit_s / (AUDIT_EVERY * case.medians_s["pydist"])


def aims(record: Record) -> list[Aim]:
    added = [
        Aim(
            f"{case.name}: time added, of what DDP adds",
            1.0,
            added_ratio(*(case.samples_s[name] for name in ("pydist", "ddp", "compute"))),
            at_least=False,
        )
        for case in record.cases
        if case.name in OPTIONS
    ]
    shares = [(audit_share(record.case(name)), name) for name in AUDITS]
    share, where = max(shares)
    text = f"audit_every={AUDIT_EVERY}: time added to a step"
    return [*added, Aim(text, 1.0, 100 * share, False, "%", where)]


if __name__ == "__main__":
    command_line.run_one(NAME)
