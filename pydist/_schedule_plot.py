"""Owns the picture of what ranks do over time; the only place that needs matplotlib."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient (I)", "W": "weight gradient (W)"}
_PARTS = re.compile(r"(\d+)([FBIW])(\d+)")

# By rank: (action or overlapped pair, start, end).
Timeline = Sequence[Sequence[tuple[str, float, float]]]


def draw(
    panels: Sequence[tuple[str, Timeline]], path: str | os.PathLike[str] | None = None
) -> Figure:
    """One panel above the other, on one axis of time; saved to `path` if given.

    Raises ImportError that says how to install matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing a schedule needs matplotlib: pip install matplotlib, or pydist[plot]"
        ) from error
    num_rows = sum(len(timeline) for _, timeline in panels)
    num_actions = max((len(row) for _, timeline in panels for row in timeline), default=1)
    figure = Figure(
        figsize=(min(40.0, 4 + 0.3 * num_actions), 1.2 + 0.45 * num_rows + 0.4 * len(panels)),
        layout="constrained",
    )
    ratios = [max(1, len(timeline)) for _, timeline in panels]
    grid = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios}
    )
    kinds: set[str] = set()
    ends = [end for _, timeline in panels for row in timeline for _, _, end in row]
    last = max(ends, default=1.0)
    for axes, (title, timeline) in zip(grid[:, 0], panels, strict=True):
        kinds |= _draw_panel(axes, title, timeline, last)
    grid[-1, 0].set_xlabel("time")
    grid[-1, 0].set_xlim(0, last)
    _draw_legend(figure, kinds)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _draw_panel(axes: Axes, title: str, timeline: Timeline, last: float) -> set[str]:
    kinds: set[str] = set()
    for rank, row in enumerate(timeline):
        stages = sorted({int(part[0]) for text, _, _ in row for part in _PARTS.findall(text)})
        for text, start, end in row:
            parts = _PARTS.findall(text)
            for slot, (stage, kind, microbatch) in enumerate(parts):
                kinds.add(kind)
                height = 0.9 / len(parts)
                bottom = rank - 0.45 + height * slot
                # A rank's later stages are paler, so that the two halves of a V can be told apart.
                alpha = 1.0 - 0.4 * stages.index(int(stage)) / max(1, len(stages) - 1)
                axes.broken_barh(
                    [(start, end - start)],
                    (bottom, height),
                    facecolor=COLORS[kind],
                    edgecolor="white",
                    linewidth=0.6,
                    alpha=alpha,
                )
                if end - start > 0.004 * last:
                    axes.text(
                        (start + end) / 2,
                        bottom + height / 2,
                        microbatch,
                        ha="center",
                        va="center",
                        fontsize=7,
                        clip_on=True,
                    )
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in range(len(timeline))])
    axes.set_ylim(len(timeline) - 0.5, -0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return kinds


def _draw_legend(figure: Figure, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in NAMES if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(NAMES), frameon=False)
