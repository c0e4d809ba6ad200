"""Owns the processes of a benchmark's ranks: started once, told what to run, on one clock."""

import itertools
import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.network import Place, enter

P = ParamSpec("P")
T = TypeVar("T")

# Start and end in nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
Span = tuple[int, int]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CACHE_LINE_NBYTES = 64
TIMEOUT_S = 300.0
BARRIER_TIMEOUT_S = 60.0


@dataclass
class Rank:
    """What a function that runs in a rank's process is given."""

    index: int
    size: int
    # Shared by all ranks; each counts its own barriers, in its own cache line.
    arrivals: "memoryview[int]"
    kept: dict[str, Any] = field(default_factory=dict)

    def barrier(self) -> None:
        """Independent of what is measured; spins, so that ranks leave it almost together."""
        stride = CACHE_LINE_NBYTES // self.arrivals.itemsize
        mine = self.arrivals[self.index * stride] + 1
        self.arrivals[self.index * stride] = mine
        deadline = time.monotonic() + BARRIER_TIMEOUT_S
        for peer in range(self.size):
            while self.arrivals[peer * stride] < mine:
                os.sched_yield()  # there may be more ranks than cores
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {peer} did not come to the benchmark's barrier")

    def timed(self, run: Callable[[], object]) -> Span:
        self.barrier()
        start_ns = time.monotonic_ns()
        run()
        return start_ns, time.monotonic_ns()


def elapsed_s(spans: Sequence[Span]) -> float:
    """From the first rank that began to the last that ended."""
    return (max(end for _, end in spans) - min(start for start, _ in spans)) * 1e-9


class RanksClock:
    """A timer for pytest-benchmark: advances by what the ranks measured, without their messages."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, spans: Sequence[Span]) -> None:
        self._now_s += elapsed_s(spans)


class Ranks:
    """Processes with a Gloo group and one thread each, idle until called; beside this process,
    or at the places given."""

    def __init__(
        self,
        size: int,
        environment: Mapping[str, str] | None = None,
        places: Sequence[Place] = (),
    ) -> None:
        self.size = size
        self._address = places[0].host.address if places else "127.0.0.1"
        call = places[0].host.namespace.call if places else _call
        self._store = call(lambda: _make_store(self._address))
        self._arrivals_fd = os.memfd_create("barrier")
        os.ftruncate(self._arrivals_fd, size * CACHE_LINE_NBYTES)
        variables = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **ONE_THREAD, **(environment or {})}
        variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for index in range(size):
            if places:
                variables = {**variables, **places[index].variables}
            self._start(index, variables, places[index].host.namespace.path if places else "")

    def _start(self, index: int, variables: Mapping[str, str], namespace: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), self._arrivals_fd)
            arguments = (index, self.size, (self._address, self._store.port), namespace, *inherited)
            code = f"from bench import ranks; ranks.serve{arguments}"
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, pass_fds=inherited, env=dict(variables))
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def call(
        self, function: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Runs function(rank, ...) on every rank at once; the results by rank."""
        request = pickle.dumps((function, args, kwargs))
        for connection in self._connections:
            connection.send_bytes(request)
        results: dict[int, T] = {}
        while len(results) < self.size:
            pending = [c for i, c in enumerate(self._connections) if i not in results]
            ready = wait(pending, TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{len(pending)} ranks did not answer within {TIMEOUT_S:.0f} s")
            for index, connection in enumerate(self._connections):
                if connection in ready:
                    results[index] = self._result(index)
        return [results[index] for index in range(self.size)]

    def _result(self, index: int) -> Any:
        try:
            succeeded, value = pickle.loads(self._connections[index].recv_bytes())
        except (EOFError, OSError):
            code = self._processes[index].wait(10)
            raise RuntimeError(f"rank {index} ended with code {code}") from None
        if not succeeded:
            raise RuntimeError(f"rank {index} raised\n{value}")
        return value

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in self._processes:
                process.kill()
        for connection in self._connections:
            connection.close()  # what ends a rank that waits for a call
        codes = [process.wait(60) for process in self._processes]
        os.close(self._arrivals_fd)
        if kind is None and any(codes):
            raise RuntimeError(f"ranks ended with codes {codes}")


def _call(function: Callable[[], T]) -> T:
    return function()


def _make_store(address: str) -> TCPStore:
    return TCPStore(address, 0, None, is_master=True, wait_for_workers=False)


def serve(
    index: int,
    size: int,
    store_address: tuple[str, int],
    namespace: str,
    connection_fd: int,
    arrivals_fd: int,
) -> None:
    """The life of a rank's process."""
    if namespace:
        enter(namespace)
    torch.set_num_threads(1)
    torch.manual_seed(index)
    store = TCPStore(*store_address, None, is_master=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=timeout)
    rank = Rank(index, size, memoryview(mmap.mmap(arrivals_fd, 0)).cast("q"))
    with Connection(connection_fd) as connection:
        for _ in itertools.count():
            try:
                function, args, kwargs = pickle.loads(connection.recv_bytes())
            except EOFError:
                break
            connection.send_bytes(pickle.dumps(_outcome(function, rank, args, kwargs)))
    rank.kept.clear()
    dist.destroy_process_group()
    # A thread of Gloo's may still be about to drop a tensor, for which it needs Python: if the
    # interpreter ends meanwhile, that thread's end ends the process with SIGABRT.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _outcome(
    function: Callable[..., object], rank: Rank, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bool, object]:
    try:
        return True, function(rank, *args, **kwargs)
    except Exception:
        return False, traceback.format_exc()
