"""Owns the proof that the emulated device is right: order, events, capture, and that each class of
fault is found."""

import ctypes
import gc
import time

import pytest
import torch
from emulated import (
    Graph,
    call,
    call_for,
    copy,
    current_stream,
    emulated_pool,
    fault,
    fill_zero,
    held,
    is_complete,
    launch,
    make_event,
    make_stream,
    make_torch_stream,
    record,
    set_option,
    take_faults,
    touch,
    wait,
)


def in_one_rank(function: object, *args: object, seed: int = 0) -> object:
    return emulated_pool(1).run(function, *args, seed=seed)[0]


def until(done: object, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it does not come to an end"
        time.sleep(0.001)


# Streams and events


def _a_stream_keeps_its_order(rank: int, size: int) -> list[float]:
    value, one = torch.zeros(1), torch.ones(1)
    stream = make_stream()
    with held():
        for factor in (2.0, 3.0, 5.0):
            launch(value, one, factor, stream)
        assert value.item() == 0  # held
        event = make_event()
        record(event, stream)
        assert not is_complete(event)
    until(lambda: is_complete(event))
    return [value.item()]


def test_a_stream_keeps_its_order_and_runs_late() -> None:
    assert in_one_rank(_a_stream_keeps_its_order) == [((0 * 2 + 1) * 3 + 1) * 5 + 1]


def _order_of_streams(rank: int, size: int) -> float:
    """A number that depends on the order in which six streams came, twice each."""
    set_option("max_delay_s", 0)
    place = torch.ones(1)
    tensors = [torch.full((1,), float(number)) for number in range(1, 7)]
    streams = [make_stream() for _ in tensors]
    with held():
        for _ in range(2):
            for stream, tensor in zip(streams, tensors, strict=True):
                launch(place, tensor, -0.5, stream, declares=False)
    call("synchronize")
    return place.item()


def test_the_order_of_streams_is_that_of_the_seed() -> None:
    by_seed = [in_one_rank(_order_of_streams, seed=seed) for seed in range(6)]
    again = [in_one_rank(_order_of_streams, seed=seed) for seed in range(6)]
    assert by_seed == again
    assert len(set(by_seed)) > 3


# NCCL


def _quick_nccl(rank: int, size: int) -> list[float]:
    from emulated_nccl import Nccl, check

    comm = Nccl()
    value = torch.full((300000,), float(rank + 1))
    comm.follow()
    check(comm.all_reduce(value, value))
    comm.wait()
    result = [value[0].item(), value[-1].item()]
    comm.finish()
    return result


def test_quick() -> None:
    assert emulated_pool(2).run(_quick_nccl) == [[3, 3]] * 2
