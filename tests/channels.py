"""Owns what the tests of channels share: making one, and steps of it as context managers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pydist import _C
from pydist._engine import group_engine

Key = tuple[str, int, int, int]


def make_channel(timeout_s: float = 30.0, **options: Any) -> _C.Channel:
    """A channel between the ranks of the default group. Collective."""
    engine = group_engine()
    return _C.Channel(
        store=engine.store_prefix("test-channel"),
        group=engine.channel_group(),
        rank=engine.rank,
        size=engine.size,
        timeout_s=timeout_s,
        global_ranks=engine.global_ranks,
        name="the pipeline of the test",
        **options,
    )


@contextmanager
def step(channel: _C.Channel, kind: str = "train") -> Iterator[None]:
    """One step as an executor takes it: what raises ends it on all ranks."""
    try:
        channel.begin_step(kind)
        yield
        channel.end_step("to end the test's step")
    except BaseException as error:
        channel.fail(f"{channel.describe(channel.rank)} raised {type(error).__name__}: {error}")
        raise


def activation(microbatch: int, stage: int = 1, port: int = 0) -> Key:
    return ("activation", stage, microbatch, port)


def gradient(microbatch: int, stage: int = 0, port: int = 0) -> Key:
    return ("gradient", stage, microbatch, port)


def send_tensor(channel: _C.Channel, destination: int, key: Key, tensor: Tensor) -> None:
    channel.send(destination, key, [(tensor, False)])


def receive_tensor(channel: _C.Channel, source: int, key: Key, purpose: str = "") -> Tensor:
    slots, _, _ = channel.receive(source, key, purpose)
    (slot,) = slots
    assert slot[0] is not None
    return slot[0]
