"""Owns the run of DataParallel's tests on the emulated device: what holds on the CPU holds there.

Tests that take the fixture `transport` are run again, with ranks whose tensors are a device's.
"""

import dataclasses

import pytest

from conftest import Transport
from emulated import LIBRARY, EmulatedPool, emulated_pool, library
from other_transports import gather_tests

MODULES = [
    "aliasing",
    "audit",
    "buffers",
    "changes",
    "checkpoint",
    "delayed",
    "equality",
    "gradients",
    "hooks",
    "join",
    "mixed_precision",
    "modules",
    "no_sync",
    "unused",
]
# What is otherwise on a device.
ELSEWHERE = {
    "a_hook_that_raises_on_one_rank_is_named_on_all",  # by the step after: nobody waits
    "sparse_gradients_too",  # refused
}


@dataclasses.dataclass(frozen=True)
class OnDevice(Transport):
    """Over NCCL, in the emulation."""

    def pool(self, world_size: int) -> EmulatedPool:  # type: ignore[override]
        return emulated_pool(world_size)

    @property
    def env(self) -> dict[str, str]:
        return {LIBRARY: library()}


@pytest.fixture(scope="session")
def transport() -> Transport:
    return OnDevice("nccl")


globals().update(gather_tests([f"data_parallel_{module}" for module in MODULES], ELSEWHERE))
