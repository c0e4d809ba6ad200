"""Owns what ends messages that are not waited for: deaths, signals, groups that go."""

import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import pydist
from conftest import Transport
from ranks import resource_snapshot, start_ranks

SHARED = Transport("shared_memory")


def wait_for_the_dead(rank: int, world_size: int, waits: bool) -> tuple[str, float]:
    pydist.barrier()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        work = pydist.irecv(torch.ones(12), 1, tag=3)
    else:
        work = pydist.isend(torch.ones(3 << 20), 1, tag=4)
    began = time.monotonic()
    while not waits and not work.is_completed():  # the engine's own thread notices, too
        assert time.monotonic() - began < 10
        time.sleep(0.01)
    with pytest.raises(pydist.PeerError) as raised:
        work.wait()
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("waits", [True, False])
def test_death_of_a_peer(waits: bool) -> None:
    running = start_ranks(3, wait_for_the_dead, waits, env=SHARED.env)
    pid = running.pids[1]
    outcomes = running.join()
    for survivor, call in ((0, "recv of 12 float32 with tag 3"), (2, "send of 3145728 float32")):
        assert outcomes[survivor].ok, outcomes[survivor].traceback
        text, waited_s = outcomes[survivor].value
        assert f"rank 1 (pid {pid})" in text
        assert waited_s < 2.5
        # The survivors tell each other, so that one's text may be the other's.
        assert call in text or "float32 with tag" in text
    assert "tag 3" in outcomes[0].value[0] or "tag 4" in outcomes[0].value[0]


def time_out(rank: int, world_size: int) -> str:
    pydist.barrier()
    if rank == 1:
        time.sleep(3)
        return ""
    work = pydist.irecv(torch.ones(3), 1, tag=5)
    began = time.monotonic()
    with pytest.raises(pydist.TimeoutError) as raised:
        work.wait()
    assert 0.5 < time.monotonic() - began < 2.5
    return str(raised.value)


def test_timeout_names_the_message() -> None:
    outcomes = start_ranks(2, time_out, env={**SHARED.env, "PYDIST_TIMEOUT_S": "1"}).join()
    assert outcomes[0].ok, outcomes[0].traceback
    assert "recv of 3 float32 with tag 5 from rank 1" in outcomes[0].value


def interrupt_wait(rank: int, world_size: int) -> None:
    pydist.barrier()
    if rank == 1:
        with pytest.raises(pydist.PeerError, match=r"rank 0.*interrupted"):
            pydist.irecv(torch.ones(3), 0).wait()
        return
    work = pydist.irecv(torch.ones(3), 1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert time.monotonic() - began < 1.5


def test_interrupt_in_wait() -> None:
    outcomes = start_ranks(2, interrupt_wait, env=SHARED.env).join()
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]


def handle_a_signal_in_wait(rank: int, world_size: int) -> list[int]:
    """A handler that raises nothing runs, and the wait goes on."""
    if rank == 1:
        pydist.barrier()
        time.sleep(0.8)
        pydist.isend(torch.ones(3), 0).wait()
        return []
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    pydist.barrier()
    work = pydist.irecv(found := torch.zeros(3), 1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    work.wait()
    signal.signal(signal.SIGUSR1, before)
    assert found.tolist() == [1.0] * 3
    return handled


def test_a_signal_in_wait() -> None:
    assert SHARED.pool(2).run(handle_a_signal_in_wait)[0] == [signal.SIGUSR1]


def drop_groups(rank: int, world_size: int, rounds: int) -> None:
    """Groups go while receives are posted, and while requests of theirs are kept."""
    for index in range(rounds):
        group = dist.new_group(list(range(world_size)))
        work = pydist.irecv(torch.empty(1000), 1 - rank, group, tag=1)
        pydist.irecv(torch.empty(1000), 1 - rank, group, tag=2)
        if index % 2 == 0:
            del work
        dist.destroy_process_group(group)
        del group
        gc.collect()
        if index % 2 == 1:
            del work


def test_groups_go_with_receives_pending() -> None:
    pool = SHARED.pool(2)
    pool.run(drop_groups, 4)
    before = pool.run(resource_snapshot)
    pool.run(drop_groups, 30)
    after = pool.run(resource_snapshot)
    for old, new in zip(before, after, strict=True):
        for what in ("threads", "descriptors", "children"):
            assert new[what] <= old[what], (what, before, after)
        assert new["resident_nbytes"] <= old["resident_nbytes"] + (20 << 20), (before, after)
