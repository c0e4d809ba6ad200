"""Owns what happens inside a test's processes: the nursery that forks ranks, and a rank's loop.

Importing torch takes longer than most tests, so one process, the nursery, imports it once and
forks every rank from that clean state (no thread, no engine, no process group):

    pytest --spec, socket--> nursery --fork--> rank --Outcome--> pytest
"""

import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1

kept: list[object] = []  # for the life of the process


@dataclasses.dataclass
class Spec:
    """What one rank is told at its start."""

    rank: int
    world_size: int
    environment: dict[str, str]
    folder: str  # logs and traces of the ranks of one world
    store_port: int | None  # None: the function sets up torch.distributed itself
    store_prefix: str
    group_timeout_s: float
    network_namespace: str | None = None  # a file; the environment says where rank 0 is
    backend: str = "gloo"


@dataclasses.dataclass
class Outcome:
    """What became of one call in one rank."""

    rank: int
    value: Any = None
    error: str | None = None  # the name of the exception's class, "pydist.PeerError"
    message: str = ""
    traceback: str = ""
    exception: BaseException | None = None  # where it can be pickled
    seconds: float = 0.0  # spent in the function
    ended_at: float = 0.0  # time.monotonic(), comparable between the processes of a machine
    exit_code: int | None = None  # negative: the signal that ended the process
    stderr: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None


def resource_snapshot(rank: int, world_size: int) -> dict[str, int]:
    """Threads, descriptors, children and resident memory of this rank, to compare before and
    after: `before = pool.run(resource_snapshot)`."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(children),
        "resident_nbytes": pages * mmap.PAGESIZE,
    }


def call(rank: int, world_size: int, target: tuple[str, str], arguments: bytes) -> Outcome:
    """Runs one function; whatever it raises becomes a part of the outcome."""
    started = time.monotonic()
    outcome = Outcome(rank)
    try:
        if "PYDIST_EMULATED_LIBRARY" in os.environ:
            resolve("emulated", "load")()
        function = resolve(*target)
        args, kwargs = pickle.loads(arguments)
        started = time.monotonic()
        outcome.value = function(rank, world_size, *args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:
        outcome.error = name_of(type(error))
        outcome.message = str(error)
        outcome.traceback = describe(error)
        outcome.exception = error.with_traceback(None)
    outcome.ended_at = time.monotonic()
    outcome.seconds = outcome.ended_at - started
    return outcome


def resolve(module: str, qualified_name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def name_of(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def describe(error: BaseException) -> str:
    """The traceback, and for a failed assert the values around it, which pytest would show."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if not isinstance(error, AssertionError) or error.__traceback__ is None:
        return text
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    values = [f"    {name} = {short(value)}" for name, value in frame.f_locals.items()]
    return text + "  where\n" + "\n".join(values) + "\n"


def short(value: object, limit: int = 300) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr raised {error!r}>"
    return text if len(text) <= limit else text[:limit] + "..."


def packed(outcome: Outcome) -> bytes:
    """Plain pickle, not multiprocessing's: torch's reducers for that leave files in /dev/shm."""
    if outcome.exception is not None:
        try:
            pickle.loads(pickle.dumps(outcome.exception))
        except Exception:
            outcome.exception = None
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        outcome.value, outcome.error = None, "pickle.PicklingError"
        outcome.message = f"the result of this rank cannot be sent: {error}"
        outcome.traceback = outcome.message
        return pickle.dumps(outcome)


def set_up(spec: Spec) -> None:
    """Makes this process a rank: environment, log, traces, seeds."""
    end_with_parent()
    os.environ.update(spec.environment)
    if spec.network_namespace is not None:
        resolve("bench.network", "enter")(spec.network_namespace)
    log = os.open(f"{spec.folder}/rank{spec.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    trace = open(f"{spec.folder}/rank{spec.rank}.trace", "w")  # noqa: SIM115  (for life)
    kept.append(trace)
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    move_mappings(spec.rank)

    import torch

    torch.set_num_threads(1)
    if spec.store_port is not None:
        join_group(spec, spec.store_port)


def move_mappings(rank: int) -> None:
    """Forked ranks map memory at equal addresses, where a pointer sent to a peer by mistake would
    work; a reservation of another size in every rank (never unmapped) moves what comes after."""
    kept.append(mmap.mmap(-1, (rank + 1) * 67 * mmap.PAGESIZE, prot=mmap.PROT_READ))


def join_group(spec: Spec, store_port: int) -> None:
    import datetime

    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    timeout = datetime.timedelta(seconds=spec.group_timeout_s)
    if spec.network_namespace is not None:  # the store of pytest's process is out of reach
        dist.init_process_group("gloo", timeout=timeout)
        return
    server = TCPStore("127.0.0.1", store_port, is_master=False, timeout=timeout)
    dist.init_process_group(
        spec.backend,
        store=PrefixStore(spec.store_prefix, server),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timeout,
    )


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(spec: Spec, connection: Connection) -> int:
    """A rank's life: one outcome for the start, then one for each call, until the socket closes."""
    set_up_outcome = Outcome(spec.rank)
    try:
        set_up(spec)
    except Exception as error:
        set_up_outcome.error, set_up_outcome.message = name_of(type(error)), str(error)
        set_up_outcome.traceback = describe(error)
    connection.send_bytes(packed(set_up_outcome))
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return 0
        if not request:
            return 0
        import torch

        torch.manual_seed(0)
        target, arguments = pickle.loads(request)
        outcome = call(spec.rank, spec.world_size, target, arguments)
        connection.send_bytes(packed(outcome))
        del outcome
        sys.stdout.flush()
        sys.stderr.flush()


def nursery_main(control_fd: int) -> int:
    """Forks a rank for each request (a Spec and a socket) and reaps it when asked for its pid."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends us
    import numpy  # noqa: F401
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a nursery with {num_threads} threads cannot fork safely"
    gc.freeze()  # the ranks share these pages
    control = socket.socket(fileno=control_fd)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not request:
            return 0
        what = pickle.loads(request)
        if isinstance(what, int):
            _, status = os.waitpid(what, 0)
            control.send(struct.pack("i", os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            return serve(what, Connection(descriptors[0]))
        os.close(descriptors[0])
        control.send(struct.pack("i", pid))


def interpreter_main(connection_fd: int) -> int:
    """A rank in an interpreter of its own, for what forking would hide."""
    connection = Connection(connection_fd)
    return serve(pickle.loads(connection.recv_bytes()), connection)
