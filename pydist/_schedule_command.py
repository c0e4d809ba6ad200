"""Owns `pydist schedule`: one schedule as a picture in text, or all of them in a table."""

from __future__ import annotations

import argparse

from pydist import schedule
from pydist.schedule import Costs, Schedule, ScheduleError, Simulation

NAME = "schedule"
SUMMARY = "Shows a pipeline schedule and simulates it, or compares all kinds."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", help=f"{', '.join(schedule.kinds())}; by default a table of all")
    parser.add_argument("--csv", metavar="FILE", help="read the schedule from this file instead")
    parser.add_argument("--ranks", type=int, metavar="P")
    parser.add_argument("--microbatches", type=int, metavar="M")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="by default as it fits")
    times = parser.add_argument_group("times of one microbatch on a full rank")
    times.add_argument("--forward", type=float, default=1.0, metavar="F")
    times.add_argument("--backward-input", type=float, default=1.0, metavar="I")
    times.add_argument("--backward-weight", type=float, default=1.0, metavar="W")
    times.add_argument("--backward", type=float, metavar="B", help="by default I + W")
    times.add_argument("--communication", type=float, default=0.0, metavar="C")
    parser.add_argument("--plot", metavar="FILE", help="draw it into this file (needs matplotlib)")
    parser.add_argument("--write-csv", metavar="FILE", help="write the actions to this file")


def run(arguments: argparse.Namespace) -> int:
    costs = Costs(
        forward=arguments.forward,
        backward_input=arguments.backward_input,
        backward_weight=arguments.backward_weight,
        backward=arguments.backward,
        communication=arguments.communication,
    )
    if arguments.csv is None and (arguments.ranks is None or arguments.microbatches is None):
        raise ScheduleError("give --ranks and --microbatches, or --csv with a schedule of your own")
    if arguments.csv is not None:
        chosen = schedule.from_csv(arguments.csv)
    elif arguments.kind is not None:
        chosen = _build(arguments.kind, arguments, costs)
    else:
        print(_table(arguments, costs))
        return 0
    result = chosen.simulate(**vars(costs))
    print(f"{chosen.title}\n{result}\n{_figures(chosen, result)}")
    if arguments.plot is not None:
        chosen.plot(arguments.plot, result)
    if arguments.write_csv is not None:
        chosen.to_csv(arguments.write_csv)
    return 0


def _build(kind: str, arguments: argparse.Namespace, costs: Costs) -> Schedule:
    return schedule.build(
        kind,
        arguments.ranks,
        arguments.microbatches,
        arguments.stages_per_rank,
        costs=costs if kind == "auto" else None,
    )


def _share(bubble: float, result: Simulation) -> str:
    share = bubble / result.makespan if result.makespan > 0 else 0.0
    return f"{bubble:.6g} ({100 * share:.1f} %)"


def _figures(chosen: Schedule, result: Simulation) -> str:
    def by_rank(values: list[float]) -> str:
        return " ".join(f"{value:.6g}" for value in values)

    lines = [
        ("makespan", f"{result.makespan:.6g}"),
        ("makespan bubble", f"{_share(result.makespan_bubble, result)} of it beyond the work"),
        ("span bubble", f"{_share(result.span_bubble, result)} between a rank's first and last"),
        ("peak activations", f"{by_rank(result.peak_activations)} microbatches by rank"),
        ("after F, before I", by_rank(result.peak_after_forward)),
        ("after I, before W", by_rank(result.peak_after_input)),
    ]
    if chosen.unordered_stages:
        stages = ", ".join(map(str, chosen.unordered_stages))
        lines.append(("note", f"gradients of stage {stages} are not added in ascending order"))
    return "\n".join(f"{name:<18} {value}" for name, value in lines)


def _table(arguments: argparse.Namespace, costs: Costs) -> str:
    rows = [("kind", "stages a rank", "makespan", "makespan bubble", "span bubble", "peak")]
    refused = []
    for kind in schedule.kinds():
        if kind == "forward-only":
            continue
        try:
            built = _build(kind, arguments, costs)
        except ScheduleError as error:
            refused.append(str(error))
            continue
        result = built.simulate(**vars(costs))
        rows.append(
            (
                built.name if kind == "auto" else kind,
                f"{built.num_stages // built.num_ranks}",
                f"{result.makespan:.6g}",
                _share(result.makespan_bubble, result),
                _share(result.span_bubble, result),
                f"{max(result.peak_activations):.6g}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *(f"left out: {reason}" for reason in refused)])
