"""Owns one test of torch's own: its TestCase, made as the wheel does not, and how it ended.

The wheel contains torch/testing/_internal/distributed/distributed_test.py, but not the small file
that makes a TestCase of it: case_class() does. data_parallel_case.py and collectives_case.py
change what is tested. That is for good, so a test has a process of its own (run_cases.py).
"""

import dataclasses
import logging
import os
import sys
import unittest
from collections.abc import Callable
from typing import Any

import torch

CASE_TIMEOUT_S = 60
GROUP_TIMEOUT_S = 30  # below the case's, so that a rank's own words come first


@dataclasses.dataclass
class Record:
    """How a test ended: "pass", "fail" or "skip", and why."""

    test: str
    status: str
    reason: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Suite:
    """The TestCase with all of torch's tests, and what a test must leave behind to have passed."""

    case: type[unittest.TestCase]
    # What is wrong with a test that passed, or nothing; called in the test's process.
    complaint: Callable[[], str] = lambda: ""


def import_torch_tests(world_size: int, shown_backend: str) -> Any:
    """The module with torch's tests, which reads the environment while it is imported."""
    os.environ.update(BACKEND=shown_backend, WORLD_SIZE=str(world_size), TEMP_DIR="")
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(CASE_TIMEOUT_S)
    torch.set_num_threads(1)
    import torch.testing._internal.distributed.distributed_test as torch_tests

    torch_tests.default_pg_timeout = GROUP_TIMEOUT_S
    torch_tests.CUSTOM_PG_TIMEOUT.clear()
    return torch_tests


def case_class(torch_tests: Any) -> type[unittest.TestCase]:
    """The TestCase; its ranks are forked, which torch's own are not: that takes seconds a test."""
    base: Any = torch_tests.DistributedTest._DistTestBase

    class TorchCase(torch_tests.TestDistBackend, base):
        exit_codes: tuple[int, ...] = ()

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            TorchCase.exit_codes = tuple(process.exitcode for process in self.processes)
            super()._check_return_codes(fn, elapsed_time)

    return TorchCase


def run(suite: Suite, test: str) -> Record:
    """Runs the test: forks its ranks, and waits for them."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    result = unittest.TestResult()
    # A suite, so that the class's fixtures run.
    unittest.TestSuite([suite.case(test)]).run(result)
    problems = [text for _, text in result.failures + result.errors]
    if problems:
        # The first rank that failed is enough.
        return Record(test, "fail", problems[0].split("\nTo execute this test, run")[0])
    if result.unexpectedSuccesses:
        return Record(test, "fail", "passes, although torch expects it to fail")
    if result.skipped:
        return Record(test, "skip", result.skipped[0][1])
    exit_codes = suite.case.exit_codes  # type: ignore[attr-defined]
    if any(exit_codes):
        return Record(test, "fail", f"the ranks ended with exit codes {exit_codes}")
    complaint = suite.complaint()
    return Record(test, "fail" if complaint else "pass", complaint)
