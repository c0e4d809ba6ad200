"""Owns the run of DataParallel's tests over hosts: what holds on one holds on several.

Tests that take the fixture `transport` are run again, with ranks that believe to be on two hosts.
"""

import dataclasses

import pytest

from conftest import Transport
from other_transports import tests_of
from ranks import HOSTS

MODULES = [
    "buffers",
    "changes",
    "delayed",
    "equality",
    "failures",
    "gradients",
    "hooks",
    "join",
    "mixed_precision",
    "modules",
    "no_sync",
    "skip_unused",
    "sparse",
    "unused",
    "verification",
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


globals().update(tests_of(MODULES, set()))
