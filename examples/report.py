"""Owns what the demo says at its end: the check of the runs, the table and the loss curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from gpt_training import EngineResult
from trainees import Plan

# The final train loss is the mean of so many steps: one batch alone says little.
_FINAL_NUM_STEPS = 20


@dataclass(frozen=True)
class Tolerance:
    """How far a run may be from the reference, relative to it: pairs of (first step, bound).

    Rounding differs between the runs, and training amplifies it. Measured with torch DDP on two
    ranks against one process, small model, 500 steps, an x86-64 machine:

        steps before           100     500
        loss apart by         2e-7    4e-6
        gradient norm apart   2e-6    4e-5

    The bounds leave room of 50 and more for other machines and models, and beyond 1000 steps for
    what was not measured. The first steps are the sharp test: a skipped reduction moves the first
    gradient norm by 1e-1 already.
    """

    bounds: tuple[tuple[int, float], ...]

    def at(self, step: int) -> float:
        """The bound in this step."""
        return [bound for first_step, bound in self.bounds if first_step <= step][-1]


LOSS_TOLERANCE = Tolerance(((0, 1e-5), (100, 1e-3), (1000, 3e-2)))
# The loss alone would miss a wrong factor: AdamW and clipping undo it.
GRADIENT_NORM_TOLERANCE = Tolerance(((0, 1e-4), (100, 1e-2), (1000, 3e-1)))


def disagreements(results: list[EngineResult]) -> list[str]:
    """A sentence for each way in which runs differ from the first beyond rounding."""
    sentences = [
        f"the ranks of '{result.name}' ended with different weights"
        for result in results
        if not result.ranks_agree
    ]
    reference = results[0]
    for other in results[1:]:
        for what, expected, found, tolerance in (
            ("loss", reference.losses, other.losses, LOSS_TOLERANCE),
            ("gradient norm", reference.norms, other.norms, GRADIENT_NORM_TOLERANCE),
        ):
            step = first_step_apart(expected, found, tolerance)
            if step is not None:
                sentences.append(
                    f"in step {step} the {what} of '{other.name}' is {found[step]:.7g}, but that "
                    f"of '{reference.name}' is {expected[step]:.7g}: more than rounding explains "
                    f"(allowed: a relative {tolerance.at(step):g})"
                )
    return sentences


def first_step_apart(
    expected: npt.NDArray[np.float64], found: npt.NDArray[np.float64], tolerance: Tolerance
) -> int | None:
    """The first step in which the curves are further apart than allowed; NaN always is."""
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not abs(b - a) <= tolerance.at(step) * abs(a):
            return step
    return None


def render_table(results: list[EngineResult], plan: Plan) -> str:
    """The table of the runs; ratios are to the run of torch DDP, the second."""
    header = ["", "train loss", "held-out loss", "samples/s", "step", "communication", "vs. DDP"]
    rows = [header]
    for result in results:
        communication = "-"
        if result.communication_s is not None:
            share = result.communication_s / result.step_s
            communication = f"{1e3 * result.communication_s:.1f} ms ({share:.1%})"
        rows.append(
            [
                result.name,
                f"{result.losses[-_FINAL_NUM_STEPS:].mean():.4f}",
                f"{result.held_out_loss:.4f}",
                f"{plan.global_batch / result.step_s:.0f}",
                f"{1e3 * result.step_s:.1f} ms",
                communication,
                f"{results[1].step_s / result.step_s:.2f}x",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def draw_losses(results: list[EngineResult], path: Path) -> None:
    """The loss curves over each other, and below how far each is from the first."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    curves, distances = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    reference = results[0]
    for width, result in zip((6.0, 3.0, 1.0), results, strict=False):
        curves.plot(result.losses, linewidth=width, label=result.name, alpha=0.8)
    for result in results[1:]:
        distance = np.abs(result.losses - reference.losses) / reference.losses
        distances.plot(np.maximum(distance, 1e-9), label=f"{result.name} to {reference.name}")
    curves.set_title("GPT on the source of Python's standard library")
    curves.set_ylabel("train loss (nats per character)")
    curves.legend()
    distances.set_yscale("log")
    distances.set_ylabel("relative distance")
    distances.set_xlabel("step")
    distances.legend()
    figure.savefig(path, dpi=120)
