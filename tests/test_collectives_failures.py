"""Owns what collectives do when ranks disagree, come late, are interrupted or die."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import pydist
from conftest import Transport
from ranks import start_ranks

SHARED = Transport("shared_memory")


def check_still_usable(world_size: int) -> None:
    tensor = torch.ones(5)
    pydist.all_reduce(tensor)
    assert tensor.tolist() == [float(world_size)] * 5


def disagree(rank: int, world_size: int) -> None:
    odd_one = rank == 1
    untouched = torch.arange(12.0)
    tensor = untouched.clone()
    calls = [
        lambda: pydist.broadcast(tensor[:10], 0) if odd_one else pydist.all_reduce(tensor),
        lambda: pydist.all_reduce(tensor[: 10 if odd_one else 12]),
        lambda: pydist.all_reduce(tensor, dist.ReduceOp.MAX if odd_one else dist.ReduceOp.MIN),
        lambda: pydist.all_reduce(tensor.double() if odd_one else tensor),
        lambda: pydist.broadcast(tensor, 1 if odd_one else 0),
        lambda: pydist.barrier() if odd_one else pydist.all_reduce(tensor),
        lambda: pydist.all_reduce(torch.ones(100_000 + rank)),
        lambda: pydist.all_gather_into_tensor(torch.empty(world_size * (rank + 1)),
                                              torch.empty(rank + 1)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(pydist.MismatchError) as raised:
            call()
        assert "rank 0" in str(raised.value)
        assert "rank 1" in str(raised.value)
        assert torch.equal(tensor, untouched)
        check_still_usable(world_size)
    with pytest.raises(pydist.MismatchError, match=r"10 float32") as raised:
        calls[0]()
    assert "all_reduce(sum) of 12 float32" in str(raised.value)
    assert "broadcast(from rank 0)" in str(raised.value)
    # Splits of all_to_all.
    counts = [1] * world_size
    wrong = [2, 0, *counts[2:]] if odd_one else counts
    with pytest.raises(pydist.MismatchError, match=r"rank 1.* sends 2 elements to rank 0"):
        pydist.all_to_all_single(torch.empty(world_size), torch.empty(world_size), counts, wrong)
    check_still_usable(world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_disagreement_raises_on_all_ranks(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(disagree)


def call_wrongly_on_rank_0(rank: int, world_size: int) -> None:
    ints, floats = torch.ones(4, dtype=torch.int64), torch.ones(4)
    wrong = [
        (lambda: pydist.all_reduce(ints, dist.ReduceOp.AVG), lambda: pydist.all_reduce(ints)),
        (lambda: pydist.all_reduce(torch.ones(4, dtype=torch.complex64), dist.ReduceOp.MAX),
         lambda: pydist.all_reduce(torch.ones(4, dtype=torch.complex64))),
        (lambda: pydist.all_reduce(floats, dist.ReduceOp.BAND), lambda: pydist.all_reduce(floats)),
        (lambda: pydist.all_gather_into_tensor(torch.empty(4), floats),
         lambda: pydist.all_gather_into_tensor(torch.empty(4 * world_size), floats)),
        (lambda: pydist.reduce_scatter_tensor(floats, floats),
         lambda: pydist.reduce_scatter_tensor(floats, torch.ones(4 * world_size))),
        (lambda: pydist.all_gather([floats], floats), lambda: pydist.barrier()),
        (lambda: pydist.all_to_all_single(torch.empty(4), torch.empty(4), [4, 1]),
         lambda: pydist.all_to_all_single(torch.empty(4), torch.empty(4))),
    ]  # fmt: skip
    for mine, theirs in wrong:
        error = pydist.UsageError if rank == 0 else pydist.MismatchError
        with pytest.raises(error) as raised:
            (mine if rank == 0 else theirs)()
        assert rank == 0 or "invalid call" in str(raised.value)
        check_still_usable(world_size)


def test_wrong_call_raises_on_the_peers_too(transport: Transport) -> None:
    transport.pool(2).run(call_wrongly_on_rank_0)


def refuse_message(rank: int, world_size: int) -> None:
    tensor = torch.ones(2 + rank)
    refused = False
    if rank == 1:
        with pytest.raises(pydist.MismatchError, match=r"3 float32"):
            pydist.recv(tensor, 0)
    else:
        try:
            pydist.send(tensor, 1)
        except pydist.MismatchError as error:
            refused = "refused" in str(error)
    pydist.barrier()
    if rank == 0 and not refused:  # the message was gone before it was refused: the next call
        with pytest.raises(pydist.MismatchError, match=r"refused"):
            pydist.send(tensor, 1)
    pydist.barrier()
    if rank == 0:
        pydist.send(tensor, 1)
    else:
        pydist.recv(torch.zeros(2), 0)
    check_still_usable(world_size)


def test_message_of_another_size_raises_on_both(transport: Transport) -> None:
    transport.pool(2).run(refuse_message)


def come_late(rank: int, world_size: int) -> str:
    pydist.barrier()
    if rank == 1:
        time.sleep(3)
        return ""
    began = time.monotonic()
    with pytest.raises(pydist.TimeoutError) as raised:
        pydist.all_reduce(torch.ones(3))
    assert 0.5 < time.monotonic() - began < 2.5
    assert isinstance(raised.value, TimeoutError)
    return str(raised.value)


def test_timeout_names_the_missing_rank() -> None:
    outcomes = start_ranks(2, come_late, env={**SHARED.env, "PYDIST_TIMEOUT_S": "1"}).join()
    assert outcomes[0].ok, outcomes[0].traceback
    assert "rank 1" in outcomes[0].value
    assert "all_reduce(sum) of 3 float32" in outcomes[0].value


def wait_for_interrupt(rank: int, world_size: int) -> float:
    pydist.barrier()
    if rank == 0:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pydist.all_reduce(torch.ones(3))
        assert time.monotonic() - began < 1.5
        return time.time()
    with pytest.raises(pydist.PeerError, match=r"rank 0.*interrupted"):
        pydist.recv(torch.ones(3), 0)
    with pytest.raises(pydist.PeerError, match=r"rank 0.*interrupted"):  # later calls too
        pydist.all_reduce(torch.ones(3))
    return time.time()


def test_interrupt() -> None:
    outcomes = start_ranks(2, wait_for_interrupt, env=SHARED.env).join()
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]
    assert outcomes[1].value - outcomes[0].value < 1


def interrupt_request(rank: int, world_size: int) -> None:
    pydist.barrier()
    if rank == 1:
        with pytest.raises(pydist.PeerError, match=r"rank 0.*interrupted"):
            pydist.recv(torch.ones(3), 0)
        return
    work = pydist.all_reduce(torch.ones(3), async_op=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()


def test_interrupt_while_waiting_for_a_request() -> None:
    outcomes = start_ranks(2, interrupt_request, env=SHARED.env).join()
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]


def all_reduce_until_killed(rank: int, world_size: int, in_arena: bool) -> tuple[float, str]:
    size = 25 << 18
    tensor = pydist.symmetric_empty(size) if in_arena else torch.empty(size)
    tensor.fill_(1.0)
    pydist.all_reduce(tensor)
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            began = time.monotonic()
            pydist.all_reduce(tensor, dist.ReduceOp.MAX)
    except pydist.PeerError as error:
        with pytest.raises(pydist.PeerError, match=r"rank 1 \(pid"):
            pydist.barrier()
        return time.monotonic() - began, str(error)


@pytest.mark.parametrize("in_arena", [True, False])
def test_kill_in_a_large_all_reduce(in_arena: bool) -> None:
    running = start_ranks(3, all_reduce_until_killed, in_arena, env=SHARED.env)
    pid = running.pids[1]
    outcomes = running.join()
    for survivor in (0, 2):
        assert outcomes[survivor].ok, outcomes[survivor].traceback
        waited_s, text = outcomes[survivor].value
        assert waited_s < 1.0
        assert f"rank 1 (pid {pid})" in text
        assert "all_reduce(max)" in text


def wait_for_the_dead(rank: int, world_size: int) -> str:
    pydist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pydist.PeerError) as raised:
        pydist.recv(torch.ones(1), 1) if rank == 0 else pydist.send(torch.ones(1 << 20), 1)
    return str(raised.value)


def test_kill_ends_messages() -> None:
    outcomes = start_ranks(3, wait_for_the_dead, env=SHARED.env).join()
    assert "rank 1 (pid" in outcomes[0].value
    assert "recv of 1 float32" in outcomes[0].value
    assert "rank 1 (pid" in outcomes[2].value


def force_unknown_transport(rank: int, world_size: int) -> None:
    with pytest.raises(pydist.UsageError, match="shared_memory, process_group"):
        pydist.barrier()


def test_unknown_transport() -> None:
    outcomes = start_ranks(1, force_unknown_transport, env={"PYDIST_TRANSPORT": "pigeons"}).join()
    assert outcomes[0].ok, outcomes[0].traceback
