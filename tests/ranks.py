"""Owns the ranks of the tests: real processes, kept in pools, watched, and ended by their pid.

    pool = get_pool(2)                      # or the fixtures pool2, transport.pool(2), ...
    pool = get_pool(2, backend="pydist")    # else torch.distributed runs on Gloo
    pool.run(function, *args)               # function(rank, world_size, *args) in every rank;
                                            # returns the results by rank
    pool.run(function, expect_errors=True)  # returns an Outcome per rank
    fresh_ranks(3, function, *args)         # one-off processes, which may die: an Outcome per rank

The function is a module-level one; arguments and results are pickled. An exception in a rank is
raised here, with that rank's traceback. A rank that does not answer in time is asked for the
tracebacks of all its threads, as are the others, and everything is reported in RankHang.
"""

import dataclasses
import itertools
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from rank_processes import Nursery, RankProcess, start_rank_in_interpreter
from rank_worker import Outcome, Spec, resource_snapshot

__all__ = [
    "FreshRanks",
    "Outcome",
    "Place",
    "RankDied",
    "RankHang",
    "RankPool",
    "close_all",
    "fresh_ranks",
    "get_pool",
    "resource_snapshot",
    "start_ranks",
]

WATCHDOG_S = 60.0
GROUP_TIMEOUT_S = 30.0  # below the watchdog, so that a rank's own message comes first
# After the first failure the others get this long to notice it and to fail in their own words.
GRACE_S = 10.0
# In a pool's or a world's environment: the name of each rank's host, a letter, as in "aab". What
# is one machine then looks like several.
HOSTS = "PYDIST_TEST_HOSTS"
MAX_PROCESSES = 24  # pools beyond that end, the least recently used first

problems: list[str] = []  # what went wrong while closing; conftest.py fails the session for it
_world_numbers = itertools.count()
_nursery = Nursery()
_pools: dict[tuple[int, str, tuple[tuple[str, str], ...]], "RankPool"] = {}
_store: Any = None


class RankHang(AssertionError):
    """A rank did not answer in time."""


class RankDied(AssertionError):
    """A rank ended without an answer."""


class RankTraceback(Exception):
    """The cause attached to an exception carried over from ranks: their tracebacks as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one rank is started, if not beside pytest: in another network stack."""

    network_namespace: str
    variables: dict[str, str]


@dataclasses.dataclass
class Options:
    """How the ranks of a world are started."""

    env: dict[str, str] = dataclasses.field(default_factory=dict)
    init: bool = True  # torch.distributed is initialised before the function runs
    own_interpreter: bool = False  # not forked: a second or two more for each rank
    group_timeout_s: float = GROUP_TIMEOUT_S
    places: tuple[Place, ...] = ()  # by rank; empty: all beside pytest
    backend: str = "gloo"


def _store_port() -> int:
    """One TCPStore for all worlds lives here, so that no rank's death takes it away."""
    global _store
    if _store is None:
        from torch._C._distributed_c10d import TCPStore

        _store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(_store.port)


class _World:
    """The ranks of one start, and the waiting for their answers."""

    def __init__(self, world_size: int, options: Options) -> None:
        self._folder = tempfile.mkdtemp(prefix="pydist-ranks-")
        self._joined = False
        prefix = f"world{next(_world_numbers)}"
        start = start_rank_in_interpreter if options.own_interpreter else _nursery.start_rank
        self.ranks: list[RankProcess] = []
        for rank in range(world_size):
            place = options.places[rank] if options.places else None
            spec = Spec(
                rank=rank,
                world_size=world_size,
                environment=_environment(rank, world_size, options, place),
                folder=self._folder,
                store_port=_store_port() if options.init else None,
                store_prefix=prefix,
                group_timeout_s=options.group_timeout_s,
                network_namespace=place.network_namespace if place else None,
                backend=options.backend,
            )
            self.ranks.append(start(spec))

    def send(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if "<" in function.__qualname__ or function.__module__ == "__main__":
            raise TypeError(f"{function.__qualname__} is not a function of a test module's top")
        target = (function.__module__, function.__qualname__)
        request = pickle.dumps((target, pickle.dumps((args, kwargs))))
        for rank in self.ranks:
            rank.send_call(request)

    def outcomes(self, timeout_s: float, grace_s: float | None) -> list[Outcome]:
        """One per rank, RankDied for those that ended; RankHang if one does not come in time."""
        deadline = time.monotonic() + timeout_s
        if not self._joined:
            started = self._answers(deadline, GRACE_S)
            if not all(answer.ok for answer in started):
                return started
            self._joined = True
        return self._answers(deadline, grace_s)

    def _answers(self, deadline: float, grace_s: float | None) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        while len(found) < len(self.ranks):
            missing = [rank for rank in self.ranks if rank.rank not in found]
            # The pidfd too: a child of a dead rank may hold its end of the socket.
            sources: dict[Any, RankProcess] = {rank.connection: rank for rank in missing}
            sources.update({rank.pidfd: rank for rank in missing})
            ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
            for rank in {id(sources[source]): sources[source] for source in ready}.values():
                found[rank.rank] = rank.receive()
                if grace_s is not None and not found[rank.rank].ok:
                    deadline = min(deadline, time.monotonic() + grace_s)
            if not ready and time.monotonic() >= deadline:
                raise RankHang(self.report(found, missing))
        return [found[index] for index in sorted(found)]

    def report(self, found: dict[int, Outcome], missing: list[RankProcess]) -> str:
        """Who did not answer, and what every rank was doing or had done."""
        late = ", ".join(str(rank.rank) for rank in missing)
        text = [f"rank {late} of {len(self.ranks)} did not answer in time"]
        for rank in self.ranks:
            outcome = found.get(rank.rank)
            if outcome is None:
                text.append(f"--- rank {rank.rank} (pid {rank.pid}) is in\n{rank.traces()}")
            elif outcome.ok:
                text.append(f"--- rank {rank.rank} returned")
            else:
                text.append(f"--- rank {rank.rank} raised\n{outcome.traceback}")
            text.append(rank.log()[-2000:])
        return "\n".join(text)

    def leave(self, timeout_s: float) -> list[RankProcess]:
        """Lets the ranks leave as a script's end would; returns those that did not in time."""
        deadline = time.monotonic() + timeout_s
        for rank in self.ranks:
            rank.ask_to_leave()
        return [r for r in self.ranks if not r.ended_within(deadline - time.monotonic())]

    def end(self) -> list[int]:
        """Kills what is still there; returns the exit codes."""
        for rank in self.ranks:
            if not rank.ended_within(0):
                rank.kill()
        codes = [rank.exit_code() for rank in self.ranks]
        shutil.rmtree(self._folder, ignore_errors=True)
        return codes


def _environment(
    rank: int, world_size: int, options: Options, place: Place | None
) -> dict[str, str]:
    hosts = options.env.get(HOSTS)
    return {
        **({"PYDIST_HOST": hosts[rank]} if hosts else {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_store_port()),
        **(place.variables if place else {}),
        **options.env,
    }


def _raise_first(outcomes: list[Outcome]) -> None:
    """Raises what the first rank to fail raised, with the tracebacks of all that failed."""
    failed = sorted((o for o in outcomes if not o.ok), key=lambda o: o.ended_at or float("inf"))
    if not failed:
        return
    text = "\n".join(f"--- rank {outcome.rank} raised\n{outcome.traceback}" for outcome in failed)
    if failed[0].exception is not None:
        raise failed[0].exception from RankTraceback(text)
    kind = RankDied if failed[0].error == "RankDied" else AssertionError
    raise kind(text)


class RankPool:
    """Ranks that stay from test to test; started at the first run, and again after a failure."""

    def __init__(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        watchdog_s: float = WATCHDOG_S,
        places: tuple[Place, ...] = (),
        backend: str = "gloo",
    ) -> None:
        self.world_size = world_size
        self.env = dict(env or {})
        self.places = places
        self.backend = backend
        self.watchdog_s = watchdog_s
        self.last_used = 0.0
        self._world: _World | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        expect_errors: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """function(rank, world_size, *args, **kwargs) in every rank; see the module's text."""
        self.last_used = time.monotonic()
        if self._world is None:
            _make_room(self.world_size)
            options = Options(env=self.env, places=self.places, backend=self.backend)
            self._world = _World(self.world_size, options)
        sound = False
        try:
            self._world.send(function, args, kwargs)
            grace_s = None if expect_errors else GRACE_S
            outcomes = self._world.outcomes(timeout_s or self.watchdog_s, grace_s)
            sound = all(outcome.ok for outcome in outcomes)
        finally:
            if not sound:  # after a failure the ranks' groups may be in any state
                self.discard()
        if expect_errors:
            return outcomes
        _raise_first(outcomes)
        return [outcome.value for outcome in outcomes]

    @property
    def pids(self) -> list[int]:
        """Empty while no ranks are running."""
        return [rank.pid for rank in self._world.ranks] if self._world else []

    def discard(self) -> None:
        """Ends the ranks at once; the next run starts new ones."""
        world, self._world = self._world, None
        if world is not None:
            world.end()

    def close(self) -> None:
        """Lets the ranks leave without any clean-up call, which must go well: else a problem."""
        world, self._world = self._world, None
        if world is None:
            return
        late = world.leave(timeout_s=15)
        text = world.report({}, late) if late else "\n".join(r.log()[-1000:] for r in world.ranks)
        codes = world.end()
        if any(codes):
            problems.append(
                f"the ranks of an idle pool of {self.world_size} with {self.env} left with exit "
                f"codes {codes}, expected zeros\n{text}"
            )


def _make_room(num_processes: int) -> None:
    running = sorted((p for p in _pools.values() if p.pids), key=lambda pool: pool.last_used)
    total = num_processes + sum(pool.world_size for pool in running)
    for pool in running:
        if total <= MAX_PROCESSES:
            break
        pool.close()
        total -= pool.world_size


def get_pool(world_size: int, *, backend: str = "gloo", **env: str) -> RankPool:
    """The pool of that size and backend whose ranks see these environment variables; made at the
    first use."""
    key = (world_size, backend, tuple(sorted(env.items())))
    if key not in _pools:
        _pools[key] = RankPool(world_size, env, backend=backend)
    return _pools[key]


class FreshRanks:
    """One call in processes of its own, which a test may signal while it runs."""

    def __init__(self, world_size: int, call: tuple[Any, Any, Any], options: Options) -> None:
        self._world = _World(world_size, options)
        self._world.send(*call)

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._world.ranks]

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        self._world.ranks[rank].kill(number)

    def join(self, timeout_s: float = WATCHDOG_S) -> list[Outcome]:
        """Waits until all processes have ended; exit_code and stderr are filled in."""
        deadline = time.monotonic() + timeout_s
        try:
            outcomes = self._world.outcomes(timeout_s, grace_s=None)
            late = self._world.leave(deadline - time.monotonic())
            if late:
                raise RankHang("while exiting: " + self._world.report({}, late))
            for outcome, rank in zip(outcomes, self._world.ranks, strict=True):
                outcome.exit_code, outcome.stderr = rank.exit_code(), rank.log()
        finally:
            self._world.end()
        return outcomes

    def end(self) -> None:
        """Kills what is still there; join() does so too."""
        self._world.end()


def start_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    init: bool = True,
    own_interpreter: bool = False,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    places: tuple[Place, ...] = (),
    backend: str = "gloo",
    **kwargs: Any,
) -> FreshRanks:
    """Starts function(rank, world_size, *args, **kwargs) in one-off processes; then join()."""
    options = Options(dict(env or {}), init, own_interpreter, group_timeout_s, places, backend)
    return FreshRanks(world_size, (function, args, kwargs), options)


def fresh_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = WATCHDOG_S,
    **options: Any,
) -> list[Outcome]:
    """start_ranks and join in one."""
    return start_ranks(world_size, function, *args, **options).join(timeout_s)


def close_all() -> None:
    """Ends every process that this module started."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
    _nursery.close()
