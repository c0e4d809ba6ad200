"""Owns what becomes of a step that fails on one rank: it is over on all, and the next one works."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from channels import (
    activation,
    gradient,
    make_channel,
    receive_tensor,
    send_tensor,
    step,
)
from conftest import Transport
from pydist._C import Channel
from pydist.errors import MismatchError, PeerError, TimeoutError
from ranks import Outcome, start_ranks


def one_step(channel: Channel, number: float) -> None:
    """Everybody sends to everybody, and back what it got."""
    peers = [peer for peer in range(channel.size) if peer != channel.rank]
    with step(channel):
        for peer in peers:
            send_tensor(channel, peer, activation(0), torch.full((7,), number + channel.rank))
        for peer in peers:
            received = receive_tensor(channel, peer, activation(0))
            assert received.tolist() == [number + peer] * 7
            send_tensor(channel, peer, gradient(0), received)
        for peer in peers:
            found = receive_tensor(channel, peer, gradient(0))
            assert found.tolist() == [number + channel.rank] * 7


class Broken(Exception):
    """What a test's rank raises in its step."""


@contextmanager
def raises_in_a_step(channel: Channel, kind: type, *parts: str) -> Iterator[None]:
    """Exactly what the parts say, and the next step works."""
    started = time.monotonic()
    with pytest.raises(kind) as raised:
        yield
    assert type(raised.value) is kind
    for part in parts:
        assert part in str(raised.value)
    assert time.monotonic() - started < 20
    one_step(channel, 50.0)


def fail_in_turn(rank: int, world_size: int) -> None:
    channel = make_channel()
    one_step(channel, 1.0)
    for failing in range(world_size):
        # At once; after it has sent something; after it has received something; at the end.
        for point in range(4):
            expected: type[Exception] = Broken if rank == failing else PeerError
            text = "broken" if rank == failing else f"rank {failing} (pid "
            with raises_in_a_step(channel, expected, text, "broken"), step(channel):
                for peer in range(world_size):
                    if rank == failing and point == 0:
                        raise Broken("broken")
                    if peer != rank:
                        send_tensor(channel, peer, activation(0), torch.ones(3))
                    if rank == failing and point == 1:
                        raise Broken("broken")
                for peer in range(world_size):
                    if peer != rank:
                        receive_tensor(channel, peer, activation(0))
                    if rank == failing and point == 2:
                        raise Broken("broken")
                if rank == failing:
                    raise Broken("broken")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_that_fails_is_over_on_all_ranks(transport: Transport, world_size: int) -> None:
    transport.pool(world_size).run(fail_in_turn)


def break_step(channel: Channel, delay_s: float) -> None:
    with step(channel):
        time.sleep(delay_s)
        raise Broken


def fail_on_all(rank: int, world_size: int) -> None:
    """Each rank raises its own error; none of them falls into the next step."""
    channel = make_channel()
    for turn in range(20):
        delay_s = random.Random(turn * 5 + rank).uniform(0, 2e-3) if turn % 2 == 0 else 0.0
        with pytest.raises((Broken, PeerError)):
            break_step(channel, delay_s)
        one_step(channel, float(turn))


def test_ranks_that_fail_together_fail_one_step(transport: Transport) -> None:
    transport.pool(3).run(fail_on_all)


def fail_ahead(rank: int, world_size: int) -> int:
    """Rank 0 fails in several steps before rank 1 has begun the first: one failure for each."""
    channel = make_channel()
    one_step(channel, 0.0)
    num_failures = 0
    for turn in range(5):
        try:
            with step(channel):
                if rank == 0:
                    raise Broken(f"number {turn}")
                if turn == 0:
                    time.sleep(0.3)
                receive_tensor(channel, 0, activation(0))
        except (Broken, PeerError):
            num_failures += 1
    one_step(channel, 1.0)
    return num_failures


def test_failures_are_seen_one_by_one(transport: Transport) -> None:
    """So the n-th step of one rank always meets the n-th of another."""
    assert transport.pool(2).run(fail_ahead) == [5, 5]


def fail_between_steps(rank: int, world_size: int) -> None:
    channel = make_channel()
    one_step(channel, 0.0)
    if rank == 0:
        channel.fail("rank 0 has no data")
        channel.fail("rank 0 has no data: said twice")
    else:
        with pytest.raises(PeerError, match=r"rank 0 has no data$|rank 0 has no data \("):
            one_step(channel, 1.0)
    one_step(channel, 2.0)


def test_a_failure_between_steps_is_one_of_the_next_step(transport: Transport) -> None:
    transport.pool(3).run(fail_between_steps)


def leave_a_step(rank: int, world_size: int) -> None:
    """A step that was neither ended nor failed is failed by the next."""
    channel = make_channel()
    if rank == 0:
        channel.begin_step("train")
    else:
        with pytest.raises(PeerError, match="without ending it"), step(channel):
            receive_tensor(channel, 0, activation(0))
    one_step(channel, 2.0)


def test_a_step_that_was_left_fails(transport: Transport) -> None:
    transport.pool(2).run(leave_a_step)


def take_another_step(rank: int, world_size: int) -> None:
    """One trains, the other evaluates: both are told, whoever waits, and whoever sends."""
    channel = make_channel()
    kinds = ["train", "evaluate", "forward"]
    for one, other in ((0, 1), (1, 2), (2, 0)):
        mine = kinds[one if rank == 0 else other]
        for sender in (0, 1, None):
            texts = [f"({kinds[one]})", f"({kinds[other]})", "rank 0 (pid", "rank 1 (pid"]
            with raises_in_a_step(channel, MismatchError, *texts), step(channel, mine):
                if sender in (rank, None):
                    send_tensor(channel, 1 - rank, activation(0), torch.ones(3))
                if sender != rank:
                    receive_tensor(channel, 1 - rank, activation(0))


def test_steps_of_different_kinds_are_a_mismatch(transport: Transport) -> None:
    transport.pool(2).run(take_another_step)


def send_unwanted(channel: Channel) -> None:
    with step(channel):
        if channel.rank == 0:
            send_tensor(channel, 1, activation(2, stage=3), torch.ones(1))
    assert channel.rank == 0
    with step(channel):
        pass


def miss_messages(rank: int, world_size: int) -> None:
    channel = make_channel()
    # Rank 1 wants what rank 0 never sends; it is told as soon as rank 0 has ended its step.
    texts = ["the gradient of stage 0, microbatch 4", "rank 0 (pid", "rank 1 (pid", "1B4", "step 1"]
    with raises_in_a_step(channel, MismatchError, *texts), step(channel):
        if rank == 1:
            receive_tensor(channel, 0, gradient(4), "to run 1B4")
    # Rank 0 sends what rank 1 does not want, which learns it when all have ended the step.
    unwanted = r"rank 0 \(pid .* sent the input of stage 3, microbatch 2 to rank 1"
    # Rank 0 may have ended the step by then: it is told in the next one.
    with pytest.raises(MismatchError, match=unwanted):
        send_unwanted(channel)
    one_step(channel, 3.0)


def test_messages_that_do_not_pair_are_a_mismatch(transport: Transport) -> None:
    transport.pool(2).run(miss_messages)


def come_late(rank: int, world_size: int) -> None:
    """Rank 1 is elsewhere during two steps of rank 0, which names it; then both go on."""
    channel = make_channel(timeout_s=1.5)
    if rank == 0:
        with pytest.raises(TimeoutError) as raised, step(channel):
            receive_tensor(channel, 1, gradient(3), "to run 0B3")
        for part in ("rank 0 (pid", "waited 1.5 s for rank 1 (pid", "the gradient of stage 0",
                     "microbatch 3", "to run 0B3", "(train)"):  # fmt: skip
            assert part in str(raised.value)
        with (
            pytest.raises(TimeoutError, match=r"1\.5 s for rank 1 .*ending step 1 "),
            step(channel),
        ):
            pass
    dist.barrier()
    if rank == 1:
        for _ in range(2):
            with pytest.raises(PeerError, match=r"rank 0 \(pid .* waited 1\.5 s"), step(channel):
                receive_tensor(channel, 0, activation(0))
    for turn in range(3):
        one_step(channel, float(turn))


def test_a_rank_that_does_not_come_is_named(transport: Transport) -> None:
    transport.pool(2).run(come_late)


def wait_in_step(channel: Channel, turn: int) -> None:
    """Rank 0 waits for a message or, in turn 1, for the end of the step."""
    with step(channel):
        if turn != 1:
            receive_tensor(channel, 1 - channel.rank, activation(0))
        elif channel.rank == 1:
            time.sleep(0.6)


def interrupt_oneself(rank: int, world_size: int) -> None:
    channel = make_channel()
    for turn in range(3):
        if rank == 0:
            main = threading.main_thread().ident
            assert main is not None
            timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait_in_step(channel, turn)
            timer.join()
        else:
            with pytest.raises(PeerError, match=r"rank 0 .*KeyboardInterrupt"):
                wait_in_step(channel, turn)
        one_step(channel, float(turn))


def test_an_interrupt_gets_through_and_the_next_step_works(transport: Transport) -> None:
    transport.pool(2).run(interrupt_oneself)


def wait_for_death(rank: int, world_size: int, place: str) -> tuple[str, str]:
    """Rank 1 is killed from outside; what the others' step and the next one raised, and when."""
    channel = make_channel()
    one_step(channel, 0.0)
    texts = []
    for _ in range(2):
        with pytest.raises(PeerError) as raised:
            step_with_death(channel, place)
        texts.append(str(raised.value))
    return texts[0], texts[1]


def step_with_death(channel: Channel, place: str) -> None:
    with step(channel):
        if channel.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if place == "receive":
            source = 1 if channel.rank == 0 else 0
            receive_tensor(channel, source, activation(0), "to run 1F0")


@pytest.mark.parametrize("place", ["receive", "end_step"])
def test_a_dead_rank_is_named_and_is_the_end(transport: Transport, place: str) -> None:
    started = start_ranks(3, wait_for_death, place, env=transport.env)
    dead = f"rank 1 (pid {started.pids[1]}) died or left"
    outcomes: list[Outcome] = started.join()
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.traceback
        for text in outcome.value:
            assert dead in text


def end_first(rank: int, world_size: int) -> None:
    """Rank 0 leaves as soon as its last step has ended: nobody takes that for a death."""
    channel = make_channel()
    for turn in range(20):
        one_step(channel, float(turn))
    if rank == 0:
        del channel
        os._exit(0)


def test_a_rank_that_leaves_after_the_last_step_is_no_failure(transport: Transport) -> None:
    outcomes = start_ranks(3, end_first, env=transport.env).join()
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.traceback


def use_in_a_child(rank: int, world_size: int) -> None:
    """A forked child (a DataLoader worker, say) is refused, and its end does no harm."""
    channel = make_channel()
    channel.begin_step("train")
    send_tensor(channel, 1 - rank, activation(0), torch.ones(10_000))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (lambda: channel.begin_step("train"), lambda: channel.end_step("")):
                with pytest.raises(ValueError, match="forked"):
                    call()
            with pytest.raises(ValueError, match="forked"):
                receive_tensor(channel, 1 - rank, activation(0))
            channel.fail("a child must not fail its parent's step")
            del call, channel
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert receive_tensor(channel, 1 - rank, activation(0)).eq(1).all()
    channel.end_step("")
    one_step(channel, 3.0)


def test_a_forked_child_is_refused(transport: Transport) -> None:
    transport.pool(2).run(use_in_a_child)


def raiser(point: int) -> Callable[[], None]:
    """Raises at the call of that number."""
    calls = itertools.count()

    def pass_point() -> None:
        if next(calls) == point:
            raise Broken

    return pass_point


def stress(rank: int, world_size: int, seed: int, num_steps: int, ring_nbytes: int) -> int:
    """Steps in which ranks raise at random points; what arrives is checked against its own step.

    Each rank sends a number that it has never sent before along with a share of random size, and
    gets it back: an echo of another step would be another number.
    """
    channel = make_channel(ring_nbytes=ring_nbytes, max_lent_nbytes=1 << 20)
    order = random.Random(seed * 100 + rank)
    peers = [peer for peer in range(world_size) if peer != rank]
    num_failures = 0
    nonce = rank * 1_000_000.0
    for _ in range(num_steps):
        failing = order.random() < 0.25
        point = order.randrange(3 * len(peers) + 1) if failing else -1
        pass_point = raiser(point)
        nonce += 1
        try:
            with step(channel):
                for peer in order.sample(peers, len(peers)):
                    pass_point()
                    num = order.choice([1, 100, 30_000])
                    send_tensor(channel, peer, activation(0), torch.full((num,), nonce))
                for peer in order.sample(peers, len(peers)):
                    pass_point()
                    received = receive_tensor(channel, peer, activation(0))
                    assert received.min() == received.max()
                    assert received[0] // 1_000_000 == peer
                    send_tensor(channel, peer, gradient(0), received)
                for peer in order.sample(peers, len(peers)):
                    pass_point()
                    assert receive_tensor(channel, peer, gradient(0)).eq(nonce).all()
                pass_point()
        except (Broken, PeerError):
            num_failures += 1
    for turn in range(3):
        one_step(channel, float(turn))
    return num_failures


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_failures_never_mix_two_steps(transport: Transport, world_size: int) -> None:
    """The ranks agree on how many steps have failed, so on which: on all ranks, or on none."""
    num_steps = 400 if transport.name == "shared_memory" else 60
    for ring_nbytes in (256, 0):
        counts = transport.pool(world_size).run(stress, world_size, num_steps, ring_nbytes)
        assert len(set(counts)) == 1
        assert num_steps // 5 < counts[0] < num_steps
