"""Owns the public face of schedules: building, reading, checking, simulating and drawing them.

A schedule is data: for each rank the actions of one step, in order. ``0F3`` is the forward of
stage 0 on microbatch 3; ``B`` is a whole backward, ``I`` its part that gives the gradients of the
stage's inputs and ``W`` the part that gives those of its parameters; ``0F3&5B1`` is an overlapped
pair. Actions name computation only: what is sent and received follows from them.

    s = schedule.build("zb-h1", num_ranks=4, num_microbatches=8)
    print(s)                                    # a picture in text
    print(s.simulate(forward=1.0).span_bubble)  # what waiting it leaves
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pydist import _C, _schedule_plot
from pydist.errors import ScheduleError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "ActionRecord",
    "Costs",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "TimedAction",
    "build",
    "default_stages_per_rank",
    "from_csv",
    "kinds",
    "plot_timelines",
    "register",
]

# For all stages at once, or one number for each stage.
PerStage: TypeAlias = float | Sequence[float]


class ActionRecord(NamedTuple):
    """An action as it ran: in ns of the monotonic clock, which a machine's ranks share."""

    action: str
    start_ns: int
    end_ns: int
    """Everything that it gives has been sent."""
    wait_ns: int
    """Of that, for messages of other ranks."""

    @property
    def stage(self) -> int:
        return int(self.action.partition(self.kind)[0])

    @property
    def kind(self) -> str:
        """F, B, I or W."""
        return self.action.strip("0123456789")

    @property
    def began_ns(self) -> int:
        """When it had what it waited for."""
        return self.start_ns + self.wait_ns

    @property
    def work_s(self) -> float:
        """Without waiting, in seconds."""
        return 1e-9 * (self.end_ns - self.began_ns)


@dataclass(frozen=True)
class Costs:
    """Times and bytes of one microbatch.

    A number is that of a full rank, so each of its v stages has a v-th of it; a list has one number
    for each stage. Times have any unit. With what `Schedule.simulate` takes one by one:
    ``s.simulate(**vars(costs))``.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    """I: the gradients of a stage's inputs."""
    backward_weight: PerStage = 1.0
    """W: those of its parameters."""
    backward: PerStage | None = None
    """B, both in one; by default I + W (measured, B is less: splitting has its price)."""
    communication: float = 0.0
    """Between the end of an action and the arrival of what it gives on another rank."""
    nbytes_after_forward: PerStage = 0.0
    """What a microbatch holds from F to B or I."""
    nbytes_after_input: PerStage = 0.0
    """What it holds from I to W."""

    @classmethod
    def measured(cls, actions: Iterable[ActionRecord], num_stages: int) -> Costs:
        """The mean times of recorded actions, of all ranks together; without bytes.

        What no action tells is 0: I and W of a stage that only ran B, say.
        """
        times_s: dict[tuple[str, int], list[float]] = {}
        for action in actions:
            times_s.setdefault((action.kind, action.stage), []).append(action.work_s)

        def by_stage(kind: str) -> list[float]:
            found = [times_s.get((kind, stage), [0.0]) for stage in range(num_stages)]
            return [sum(times) / len(times) for times in found]

        return cls(by_stage("F"), by_stage("I"), by_stage("W"), by_stage("B"))

    def _by_stage(self, num_ranks: int, num_stages: int) -> _C.Costs:
        """Raises ScheduleError where numbers are negative, infinite or too few."""

        def by_stage(name: str) -> list[float]:
            value: PerStage = getattr(self, name)
            if isinstance(value, (int, float)):
                values = [float(value) * num_ranks / num_stages] * num_stages
            else:
                values = [float(number) for number in value]
            if len(values) != num_stages:
                raise ScheduleError(
                    f"{name} has {len(values)} numbers, expected one for each of {num_stages} "
                    f"stages"
                )
            _check_numbers(name, values)
            return values

        _check_numbers("communication", [self.communication])
        weight, back = by_stage("backward_weight"), by_stage("backward_input")
        whole = [i + w for i, w in zip(back, weight, strict=True)]
        return _C.Costs(
            forward=by_stage("forward"),
            backward=whole if self.backward is None else by_stage("backward"),
            input=back,
            weight=weight,
            communication=self.communication,
            nbytes_after_forward=by_stage("nbytes_after_forward"),
            nbytes_after_input=by_stage("nbytes_after_input"),
        )


class TimedAction(NamedTuple):
    """An action, or an overlapped pair, and when it runs."""

    action: str
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule does under given costs; lists are by rank.

    Times have the unit of the costs. Peaks of activations are in microbatches of all stages that
    the rank holds, so half a microbatch is one of its two stages.
    """

    makespan: float
    """From the start of the first action to the end of the last."""
    makespan_bubble: float
    """The makespan less the work of the rank that works most."""
    span_bubble: float
    """The longest that a rank waits between its own first and last action."""
    peak_activations: list[float]
    """Microbatches between F and B or W."""
    peak_after_forward: list[float]
    """Microbatches between F and B or I."""
    peak_after_input: list[float]
    """Microbatches between I and W."""
    peak_nbytes: list[float]
    """Bytes held, from the sizes that were given."""
    peak_parked: list[int]
    """Messages that have arrived and are not used yet."""
    idle: list[list[tuple[float, float]]]
    """When the rank waits: (start, end), from 0 to the makespan."""
    timeline: list[list[TimedAction]]
    """When each action runs."""
    grid: str
    """The timeline as text, with a column for each rank."""

    def __str__(self) -> str:
        return self.grid


class Schedule:
    """Actions of one step by rank; immutable.

    ``actions``: for each rank a list of texts such as ``"0F3"`` or ``"0F3&5B1"``.
    ``placement``: the rank of each stage; by default the rank that has actions of it.
    Nothing is checked but the texts: ``validate`` does that, and so does whatever runs a schedule.
    Raises ScheduleError for a text that is no action.
    """

    def __init__(
        self,
        actions: Sequence[Sequence[str]],
        *,
        name: str = "custom",
        placement: Sequence[int] | None = None,
        num_microbatches: int | None = None,
    ) -> None:
        lists = [list(entries) for entries in actions]
        stages = None if placement is None else list(placement)
        self._plan = _C.Schedule(name, lists, stages, num_microbatches)

    @classmethod
    def _of(cls, plan: _C.Schedule) -> Schedule:
        schedule = cls.__new__(cls)
        schedule._plan = plan
        return schedule

    @property
    def name(self) -> str:
        """The kind it was built as, or the name it was given."""
        return self._plan.name

    @property
    def actions(self) -> list[list[str]]:
        """By rank, in order."""
        return self._plan.actions

    @property
    def placement(self) -> list[int]:
        """The rank of each stage."""
        return self._plan.rank_of_stage

    @property
    def num_ranks(self) -> int:
        return len(self._plan.actions)

    @property
    def num_stages(self) -> int:
        return len(self._plan.rank_of_stage)

    @property
    def num_microbatches(self) -> int:
        return self._plan.num_microbatches

    @property
    def title(self) -> str:
        """Its name and sizes."""
        return (
            f"{self.name}: {_count(self.num_ranks, 'rank')}, {_count(self.num_stages, 'stage')}, "
            f"{_count(self.num_microbatches, 'microbatch', 'es')}"
        )

    @property
    def has_backward(self) -> bool:
        """False for forwards alone. Raises ScheduleError as `validate` does."""
        return self._plan.validate()[0]

    @property
    def unordered_stages(self) -> list[int]:
        """Stages whose B, I or W do not run in ascending order of microbatches.

        Gradients of all others have the bits of one process that goes through the microbatches in
        order; of these they are equal up to rounding. Raises ScheduleError as `validate` does.
        """
        return [stage for stage, in_order in enumerate(self._plan.validate()[1]) if not in_order]

    def validate(self) -> None:
        """Raises ScheduleError unless the schedule runs to its end.

        Every action must be there once and on the rank of its stage, every stage must have a
        backward of each microbatch (or none of any), and order and data must have no circle: the
        error shows the smallest one and marks it in the lists.
        """
        self._plan.validate()

    def simulate(
        self,
        forward: PerStage = 1.0,
        backward_input: PerStage = 1.0,
        backward_weight: PerStage = 1.0,
        backward: PerStage | None = None,
        communication: float = 0.0,
        *,
        nbytes_after_forward: PerStage = 0.0,
        nbytes_after_input: PerStage = 0.0,
    ) -> Simulation:
        """Runs the schedule on paper; `Costs` says what each number means.

        Raises ScheduleError where the schedule is not valid, or costs are negative or too few.
        """
        costs = Costs(
            forward,
            backward_input,
            backward_weight,
            backward,
            communication,
            nbytes_after_forward,
            nbytes_after_input,
        )
        return self._result(self._plan.simulate(costs._by_stage(self.num_ranks, self.num_stages)))

    def forward_only(self) -> Schedule:
        """Forwards alone, with the same placement and microbatches."""
        return Schedule._of(self._plan.forward_only())

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """A line for each rank with its actions between commas; written to `path` if given."""
        text = self._plan.to_csv()
        if path is not None:
            Path(path).write_text(text)
        return text

    def plot(
        self, path: str | os.PathLike[str] | None = None, simulation: Simulation | None = None
    ) -> Figure:
        """Draws the schedule, with a row for each rank; saved to `path` if given.

        ``simulation`` gives the times, by default those of ``simulate()`` with I and W of the time
        of F. Needs matplotlib (``pip install pydist[plot]``).
        """
        times = simulation or self.simulate()
        return _schedule_plot.draw([(self.title, times.timeline)], path)

    def __str__(self) -> str:
        """A row for each step at which an action may run, if every action takes one."""
        return f"{self.title}\n{self._plan.grid_of_times(self._plan.simulate_steps())}"

    def __repr__(self) -> str:
        return f"<Schedule {self.title}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.name, self.num_ranks, self.num_microbatches, *self.placement))

    def __reduce__(self) -> tuple[Callable[..., Schedule], tuple[Any, ...]]:
        return _restored, self._key()

    def _key(self) -> tuple[Any, ...]:
        return self.actions, self.name, self.placement, self.num_microbatches

    def _result(self, found: _C.Simulation) -> Simulation:
        spans = zip(self.actions, found.times, strict=True)
        return Simulation(
            makespan=found.makespan,
            makespan_bubble=found.makespan_bubble,
            span_bubble=found.span_bubble,
            peak_activations=found.peak_activations,
            peak_after_forward=found.peak_after_forward,
            peak_after_input=found.peak_after_input,
            peak_nbytes=found.peak_nbytes,
            peak_parked=found.peak_parked,
            idle=found.idle,
            timeline=[
                [TimedAction(text, *span) for text, span in zip(entries, times, strict=True)]
                for entries, times in spans
            ],
            grid=self._plan.grid_of_times(found),
        )


# builder(num_ranks, num_microbatches, stages_per_rank) -> Schedule, or lists of actions by rank
Builder: TypeAlias = Callable[[int, int, int], "Schedule | Sequence[Sequence[str]]"]
_registered: dict[str, Builder] = {}


def kinds() -> list[str]:
    """Names that `build` takes: the built-in ones and those registered."""
    return [*_built_in(), *_registered]


def default_stages_per_rank(kind: str) -> int:
    """Stages on each rank where none are asked for: 2 for interleaved and V kinds, else 1."""
    _check_kind(kind)
    return 1 if kind == "auto" or kind in _registered else _C.default_stages_per_rank(kind)


def build(
    kind: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    *,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
) -> Schedule:
    """A schedule of a built-in or registered kind.

    ``stages_per_rank`` is 2 for interleaved and V kinds, else 1, unless given. All kinds take any
    number of microbatches, but dualpipe-v, which needs two for each rank.

    ``"auto"`` takes ``costs`` and gives the shortest, by the simulator, of all built-in schedules
    with that many stages and of what a search finds, among those that keep to ``memory_cap``: the
    bytes that activations and kept gradients may take on each rank, one number or a list by rank.
    With v = 1 and few ranks and microbatches (3 and 4, say) there is no shorter one that runs each
    kind in ascending order; with more the search is narrowed, and takes a few seconds at most.

    Raises ScheduleError, which says what would work.
    """
    _check_kind(kind)
    if stages_per_rank is None:
        stages_per_rank = default_stages_per_rank(kind)
    if kind == "auto":
        return _build_auto(num_ranks, num_microbatches, stages_per_rank, costs, memory_cap)
    if costs is not None or memory_cap is not None:
        raise ScheduleError(f"costs and memory_cap are for kind 'auto', not for '{kind}'")
    if kind in _registered:
        return _build_registered(kind, num_ranks, num_microbatches, stages_per_rank)
    return Schedule._of(_C.Schedule.build(kind, num_ranks, num_microbatches, stages_per_rank))


def register(name: str, builder: Builder) -> None:
    """Makes `build` know a schedule of your own; a name registered before gets the new builder.

    ``builder(num_ranks, num_microbatches, stages_per_rank)`` returns a Schedule, or for each rank
    its list of actions as texts. `build` validates what it returns.

    Raises ScheduleError where the name is that of a built-in schedule.
    """
    if name in _built_in():
        raise ScheduleError(f"schedule '{name}' is built in; register yours with another name")
    _registered[name] = builder


def from_csv(path: str | os.PathLike[str], name: str | None = None) -> Schedule:
    """Reads what `Schedule.to_csv` wrote: a line for each rank, an action in each field.

    Empty fields are skipped. The placement follows from the actions. The schedule is validated.

    Raises ScheduleError with the line and field that is wrong, or as `Schedule.validate` does.
    """
    file = Path(path)
    schedule = Schedule._of(_C.Schedule.from_csv(name or file.stem, file.read_text()))
    schedule.validate()
    return schedule


def plot_timelines(
    timelines: Mapping[str, Sequence[Sequence[TimedAction]]],
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draws what ranks do over time, by title, on one axis: as planned and as it ran, say.

    Each is a list of actions by rank, like `Simulation.timeline`. Saved to `path` if given. Needs
    matplotlib (``pip install pydist[plot]``).
    """
    return _schedule_plot.draw(list(timelines.items()), path)


def _built_in() -> list[str]:
    return [*_C.schedule_kinds(), "auto"]


def _check_kind(kind: str) -> None:
    """Raises ScheduleError, with what was meant where that can be guessed."""
    known = kinds()
    if kind in known:
        return
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(kind).lower(), list(by_lower), n=1)
    guess = f" Did you mean '{by_lower[close[0]]}'?" if close else ""
    raise ScheduleError(
        f"no schedule is called '{kind}'; there are {', '.join(map(repr, known))}.{guess}"
    )


def _build_auto(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Costs | None,
    memory_cap: float | Sequence[float] | None,
) -> Schedule:
    caps: list[float] = []
    if isinstance(memory_cap, (int, float)):
        caps = [float(memory_cap)] * num_ranks
    elif memory_cap is not None:
        caps = [float(cap) for cap in memory_cap]
        if len(caps) != num_ranks:
            raise ScheduleError(
                f"memory_cap has {len(caps)} numbers, expected one for each of {num_ranks} ranks"
            )
    _check_numbers("memory_cap", caps)
    num_stages = max(1, num_ranks * stages_per_rank)
    numbers = (costs or Costs())._by_stage(num_ranks, num_stages)
    return Schedule._of(
        _C.find_best_schedule(num_ranks, num_microbatches, stages_per_rank, numbers, caps)
    )


def _build_registered(
    kind: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Schedule:
    built = _registered[kind](num_ranks, num_microbatches, stages_per_rank)
    schedule = built if isinstance(built, Schedule) else Schedule(built, name=kind)
    schedule.validate()
    found = (schedule.num_ranks, schedule.num_microbatches)
    if found != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"the builder of schedule '{kind}' was asked for {num_ranks} ranks and "
            f"{num_microbatches} microbatches, and made one for {found[0]} and {found[1]}"
        )
    return schedule


def _restored(
    actions: list[list[str]], name: str, placement: list[int], num_microbatches: int
) -> Schedule:
    return Schedule(actions, name=name, placement=placement, num_microbatches=num_microbatches)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _check_numbers(name: str, values: list[float]) -> None:
    for value in values:
        if not 0.0 <= value < float("inf"):
            raise ScheduleError(f"{name} is {value}, expected a finite number that is not negative")
