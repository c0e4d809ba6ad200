"""Owns how results are written: aligned tables, units, and the verdict on an aim."""

from collections.abc import Sequence
from dataclasses import dataclass


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table that is aligned in a terminal too; numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = [_line(header, widths), "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|"]
    return lines + [_line(row, widths) for row in rows]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)) + " |"


def size_text(nbytes: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.0f} ns"


def rate_text(nbytes_per_s: float) -> str:
    return f"{nbytes_per_s / 1e9:.3g}"


@dataclass(frozen=True)
class Aim:
    """What a benchmark should show, and the worst that it did show."""

    text: str
    target: float
    measured: float
    at_least: bool  # else at most
    unit: str = ""
    where: str = ""  # the case that was worst

    @property
    def met(self) -> bool:
        if self.at_least:
            return self.measured >= self.target
        return self.measured <= self.target

    @property
    def missed_by(self) -> float:
        """As a share of the target."""
        return abs(self.measured - self.target) / self.target


def aims_table(aims: Sequence[Aim]) -> list[str]:
    header = ("aim", "target", "measured", "worst at", "verdict")
    rows = []
    for aim in aims:
        verdict = "met" if aim.met else f"missed by {aim.missed_by:.0%}"
        bound = "≥" if aim.at_least else "≤"
        target = f"{bound} {aim.target:.3g}{aim.unit}"
        rows.append((aim.text, target, f"{aim.measured:.3g}{aim.unit}", aim.where, verdict))
    return table(header, rows) if rows else []
