"""Owns the run of training's tests over hosts: what holds on one holds on several.

Tests that take the fixture `transport` are run again, with ranks that believe to be on two hosts.
"""

import dataclasses

import pytest

from conftest import Transport
from other_transports import gather_tests
from ranks import HOSTS

MODULES = [
    "data_parallel_buckets",
    "data_parallel_buffers",
    "data_parallel_changes",
    "data_parallel_delayed",
    "data_parallel_equality",
    "data_parallel_failures",
    "data_parallel_gradients",
    "data_parallel_hooks",
    "data_parallel_join",
    "data_parallel_mixed_precision",
    "data_parallel_modules",
    "data_parallel_no_sync",
    "data_parallel_replaced",
    "data_parallel_skip_unused",
    "data_parallel_sparse",
    "data_parallel_unused",
    "data_parallel_verification",
    "pipeline_hybrid",
    "stage_reduction",
    "sync_batchnorm",
]


@dataclasses.dataclass(frozen=True)
class OnHosts(Transport):
    """Ranks with even numbers on one host, the others on another."""

    @property
    def env(self) -> dict[str, str]:
        return {HOSTS: "abababab"}


@pytest.fixture(scope="session")
def transport() -> Transport:
    return OnHosts("hosts")


globals().update(gather_tests(MODULES, set()))
