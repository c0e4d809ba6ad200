"""Owns the tests of where a report says time went: arithmetic, late ranks, unused parameters."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from conftest import Transport
from models import OneUnused, mlp, wavy_loss
from pydist import DataParallel
from pydist._C import testing
from pydist.report import LateRank, Report, Unused
from reference import draw

MS = 1_000_000
DELAY_S = 0.05
NUM_STEPS = 10


def one_step(stats: Any, start_ms: int, busy_ms: list[int], rank: int) -> None:
    """forward 3 ms, 2 ms for the loss, backward 7 ms, then the meeting and 4 ms of reducing."""
    stats.begin_forward(start_ms * MS)
    stats.end_forward((start_ms + 3) * MS)
    stats.open((start_ms + 5) * MS)
    stats.close((start_ms + 12) * MS)
    meeting_ms = start_ms + 12 + max(busy_ms) - busy_ms[rank]
    stats.meet(meeting_ms * MS, rank, [busy * MS for busy in busy_ms])
    stats.finish((meeting_ms + 4) * MS)


def test_times_add_up() -> None:
    """A rank that waits 10, 0 and 30 ms in three steps: the first has no earlier meeting to count
    from, so all of its time in end() is waiting; afterwards busy times tell who was late."""
    stats = testing.RoundStats(3)
    assert stats.busy_ns(100 * MS) == 0
    one_step(stats, 1000, [0, 0, 0], 1)
    assert stats.late() == [(0, 0)] * 3
    one_step(stats, 2000, [40, 70, 10], 1)
    one_step(stats, 3000, [35, 5, 20], 1)
    assert stats.late() == [(1, (30 + 15) // 2 * MS + MS // 2), (1, (30 + 60) // 2 * MS), (0, 0)]
    assert stats.times() == {
        "forward": 9 * MS,
        "backward": 21 * MS,
        "waiting": 30 * MS,
        "reducing": 12 * MS,
        "total": (3046 - 1000) * MS,
    }


def test_waiting_elsewhere_is_not_being_busy() -> None:
    """Who waits in the broadcast of buffers for a late rank must not look as late as that rank."""
    stats = testing.RoundStats(2)
    one_step(stats, 1000, [0, 0], 0)  # they meet at 1012
    stats.discount(50 * MS)
    assert stats.busy_ns(1112 * MS) == 50 * MS
    one_step(stats, 2000, [50, 60], 0)  # they meet at 2022
    assert stats.busy_ns(2032 * MS) == 10 * MS


class Slow(nn.Module):
    """Sleeps on one rank: before the forward's end, or within backward."""

    def __init__(self, delays: bool, in_backward: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        self.delays = delays
        self.in_backward = in_backward

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x)
        if self.delays and self.in_backward:
            hidden.register_hook(lambda gradient: time.sleep(DELAY_S))
        return hidden  # type: ignore[no-any-return]


def delayed(rank: int, world_size: int, late: int, where: str) -> Report:
    module = Slow(rank == late, where == "backward")
    model = DataParallel(module)
    for step in range(NUM_STEPS):
        if rank == late and where == "before":
            time.sleep(DELAY_S)
        wavy_loss(model(draw(rank, step, 4, 16))).backward()
    return model.report()


def check_late(report: Report, late: int, where: str) -> None:
    first = report.late[0]
    assert first.rank == late, report.late
    assert first.num_last > NUM_STEPS // 2
    others = sum(one.waited_s for one in report.late[1:])
    assert first.waited_s > 2 * others, report.late
    assert f"late        rank {late} came last in {first.num_last} of 9 rounds" in str(report)
    if report.rank == late:
        assert report.waiting_s < first.waited_s / 2
    elif where == "backward":  # else it waited in the forward's broadcast already
        assert report.waiting_s > first.waited_s / 2


def test_a_delayed_rank_is_named_on_every_rank(transport: Transport) -> None:
    """One rank sleeps 50 ms a step: in backward, or before a forward whose broadcast of buffers
    lets the others wait there already. Every rank's report says who came last, and what it cost."""
    for late, where in ((1, "backward"), (0, "before"), (1, "before")):
        for report in transport.pool(2).run(delayed, late, where):
            check_late(report, late, where)


def test_a_delayed_rank_is_named_among_three(transport: Transport) -> None:
    for report in transport.pool(3).run(delayed, 2, "before"):
        check_late(report, 2, "before")


def timed(rank: int, world_size: int) -> Report:
    model = DataParallel(mlp(192, 3))
    for step in range(3):
        with model.no_sync():
            wavy_loss(model(draw(rank, step, 4, 192))).backward()
        wavy_loss(model(draw(rank, step, 4, 192))).backward()
    return model.report()


def test_parts_fit_into_steps(transport: Transport) -> None:
    """All parts are there, and no more than the whole; what is hidden is within backward."""
    for report in transport.pool(2).run(timed):
        parts = (report.forward_s, report.backward_s, report.waiting_s, report.reducing_s)
        assert all(part >= 0 for part in parts)
        assert min(report.forward_s, report.backward_s, report.reducing_s) > 0
        assert sum(parts) <= report.total_s
        assert 0 <= report.hidden_s <= report.backward_s + report.reducing_s + report.waiting_s


class OneEach(nn.Module):
    """Rank 0 uses `a`, the others `b`; nobody uses `c`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.rank = torch.distributed.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        return (self.a if self.rank == 0 else self.b)(x)  # type: ignore[no-any-return]


def report_unused(rank: int, world_size: int) -> Report:
    module = OneEach()
    module.c.bias.requires_grad_(False)
    model = DataParallel(module, find_unused_parameters=True)
    model(torch.ones(2, 8)).sum().backward()
    return model.report()


def test_unused_parameters_are_named_with_their_ranks(transport: Transport) -> None:
    """All ranks know who did not use what; a frozen parameter is none of them."""
    for report in transport.pool(3).run(report_unused):
        assert report.unused == (
            Unused("a.weight", (1, 2)),
            Unused("a.bias", (1, 2)),
            Unused("b.weight", (0,)),
            Unused("b.bias", (0,)),
            Unused("c.weight", (0, 1, 2)),
        )
        text = " ".join(str(report).split())
        assert "a.weight (rank 1, 2), " in text
        assert "c.weight (every rank)" in text
        assert "no rank used 1 parameters in the last round (c.weight" in text


def many_small(rank: int, world_size: int, gradient_as_bucket_view: bool) -> Report:
    model = DataParallel(
        nn.Sequential(*[OneUnused(9) if i == 0 else nn.Linear(5, 5) for i in range(40)]),
        bucket_cap_mb=0.001,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
    model(draw(rank, 0, 4, 9)).sum().backward()
    return model.report()


def test_the_text_fits_a_terminal(transport: Transport) -> None:
    """Dozens of buckets and small parameters: the largest are listed, lines are wrapped, and so few
    bytes are not worth a hint."""
    for views in (False, True):
        for report in transport.pool(2).run(many_small, views):
            assert report.num_buckets > 4
            assert sum(unit.nbytes for unit in report.units) == 4 * (90 + 50 + 39 * 30)
            lines = str(report).splitlines()
            assert max(map(len, lines)) <= 100
            assert len(lines) < 30
            assert "are copied" not in str(report)
            if transport.name == "process_group":
                assert "PYDIST_TRANSPORT=process_group" in report.hints[0]


def report_of(**changes: Any) -> Report:
    """A report of 100 steps of 10 ms where nothing stands out."""
    values: dict[str, Any] = {
        "model": "DataParallel(Net)",
        "transport": "shared_memory",
        "rank": 0,
        "size": 4,
        "num_rounds": 100,
        "units": (),
        "born_nbytes": 1000,
        "packed_nbytes": {},
        "moved_nbytes": 1000,
        "forward_s": 0.3,
        "backward_s": 0.6,
        "hidden_s": 0.1,
        "waiting_s": 0.01,
        "reducing_s": 0.02,
        "total_s": 1.0,
        "wait_s": 0.03,
        "late": (),
        "unused": (),
        "allocator": "",
        "forced_transport": False,
    }
    return Report(**{**values, **changes})


def test_hints_need_evidence() -> None:
    """Each rule speaks where its evidence is there, and is silent otherwise."""
    assert report_of().hints == ()
    assert report_of(size=1, late=(LateRank(1, 9, 0.5),)).hints == ()
    (hint,) = report_of(late=(LateRank(3, 90, 0.4), LateRank(1, 9, 0.01))).hints
    assert hint.startswith("rank 3 slows the others down: in a step of 10.0 ms they wait 4.0 ms")
    (hint,) = report_of(late=(LateRank(3, 50, 0.2), LateRank(1, 49, 0.19))).hints
    assert hint.startswith("ranks take turns in coming last")
    (hint,) = report_of(reducing_s=0.2).hints
    assert hint.startswith("reducing after backward takes 2.0 ms of a step of 10.0 ms")
    mib = 1 << 20
    packed = {"held by user code": 800 * mib, "small": 10 * mib}
    (hint,) = report_of(born_nbytes=1000 * mib, packed_nbytes=packed).hints
    assert hint.startswith("44 % of the gradient bytes are copied: a hook or a variable keeps")
    (hint,) = report_of(
        packed_nbytes={"not in the arena": 900 * mib}, allocator="PYDIST_ALLOCATOR=0"
    ).hints
    assert "born in place: PYDIST_ALLOCATOR=0" in hint
    (hint,) = report_of(unused=(Unused("a", (0, 1, 2, 3)), Unused("b", (0,)))).hints
    assert hint.startswith("no rank used 1 parameters in the last round (a, for example)")
    (hint,) = report_of(transport="process_group", forced_transport=True).hints
    assert hint.startswith("PYDIST_TRANSPORT=process_group keeps ranks from sharing memory")
