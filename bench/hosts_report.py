"""Owns what the benchmark of several hosts says of its record: tables and aims."""

from collections.abc import Sequence

from bench import host_cost_model
from bench.record import Case, Record
from bench.table import Aim, size_text, table, time_text

Layout = tuple[int, ...]
COMPARED: Layout = (2, 2)  # beside flat Gloo, and in training steps
RATES = (1e9, 1e10)
LARGE_NBYTES = 8 * 2**20  # where the aims begin


def layout_text(layout: Sequence[int]) -> str:
    return " + ".join(map(str, layout))


def rate_text(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:g} Gbit/s"


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
