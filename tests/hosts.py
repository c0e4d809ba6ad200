"""Owns ranks on several hosts: network stacks of their own on this machine, joined by links.

    with Hosts((2, 2)) as hosts:                # two hosts with two ranks each
        hosts.run(function, *args)              # as RankPool.run: results by rank
        hosts.start(function, *args).join()     # as start_ranks: one-off ranks, an Outcome each
        hosts.network.cut(1)                    # from now on host 1 is silent

Ranks are numbered host by host. See bench/network.py for what a host is.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

from bench.network import Network, places
from ranks import FreshRanks, Place, RankPool, start_ranks

_ports = itertools.count(29500)


def skip_unless_root() -> None:
    """Root that cannot make namespaces is an error, not a skip."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")


class Hosts:
    """layout[i] is the number of ranks on host i; see Network for the links' limits."""

    def __init__(
        self,
        layout: tuple[int, ...],
        rate_bit_per_s: float | None = None,
        delay_s: float = 0.0,
        env: dict[str, str] | None = None,
    ) -> None:
        skip_unless_root()
        self.layout = layout
        self.env = dict(env or {})
        self.network = Network(len(layout), rate_bit_per_s, delay_s)
        self._pool = RankPool(self.num_ranks, self.env, places=self._places())
        self._started: list[FreshRanks] = []

    @property
    def num_ranks(self) -> int:
        return sum(self.layout)

    def ranks_of(self, host: int) -> range:
        first = sum(self.layout[:host])
        return range(first, first + self.layout[host])

    def _places(self) -> tuple[Place, ...]:
        """For one world: each has a port of its own for its store, which is in the first host."""
        found = places(self.network, self.layout, next(_ports))
        return tuple(Place(place.host.namespace.path, place.variables) for place in found)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """In ranks that stay from call to call, unless one has failed."""
        if not self._pool.pids:
            self._pool.places = self._places()
        return self._pool.run(function, *args, **kwargs)

    def start(self, function: Callable[..., Any], *args: Any, **options: Any) -> FreshRanks:
        """In ranks of their own, which may be killed; then join()."""
        places = self._places()
        env = {**self.env, **options.pop("env", {})}
        fresh = start_ranks(self.num_ranks, function, *args, env=env, places=places, **options)
        self._started.append(fresh)
        return fresh

    def kill(self, fresh: FreshRanks, host: int) -> None:
        """All of a host's ranks, by SIGKILL: what its kernel has to say about that still comes."""
        for rank in self.ranks_of(host):
            fresh.signal(rank)

    def close(self) -> None:
        self._pool.close()
        for fresh in self._started:
            fresh.end()
        self.network.close()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
