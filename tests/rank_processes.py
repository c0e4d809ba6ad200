"""Owns the processes that ranks run in, as seen from pytest: started, signalled and reaped."""

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from rank_worker import Outcome, Spec


class RankProcess:
    """One rank. Until it is reaped its pid stays taken, so no signal can reach a stranger."""

    def __init__(
        self, spec: Spec, pid: int, connection: Connection, reap: Callable[[], int]
    ) -> None:
        self.rank = spec.rank
        self.pid = pid
        self.connection = connection
        self.pidfd = os.pidfd_open(pid)
        self._folder = Path(spec.folder)
        self._reap = reap
        self._exit_code: int | None = None

    def ended_within(self, timeout_s: float) -> bool:
        if self._exit_code is not None:
            return True
        return bool(select.select([self.pidfd], [], [], max(0.0, timeout_s))[0])

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._exit_code is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def exit_code(self) -> int:
        """Waits for the end, which is known to be near; negative is the signal that ended it."""
        if self._exit_code is None:
            self._exit_code = self._reap()
            os.close(self.pidfd)
            self.connection.close()
        return self._exit_code

    def ask_to_leave(self) -> None:
        self._send(b"")

    def send_call(self, request: bytes) -> None:
        self._send(request)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended: whoever waits for the answer sees it
            self.connection.send_bytes(message)

    def receive(self) -> Outcome:
        """The answer that is ready, or RankDied where the process ended without one."""
        try:
            outcome = pickle.loads(self.connection.recv_bytes()) if self.connection.poll() else None
        except (EOFError, OSError):
            outcome = None
        if isinstance(outcome, Outcome):
            return outcome
        if not self.ended_within(5):  # it closed its socket and stays
            self.kill()
        message = f"rank {self.rank} (pid {self.pid}) ended with code {self.exit_code()}"
        text = f"{message}; its output ended with\n{self.log()[-2000:]}"
        return Outcome(self.rank, error="RankDied", message=message, traceback=text)

    def log(self, suffix: str = "log") -> str:
        path = self._folder / f"rank{self.rank}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else ""

    def traces(self) -> str:
        """What every thread of the process is doing, in Python's words."""
        if self.ended_within(0):
            return "the process has ended"
        if not (self._folder / f"rank{self.rank}.trace").exists():
            return "the process has not come as far as its set-up"
        before = self.log("trace")
        self.kill(signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.1)
            text = self.log("trace")[len(before) :]
            if text.endswith("\n"):
                return text
        return "no traceback came within 2 s: the process is stopped"


class Nursery:
    """The process that forks ranks, started at the first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start_rank(self, spec: Spec) -> RankProcess:
        control = self._started()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [pickle.dumps(spec)], [theirs.fileno()])
        pid = self._reply()
        return RankProcess(spec, pid, Connection(ours.detach()), lambda: self._reap(pid))

    def _reap(self, pid: int) -> int:
        self._started().send(pickle.dumps(pid))
        return self._reply()

    def _reply(self) -> int:
        answer = self._started().recv(4)
        if not answer:
            raise RuntimeError("the process that forks ranks has ended; its stderr says why")
        return int(struct.unpack("i", answer)[0])

    def _started(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = start_interpreter("nursery_main", theirs.fileno())
        return self._control

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(10)
        self._process = self._control = None


def start_interpreter(main: str, fd: int) -> "subprocess.Popen[bytes]":
    """A clean interpreter that calls rank_worker's function of that name with a descriptor."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYDIST_")}
    # The imports of the tests, whatever made them work here, work there too.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    for library in ("OMP", "MKL", "OPENBLAS"):
        environment[f"{library}_NUM_THREADS"] = "1"
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    code = f"import sys, rank_worker; sys.exit(rank_worker.{main}({fd}))"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, env=environment)


def start_rank_in_interpreter(spec: Spec) -> RankProcess:
    """A rank that shares nothing with the others, for what forking would hide."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_interpreter("interpreter_main", theirs.fileno())
    connection = Connection(ours.detach())
    connection.send_bytes(pickle.dumps(spec))
    return RankProcess(spec, process.pid, connection, process.wait)
