"""Owns the proof that the emulated device finds bugs: each of them is planted into a step of the
real engine, as if its code had it, and must be found as what it is."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from emulated import (
    LIBRARY,
    WatchedTorch,
    library,
    plant,
    run_on_device,
    set_option,
    synchronize,
    take_faults,
)
from models import mlp, wavy_loss
from pydist import DataParallel
from ranks import Outcome, fresh_ranks
from reference import draw

WIDTH = 64
BUGS_TIMEOUT_S = 8.0  # that some of them make a rank wait for


@dataclasses.dataclass(frozen=True)
class Planted:
    """A bug, at the nth occasion in a step, and a part of what is said of it."""

    name: str
    bug: str
    nth: int
    says: str
    algorithm: str = "nccl"
    options: tuple[tuple[str, float], ...] = ()


def step(model: Any, rank: int, number: int) -> None:
    model.zero_grad()
    wavy_loss(model(draw(rank, number, 4, WIDTH))).backward()


def find(rank: int, size: int, planted: Planted) -> str:
    """Two steps, and two with the bug in rank 0's first of them; what these raised."""
    torch.manual_seed(1)
    model = DataParallel(mlp(WIDTH, 3), algorithm=planted.algorithm, bucket_cap_mb=0.01)
    for number in range(2):
        step(model, rank, number)
    synchronize()
    dist.barrier()
    if planted.bug:
        set_option("stuck_after_s", BUGS_TIMEOUT_S + 2)
    for name, value in planted.options:
        set_option(name, value)
    if rank == 0 and planted.bug:
        plant(planted.bug, planted.nth)
    raised = ""
    try:
        with WatchedTorch():
            for number in range(2, 4):
                step(model, rank, number)
        synchronize()
    except RuntimeError as error:
        raised = str(error)  # of the fault, or of the peer's
    take_faults()  # they are printed
    return raised


ORDER = "neither comes before the other"
BUGS = [
    Planted("pack without the wait of NCCL's stream", "no_wait", 0, ORDER),
    Planted("a large gradient without that wait", "no_wait", 1, ORDER),
    Planted("no wait at the end of backward", "no_wait", 2, ORDER),
    Planted("an event that is not recorded", "no_record", 3, ORDER),
    Planted("a group that stays open", "no_group_end", 0, "group of NCCL's open", "slices"),
    Planted("a count", "wrong_count", 0, "ranks disagree"),
    Planted("a type", "wrong_dtype", 0, "ranks disagree"),
    Planted("an order", "wrong_order", 0, "ranks disagree"),
    Planted("a buffer freed early", "freed_early", 0, "is not known to be done with"),
    Planted("a buffer reused early", "reused_early", 0, ORDER),
    Planted("a stream", "wrong_stream", 1, ORDER),
    Planted("a communicator that has ended", "used_after_abort", 0, "has been aborted"),
]


def run(planted: Planted) -> list[Outcome]:
    limits = {"group_timeout_s": BUGS_TIMEOUT_S} if planted.bug else {}
    environment = {LIBRARY: library()}
    return fresh_ranks(2, run_on_device, find, (planted,), 0, env=environment, **limits)


def faults(outcomes: list[Outcome]) -> str:
    """What the ranks have printed of them; a fault may end a rank where nothing may throw."""
    return "\n".join(
        line for each in outcomes for line in each.stderr.splitlines() if "FAULT" in line
    )


@pytest.mark.parametrize("algorithm", ["nccl", "slices"])
def test_without_a_bug_nothing_is_found(algorithm: str) -> None:
    outcomes = run(Planted("none", "", 0, "", algorithm))
    assert [each.value for each in outcomes] == ["", ""], outcomes
    assert faults(outcomes) == ""


SLOW = ("a count", "a buffer freed early")  # end by a watchdog, as "a type" does


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(bug, id=bug.name, marks=[pytest.mark.slow] if bug.name in SLOW else [])
        for bug in BUGS
    ],
)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    assert planted.says in faults(run(planted))
