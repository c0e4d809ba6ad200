"""Owns the tests of what is refused: every verdict against an interpreter written here anew."""

import itertools
import random
import re
from collections.abc import Iterator

import pytest

from pydist import _C, schedule
from pydist.schedule import Schedule, ScheduleError

Lists = list[list[str]]


def parts(text: str) -> list[tuple[int, str, int]]:
    return [
        (int(stage), kind, int(microbatch))
        for stage, kind, microbatch in re.findall(r"(\d+)([FBIW])(\d+)", text)
    ]


def runs_to_its_end(lists: Lists, placement: list[int], num_microbatches: int) -> bool:
    """The brute-force interpreter: ranks take turns, messages are never lost and never wait.

    It knows nothing of the validator's rules. It executes actions as a stage would: what it has
    not is not there, what it has done it cannot do again, and at the end it looks at what it has.
    """
    num_stages = len(placement)
    outputs: set[tuple[int, int]] = set()
    gradients: set[tuple[int, int]] = set()
    through_input: set[tuple[int, int]] = set()
    accumulated: set[tuple[int, int]] = set()

    def can_run(stage: int, kind: str, microbatch: int) -> bool:
        here, before, after = ((stage + step, microbatch) for step in (0, -1, 1))
        if kind == "F":
            return stage == 0 or before in outputs
        if kind == "W":
            return here in through_input
        return here in outputs and (after in gradients or stage == num_stages - 1)

    def run(stage: int, kind: str, microbatch: int) -> bool:
        """False: a second time."""
        here = (stage, microbatch)
        if kind == "F":
            fresh = here not in outputs
            outputs.add(here)
        elif kind == "W":
            fresh = here not in accumulated
            accumulated.add(here)
        else:
            fresh = here not in gradients
            gradients.add(here)
            if kind == "B":
                fresh = fresh and here not in accumulated
                accumulated.add(here)
            else:
                through_input.add(here)
        return fresh

    for rank, entries in enumerate(lists):
        for stage, _, microbatch in itertools.chain.from_iterable(map(parts, entries)):
            if stage >= num_stages or microbatch >= num_microbatches or placement[stage] != rank:
                return False
    left = [[parts(text) for text in entries] for entries in lists]
    while any(left):
        ready = [
            entries for entries in left if entries and all(can_run(*part) for part in entries[0])
        ]
        if not ready:
            return False
        for part in ready[0].pop(0):
            if not run(*part):
                return False
    everything = set(itertools.product(range(num_stages), range(num_microbatches)))
    if not gradients and not accumulated:
        return outputs == everything
    return outputs == gradients == accumulated == everything


def mutate(lists: Lists, generator: random.Random) -> None:
    """Small things that hands get wrong, several of which leave a schedule valid."""
    entries = generator.choice([row for row in lists if row])
    at = generator.randrange(len(entries))
    kind = generator.choice(["swap", "swap", "move", "delete", "repeat", "other", "change", "pair"])
    if kind == "swap":
        other = min(len(entries) - 1, at + generator.choice([1, 1, 2, 5]))
        entries[at], entries[other] = entries[other], entries[at]
    elif kind == "move":
        entries.insert(generator.randrange(len(entries)), entries.pop(at))
    elif kind == "delete":
        del entries[at]
    elif kind == "repeat":
        entries.insert(generator.randrange(len(entries)), entries[at])
    elif kind == "other":
        lists[generator.randrange(len(lists))].append(entries.pop(at))
    elif kind == "change":
        stage, letter, microbatch = parts(entries[at])[0]
        letter = generator.choice("FBIW")
        entries[at] = f"{stage}{letter}{max(0, microbatch + generator.choice([-1, 0, 0, 1]))}"
    elif at + 1 < len(entries) and "&" not in entries[at] + entries[at + 1]:
        entries[at : at + 2] = [f"{entries[at]}&{entries[at + 1]}"]


def mutated(seed: int) -> tuple[Schedule, Lists]:
    generator = random.Random(seed)
    kinds = [kind for kind in _C.schedule_kinds() if kind != "dualpipe-v"] + ["dualpipe-v"]
    kind = generator.choice(kinds)
    p, m = generator.randint(1, 4), generator.randint(1, 5)
    m = max(m, 2 * p) if kind == "dualpipe-v" else m
    built = schedule.build(kind, p, m)
    lists = built.actions
    for _ in range(generator.choice([1, 1, 2, 3, 8])):
        if any(lists):
            mutate(lists, generator)
    return built, lists


def test_verdicts_on_mutated_schedules_equal_an_interpreters() -> None:
    """1,000 schedules, each a built-in one with up to eight changes."""
    verdicts = []
    for seed in range(1000):
        built, lists = mutated(seed)
        expected = runs_to_its_end(lists, built.placement, built.num_microbatches)
        changed = Schedule(
            lists, placement=built.placement, num_microbatches=built.num_microbatches
        )
        try:
            changed.validate()
            found = True
        except ScheduleError:
            found = False
        assert found == expected, (seed, lists)
        verdicts.append(found)
    assert 150 < sum(verdicts) < 850  # or the mutations show nothing


def waits_for(lists: Lists) -> dict[str, set[str]]:
    """By entry, those that must have ended before it: by order of the list, or by need."""
    num_stages = 1 + max(stage for row in lists for text in row for stage, _, _ in parts(text))
    giver: dict[tuple[int, str, int], str] = {}
    for text in itertools.chain.from_iterable(lists):
        for stage, kind, microbatch in parts(text):
            if kind != "W":
                giver[stage, "F" if kind == "F" else "B", microbatch] = text
            if kind == "I":
                giver[stage, "I", microbatch] = text
    edges: dict[str, set[str]] = {}
    for row in lists:
        for index, text in enumerate(row):
            edges[text] = set(row[:index])
            for stage, kind, microbatch in parts(text):
                needed = {
                    "F": [(stage - 1, "F", microbatch)] * (stage > 0),
                    "W": [(stage, "I", microbatch)],
                }.get(kind)
                if needed is None:
                    needed = [(stage, "F", microbatch)]
                    needed += [(stage + 1, "B", microbatch)] * (stage < num_stages - 1)
                edges[text] |= {giver[value] for value in needed}
    return edges


def length_of_smallest_cycle(edges: dict[str, set[str]]) -> int:
    """Breadth first by sets; 0 where there is none."""
    best = 0
    for start in edges:
        reached, depth = set(edges[start]), 1
        while reached and start not in reached:
            further = reached.union(*(edges[text] for text in reached))
            if further == reached:
                break
            reached, depth = further, depth + 1
        if start in reached and (best == 0 or depth < best):
            best = depth
    return best


def stuck_schedules() -> Iterator[Lists]:
    """Most are circular although each list alone is in order."""
    generator = random.Random(4)
    for _ in range(300):  # a rank has its microbatches in another order
        kind = generator.choice(["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
        m = generator.randint(2, 5)
        lists = schedule.build(kind, generator.randint(2, 4), m).actions
        for row in generator.sample(lists, generator.choice([1, 1, 2])):
            places = generator.sample(range(m), m)
            row[:] = [
                f"{stage}{letter}{places[microbatch]}"
                for text in row
                for stage, letter, microbatch in parts(text)
            ]
        yield lists
    for _ in range(400):  # two entries that have changed places
        kind = generator.choice(["interleaved-1f1b", "zb-v"])
        lists = schedule.build(kind, generator.randint(2, 4), generator.randint(2, 5)).actions
        row = generator.choice(lists)
        at, other = generator.randrange(len(row)), generator.randrange(len(row))
        row[at], row[other] = row[other], row[at]
        yield lists


CYCLE_LINE = re.compile(r"^  (\S+) on rank (\d+) (needs|comes after) ([^\s,.]+)", re.MULTILINE)


def test_the_circle_in_the_error_is_real_and_the_smallest() -> None:
    lengths = []
    for lists in stuck_schedules():
        try:
            Schedule(lists).validate()
            continue
        except ScheduleError as error:
            message = str(error)
        if "in a circle" not in message:
            continue  # out of order within a rank, which is said more simply
        edges = waits_for(lists)
        lines = CYCLE_LINE.findall(message)
        for index, (text, rank, _, other) in enumerate(lines):
            assert text in lists[int(rank)]
            assert other in edges[text]
            assert other == lines[(index + 1) % len(lines)][0]
            assert f"*{text}*" in message
        assert message.count("*") == 2 * len(lines)
        assert len(lines) == length_of_smallest_cycle(edges), lists
        lengths.append(len(lines))
    assert len(lengths) > 40
    assert len(set(lengths)) > 1


def refusal(lists: Lists, **options: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        Schedule(lists, name="mine", **options).validate()  # type: ignore[arg-type]
    return str(caught.value)


def test_a_circle_is_shown_in_the_lists() -> None:
    """Rank 0 wants 0B0 before it sends 0F1, which rank 1 wants before it can send 1B0."""
    message = refusal([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    expected = """
schedule 'mine': its actions wait for each other in a circle, so it never ends:
  0B0 on rank 0 needs 1B0 on rank 1,
  1B0 on rank 1 comes after 1F1,
  1F1 on rank 1 needs 0F1 on rank 0,
  0F1 on rank 0 comes after 0B0.

   rank 0  rank 1
0  0F0     *1F1*
1  *0B0*   1B1
2  *0F1*   1F0
3  0B1     *1B0*
"""
    assert message.strip() == expected.strip()


MESSAGES = {
    "1B1 is missing on rank 1, and so are 1I1 and 1W1 in its place": [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1"],
    ],
    "0W0 is missing on rank 0: 0I0 leaves the parameters' gradients to it": [["0F0", "0I0"]],
    "0I0 is missing on rank 0, which 0W0 needs": [["0F0", "0W0"]],
    "0F0 is missing on rank 0": [["0F1", "0B0", "0B1"]],
    "0B0 is there twice on rank 0": [["0F0", "0B0", "0B0"]],
    "0B0 and 0I0 are both there: B is I and W in one": [["0F0", "0B0", "0I0"]],
    "0F1 is on rank 1, but stage 0 is on rank 0": [
        ["0F0", "0B0", "0B1"],
        ["1F0", "0F1", "1F1", "1B0", "1B1"],
    ],
    "0B0 comes before 0F0 on rank 0, which it needs": [["0B0", "0F0"]],
    "0W0 comes before 0I0 on rank 0": [["0F0", "0W0", "0I0"]],
    "1F0 needs the other action of its pair; a pair runs at once": [["0F0&1F0", "1B0", "0B0"]],
    "rank 1 has no stage; leave it out of the group": [["0F0", "0B0"], []],
    "has no ranks": [],
    "has no actions": [[]],
}


@pytest.mark.parametrize("expected", MESSAGES)
def test_messages(expected: str) -> None:
    message = refusal(MESSAGES[expected])
    assert message.startswith("schedule 'mine'")
    assert expected in message


def test_claims_about_the_shape_are_checked() -> None:
    lists = [["0F0", "0B0"], ["1F0", "1B0"]]
    assert "stage 1 is on rank 7 of 2" in refusal(lists, placement=[0, 7])
    assert "rank 1 has no stage" in refusal(lists, placement=[0])
    assert "2F0 on rank 1 is of no stage or microbatch: stages are 0 to 1" in refusal(
        [lists[0], ["1F0", "1B0", "2F0"]], placement=[0, 1], num_microbatches=1
    )
    assert "0F1 is missing" in refusal(lists, num_microbatches=2)
    assert "too few for 2 stages and 100000000 microbatches" in refusal(
        lists, num_microbatches=10**8
    )


def test_long_lists_are_shown_around_the_mark() -> None:
    """A grid of 400 rows says less than one of 13."""
    lists = schedule.build("1f1b", 2, 100).actions
    lists[0].remove("0B60")
    lists[0].insert(0, "0B60")
    message = refusal(lists)
    assert "0B60 comes before 0F60 on rank 0" in message
    assert "*0B60*" in message
    assert "*0F60*" in message
    rows = message.split("\n\n")[1].splitlines()
    assert rows.count("...") == 2
    assert len(rows) < 30
