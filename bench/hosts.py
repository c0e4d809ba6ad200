"""Owns the benchmark of ranks on several hosts: what is measured, and what it says."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from bench import command_line, host_cost_model
from bench.host_runs import SUMS, Layout, Site, layout_text, measure_steps, measure_sum, rate_text
from bench.options import LARGE, TINY
from bench.record import RESULTS, Case, Record, load
from bench.table import Aim, size_text, table, time_text

NAME = "hosts"
COMPARED: Layout = (2, 2)  # beside flat Gloo, and in training steps
RATES = (1e9, 1e10)
NUM_TURNS = {True: 2, False: 9}
NUM_STEP_TURNS = {True: 2, False: 7}
LARGE_NBYTES = 8 * 2**20  # where the aims begin

KIB, MIB = 2**10, 2**20
QUICK_SIZES = (4 * KIB, 512 * KIB)
COMPARED_SIZES = (64 * KIB, MIB, 8 * MIB, 32 * MIB)
# For the cost model, with the engine alone; which of them it is fitted on, host_cost_model says.
MODEL_SIZES = tuple(16 * KIB * 2**power for power in range(12))
MODEL_LAYOUTS: tuple[Layout, ...] = ((1, 1), (2, 2), (1, 1, 1), (2, 1), (2, 2, 2))
MODEL_RATES = (1e9, 2.5e9, 1e10)
NUM_MODEL_TURNS = 5


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


# --- what it says ---


def floor_s(case: Case, wire_nbytes_per_element: int = 4) -> float:
    """What the link needs for what two hosts must at least send each other: each all of its own."""
    layout = layout_of(case)
    nbytes = float(case.parameters.get("nbytes") or case.parameters["gradient_nbytes"])
    share = 2 * (len(layout) - 1) / len(layout)
    return (
        nbytes * wire_nbytes_per_element / 4 * share * 8 / float(case.parameters["rate_bit_per_s"])
    )


def layout_of(case: Case) -> Layout:
    return tuple(int(count) for count in str(case.parameters["layout"]).split(" + "))


def of_kind(record: Record, kind: str, rate: float) -> list[Case]:
    wanted = (kind, rate)
    return [
        case
        for case in record.cases
        if (case.parameters["kind"], case.parameters["rate_bit_per_s"]) == wanted
        and (kind == "step" or "gloo" in case.samples_s)
    ]


SUM_HEADER = ("size", "contender", "time", "sent by a host", "time / floor", "Gloo / it", "wrong")
STEP_HEADER = (
    "contender",
    "step",
    "sent by a host",
    "floor",
    "step / floor",
    "DDP fp32 / it",
    "wrong",
)


def render(record: Record) -> list[str]:
    lines = [
        "Measured: hosts are network namespaces of one machine, joined by links of the rate given "
        "for each direction. Floor: the bytes that must cross the link, at its rate.",
        "",
    ]
    for rate in RATES:
        cases = of_kind(record, "sum", rate)
        rows = [row for case in cases for row in _sum_rows(case)]
        title = f"Sums of fp32, {layout_text(COMPARED)} ranks, {rate_text(rate)}:"
        lines += [title, "", *table(SUM_HEADER, rows), ""]
        for case in of_kind(record, "step", rate):
            nbytes = size_text(int(case.parameters["gradient_nbytes"]))
            title = (
                f"Steps, {layout_text(COMPARED)} ranks, {rate_text(rate)}, {nbytes} of gradients:"
            )
            lines += [title, "", *table(STEP_HEADER, _step_rows(case)), ""]
    if record.mode == "full":
        lines += host_cost_model.render(record)
    return lines


def _sent(case: Case, contender: str) -> int:
    return int(case.facts[f"sent_nbytes, {contender}"])


def _sum_rows(case: Case) -> list[tuple[str, ...]]:
    return [
        (
            size_text(int(case.parameters["nbytes"])),
            name,
            time_text(seconds),
            size_text(_sent(case, name)),
            f"{seconds / floor_s(case):.2f}",
            f"{case.medians_s['gloo'] / seconds:.2f}",
            str(case.wrong_results[name]),
        )
        for name, seconds in case.medians_s.items()
    ]


WIRE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def _step_rows(case: Case) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, seconds in case.medians_s.items():
        wire = WIRE_NBYTES.get(name.split(", ")[-1])
        floor = floor_s(case, wire) if wire else None
        rows.append(
            (
                name,
                time_text(seconds),
                size_text(_sent(case, name)),
                time_text(floor) if floor else "-",
                f"{seconds / floor:.2f}" if floor else "-",
                f"{case.medians_s['ddp, fp32'] / seconds:.2f}",
                str(case.wrong_results.get(name, "-")),
            )
        )
    return rows


def aims(record: Record) -> list[Aim]:
    found: list[Aim] = []
    for rate in RATES:
        large = [
            c for c in of_kind(record, "sum", rate) if int(c.parameters["nbytes"]) >= LARGE_NBYTES
        ]
        text = rate_text(rate)
        found += _worst(
            f"{text}, sums from 8 MiB: time / the link's floor",
            1.2,
            [(c.medians_s["pydist"] / floor_s(c), c.name) for c in large],
            at_least=False,
        )
        found += _worst(
            f"{text}, sums from 8 MiB: flat Gloo's time / its own",
            1.3,
            [(c.medians_s["gloo"] / c.medians_s["pydist"], c.name) for c in large],
        )
        for step in of_kind(record, "step", rate):
            for name, target in (("pydist, fp32", 1.3), ("pydist, bf16", 2.5)):
                ratio = step.medians_s["ddp, fp32"] / step.medians_s[name]
                what = f"{text}, steps: DDP's over flat Gloo / {name}"
                found += _worst(what, target, [(ratio, step.name)])
    return found + host_cost_model.aims(record)


def _worst(
    text: str, target: float, measured: list[tuple[float, str]], at_least: bool = True
) -> list[Aim]:
    if not measured:
        return []
    value, where = min(measured) if at_least else max(measured)
    return [Aim(text, target, value, at_least, "", where)]


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the samples here")
    parser.add_argument(
        "--project", action="store_true", help="no measurement: what the cost model says of more"
    )
    options = parser.parse_args()
    if options.project:
        print("\n".join(host_cost_model.projection(load(RESULTS / f"{NAME}.json"))))
        return
    record = measure(options.quick, command_line.command_of(f"bench.{NAME}", options.quick))
    if options.json:
        record.save(options.json.resolve())
    print("\n".join(command_line.lines_of(record)))
    command_line.check_results(record)


if __name__ == "__main__":
    # By its importable name, under which its functions can be sent to the ranks.
    command_line.module_of(NAME).main()
