"""What the NCCL communicator says when something goes wrong: who, in which call, and what to do."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import emulated
import pydist
from emulated import emulated_pool
from nccl_groups import SUM, fresh_name, in_order, make, run
from ranks import Outcome, start_ranks


def message(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def make_together(name: str, rank: int, size: int, **options: Any) -> Any:
    """The ranks come at the same time, so that a short timeout is long enough for that."""
    dist.barrier()
    return make(name, rank, size, **options)


def first_call(comm: Any) -> torch.Tensor:
    tensor = torch.ones(16)
    with in_order(comm):
        comm.all_reduce(tensor, SUM, "the first")
    comm.wait(comm.mark())
    return tensor


def reduce_and_wait(comm: Any, tensor: torch.Tensor, what: str) -> None:
    comm.all_reduce(tensor, SUM, what)
    comm.wait(comm.mark())


def meet_without_one(rank: int, size: int, name: str) -> str:
    dist.barrier()
    if rank == 1:
        return ""
    return message(pydist.TimeoutError, lambda: make(name, rank, size, timeout_s=3))


def test_set_up_names_the_rank_that_does_not_come() -> None:
    texts = run(emulated_pool(3), meet_without_one)
    for rank in (0, 2):
        assert " waited 3 s for rank 1 to set up NCCL. start anew" in texts[rank]


def meet_where_nobody_is_found(rank: int, size: int, name: str) -> str:
    emulated.set_option("init_never_finishes", 1)
    return message(pydist.TimeoutError, lambda: make_together(name, rank, size, timeout_s=3))


def test_set_up_ends_where_nccl_hangs() -> None:
    for text in run(emulated_pool(2), meet_where_nobody_is_found):
        assert "for NCCL to connect the ranks, which all have come" in text


def call_without_one(rank: int, size: int, name: str) -> str:
    comm = make_together(name, rank, size, timeout_s=3, ranks=[4, 5, 6])
    tensor = torch.ones(16)
    for index in range(4 if rank == 2 else 5):
        comm.all_reduce(tensor, SUM, f"bucket {index}")
    if rank < 2:
        return message(pydist.TimeoutError, lambda: comm.wait(comm.mark()))
    while True:  # its main thread does not look at anything
        time.sleep(0.1)
        try:
            comm.check()
        except pydist.PeerError as error:
            return str(error)


def test_a_late_rank_is_named_with_the_call_that_it_has_not_made() -> None:
    for text in run(emulated_pool(3), call_without_one):
        assert "waited 3 s for all-reducing bucket 4 (call 5)" in text
        assert ", which rank 2 (global rank 6, pid " in text
        assert "has not made: its last was call 4, all-reducing bucket 3, " in text
        assert text.endswith(" s ago. start anew")


def call_beside_a_stopped_one(rank: int, size: int, name: str) -> str:
    comm = make_together(name, rank, size, timeout_s=3)
    tensor = first_call(comm)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        return message(pydist.TimeoutError, lambda: reduce_and_wait(comm, tensor, "more"))
    finally:
        os.kill(pids[1], signal.SIGCONT)


def test_a_stopped_process_gives_no_sign_of_life() -> None:
    text = run(emulated_pool(2), call_beside_a_stopped_one)[0]
    assert "waited 3 s for all-reducing more (call 2), rank 1 (pid " in text
    assert "gives no sign of life" in text


def call_beside_a_dead_one(rank: int, size: int, name: str) -> str:
    comm = make_together(name, rank, size, timeout_s=30)
    tensor = first_call(comm)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return message(pydist.PeerError, lambda: reduce_and_wait(comm, tensor, "more"))


def start_on_device(size: int, function: Any) -> Any:
    env = {emulated.LIBRARY: emulated.library()}
    args = (fresh_name(),)
    return start_ranks(size, emulated.run_on_device, function, args, 0, env=env)


def test_a_killed_rank_is_named_at_once() -> None:
    outcomes: list[Outcome] = start_on_device(3, call_beside_a_dead_one).join()
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].traceback
        assert "rank 1 (pid " in outcomes[rank].value
        assert ") has ended while rank " in outcomes[rank].value
        assert "waited for all-reducing more (call 2)" in outcomes[rank].value


def fail_on_one(rank: int, size: int, name: str) -> str:
    comm = make(name, rank, size)
    tensor = first_call(comm)
    if rank == 1:
        comm.fail("rank 1 raised ValueError: three")
        return message(pydist.PeerError, lambda: comm.all_reduce(tensor, SUM, "more"))
    text = message(pydist.PeerError, lambda: reduce_and_wait(comm, tensor, "more"))
    for call in (comm.check, comm.mark, comm.after_current_stream, comm.before_current_stream):
        assert message(pydist.PeerError, call) == text
    return text


def test_a_failure_is_told_to_all_ranks() -> None:
    for text in run(emulated_pool(3), fail_on_one):
        assert text == "the group has failed: rank 1 raised ValueError: three. start anew"


def meet_one_that_fails(rank: int, size: int, name: str) -> str:
    if rank == 1:
        # What a rank does that cannot even make its communicator.
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        store.set("failure", "Prank 1 has no memory")
        store.set("alarm", "failure")
        return "rank 1 has no memory"
    return message(pydist.PeerError, lambda: make(name, rank, size))


def test_a_failure_ends_the_set_up_of_the_others() -> None:
    for text in run(emulated_pool(2), meet_one_that_fails):
        assert "rank 1 has no memory" in text


def call_with_an_error(rank: int, size: int, name: str) -> str:
    comm = make(name, rank, size)
    tensor = first_call(comm)
    if rank == 1:
        emulated.set_option("async_error_after", 0)

    def calls() -> None:
        for index in range(5):
            reduce_and_wait(comm, tensor, f"bucket {index}")

    return message(pydist.PeerError, calls)


def test_an_error_of_nccls_is_raised_everywhere_with_its_rank() -> None:
    texts = run(emulated_pool(2), call_with_an_error)
    for text in texts:
        assert "network error" in text
        assert "all-reducing bucket 0" in text


def call_slowly(rank: int, size: int, name: str) -> None:
    comm = make_together(name, rank, size, timeout_s=4)
    if rank == 1:
        emulated.set_option("nccl_delay_s", 1.3)
    tensor = torch.ones(16)
    for _ in range(4):  # more than the timeout in all
        comm.all_reduce(tensor, SUM, "x")
    comm.wait(comm.mark())
    assert tensor.tolist() == [float(size**4)] * 16


def test_a_slow_peer_is_no_failure() -> None:
    run(emulated_pool(2), call_slowly)


def interrupt_soon() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def interrupt_set_up(rank: int, size: int, name: str) -> str:
    if rank == 1:
        time.sleep(0.1)
        return ""
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        make(name, rank, size)
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return store.get("failure").decode()


def test_set_up_can_be_interrupted() -> None:
    assert "was interrupted while it waited" in run(emulated_pool(2), interrupt_set_up)[0]


def interrupt_a_wait(rank: int, size: int, name: str) -> str:
    comm = make(name, rank, size)
    tensor = first_call(comm)
    if rank == 0:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            reduce_and_wait(comm, tensor, "more")
        return ""
    while True:
        time.sleep(0.1)
        try:
            comm.check()
        except pydist.PeerError as error:
            return str(error)


def test_a_wait_can_be_interrupted_and_peers_learn_of_it() -> None:
    text = run(emulated_pool(2), interrupt_a_wait)[1]
    assert "rank 0 (pid " in text
    assert "was interrupted while it waited" in text


def end_while_peers_hang(rank: int, size: int, name: str) -> None:
    comm = make_together(name, rank, size, timeout_s=3)
    tensor = first_call(comm)
    if rank == 0:
        comm.all_reduce(tensor, SUM, "more")
    del comm  # waits for the call, until the watchdog aborts it: else for longer than the pool does


def test_an_end_waits_no_longer_than_the_timeout() -> None:
    run(emulated_pool(2), end_while_peers_hang)
