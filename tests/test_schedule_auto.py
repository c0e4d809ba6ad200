"""Owns the tests of "auto": never worse than a built-in schedule, and as good as brute force."""

import heapq
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist import schedule
from pydist.schedule import Costs, ScheduleError


class Moment(NamedTuple):
    """All that matters for what comes next; times count from now."""

    done: tuple[tuple[int, int, int], ...]  # by stage: F, B or I, and B or W that have started
    busy: tuple[int, ...]  # by rank
    on_the_way: frozenset[tuple[str, int, int, int]]  # (kind, stage, microbatch, time)


class BruteForce:
    """Every way to go through time: at each event each idle rank starts something, or waits.

    One stage on each rank and whole numbers as costs. It merges moments that are the same and
    nothing else: no bound, no preference, no rule of what is worth trying.
    """

    def __init__(self, costs: Costs, num_microbatches: int, caps: list[int] | None) -> None:
        names = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
        self.costs: dict[str, list[int]] = {kind: getattr(costs, names[kind]) for kind in names}
        self.travel, self.m = int(costs.communication), num_microbatches
        self.held, self.caps = (costs.nbytes_after_forward, costs.nbytes_after_input), caps
        self.num_stages = len(self.costs["F"])

    def makespan(self) -> int:
        num = self.num_stages
        start = Moment(((0, 0, 0),) * num, (0,) * num, frozenset())
        queue: list[tuple[int, int, Moment, int]] = [(0, 0, start, 0)]
        seen: set[tuple[Moment, int]] = set()
        number = 0
        while queue:
            now, _, moment, first_rank = heapq.heappop(queue)
            if (moment, first_rank) in seen:
                continue
            seen.add((moment, first_rank))
            if all(done == (self.m,) * 3 for done in moment.done) and not any(moment.busy):
                return now
            for later, wait, rank in self.successors(moment, first_rank):
                number += 1
                heapq.heappush(queue, (now + wait, number, later, rank))
        raise AssertionError("the cap lets nothing through")

    def successors(self, moment: Moment, first_rank: int) -> Iterator[tuple[Moment, int, int]]:
        for rank in range(first_rank, self.num_stages):
            if moment.busy[rank] == 0:
                for kind in self.kinds_that_can_start(moment, rank):
                    yield self.after_start(moment, rank, kind), 0, rank + 1
        times = [time for time in moment.busy if time > 0]
        times += [time for *_, time in moment.on_the_way]
        if times:
            yield self.after_wait(moment, min(times)), min(times), 0

    def kinds_that_can_start(self, moment: Moment, stage: int) -> Iterator[str]:
        forwards, backwards, weights = moment.done[stage]
        here: list[str] = []
        if forwards < self.m and self.is_there(moment, "F", stage - 1, forwards):
            here.append("F")
        if backwards < forwards and self.is_there(moment, "B", stage + 1, backwards):
            here += ["I"] + ["B"] * (weights == backwards)
        if weights < backwards:
            here.append("W")
        for kind in here:
            if self.fits(self.count(moment.done[stage], kind), stage):
                yield kind

    def is_there(self, moment: Moment, kind: str, giver: int, microbatch: int) -> bool:
        if not 0 <= giver < self.num_stages:
            return True
        is_given = moment.done[giver][0 if kind == "F" else 1] > microbatch
        value = (kind, giver, microbatch)
        return is_given and all(value != travelling[:3] for travelling in moment.on_the_way)

    def fits(self, done: tuple[int, int, int], stage: int) -> bool:
        if self.caps is None:
            return True
        after_forward, after_input = (nbytes[stage] for nbytes in self.held)  # type: ignore[index]
        nbytes = (done[0] - done[1]) * after_forward + (done[1] - done[2]) * after_input
        return nbytes <= self.caps[stage]

    @staticmethod
    def count(done: tuple[int, int, int], kind: str) -> tuple[int, int, int]:
        return done[0] + (kind == "F"), done[1] + (kind in "BI"), done[2] + (kind in "BW")

    def after_start(self, moment: Moment, stage: int, kind: str) -> Moment:
        done, busy = list(moment.done), list(moment.busy)
        microbatch = done[stage][0] if kind == "F" else done[stage][1]
        done[stage] = self.count(done[stage], kind)
        busy[stage] = self.costs[kind][stage]
        on_the_way = moment.on_the_way
        if kind != "W":
            value = "F" if kind == "F" else "B"
            on_the_way |= {(value, stage, microbatch, busy[stage] + self.travel)}
        return Moment(tuple(done), tuple(busy), on_the_way)

    @staticmethod
    def after_wait(moment: Moment, wait: int) -> Moment:
        on_the_way = {(*value, time - wait) for *value, time in moment.on_the_way if time > wait}
        busy = tuple(max(0, time - wait) for time in moment.busy)
        return Moment(moment.done, busy, frozenset(on_the_way))  # type: ignore[arg-type]


def instance(generator: random.Random, p: int, is_capped: bool) -> tuple[Costs, list[int] | None]:
    """Whole numbers; B lies between the longer of I and W and their sum."""

    def numbers(low: int, high: int) -> list[int]:
        return [generator.randint(low, high) for _ in range(p)]

    forward, back, weight = numbers(1, 4), numbers(1, 4), numbers(1, 4)
    whole = [generator.randint(max(i, w), i + w) for i, w in zip(back, weight, strict=True)]
    held = numbers(1, 3)
    costs = Costs(forward, back, weight, whole, generator.choice([0, 1]), held, numbers(1, 3))
    caps = [max(generator.randint(3, 8), one) for one in held]
    return costs, caps if is_capped else None


def check_against_brute_force(seed: int, p: int, m: int, is_capped: bool) -> None:
    costs, caps = instance(random.Random(f"{seed} {p} {m}"), p, is_capped)
    built = schedule.build("auto", p, m, costs=costs, memory_cap=caps)
    result = built.simulate(**vars(costs))
    assert result.makespan == BruteForce(costs, m, caps).makespan(), (costs, caps)
    assert caps is None or all(
        peak <= cap for peak, cap in zip(result.peak_nbytes, caps, strict=True)
    )
    assert built.unordered_stages == []


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_auto_equals_brute_force(p: int, m: int) -> None:
    """One stage a rank, microbatches in order within a kind, with and without a cap."""
    for seed in range(max(1, 7 - 2 * p * m // 3)):
        check_against_brute_force(seed, p, m, is_capped=True)
        if (p, m) != (3, 4):
            check_against_brute_force(seed, p, m, is_capped=False)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m", "num_seeds"), [(2, 3, 60), (2, 4, 30), (3, 2, 60), (3, 4, 6)])
def test_auto_equals_brute_force_in_many_cases(p: int, m: int, num_seeds: int) -> None:
    for seed in range(100, 100 + num_seeds):
        check_against_brute_force(seed, p, m, is_capped=seed % 2 == 0)


def best_built_in(p: int, m: int, v: int, costs: Costs, cap: float | None) -> float:
    """The makespan of the shortest built-in schedule under the cap; infinite: none keeps to it."""
    best = float("inf")
    for kind in schedule.kinds():
        if kind in ("auto", "forward-only"):
            continue
        try:
            result = schedule.build(kind, p, m, v).simulate(**vars(costs))
        except ScheduleError:
            continue
        if cap is None or max(result.peak_nbytes) <= cap:
            best = min(best, result.makespan)
    return best


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, Costs, float | None]:
    p, m, v = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
    one = st.floats(0.0, 4.0).map(lambda value: round(value, 2))
    by_stage = st.lists(one, min_size=p * v, max_size=p * v)
    cost = one | by_stage
    costs = Costs(
        draw(cost),
        draw(cost),
        draw(cost),
        draw(st.none() | cost),
        draw(one),
        draw(cost),
        draw(cost),
    )
    return p, m, v, costs, draw(st.none() | st.floats(0.0, 30.0))


@settings(deadline=None, max_examples=80)
@given(requests())
def test_auto_is_never_worse_than_a_built_in(
    request: tuple[int, int, int, Costs, float | None],
) -> None:
    """Whatever it costs and whatever the cap, unless not even one microbatch keeps to that."""
    p, m, v, costs, cap = request
    best = best_built_in(p, m, v, costs, cap)
    try:
        built = schedule.build("auto", p, m, v, costs=costs, memory_cap=cap)
    except ScheduleError:
        with pytest.raises(ScheduleError, match="but one microbatch alone holds"):
            schedule.build("auto", p, 1, v, costs=costs, memory_cap=cap)
        assert best == float("inf")
        return
    result = built.simulate(**vars(costs))
    assert result.makespan <= best * (1 + 1e-9)
    assert cap is None or max(result.peak_nbytes) <= cap * (1 + 1e-9)
    assert built.unordered_stages == []


def test_auto_beats_every_built_in() -> None:
    """Splitting costs 0.3: it mixes B with I and W, and splits only where a gap is filled."""
    costs = Costs(backward=1.7)
    built = schedule.build("auto", 3, 4, costs=costs)
    assert built.name == "auto: search"
    assert best_built_in(3, 4, 1, costs, None) == pytest.approx(14.0)
    assert built.simulate(**vars(costs)).makespan == pytest.approx(13.7)
    kinds = {text[1] for row in built.actions for text in row}
    assert kinds == set("FBIW")


def test_auto_keeps_to_a_cap_that_no_built_in_keeps_to() -> None:
    """Two microbatches on each of three ranks; 1f1b wants three on the first."""
    costs = Costs(nbytes_after_forward=1.0, nbytes_after_input=1.0)
    assert best_built_in(3, 6, 1, costs, 2.0) == float("inf")
    built = schedule.build("auto", 3, 6, costs=costs, memory_cap=2.0)
    result = built.simulate(**vars(costs))
    assert result.peak_nbytes == [2.0, 2.0, 2.0]
    one_by_one = 6 * 3 * 3  # no rank ever works beside another
    assert result.makespan < 0.6 * one_by_one
    capped = schedule.build("auto", 3, 6, costs=costs, memory_cap=[1.0, 3.0, 3.0])
    assert capped.simulate(**vars(costs)).peak_nbytes[0] == 1.0


def test_auto_takes_a_built_in_where_nothing_is_shorter() -> None:
    assert schedule.build("auto", 4, 8).name == "auto: zb-h1"
    held = Costs(nbytes_after_forward=1.0, nbytes_after_input=1.0)
    assert schedule.build("auto", 4, 8, 2, costs=held).name in (
        "auto: zb-v",
        "auto: interleaved-zb",
    )
    expensive = Costs(backward=1.0)  # W is for nothing in B
    assert schedule.build("auto", 4, 16, costs=expensive).name == "auto: 1f1b"


def test_auto_of_a_larger_pipeline_comes_to_an_end() -> None:
    """The search is narrowed to what it can afford; the answer is still no worse."""
    costs = Costs(backward=1.8, communication=0.1)
    built = schedule.build("auto", 16, 48, 2, costs=costs)
    assert built.simulate(**vars(costs)).makespan <= best_built_in(16, 48, 2, costs, None) + 1e-6


def test_what_auto_refuses() -> None:
    with pytest.raises(ScheduleError, match="memory_cap has 1 numbers, expected one for each of 2"):
        schedule.build("auto", 2, 2, memory_cap=[1.0])
    with pytest.raises(ScheduleError, match="forward has 3 numbers, expected one for each of 2"):
        schedule.build("auto", 2, 2, costs=Costs(forward=[1.0, 1.0, 1.0]))
    with pytest.raises(ScheduleError, match="memory_cap is nan"):
        schedule.build("auto", 2, 2, memory_cap=float("nan"))
    with pytest.raises(ScheduleError, match="num_microbatches is 0"):
        schedule.build("auto", 2, 0)
    with pytest.raises(ScheduleError, match="num_ranks is 0"):
        schedule.build("auto", 0, 2)
    with pytest.raises(ScheduleError, match="costs and memory_cap are for kind 'auto', not for"):
        schedule.build("1f1b", 2, 2, memory_cap=4.0)
    held = Costs(nbytes_after_forward=[3.0, 5.0])
    with pytest.raises(
        ScheduleError, match="of rank 1 is 4 bytes, but one microbatch alone holds 5"
    ):
        schedule.build("auto", 2, 2, costs=held, memory_cap=4.0)
    with pytest.raises(ScheduleError, match="'auto' is built in"):
        schedule.register("auto", lambda p, m, v: [])
