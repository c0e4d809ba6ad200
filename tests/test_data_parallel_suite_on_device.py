"""Owns the run of DataParallel's tests on the emulated device: what holds on the CPU holds there.

Tests that take the fixture `transport` are run again, with ranks whose tensors are a device's.
"""

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Transport
from emulated import LIBRARY, EmulatedPool, emulated_pool, library

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


def _tests() -> Iterator[tuple[str, Any]]:
    left_out = set()
    for module in MODULES:
        for name, value in vars(importlib.import_module(f"test_data_parallel_{module}")).items():
            code = getattr(value, "__code__", None)
            arguments = code.co_varnames[: code.co_argcount] if code else ()
            if name.removeprefix("test_") in ELSEWHERE:
                left_out.add(name.removeprefix("test_"))
            elif name.startswith("test_") and "transport" in arguments:
                yield f"test_{module}__{name.removeprefix('test_')}", value
    assert left_out == set(ELSEWHERE), set(ELSEWHERE) - left_out


globals().update(_tests())
