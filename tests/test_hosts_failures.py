"""Owns what collectives over several hosts do when a rank or a host dies, comes late or is
interrupted: as in test_hosts.py, on one machine."""

import os
import signal
import threading
import time

import pytest
import torch

import pydist
import pydist._hosts
from ranks import HOSTS, fresh_ranks, start_ranks
from reference import expect_error

LARGE = 8 << 18
SOON_S = 8.0  # a connection breaks at once, signs of life are waited for


def reduce_until_lost(rank: int, world_size: int, victims: list[int]) -> tuple[float, str]:
    """The survivors' next calls raise the same."""
    tensor = torch.ones(LARGE)
    pydist.all_reduce(tensor)
    if rank in victims:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()

    def reduce_for_ever() -> None:
        nonlocal began
        while True:
            began = time.monotonic()
            pydist.all_reduce(tensor, torch.distributed.ReduceOp.MAX)

    error = expect_error(pydist.PeerError, reduce_for_ever)
    waited_s = time.monotonic() - began
    again = expect_error(pydist.PeerError, pydist.barrier)
    assert all(f"rank {victim} (pid" in str(again) for victim in victims), again
    return waited_s, str(error)


@pytest.mark.parametrize("split", ["aabb", "abab", "aab"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_everywhere(split: str, victim: int) -> None:
    running = start_ranks(len(split), reduce_until_lost, [victim], env={HOSTS: split})
    pid = running.pids[victim]
    outcomes = running.join()
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.ok, outcome.traceback
        waited_s, text = outcome.value
        assert waited_s < SOON_S
        assert f"rank {victim} (pid {pid}, host {split[victim]})" in text


def test_a_killed_host_is_named() -> None:
    outcomes = fresh_ranks(4, reduce_until_lost, [2, 3], env={HOSTS: "aabb"})
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.traceback
        waited_s, text = outcome.value
        assert waited_s < SOON_S
        # Either rank may live a moment longer, and say of the other that it died.
        assert "host b" in text


def come_late(rank: int, world_size: int, late: int) -> str:
    pydist.barrier()
    if rank == late:
        time.sleep(5)
        return ""
    errors = (pydist.TimeoutError, pydist.PeerError)  # one rank's limit is over first
    return str(expect_error(errors, lambda: pydist.all_reduce(torch.ones(3))))


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_timeout_names_the_late_rank(late: int) -> None:
    env = {HOSTS: "aabb", "PYDIST_TIMEOUT_S": "1"}
    outcomes = fresh_ranks(4, come_late, late, env=env)
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, outcome.traceback
        assert rank == late or f"waited 1 s for rank {late} (pid" in outcome.value


def never_come(rank: int, world_size: int) -> str:
    if rank == 2:
        time.sleep(3)
        return ""
    return str(expect_error(pydist.TimeoutError, pydist.barrier))


def test_a_rank_that_makes_no_group_is_named() -> None:
    env = {HOSTS: "abc", "PYDIST_TIMEOUT_S": "1"}
    outcomes = fresh_ranks(3, never_come, env=env)
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.traceback
        assert "rank 2 to join the default group" in outcome.value


def fail_to_connect(rank: int, world_size: int) -> str:
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    return str(expect_error((pydist.PeerError, pydist.TimeoutError), pydist.barrier))


def test_a_rank_that_cannot_connect_is_named() -> None:
    env = {HOSTS: "ab", "PYDIST_TIMEOUT_S": "3"}
    outcomes = fresh_ranks(2, fail_to_connect, env=env)
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]
    assert "rank 1 (pid" in outcomes[0].value
    assert "nowhere0" in outcomes[1].value


def die_before_it_connects(rank: int, world_size: int) -> str:
    if rank == 1:
        pydist._hosts.own_gloo_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return str(expect_error((pydist.PeerError, pydist.TimeoutError), pydist.barrier))


def test_a_rank_that_dies_before_it_connects_is_named() -> None:
    env = {HOSTS: "abb", "PYDIST_TIMEOUT_S": "2"}
    outcomes = fresh_ranks(3, die_before_it_connects, env=env)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].traceback
        assert "rank 1 (pid" in outcomes[rank].value


def wait_for_message(rank: int, world_size: int) -> str:
    pydist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    source = 1 if rank == 0 else None
    return str(expect_error(pydist.PeerError, lambda: pydist.recv(torch.ones(1), source)))


def test_a_message_of_a_killed_rank_is_not_waited_for() -> None:
    outcomes = fresh_ranks(3, wait_for_message, env={HOSTS: "abc"})
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].traceback
    assert "rank 1 (pid" in outcomes[0].value


def wait_for_interrupt(rank: int, world_size: int) -> float:
    pydist.barrier()
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pydist.all_reduce(torch.ones(3))
        assert time.monotonic() - began < 2
    else:
        error = expect_error(pydist.PeerError, lambda: pydist.recv(torch.ones(3), 0))
        assert "rank 0 (pid" in str(error)
        assert "interrupted" in str(error)
    return time.time()


def test_an_interrupt_ends_the_group() -> None:
    outcomes = start_ranks(3, wait_for_interrupt, env={HOSTS: "aab"}).join()
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]
    assert max(outcome.value for outcome in outcomes) - outcomes[0].value < 4


def leave_others_waiting(rank: int, world_size: int) -> None:
    pydist.barrier()
    if rank == 0:
        pydist.send(torch.ones(1 << 20), 1)


def test_ranks_leave_while_a_message_is_on_its_way() -> None:
    """Nobody receives it, and nobody hangs for that."""
    outcomes = fresh_ranks(2, leave_others_waiting, env={HOSTS: "ab"})
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]
