"""Owns the tests of pydist.schedule: what is built, read, simulated, drawn and refused."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pydist
from pydist import _C, schedule
from pydist.schedule import Schedule, ScheduleError

# Makespan bubble, span bubble and peak activations by rank with F = I = W = 1; p, m as keys.
HELD_1F1B = {4: [4.0, 3.0, 2.0, 1.0], 8: [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]}
HELD_INTERLEAVED = {
    4: [5.5, 4.5, 3.5, 2.5],
    8: [11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5],
}
ORACLE: dict[tuple[int, int], dict[str, tuple[float, float, float | list[float]]]] = {
    (4, 8): {
        "gpipe": (9, 9, 8),
        "1f1b": (9, 9, HELD_1F1B[4]),
        "interleaved-1f1b": (4.5, 4.5, HELD_INTERLEAVED[4]),
        "zb-h1": (3, 3, 4),
        "interleaved-zb": (1.5, 1.5, 4),
        "zb-h2": (3, 0, 7),
        "zb-v": (1.5, 0, 4),
        "dualpipe-v": (3, 3, 4.5),
    },
    (4, 16): {
        "gpipe": (9, 9, 16),
        "1f1b": (9, 9, HELD_1F1B[4]),
        "interleaved-1f1b": (4.5, 4.5, HELD_INTERLEAVED[4]),
        "zb-h1": (3, 3, 4),
        "interleaved-zb": (1.5, 1.5, 4),
        "zb-h2": (3, 0, 7),
        "zb-v": (1.5, 0, 4),
        "dualpipe-v": (3, 3, 4.5),
    },
    (8, 24): {
        "gpipe": (21, 21, 24),
        "1f1b": (21, 21, HELD_1F1B[8]),
        "interleaved-1f1b": (10.5, 10.5, HELD_INTERLEAVED[8]),
        "zb-h1": (7, 7, 8),
        "interleaved-zb": (3.5, 3.5, 8),
        "zb-h2": (7, 0, 15),
        "zb-v": (3.5, 0, 8),
        "dualpipe-v": (7, 7, 8.5),
    },
}
BUILT_IN = [
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-h2",
    "looped-bfs",
    "interleaved-1f1b",
    "interleaved-zb",
    "zb-v",
    "dualpipe-v",
    "forward-only",
]
ONE_STAGE = {"gpipe", "1f1b", "zb-h1", "zb-h2"}
TWO_STAGES = {"zb-v", "dualpipe-v"}


def stage_counts(kind: str) -> list[int]:
    if kind in ONE_STAGE:
        return [1]
    return [2] if kind in TWO_STAGES else [1, 2, 3, 4]


def sizes(kind: str) -> Iterator[tuple[int, int, int]]:
    """Every (p, m, v) to 8, 20 and 4 that the kind can do."""
    for p in range(1, 9):
        for m in range(2 * p if kind == "dualpipe-v" else 1, 21):
            for v in stage_counts(kind):
                yield p, m, v


@pytest.mark.parametrize("size", ORACLE)
def test_bubbles_and_peaks_are_those_of_the_literature(size: tuple[int, int]) -> None:
    """Zero-bubble papers mean the span bubble: ranks start and end at different times."""
    for kind, expected in ORACLE[size].items():
        result = schedule.build(kind, *size).simulate()
        peaks = expected[2] if isinstance(expected[2], list) else [float(expected[2])] * size[0]
        found = (result.makespan_bubble, result.span_bubble, result.peak_activations)
        assert found == (*expected[:2], peaks), kind


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_size_runs_to_its_end(kind: str) -> None:
    """No deadlock for p to 8, m to 20, v to 4; a last group merely shorter than the others has one
    at p, m, v = 4, 5, 3 with interleaved-1f1b. Accumulation is in ascending order everywhere."""
    for p, m, v in sizes(kind):
        built = schedule.build(kind, p, m, v)
        assert built.unordered_stages == [], (p, m, v)
        assert built.has_backward == (kind != "forward-only")
        assert (built.num_ranks, built.num_microbatches, built.num_stages) == (p, m, p * v)


# What torch's own tests of its interleaved schedules use: v, m, p.
TORCH_SIZES = """
2,2,2 2,4,4 2,8,2 2,8,4 2,8,8 4,4,4 4,8,4 4,8,8 4,16,4 4,32,4 4,64,4 4,16,16 4,32,32 4,128,64
3,2,2 3,8,2 3,12,4 4,6,3 4,10,5 2,3,4 2,10,4 2,15,4
"""


@pytest.mark.parametrize("kind", ["interleaved-1f1b", "looped-bfs", "interleaved-zb"])
def test_sizes_that_torch_tests(kind: str) -> None:
    for size in TORCH_SIZES.split():
        v, m, p = map(int, size.split(","))
        result = schedule.build(kind, p, m, v).simulate()
        if kind == "interleaved-1f1b" and m >= p:
            assert result.makespan_bubble == pytest.approx((p - 1) * 3 / v)
        assert len(result.timeline) == p


costs = st.floats(0.1, 10.0)


@given(st.integers(1, 8), st.integers(1, 20), costs, costs, st.integers(1, 4))
def test_bubbles_of_whole_backwards_equal_their_formulas(
    p: int, m: int, forward: float, backward: float, v: int
) -> None:
    """(p-1)(F+B), divided by the number of stages a rank; stages help only from m = p on."""
    bubble = (p - 1) * (forward + backward)
    for kind in ("gpipe", "1f1b"):
        found = schedule.build(kind, p, m).simulate(forward, backward=backward)
        assert found.makespan_bubble == pytest.approx(bubble, abs=1e-6), kind
    for kind in ("interleaved-1f1b", "looped-bfs"):
        found = schedule.build(kind, p, max(m, p), v).simulate(forward, backward=backward)
        assert found.makespan_bubble == pytest.approx(bubble / v, abs=1e-6), kind


@given(st.integers(1, 8), st.integers(1, 20), costs, costs, costs)
def test_the_bubble_of_zb_h1_equals_its_formula(
    p: int, m: int, forward: float, backward_input: float, weight: float
) -> None:
    """(p-1)(F+I-W) where W is the shortest; elsewhere the formula is too optimistic."""
    result = schedule.build("zb-h1", p, max(m, p)).simulate(forward, backward_input, weight)
    formula = (p - 1) * (forward + backward_input - weight)
    if weight <= min(forward, backward_input):
        assert result.makespan_bubble == pytest.approx(formula, abs=1e-6)
    else:
        assert result.makespan_bubble > formula - 1e-6


@pytest.mark.parametrize("p", range(1, 9))
def test_peaks_equal_their_formulas(p: int) -> None:
    for m in range(1, 21):
        held = {kind: schedule.build(kind, p, m).simulate() for kind in ONE_STAGE}
        assert held["gpipe"].peak_activations == [m] * p
        assert held["1f1b"].peak_activations == [min(m, p - rank) for rank in range(p)]
        assert held["zb-h1"].peak_activations == [min(m, p)] * p
        assert held["zb-h2"].peak_activations == [min(m, 2 * p - 1)] * p
        assert max(schedule.build("zb-v", p, m).simulate().peak_activations) <= p
        for kind in ("gpipe", "1f1b"):
            assert held[kind].peak_after_input == [0.0] * p
            assert held[kind].peak_after_forward == held[kind].peak_activations
        # Rank r holds r + 1 weight gradients back, and forwards for the ranks after it.
        assert held["zb-h1"].peak_after_input == [min(m, rank + 1) for rank in range(p)]
        assert held["zb-h1"].peak_after_forward == [min(m, p - rank) for rank in range(p)]


GRIDS = {
    ("gpipe", 3, 3, 1): """
gpipe: 3 ranks, 3 stages, 3 microbatches
time  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  .       1F2     2F1
   4  .       .       2F2
   5  .       .       2B0
   6  .       1B0     2B1
   7  0B0     1B1     2B2
   8  0B1     1B2
   9  0B2
""",
    ("1f1b", 3, 4, 1): """
1f1b: 3 ranks, 3 stages, 4 microbatches
time  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  .       .       2B0
   4  .       1B0     2F1
   5  0B0     1F2     2B1
   6  0F3     1B1     2F2
   7  0B1     1F3     2B2
   8  .       1B2     2F3
   9  0B2     .       2B3
  10  .       1B3
  11  0B3
""",
    ("interleaved-1f1b", 2, 3, 2): """
interleaved-1f1b: 2 ranks, 4 stages, 3 microbatches
time  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  0F2     1F1
   3  2F0     1F2
   4  2F1     3F0
   5  2F2     3B0
   6  2B0     3F1
   7  .       3B1
   8  2B1     3F2
   9  .       3B2
  10  2B2     1B0
  11  0B0     1B1
  12  0B1     1B2
  13  0B2
""",
    ("looped-bfs", 2, 2, 2): """
looped-bfs: 2 ranks, 4 stages, 2 microbatches
time  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  2F0     1F1
   3  2F1     3F0
   4  .       3F1
   5  .       3B0
   6  2B0     3B1
   7  2B1     1B0
   8  0B0     1B1
   9  0B1
""",
    ("zb-h1", 3, 4, 1): """
zb-h1: 3 ranks, 3 stages, 4 microbatches
time  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  .       .       2I0
   4  .       1I0     2F1
   5  0I0     1F2     2I1
   6  0W0     1I1     2F2
   7  0F3     1W0     2I2
   8  0I1     1F3     2W0
   9  0W1     1I2     2F3
  10  0I2     1W1     2I3
  11  0W2     1I3     2W1
  12  0I3     1W2     2W2
  13  0W3     1W3     2W3
""",
    ("zb-v", 2, 3, 2): """
zb-v: 2 ranks, 4 stages, 3 microbatches
time  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  0F2     2F0
   3  3F0     1F1
   4  3I0     2F1
   5  3W0     2I0
   6  3F1     2W0
   7  3I1     1F2
   8  3W1     1I0
   9  0I0     1W0
  10  0W0     2F2
  11  3F2     2I1
  12  3I2     2W1
  13  3W2     1I1
  14  0I1     2I2
  15  0W1     1I2
  16  0I2     1W1
  17  0W2     2W2
  18          1W2
""",
    ("dualpipe-v", 2, 4, 2): """
dualpipe-v: 2 ranks, 4 stages, 4 microbatches
time  rank 0   rank 1
   0  0F0      .
   1  0F1      1F0
   2  0F2      2F0
   3  3F0      1F1
   4  3I0      2F1
   5  3W0      1F2
   6  3F1      2B0
   7  0F3&3B1  2F2&1B0
   8  3F2&0B0  1F3&2B1
   9  3B2      2F3&1B1
  10  3F3&0B1  2B2
  11  3B3      1B2
  12  0I2      2I3
  13  0W2      1I3
  14  0I3      2W3
  15  0W3      1W3
""",
    ("forward-only", 2, 4, 2): """
forward-only: 2 ranks, 4 stages, 4 microbatches
time  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  2F0     1F1
   3  2F1     3F0
   4  0F2     3F1
   5  0F3     1F2
   6  2F2     1F3
   7  2F3     3F2
   8          3F3
""",
}


@pytest.mark.parametrize("size", GRIDS, ids=str)
def test_pictures(size: tuple[str, int, int, int]) -> None:
    """The pictures of the papers: time goes down, a column for each rank, "." waits."""
    assert str(schedule.build(*size)).strip() == GRIDS[size].strip()


def test_a_grid_shows_when_actions_run() -> None:
    """With costs, a row for each time at which something starts; "|" is still running."""
    result = schedule.build("1f1b", 2, 2).simulate(forward=1.0, backward=2.0, communication=0.5)
    expected = """
time  rank 0  rank 1
   0  0F0     .
   1  0F1     .
 1.5  |       1F0
 2.5  .       1B0
 4.5  .       1F1
   5  0B0     |
 5.5  |       1B1
   8  0B1
"""
    assert str(result).strip() == expected.strip()
    assert result.timeline[1][1] == ("1B0", 2.5, 4.5)
    assert result.makespan == 10.0
    assert result.idle == [[(2.0, 5.0), (7.0, 8.0)], [(0.0, 1.5), (7.5, 10.0)]]
    assert result.peak_parked == [0, 1]  # 0F1's output lies at rank 1 while that runs 1B0


def test_actions_that_take_no_time_share_a_row() -> None:
    result = schedule.build("zb-h1", 1, 2).simulate(1.0, 1.0, 0.0)
    assert [line.split() for line in str(result).splitlines()][1:] == [
        ["0", "0F0"],
        ["1", "0I0"],
        ["2", "0W0", "0F1"],
        ["3", "0I1"],
        ["4", "0W1"],
    ]


def test_costs_by_stage() -> None:
    """A slow last stage: its rank works all the time, and the other waits for it."""
    built = schedule.build("gpipe", 2, 3)
    result = built.simulate(forward=[1.0, 5.0], backward=[2.0, 10.0])
    assert result.makespan == 1 + 3 * 15 + 2
    assert result.makespan_bubble == 3.0
    assert result.span_bubble == 1 + 3 * 15 + 2 - 3 * 3
    with pytest.raises(ScheduleError, match="forward has 3 numbers, expected one for each of 2"):
        built.simulate(forward=[1.0, 1.0, 1.0])
    with pytest.raises(ScheduleError, match=r"backward_weight is -1\.0, expected a finite number"):
        built.simulate(backward_weight=-1)
    with pytest.raises(ScheduleError, match="communication is nan"):
        built.simulate(communication=float("nan"))


def test_bytes_are_counted_apart_before_and_after_i() -> None:
    """A list by stage; from F to I 100 and 10, from I to W 7 and 1."""
    built = Schedule(
        [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1I0", "1W0", "1F1", "1B1"]]
    )
    result = built.simulate(nbytes_after_forward=[100, 10], nbytes_after_input=[7, 1])
    assert result.peak_nbytes == [200, 10]
    result = built.simulate(nbytes_after_forward=[100, 10], nbytes_after_input=[700, 1])
    assert result.peak_nbytes == [1400, 10]
    assert result.peak_after_forward == [2, 1]
    assert result.peak_after_input == [2, 1]


def test_a_pair_takes_both_times_and_holds_both() -> None:
    """What a pair needs is there before it, what it gives after it: both are held."""
    built = Schedule([["0F0", "1F0", "0F1&1B0", "0B0", "1F1", "1B1", "0B1"]])
    result = built.simulate(forward=2.0, backward=4.0)
    assert result.timeline[0][2] == ("0F1&1B0", 2.0, 5.0)
    assert result.peak_activations == [1.5]


numbers = st.integers(0, 2**31 - 1)
actions = st.tuples(numbers, st.sampled_from("FBIW"), numbers)


@given(st.lists(actions, min_size=1, max_size=2))
def test_what_is_printed_is_parsed(parts: list[tuple[int, str, int]]) -> None:
    text = "&".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in parts)
    assert _C.parse_actions(text) == parts


NO_ACTIONS = "0F F3 0f3 0F3& &0F3 -1F0 0F-1 0F3&1B2&0W1 0F3.0 99999999999F0 0X1 0F+1"


@pytest.mark.parametrize("text", ["", "0F3 ", *NO_ACTIONS.split()])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action: expected a stage, one of F, B, I or W"):
        Schedule([[text]])


@pytest.mark.parametrize("kind", BUILT_IN)
def test_text_keeps_everything(kind: str, tmp_path: Path) -> None:
    """Placement and microbatches follow from the actions."""
    path = tmp_path / "mine.csv"
    for p, m, v in [(1, 2, 2), (2, 5, 1), (3, 7, 2), (4, 8, 2)]:
        if v not in stage_counts(kind):
            continue
        built = schedule.build(kind, p, m, v)
        text = built.to_csv(path)
        assert path.read_text() == text
        assert len(text.splitlines()) == p
        read = schedule.from_csv(path, name=kind)
        assert read == built
        assert schedule.from_csv(path).name == "mine"
        assert pickle.loads(pickle.dumps(built)) == copy.deepcopy(built) == built
        assert hash(read) == hash(built)
        assert built.forward_only().placement == built.placement
        built.forward_only().validate()


def test_files_are_checked_when_read(tmp_path: Path) -> None:
    path = tmp_path / "hand.csv"
    path.write_text("0F0, 0B0,\n1F0,,1X0\n")
    with pytest.raises(ScheduleError, match=r"line 2, field 3: '1X0' is no action"):
        schedule.from_csv(path)
    path.write_text("0F0,,, 0B0,\n1F0,,1B0\n\n")
    assert schedule.from_csv(path).actions == [["0F0", "0B0"], ["1F0", "1B0"]]
    path.write_text("0F0,0B0\n1F0\n")
    with pytest.raises(ScheduleError, match="1B0 is missing on rank 1"):
        schedule.from_csv(path)
    path.write_text("\n")
    with pytest.raises(ScheduleError, match="the text is empty"):
        schedule.from_csv(path)
    path.write_text("0F0,2F0,0B0,2B0\n")
    with pytest.raises(ScheduleError, match="has actions of stage 2 but none of stage 1"):
        schedule.from_csv(path)


REFUSED = {
    ("2f2b", 2, 4, None): "no schedule is called '2f2b'; there are 'gpipe', '1f1b'",
    ("1f1b", 0, 4, None): "num_ranks is 0, expected 1 or more",
    ("1f1b", 2, 0, None): "num_microbatches is 0, expected 1 or more",
    ("looped-bfs", 2, 4, 0): "stages_per_rank is 0, expected 1 or more",
    ("1f1b", 2, 4, 2): "has 1 stage on each rank, not 2; 'interleaved-1f1b' takes any number",
    ("gpipe", 2, 4, 3): "'looped-bfs' is the same with any number",
    ("zb-v", 2, 4, 3): "has 2 stages on each rank, not 3",
    ("dualpipe-v", 4, 7, None): "num_microbatches is 7, expected 8 or more for 4 ranks; 'zb-v'",
    ("gpipe", 2**20, 2**20, None): "would have more than 67108864 actions",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=str)
def test_what_cannot_be_built_says_what_would_work(
    arguments: tuple[str, int, int, int | None],
) -> None:
    with pytest.raises(ScheduleError, match=REFUSED[arguments]):
        schedule.build(*arguments)


def test_the_error_is_a_value_error() -> None:
    assert issubclass(ScheduleError, ValueError)
    assert f"{ScheduleError.__module__}.{ScheduleError.__name__}" == "pydist.schedule.ScheduleError"
    assert pydist.schedule is schedule


def test_stages_on_each_rank() -> None:
    """2 for interleaved and V kinds, else 1."""
    two = {kind for kind in BUILT_IN if schedule.default_stages_per_rank(kind) == 2}
    assert two == {"interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe-v"}
    assert schedule.build("zb-v", 2, 2).placement == [0, 1, 1, 0]
    assert schedule.build("interleaved-zb", 2, 2).placement == [0, 1, 0, 1]


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_registered", {})


@pytest.mark.usefixtures("_registry")
def test_users_register_their_own() -> None:
    def one_by_one(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[str]]:
        assert stages_per_rank == 1
        return [
            [f"{rank}{kind}{i}" for i in range(num_microbatches) for kind in "FB"]
            for rank in range(num_ranks)
        ]

    schedule.register("one-by-one", one_by_one)
    assert schedule.kinds() == [*BUILT_IN, "auto", "one-by-one"]
    built = schedule.build("one-by-one", 2, 3)
    assert built.name == "one-by-one"
    assert built.actions[1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    schedule.register("one-by-one", lambda p, m, v: schedule.build("gpipe", p, m))
    assert schedule.build("one-by-one", 2, 3) == schedule.build("gpipe", 2, 3)


@pytest.mark.usefixtures("_registry")
def test_registered_builders_are_held_to_what_they_are_asked_for() -> None:
    schedule.register("stuck", lambda p, m, v: [["0F0", "0B0"], ["1B0", "1F0"]])
    with pytest.raises(ScheduleError, match=r"schedule 'stuck': 1B0 comes before 1F0 on rank 1"):
        schedule.build("stuck", 2, 1)
    schedule.register("short", lambda p, m, v: [["0F0", "0B0"]])
    with pytest.raises(ScheduleError, match=r"asked for 2 ranks and 1 microbatches, and made one"):
        schedule.build("short", 2, 1)
    with pytest.raises(ScheduleError, match="'1f1b' is built in"):
        schedule.register("1f1b", lambda p, m, v: [])


def test_a_hand_written_order_is_reported() -> None:
    """Descending backwards are allowed, but sum gradients in another order than one process."""
    text = [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1W0"]]
    assert Schedule([text[0], ["1F0", "1F1", "1B1", "1B0"]]).unordered_stages == [0, 1]
    # What a cut leaves to I, or a stage that cannot be cut, accumulates there.
    split = ["1F0", "1F1", "1I1", "1I0", "1W0", "1W1"]
    assert Schedule([text[0], split]).unordered_stages == [0, 1]
    in_order = ["1F0", "1F1", "1I0", "1I1", "1W0", "1W1"]
    assert Schedule([text[0], in_order]).unordered_stages == [0]


def test_lowering() -> None:
    """-1: nothing to receive or send; the own rank: handed over here."""
    built = schedule.build("zb-v", 2, 1)
    assert built._plan.lowered(1) == [
        [("1F0", 0, 1, False)],
        [("2F0", 1, 0, False)],
        [("2I0", 0, 1, False)],
        [("2W0", -1, -1, True)],
        [("1I0", 1, 0, False)],
        [("1W0", -1, -1, True)],
    ]
    assert built._plan.lowered(0)[0] == [("0F0", -1, 1, False)]
    assert built._plan.lowered(0)[-1][0][3]
    pair = schedule.build("dualpipe-v", 1, 2)._plan.lowered(0)
    assert any(len(step) == 2 for step in pair)


def test_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    built = schedule.build("dualpipe-v", 2, 4)
    path = tmp_path / "picture.png"
    figure = built.plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    parts = [part for row in built.actions for text in row for part in _C.parse_actions(text)]
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert drawn == [str(microbatch) for _, _, microbatch in parts]
    built.plot(simulation=built.simulate(forward=2.0))


def test_importing_needs_no_matplotlib() -> None:
    """It takes longer than all of pydist, and is not installed everywhere."""
    code = (
        "import sys; sys.modules['matplotlib'] = None; import pydist\n"
        "s = pydist.schedule.build('gpipe', 2, 2); print(s)\n"
        "try: s.plot('x.png')\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "pip install matplotlib, or pydist[plot]" in result.stdout
