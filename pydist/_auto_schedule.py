"""Owns schedule="auto": stages are timed in the first steps, then the best schedule takes over."""

import json
import statistics
from collections.abc import Sequence

from pydist import _C, schedule
from pydist._engine import Engine
from pydist.schedule import ActionRecord, Costs, Schedule

# What runs in which step: one to warm up, one that shows F and B, one that shows I and W. Any
# schedule gives the same gradients.
STEPS = ("1f1b", "1f1b", "zb-h1")


def stage_times(records: Sequence[ActionRecord]) -> dict[int, dict[str, float]]:
    """Seconds that a stage's F, B, I and W take, without waiting: medians over microbatches."""
    found: dict[int, dict[str, list[float]]] = {}
    for record in records:
        times = found.setdefault(record.stage, {}).setdefault(record.kind, [])
        times.append(record.work_s)
    return {
        stage: {kind: statistics.median(times) for kind, times in kinds.items()}
        for stage, kinds in found.items()
    }


class AutoSchedule:
    """Chooses the schedule of one pipeline with one stage per rank."""

    def __init__(
        self, engine: Engine, num_microbatches: int, replicas: Engine | None = None
    ) -> None:
        self._engine = engine
        self._replicas = replicas  # of other pipelines, which all do what the first one chooses
        self._num_microbatches = num_microbatches
        self._num_steps = 0
        self._mine: dict[str, float] = {}

    @property
    def records(self) -> bool:
        """Whether the recorder is wanted in the next step."""
        return 0 < self._num_steps < len(STEPS)

    def after_step(self, records: Sequence[ActionRecord]) -> Schedule | None:
        """After a step that succeeded: the schedule of the next ones, if it changes. Collective."""
        if self._num_steps == len(STEPS):
            return None
        if self.records:
            for times in stage_times(records).values():
                self._mine = {**times, **self._mine}
        self._num_steps += 1
        if self._num_steps == len(STEPS):
            return self._best()
        if STEPS[self._num_steps] == STEPS[self._num_steps - 1]:
            return None
        return schedule.build(STEPS[self._num_steps], self._engine.size, self._num_microbatches)

    def _best(self) -> Schedule:
        by_rank = [
            json.loads(text)
            for text in self._engine.exchange_bytes(json.dumps(self._mine).encode())
        ]
        costs = Costs(
            forward=[times["F"] for times in by_rank],
            backward=[times["B"] for times in by_rank],
            backward_input=[times["I"] for times in by_rank],
            backward_weight=[times["W"] for times in by_rank],
        )
        found = b""
        if self._engine.rank == 0:  # a search may take a while, and ranks share processors
            size, number = self._engine.size, self._num_microbatches
            found = schedule.build("auto", size, number, 1, costs=costs).to_csv().encode()
        text = self._engine.exchange_bytes(found)[0].decode()
        if self._replicas is not None:
            text = self._replicas.exchange_bytes(text.encode())[0].decode()
        return Schedule._of(_C.Schedule.from_csv("auto", text))
