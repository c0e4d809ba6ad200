"""Owns the process that runs torch's tests, several at once, and prints a JSON line for each.

    python run_cases.py --world-size 2 --jobs 2 data-parallel --shim TEST...
    python run_cases.py --world-size 2 --jobs 2 collectives --backend pydist TEST...

Each test has a process of its own, forked from this one, so that a crash or a hang costs that test
only; so are its ranks.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import time
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch_case
from torch_case import CASE_TIMEOUT_S, Record, Suite

_LOG_CHARS = 3000
# A case gives up by itself a little earlier, with the tracebacks of its ranks.
_GRACE_S = 10


class _Running:
    """A test that is being run, in a session of its own."""

    def __init__(self, suite: Suite, test: str, log: Path) -> None:
        self.test = test
        self._log = log
        self._begin = time.monotonic()
        self.deadline = self._begin + CASE_TIMEOUT_S + _GRACE_S
        self.receiver, sender = get_context("fork").Pipe(duplex=False)
        self.process = get_context("fork").Process(
            target=_run_in_session, args=(suite, test, log, sender)
        )
        self.process.start()
        sender.close()

    def finish(self) -> Record:
        """Ends what is left of the session, and says how the test went."""
        record = self._record()
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        record.seconds = round(time.monotonic() - self._begin, 2)
        return record

    def _record(self) -> Record:
        late = time.monotonic() > self.deadline
        if not late or self.receiver.poll():
            try:
                record = self.receiver.recv()
                assert isinstance(record, Record)
                return record
            except EOFError:
                pass
        how = "did not end in time" if late else "ended without a result"
        log = self._log.read_text(errors="replace")[-_LOG_CHARS:]
        return Record(self.test, "fail", f"the case's process {how}\n{log}")


def _run_in_session(suite: Suite, test: str, log: Path, sender: Connection) -> None:
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        sender.send(torch_case.run(suite, test))
    except BaseException:
        sender.send(Record(test, "fail", traceback.format_exc()))


def run_all(suite: Suite, tests: list[str], jobs: int) -> None:
    """Prints a record as JSON as soon as its test has ended."""
    waiting = collections.deque(tests)
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(prefix="pydist-conformance-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    test = waiting.popleft()
                    running.append(_Running(suite, test, Path(folder) / f"{test}.log"))
                for ended in _wait_for_some(running):
                    running.remove(ended)
                    print(json.dumps(dataclasses.asdict(ended.finish())), flush=True)
        finally:
            for left in running:
                left.finish()


def _wait_for_some(running: list[_Running]) -> list[_Running]:
    next_deadline = min(case.deadline for case in running)
    ready: list[Any] = wait(
        [case.process.sentinel for case in running], max(0.0, next_deadline - time.monotonic())
    )
    now = time.monotonic()
    return [c for c in running if c.process.sentinel in ready or now > c.deadline]


def _build(args: argparse.Namespace) -> Suite:
    """Only the module that is needed: each changes torch."""
    if args.suite == "data-parallel":
        import data_parallel_case

        return data_parallel_case.build(args.world_size, args.shim)
    import collectives_case

    return collectives_case.build(args.world_size, args.backend, args.shown, args.any_world_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    suites = parser.add_subparsers(dest="suite", required=True)
    data_parallel = suites.add_parser("data-parallel")
    data_parallel.add_argument("--shim", action="store_true", help="run tests for GPUs on the CPU")
    collectives = suites.add_parser("collectives")
    collectives.add_argument("--backend", default="pydist")
    collectives.add_argument("--shown", default="gloo", help="the name that the tests are shown")
    collectives.add_argument(
        "--any-world-size", action="store_true", help="run the tests for eight ranks and more too"
    )
    for suite in (data_parallel, collectives):
        suite.add_argument("tests", nargs="+")
    args = parser.parse_args()
    run_all(_build(args), args.tests, args.jobs)


if __name__ == "__main__":
    main()
