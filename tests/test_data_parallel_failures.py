"""Owns the tests of ranks that raise, die, stop early or are interrupted in the middle of training.

Whatever happens to one rank, every other one raises soon, says which rank and why, and neither
hangs nor trains on with half of the gradients.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from conftest import Transport
from models import mlp, wavy_loss
from pydist import DataParallel
from ranks import Outcome, fresh_ranks, start_ranks
from reference import draw, expect_error
from transport_differences import NAMES_DEAD_RANK

DETECTION_S = 5.0
AT_ONCE_S = 1.0


class Fragile(nn.Module):
    """Does something to itself in the middle of backward, when the last layers are ready."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.first = mlp(width, 2)
        self.last = mlp(width, 2)
        self.accident: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.register_hook(lambda _: self.accident())
        return self.last(hidden)  # type: ignore[no-any-return]


def train(model: nn.Module, rank: int, num_steps: int) -> None:
    for step in range(num_steps):
        model.zero_grad()
        wavy_loss(model(draw(rank, step, 4, 192))).backward()


def raise_error() -> None:
    raise ArithmeticError("a loss scale of minus one")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def suffer(rank: int, world_size: int, victim: int, accident: str) -> tuple[str, str, float]:
    """Trains two steps, then has an accident on one rank; returns what the rank was told, what it
    was told the next time, and how long that took. An accident of "raise" leaves the rank alive."""
    module = Fragile()
    model = DataParallel(module)
    train(model, rank, 2)
    # A rank that failed in the next round would otherwise take slow ones with it in this one.
    dist.barrier()
    if rank == victim:
        module.accident = {"raise": raise_error, "kill": kill_self}.get(accident, lambda: None)
        if accident == "kill between":
            kill_self()
        if accident == "exit":
            sys.exit(0)
        if accident == "stop":
            return "", "", 0.0
        own = expect_error(ArithmeticError, lambda: train(model, rank, 1))
        assert "minus one" in str(own)
        module.accident = lambda: None
        told = ""
    else:
        told = str(expect_error(expected_error(accident), lambda: train(model, rank, 1)))
    started = time.monotonic()
    again = expect_error(RuntimeError, lambda: train(model, rank, 1))
    assert isinstance(again, (pydist.PeerError, pydist.TimeoutError))
    return told, str(again), time.monotonic() - started


def expected_error(accident: str) -> type[Exception]:
    return pydist.TimeoutError if accident == "stop" else pydist.PeerError


def check_survivors(outcomes: list[Outcome], victim: int, names_rank: bool) -> None:
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.ok, outcome.traceback
        assert outcome.exit_code == 0
        told, again, seconds = outcome.value
        if names_rank:
            assert f"rank {victim}" in told
            assert f"rank {victim}" in again
        assert seconds < AT_ONCE_S
        assert outcome.seconds < DETECTION_S + 5  # the two steps before it included


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 1)])
def test_a_rank_raises_in_backward(transport: Transport, world_size: int, victim: int) -> None:
    """One rank's backward raises, and the process lives on: the others raise PeerError naming it,
    and so does every later backward, on that rank too, at once."""
    outcomes = fresh_ranks(world_size, suffer, victim, "raise", env=transport.env)
    check_survivors(outcomes, victim, names_rank=True)
    assert outcomes[victim].ok, outcomes[victim].traceback
    ended = [outcome.ended_at for outcome in outcomes]
    assert max(ended) - ended[victim] < DETECTION_S


@pytest.mark.parametrize("accident", ["kill", "kill between"])
@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0)])
def test_a_rank_is_killed(
    transport: Transport, world_size: int, victim: int, accident: str
) -> None:
    """SIGKILL in the middle of a backward or between two: the survivors raise PeerError soon, and
    exit cleanly."""
    outcomes = fresh_ranks(world_size, suffer, victim, accident, env=transport.env)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    check_survivors(outcomes, victim, NAMES_DEAD_RANK[transport.name])


def test_c80_a_rank_exits_early(transport: Transport) -> None:
    """A loop bounded by time: rank 1 does fewer steps and ends its process in good order, while
    rank 0 waits for it in backward."""
    outcomes = fresh_ranks(2, suffer, 1, "exit", env=transport.env)
    assert outcomes[1].exit_code == 0
    check_survivors(outcomes, 1, NAMES_DEAD_RANK[transport.name])


def test_a_rank_does_fewer_steps(transport: Transport) -> None:
    """Rank 1 does fewer steps and lives on: rank 0 raises TimeoutError after the group's timeout,
    naming rank 1, instead of hanging."""
    outcomes = fresh_ranks(2, suffer, 1, "stop", env=transport.env, group_timeout_s=3)
    assert outcomes[0].ok, outcomes[0].traceback
    told, _, _ = outcomes[0].value
    if NAMES_DEAD_RANK[transport.name]:
        assert "rank 1" in told
    assert 2.5 < outcomes[0].seconds < 10


def die_before_backward(rank: int, world_size: int) -> None:
    model = DataParallel(mlp(192, 2))
    if rank == 1:
        os._exit(86)
    train(model, rank, 1)


def test_c74_death_before_the_first_backward(transport: Transport) -> None:
    """A peer died before the first collective and the survivors ignored the timeout: rank 0 raises
    within it, and nothing is left in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    outcomes = fresh_ranks(2, die_before_backward, env=transport.env, group_timeout_s=3)
    assert outcomes[1].exit_code == 86
    assert outcomes[0].error == "pydist.PeerError"
    assert outcomes[0].seconds < 10
    if NAMES_DEAD_RANK[transport.name]:
        assert "rank 1" in outcomes[0].message
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "torch" not in name}


def wait_for_signal(rank: int, world_size: int, folder: str) -> str:
    """Rank 0 waits in backward; rank 1 comes once rank 0 is interrupted, and is told."""
    model = DataParallel(mlp(192, 2))
    train(model, rank, 1)
    Path(folder, f"{rank}").touch()
    if rank == 0:
        train(model, rank, 1)
        return "finished"
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    # The interrupted round may still end well for this rank, but no later one does.
    return str(expect_error(pydist.PeerError, lambda: train(model, rank, 2)))


def test_ctrl_c_while_waiting(transport: Transport, tmp_path: Path) -> None:
    """Ctrl-C on a rank that waits in backward raises KeyboardInterrupt within about a second; its
    peer, which comes later, is told that the round has failed."""
    ranks = start_ranks(2, wait_for_signal, str(tmp_path), env=transport.env)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.7)  # long enough to be past spinning, in the sleeping wait
    ranks.signal(0, signal.SIGINT)
    sent = time.monotonic()
    time.sleep(1.5)
    (tmp_path / "go").touch()
    outcomes = ranks.join(30)
    assert outcomes[0].error == "KeyboardInterrupt", outcomes[0].traceback
    assert outcomes[0].ended_at - sent < 2
    assert outcomes[1].ok, outcomes[1].traceback
    assert "rank 0" in outcomes[1].value


def recover(rank: int, world_size: int) -> None:
    module = Fragile()
    module.accident = raise_error if rank == 1 else lambda: None
    model = DataParallel(module)
    kind: Any = ArithmeticError if rank == 1 else pydist.PeerError
    expect_error(kind, lambda: train(model, rank, 1))
    module.accident = lambda: None
    train(DataParallel(module, process_group=dist.new_group()), rank, 2)


def test_c78_a_new_wrapper_after_a_failure(transport: Transport) -> None:
    """The failed wrapper is over, but ranks that agree to go on can wrap the module again, on a
    new group."""
    outcomes = fresh_ranks(2, recover, env=transport.env)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].traceback


def raise_in_forward(rank: int, world_size: int) -> None:
    module = mlp(192, 2)
    model = DataParallel(module)
    for step in range(3):
        if step == 1:
            # The same on all ranks: no round is opened, so nobody is left waiting.
            expect_error(RuntimeError, lambda: model(torch.zeros(4, 5)))
        train(model, rank, 1)


def test_an_exception_in_forward(transport: Transport) -> None:
    """A batch of the wrong shape raises in every rank's forward; training goes on after it."""
    transport.pool(2).run(raise_in_forward)
