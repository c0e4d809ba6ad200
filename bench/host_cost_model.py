"""Owns the cost model of sums over hosts: fitted to some samples, judged by others, extrapolated.

A sum's bytes are cut into segments, whose work in the hosts and whose way over the links overlap.
With H hosts and n ranks (see csrc/collective/hosts_plan.h for segments and exchanges):

    time = latency + (work^p + link^p)^(1/p) + delay * ways
    link = (1 + headers) * 2 (H - 1) / H * bytes / rate what each host sends: never less
    work = (turn * n * turns                            a rank is woken, works, and sleeps
          + message * messages                          one host to another, each time
          + memory * n * bytes                          reduced and copied inside hosts
          + network * H * sent) / cores                 through sockets

The hosts of a measurement share one machine and its cores, so all their work adds up; hosts of a
projection have cores of their own. Pure arithmetic.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from bench.record import Case, Record
from bench.table import Aim, size_text, table, time_text

KIB, MIB = 2**10, 2**20
Floats = npt.NDArray[np.float64]

CONTENDER = "pydist"
# Neither of them is seen by the fit.
HELD_OUT_LAYOUTS = ("2 + 1", "2 + 2 + 2")
HELD_OUT_RATES = (2.5e9,)
AIM = 0.15


@dataclass(frozen=True)
class Sum:
    """One all-reduce, and where it is made."""

    layout: tuple[int, ...]  # ranks by host
    nbytes: int
    rate_bit_per_s: float
    cores: float = 2.0  # that share the work of `sharing_hosts` hosts
    sharing_hosts: int = 0  # 0: all of them, as in a measurement
    delay_s: float = 0.0  # of a link, one way

    @property
    def num_hosts(self) -> int:
        return len(self.layout)

    @property
    def sent_nbytes(self) -> float:
        """By each host."""
        return 2 * (self.num_hosts - 1) / self.num_hosts * self.nbytes

    @property
    def floor_s(self) -> float:
        return self.sent_nbytes * 8 / self.rate_bit_per_s

    @property
    def num_segments(self) -> int:
        """As HostsPlan cuts them."""
        segment = min(max(self.nbytes // 8, 512 * KIB), 4 * MIB)
        return -(-self.nbytes // segment)

    @property
    def exchanges(self) -> int:
        """Of a segment: two hosts send each other all, others slices and then sums."""
        return 1 if self.num_hosts == 2 else 2


@dataclass(frozen=True)
class Costs:
    """What is fitted. All are positive."""

    latency_s: float = 2e-4
    turn_s: float = 2e-5
    message_s: float = 2e-5
    memory_s_per_byte: float = 3e-10
    network_s_per_byte: float = 3e-10
    headers: float = 0.05  # of the bytes
    overlap: float = 4.0  # p: 1 is none, many is all

    def work_s(self, what: Sum) -> float:
        share = (what.sharing_hosts or what.num_hosts) / what.num_hosts
        ranks = sum(what.layout)
        lanes = min(what.layout)
        exchanged = what.num_segments * what.exchanges
        turns = 1 + what.num_segments + exchanged
        messages = what.num_hosts * (what.num_hosts - 1) * (1 + lanes * exchanged)
        work = (
            self.turn_s * ranks * turns
            + self.message_s * messages
            + self.memory_s_per_byte * ranks * what.nbytes
            + self.network_s_per_byte * what.num_hosts * what.sent_nbytes
        )
        return work * share / what.cores

    def link_s(self, what: Sum) -> float:
        return (1 + self.headers) * what.floor_s

    def predict_s(self, what: Sum) -> float:
        work, link = self.work_s(what), self.link_s(what)
        larger, smaller = max(work, link), min(work, link)
        # As larger * (1 + (smaller / larger)^p)^(1/p), which cannot overflow.
        together = larger * math.pow(1 + math.pow(smaller / larger, self.overlap), 1 / self.overlap)
        return self.latency_s + together + what.delay_s * (1 + what.exchanges)


Sample = tuple[Sum, float]  # what was done, and seconds


def fit(samples: Sequence[Sample], start: Costs | None = None) -> Costs:
    """Least squares of the logarithms of predicted / measured (Levenberg, Quart. Appl. Math. 2,
    1944; Marquardt, J. SIAM 11, 1963), over the logarithms of the costs: all stay positive, and a
    relative error counts alike for small and large sums."""

    def residuals(point: Floats) -> Floats:
        costs = Costs(*np.exp(point))
        return np.array([math.log(costs.predict_s(what) / s) for what, s in samples])

    return Costs(*np.exp(_levenberg(residuals, np.log(astuple(start or Costs())))))


def _levenberg(residuals: Callable[[Floats], Floats], point: Floats) -> Floats:
    damping = 1e-2
    current = residuals(point)
    for _ in range(300):
        jacobian = _jacobian(residuals, point, current)
        normal = jacobian.T @ jacobian + damping * np.eye(len(point))
        step = np.linalg.solve(normal, -jacobian.T @ current)
        step = np.clip(step, -1, 1)
        proposed = residuals(point + step)
        if proposed @ proposed < current @ current:
            gained = (current @ current - proposed @ proposed) / (current @ current)
            point, current, damping = point + step, proposed, damping / 3
            if gained < 1e-9:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 4
    return point


def _jacobian(residuals: Callable[[Floats], Floats], point: Floats, current: Floats) -> Floats:
    columns = []
    for index in range(len(point)):
        moved = point.copy()
        moved[index] += 1e-5
        columns.append((residuals(moved) - current) / 1e-5)
    return np.stack(columns, axis=1)


# --- a record's samples ---


def sum_of(case: Case, cores: float) -> Sum:
    layout = tuple(int(count) for count in str(case.parameters["layout"]).split(" + "))
    parameters = case.parameters
    nbytes, rate = int(parameters["nbytes"]), float(parameters["rate_bit_per_s"])
    return Sum(layout, nbytes, rate, cores)


def modelled(record: Record) -> list[Case]:
    return [case for case in record.cases if case.parameters["kind"] == "sum"]


def group_of(case: Case) -> str:
    """Every second size, two layouts and a rate are held out."""
    if case.parameters["layout"] in HELD_OUT_LAYOUTS:
        return f"held-out shape {case.parameters['layout']}"
    if case.parameters["rate_bit_per_s"] in HELD_OUT_RATES:
        return "held-out rate"
    power = int(case.parameters["nbytes"]).bit_length()
    return "held-out sizes" if power % 2 else FITTED


FITTED = "fitted"


@dataclass(frozen=True)
class Judged:
    """A case and its prediction."""

    case: Case
    what: Sum
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)


def judged(record: Record) -> tuple[Costs, dict[str, list[Judged]]]:
    """The costs fitted, and every case by group."""
    cores = float(record.machine["cores"])
    groups: dict[str, list[Case]] = {}
    for case in modelled(record):
        groups.setdefault(group_of(case), []).append(case)
    costs = fit([(sum_of(case, cores), case.medians_s[CONTENDER]) for case in groups[FITTED]])

    def judge(case: Case) -> Judged:
        what = sum_of(case, cores)
        return Judged(case, what, case.medians_s[CONTENDER], costs.predict_s(what))

    order = [FITTED, *sorted(group for group in groups if group != FITTED)]
    return costs, {group: [judge(case) for case in groups[group]] for group in order}


GROUP_HEADER = ("cases", "number", "median error", "worst error", "within 15 %", "worst at")
CASE_HEADER = ("held out", "measured", "predicted", "error")


def render(record: Record) -> list[str]:
    costs, groups = judged(record)
    lines = [
        "Cost model of pydist's sums (bench/host_cost_model.py), fitted to some of the measured "
        "cases by least squares, and its errors on the others:",
        "",
        *table(GROUP_HEADER, [_group_row(name, cases) for name, cases in groups.items()]),
        "",
        "Fitted: " + "; ".join(_cost_texts(costs)) + ".",
        "",
    ]
    worst = sorted(_held_out(groups), key=lambda one: one.error, reverse=True)
    rows = [
        (
            one.case.name,
            time_text(one.measured_s),
            time_text(one.predicted_s),
            f"{one.predicted_s / one.measured_s - 1:+.0%}",
        )
        for one in sorted(_held_out(groups), key=lambda one: one.case.name)
        if one.what.nbytes in (64 * KIB, MIB, 8 * MIB, 32 * MIB) or one is worst[0]
    ]
    return [*lines, *table(CASE_HEADER, rows), "", *projection(record)]


def _held_out(groups: dict[str, list[Judged]]) -> list[Judged]:
    return [one for group, cases in groups.items() if group != FITTED for one in cases]


def _group_row(name: str, cases: Iterable[Judged]) -> tuple[str, ...]:
    found = list(cases)
    worst = max(found, key=lambda one: one.error)
    within = sum(one.error <= AIM for one in found) / len(found)
    return (
        name,
        str(len(found)),
        f"{statistics.median(one.error for one in found):.0%}",
        f"{worst.error:.0%}",
        f"{within:.0%}",
        worst.case.name,
    )


def _cost_texts(costs: Costs) -> Iterable[str]:
    for field in fields(costs):
        value = getattr(costs, field.name)
        if field.name.endswith("_s_per_byte"):
            yield f"{field.name.removesuffix('_s_per_byte')} {value * 1e9:.3g} ns per byte"
        elif field.name.endswith("_s"):
            yield f"{field.name.removesuffix('_s')} {time_text(value)}"
        else:
            yield f"{field.name.replace('_', ' ')} {value:.3g}"


def aims(record: Record) -> list[Aim]:
    _, groups = judged(record)
    worst = max(_held_out(groups), key=lambda one: one.error)
    share = [one.error <= AIM for one in _held_out(groups)]
    return [
        Aim(
            "cost model, worst error of held-out cases",
            AIM,
            worst.error,
            False,
            "",
            worst.case.name,
        ),
        Aim("cost model, share of held-out cases within 15 %", 1.0, sum(share) / len(share), True),
    ]


# --- beyond what was measured ---

RANKS_PER_HOST = 8
PROJECTED_RANKS = (16, 64, 256, 1024)
PROJECTED_RATES = (1e10, 2.5e10, 1e11)
PROJECTED_SIZES = (MIB, 32 * MIB, 256 * MIB)
PROJECTED_DELAY_S = 20e-6
PROJECTION_HEADER = ("ranks", "link", "sum", "projected", "of the floor", "bound by")


def projected(ranks: int, rate_bit_per_s: float, nbytes: int) -> Sum:
    """A core for each rank, and links with the delay of a data centre."""
    layout = (RANKS_PER_HOST,) * (ranks // RANKS_PER_HOST)
    cores, delay_s = float(RANKS_PER_HOST), PROJECTED_DELAY_S
    return Sum(layout, nbytes, rate_bit_per_s, cores, sharing_hosts=1, delay_s=delay_s)


def projection(record: Record) -> list[str]:
    costs, _ = judged(record)
    rows = []
    for rate in PROJECTED_RATES:
        for nbytes in PROJECTED_SIZES:
            for ranks in PROJECTED_RANKS:
                what = projected(ranks, rate, nbytes)
                seconds = costs.predict_s(what)
                bound = "link" if costs.link_s(what) > costs.work_s(what) else "work"
                rows.append(
                    (
                        str(ranks),
                        f"{rate / 1e9:g} Gbit/s",
                        size_text(nbytes),
                        time_text(seconds),
                        f"{seconds / what.floor_s:.2f}",
                        bound,
                    )
                )
    return [
        f"Projected by the cost model, not measured: hosts of {RANKS_PER_HOST} ranks with a core "
        f"each, links with a delay of {time_text(PROJECTED_DELAY_S)}. Nothing beyond "
        f"{max(record.ranks)} ranks on one machine has been run:",
        "",
        *table(PROJECTION_HEADER, rows),
        "",
    ]
