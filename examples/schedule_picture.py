"""Owns what the demo says of its pipeline's schedule: as planned, and as it really ran."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline_trainee import NUM_MICROBATCHES, SCHEDULE
from trainees import RecordedStep

if TYPE_CHECKING:
    from pydist.schedule import Simulation, TimedAction

# By rank.
Step = Sequence[RecordedStep]


class ScheduleReport:
    """A pipeline's recorded steps, beside what the simulator makes of their actions' times.

    recorded: by rank, the same steps in each.
    """

    def __init__(self, recorded: Sequence[Sequence[RecordedStep]]) -> None:
        from pydist import schedule

        self.schedule = schedule.build(SCHEDULE, len(recorded), NUM_MICROBATCHES)
        self.steps: list[Step] = list(zip(*recorded, strict=True))

    def simulated(self, step: Step) -> Simulation:
        """The schedule with the mean times of this step's actions, by stage and kind."""
        from pydist.schedule import Costs

        actions = [action for rank in step for action in rank]
        return self.schedule.simulate(**vars(Costs.measured(actions, self.schedule.num_stages)))

    def text(self) -> str:
        """The bubble that was measured, beside the one that was to be expected; medians."""
        simulations = [self.simulated(step) for step in self.steps]
        measured_s = statistics.median(bubble_s(step) for step in self.steps)
        makespan_s = statistics.median(makespan_s_of(step) for step in self.steps)
        predicted_s = statistics.median(found.makespan_bubble for found in simulations)
        predicted_makespan_s = statistics.median(found.makespan for found in simulations)
        return (
            f"Bubble of {self.schedule.name}, of a step's forwards and backwards: "
            f"{measured_s / makespan_s:.1%} of {1e3 * makespan_s:.1f} ms measured, "
            f"{predicted_s / predicted_makespan_s:.1%} of {1e3 * predicted_makespan_s:.1f} ms "
            "predicted."
        )

    def draw(self, path: Path) -> None:
        """The step that took the median time, and above it its plan; in milliseconds."""
        from pydist.schedule import TimedAction, plot_timelines

        ran = sorted(self.steps, key=makespan_s_of)[len(self.steps) // 2]
        planned_ms = [
            [TimedAction(action, 1e3 * start, 1e3 * end) for action, start, end in row]
            for row in self.simulated(ran).timeline
        ]
        name = self.schedule.name
        panels = {
            f"{name} as planned, with the mean times of its actions (ms)": planned_ms,
            f"{name} as it ran (ms)": timeline_ms(ran),
        }
        plot_timelines(panels, path)


def timeline_ms(step: Step) -> list[list[TimedAction]]:
    """Each action from when it had what it waited for, on a clock that starts with the step."""
    from pydist.schedule import TimedAction

    first_ns = min(rank[0].began_ns for rank in step)
    return [
        [
            TimedAction(
                action.action,
                1e-6 * (action.began_ns - first_ns),
                1e-6 * (action.end_ns - first_ns),
            )
            for action in rank
        ]
        for rank in step
    ]


def makespan_s_of(step: Step) -> float:
    """From the first action that began to the last that ended."""
    first_ns = min(rank[0].began_ns for rank in step)
    return 1e-9 * (max(rank[-1].end_ns for rank in step) - first_ns)


def bubble_s(step: Step) -> float:
    """What is not work of the rank that works most."""
    return makespan_s_of(step) - max(sum(action.work_s for action in rank) for rank in step)
