"""Owns the sections: which there are, and that each runs in a process of its own, in its own time.

So a fault of the device, a hang or a crash in one of them hides nothing of the others. Processes
are forked from one that has imported torch and has never touched the device.
"""

import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from place import Place
from rows import Rows, check_case

from bench.record import Case

# Before the limit, so that the stacks of a hanging section's threads are in its log.
STACKS_BEFORE_S = 3.0
LOG_TAIL_LENGTH = 1500


@dataclasses.dataclass(frozen=True)
class Section:
    """A module of this folder with `run(place, rows)`, and the seconds that it may take."""

    name: str
    limit_s: float
    emulated_limit_s: float = 240.0
    enters: bool = True  # else it forks processes that use the device, and does not itself

    def limit(self, place: Place) -> float:
        return self.emulated_limit_s if place.emulated else self.limit_s


# The most telling ones first, should time run out.
SECTIONS = (
    Section("kernels", 75),
    Section("communicator", 50),
    Section("training", 90),
    Section("pipeline", 50),
    Section("pack_bench", 60),
    Section("step_bench", 100),
    Section("two_ranks", 50, enters=False),
)


@dataclasses.dataclass
class Fork:
    """A process that runs one function, with a log of its own."""

    pid: int
    log: Path

    def ended_within(self, seconds: float) -> int | None:
        """Its exit status as waitstatus_to_exitcode; None if it goes on after that time."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def kill_group(self) -> None:
        """With all processes that it has started."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_LENGTH:]


def fork(function: Callable[[], None], log: Path, leads_group: bool = True) -> Fork:
    """Runs function() in a forked process; an exception becomes exit status 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Fork(pid, log)
    status = 1
    try:
        if leads_group:
            os.setpgid(0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Nobody's clean-up at exit: it could wait for a peer or a device that is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_section(
    section: Section, place: Place, limit_s: float, folder: Path, planted: str | None
) -> list[Case]:
    """Its rows; and a failed one where it did not come to its end."""
    path = folder / f"{section.name}.rows"
    log = folder / f"{section.name}.log"
    path.touch()
    log.touch()

    def run() -> None:
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(1.0, limit_s - STACKS_BEFORE_S), exit=False)
        module = importlib.import_module(section.name)
        if section.enters:
            place.enter()
        settle = place.settle if section.enters else lambda: None
        module.run(place, Rows(section.name, path, planted, settle))

    started_s = time.monotonic()
    process = fork(run, log)
    status = process.ended_within(limit_s)
    if status is None:
        process.kill_group()
    elapsed_s = time.monotonic() - started_s
    cases = [Case(**json.loads(line)) for line in path.read_text().splitlines()]
    if status is None:
        problem = f"not done after its limit of {limit_s:.0f} s"
    elif status != 0:
        problem = f"ended with status {status}"
    elif not cases:
        problem = "checked nothing"
    else:
        return cases
    detail = f"{problem}; its log ends: {process.log_tail()[-250:]}"
    return [*cases, check_case(section.name, "the whole section", "failed", elapsed_s, detail)]
