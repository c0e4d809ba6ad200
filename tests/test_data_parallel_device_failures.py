"""Owns the tests of what DataParallel on an emulated device says of a rank that is gone or stands
still.
"""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import emulated
import pydist
from models import mlp, wavy_loss
from pydist import DataParallel
from ranks import Outcome, start_ranks
from reference import draw, expect_error

WIDTH = 32


def backward(model: DataParallel, rank: int, step: int) -> None:
    model.zero_grad()
    wavy_loss(model(draw(rank, step, 4, WIDTH))).backward()


def trained_model(rank: int) -> DataParallel:
    """After two steps; with several buckets."""
    torch.manual_seed(1)
    model = DataParallel(mlp(WIDTH, 3), bucket_cap_mb=0.005)
    for step in range(2):
        backward(model, rank, step)
    return model


def go_on(model: DataParallel, rank: int) -> None:
    for step in range(2, 1000):
        backward(model, rank, step)
        time.sleep(0.01)  # ranks run ahead of the device


def start_on_device(size: int, function: Any, **env: str) -> list[Outcome]:
    everything = {emulated.LIBRARY: emulated.library(), **env}
    return start_ranks(size, emulated.run_on_device, function, (), 0, env=everything).join()


def killed_in_backward(rank: int, size: int) -> str:
    model = trained_model(rank)
    if rank == 1:
        last = next(model.module.parameters())
        last.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return str(expect_error(pydist.PeerError, lambda: go_on(model, rank)))


def test_a_rank_that_is_killed_is_named_on_the_others() -> None:
    """In the middle of a backward, when a part of its gradients is under way."""
    outcomes = start_on_device(3, killed_in_backward)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].traceback
        assert "rank 1 (pid " in outcomes[rank].value
        assert ") has ended while rank " in outcomes[rank].value
        assert "DataParallel(" in outcomes[rank].value


def beside_one_that_stops(rank: int, size: int) -> str:
    model = trained_model(rank)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        return str(expect_error(pydist.TimeoutError, lambda: go_on(model, rank)))
    finally:
        os.kill(pids[1], signal.SIGCONT)


def test_a_rank_that_stops_is_named_on_the_others() -> None:
    outcomes = start_on_device(2, beside_one_that_stops, PYDIST_TIMEOUT_S="10")
    assert outcomes[0].ok, outcomes[0].traceback
    assert "waited 10 s for " in outcomes[0].value
    assert "rank 1 (pid " in outcomes[0].value
    assert "gives no sign of life" in outcomes[0].value


def beside_one_that_sleeps(rank: int, size: int) -> str:
    """Its own thread makes no call any more, but its watchdog says how far it has come."""
    model = trained_model(rank)
    dist.barrier()
    if rank == 0:
        return str(expect_error(pydist.TimeoutError, lambda: go_on(model, rank)))
    while True:
        time.sleep(0.1)
        try:
            model._communicator.check()
        except (pydist.PeerError, pydist.TimeoutError) as error:
            return str(error)


def test_a_rank_that_is_late_is_named_with_its_last_call() -> None:
    outcomes = start_on_device(2, beside_one_that_sleeps, PYDIST_TIMEOUT_S="10")
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
        assert "waited 10 s for " in outcome.value
        assert "rank 1 (pid " in outcome.value
        assert "has not made: its last was call " in outcome.value
