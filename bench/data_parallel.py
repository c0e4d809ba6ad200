"""Owns the benchmark of training steps: compute alone, torch DDP over Gloo, pydist, in turn."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pydist
from bench import bound, command_line
from bench.models import FULL, QUICK, WORKLOADS, Workload
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import Case, Parameter, Record
from bench.sampling import added_ratio, added_ratio_interval, added_s, interleaved
from bench.table import Aim, size_text, table, time_text

NAME = "data_parallel"

# "armed" is compute alone inside a wrapper of one rank: the allocator without communication.
# "floor" is the bound's update of as many bytes as there are gradients.
CONTENDERS = {
    "": ("compute", "ddp", "pydist", "armed", "floor"),
    ", allocator off": ("compute", "ddp", "pydist"),
}
ENVIRONMENTS = {"": {}, ", allocator off": {"PYDIST_ALLOCATOR": "0"}}
NUM_TURNS = {True: 3, False: 30}
AIMS = {"MLP 8 x 1024": 0.1, "200 layers of 32": 0.2, "transformer 6 x 256": 0.1}


@dataclass
class Trainee:
    """One contender's model, with the steps that it has taken."""

    model: nn.Module
    workload: Workload
    batch: tuple[Tensor, Tensor]

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        inputs, target = self.batch
        self.workload.loss(self.model(inputs), target).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def set_up(rank: Rank, name: str, contenders: tuple[str, ...]) -> int:
    """Builds every contender's model with the same parameters; the bytes of their gradients."""
    workload = WORKLOADS[name]
    torch.manual_seed(rank.index)
    batch = workload.make_input(), workload.make_target()
    trainees = {
        contender: Trainee(_wrapped(rank, contender, workload), workload, batch)
        for contender in contenders
        if contender != "floor"
    }
    num_elements = sum(p.numel() for p in trainees["compute"].model.parameters())
    rank.kept.update(trainees)
    if "floor" in contenders:
        buffers = bound.shared_buffers(rank, num_elements)
        rank.kept["floor"] = bound.updater(rank, buffers)
    return num_elements * torch.float32.itemsize


def _wrapped(rank: Rank, contender: str, workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    model = workload.make_model()
    if contender == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if contender == "pydist":
        return pydist.DataParallel(model)
    if contender == "armed":
        # Every rank has to take part in making every group.
        groups = [dist.new_group([index]) for index in range(rank.size)]
        return pydist.DataParallel(model, process_group=groups[rank.index])
    return model


def take_steps(rank: Rank, contender: str, steps: int) -> Span:
    """Some steps in a row, after one more that warms the caches."""
    kept = rank.kept[contender]
    step = kept.step if isinstance(kept, Trainee) else kept

    def run() -> None:
        for _ in range(steps):
            step()

    step()
    return rank.timed(run)


def num_wrong(rank: Rank, own: str, peer: str) -> int:
    """Parameters that differ, beyond rounding, from a peer's that took the same steps."""
    pairs = zip(rank.kept[own].model.parameters(), rank.kept[peer].model.parameters(), strict=True)
    return sum(int((~torch.isclose(a, b, rtol=1e-4, atol=1e-6)).sum()) for a, b in pairs)


def born_share(rank: Rank) -> float:
    """Of the gradient bytes, what autograd wrote straight into the arena."""
    model: pydist.DataParallel = rank.kept["pydist"].model
    report = model.report()
    return report.born_nbytes / (report.born_nbytes + sum(report.packed_nbytes.values()))


def clear(rank: Rank) -> None:
    rank.kept.clear()


def measure_workload(pools: dict[str, Ranks], name: str, quick: bool) -> Case:
    steps = WORKLOADS[name].steps
    contenders = [(pool, contender) for pool in pools for contender in CONTENDERS[pool]]
    for pool, ranks in pools.items():
        nbytes = ranks.call(set_up, name, CONTENDERS[pool])[0]
    samples_s: dict[str, list[float]] = {contender + pool: [] for pool, contender in contenders}
    for turn, (pool, contender) in interleaved(contenders, NUM_TURNS[quick]):
        seconds = elapsed_s(pools[pool].call(take_steps, contender, steps)) / steps
        samples_s[contender + pool] += [seconds] if turn >= 0 else []
    wrong = {"pydist" + pool: sum(pools[pool].call(num_wrong, "pydist", "ddp")) for pool in pools}
    wrong["armed"] = sum(pools[""].call(num_wrong, "armed", "compute"))
    facts = {"born_share" + pool: min(pools[pool].call(born_share)) for pool in pools}
    for ranks in pools.values():
        ranks.call(clear)
    parameters: dict[str, Parameter] = {"gradient_nbytes": nbytes, "steps": steps}
    return Case(name, parameters, samples_s, wrong, {**facts})


def measure(quick: bool, command: str) -> Record:
    with ExitStack() as stack:
        pools = {
            pool: stack.enter_context(Ranks(2, environment))
            for pool, environment in ENVIRONMENTS.items()
        }
        cases = [measure_workload(pools, name, quick) for name in (QUICK if quick else FULL)]
    return Record(NAME, command, "quick" if quick else "full", [2], cases)


HEADER = ("contender", "step", "added", "of DDP's", "90 % of", "added / floor", "born", "wrong")


def render(record: Record) -> list[str]:
    lines = ["Two ranks, one thread each; forward, backward and SGD."]
    lines += ["Added: to compute, within a turn. Born: gradient bytes written into the arena."]
    for case in record.cases:
        nbytes = int(case.parameters["gradient_nbytes"])
        floor_s = case.medians_s["floor"]
        lines += [
            "",
            f"{case.name}, {size_text(nbytes)} of gradients, floor {time_text(floor_s)}:",
            "",
        ]
        rows = [_row(case, contender, pool) for pool in CONTENDERS for contender in ROWS[pool]]
        lines += table(HEADER, rows)
    return [*lines, ""]


LABELS = {"compute": "compute", "ddp": "DDP, Gloo", "pydist": "pydist", "armed": "armed, 1 rank"}
ROWS = {
    pool: [contender for contender in contenders if contender in LABELS]
    for pool, contenders in CONTENDERS.items()
}


def _row(case: Case, contender: str, pool: str) -> tuple[str, ...]:
    name, samples_s = contender + pool, case.samples_s
    own, peer, base = samples_s[name], samples_s["ddp" + pool], samples_s["compute" + pool]
    added = share = interval = floors = "-"
    if contender != "compute":
        added = time_text(added_s(own, base))
    if contender in ("ddp", "pydist"):
        floors = f"{added_s(own, base) / case.medians_s['floor']:.2f}"
    if contender == "pydist":
        share = f"{added_ratio(own, peer, base):.3f}"
        low, high = added_ratio_interval(own, peer, base)
        interval = f"{low:.3f} to {high:.3f}"
    born = f"{case.facts['born_share' + pool]:.1%}" if contender == "pydist" else "-"
    return (
        LABELS[contender] + pool,
        time_text(case.medians_s[name]),
        added,
        share,
        interval,
        floors,
        born,
        str(case.wrong_results.get(name, "-")),
    )


def aims(record: Record) -> list[Aim]:
    return [
        Aim(
            f"{case.name}: time added, of what DDP adds",
            AIMS[case.name],
            added_ratio(*(case.samples_s[name] for name in ("pydist", "ddp", "compute"))),
            at_least=False,
        )
        for case in record.cases
        if case.name in AIMS
    ]


if __name__ == "__main__":
    command_line.run_one(NAME)
