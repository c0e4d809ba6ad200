"""Owns one test of torch's own, run with DataParallel in the place of torch's class.

The wheel contains torch/testing/_internal/distributed/distributed_test.py, but not the small file
that makes a TestCase of it: build() does. What it changes in torch is for good, so it has a
process of its own (run_cases.py).
"""

import dataclasses
import functools
import logging
import mmap
import os
import sys
import types
import unittest
from typing import Any

import cpu_shim
import torch
import torch.nn.parallel.distributed as stock_module

import pydist

# Written by every rank, in memory shared with the case's process: who was constructed.
_OURS, _STOCK = 0, 1
_constructed = mmap.mmap(-1, 2)

CASE_TIMEOUT_S = 60
GROUP_TIMEOUT_S = 30  # below the case's, so that a rank's own words come first


@dataclasses.dataclass
class Record:
    """How a test ended: "pass", "fail" or "skip", and why."""

    test: str
    status: str
    reason: str = ""
    seconds: float = 0.0


def build(world_size: int, shim: bool) -> type[unittest.TestCase]:
    """The TestCase with all of torch's tests; to be called once per process.

    Args:
        world_size: ranks per test.
        shim: run the tests that want GPUs, on the CPU.
    """
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), TEMP_DIR="")
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(CASE_TIMEOUT_S)
    torch.set_num_threads(1)
    if shim:
        cpu_shim.meet_requirements()
    # Reads the environment, and imports torch's class: only now.
    import torch.testing._internal.distributed.distributed_test as torch_tests

    torch_tests.default_pg_timeout = GROUP_TIMEOUT_S
    torch_tests.CUSTOM_PG_TIMEOUT.clear()
    _substitute(shim)
    if shim:
        cpu_shim.install(world_size)
        torch_tests.torch = cpu_shim.torch_without_devices()
    return _case_class(torch_tests)


def _substitute(shim: bool) -> None:
    stock = stock_module.DistributedDataParallel
    _mark_construction(stock, _STOCK, shim)
    _mark_construction(pydist.DataParallel, _OURS, shim)
    for module in list(sys.modules.values()):
        # pydist's own modules derive from the stock class.
        if isinstance(module, types.ModuleType) and not module.__name__.startswith("pydist"):
            for name in [name for name, value in vars(module).items() if value is stock]:
                setattr(module, name, pydist.DataParallel)


def _mark_construction(kind: type, mark: int, without_devices: bool) -> None:
    """Changes the class in place, so that its identity, pickles and subclasses stay the same."""
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        _constructed[mark] = 1
        if without_devices:
            args = (*(None for _ in args[:2]), *args[2:])  # device_ids and output_device
            kwargs.pop("device_ids", None)
            kwargs.pop("output_device", None)
        original(self, module, *args, **kwargs)

    kind.__init__ = init


def _case_class(torch_tests: Any) -> type[unittest.TestCase]:
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


def run(case: type[unittest.TestCase], test: str) -> Record:
    """Runs the test: forks its ranks, and waits for them."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    result = unittest.TestResult()
    unittest.TestSuite([case(test)]).run(result)  # a suite, so that the class's fixtures run
    problems = [text for _, text in result.failures + result.errors]
    if problems:
        # The first rank that failed is enough.
        return Record(test, "fail", problems[0].split("\nTo execute this test, run")[0])
    if result.unexpectedSuccesses:
        return Record(test, "fail", "passes, although torch expects it to fail")
    if result.skipped:
        return Record(test, "skip", result.skipped[0][1])
    exit_codes = case.exit_codes
    if any(exit_codes):
        return Record(test, "fail", f"the ranks ended with exit codes {exit_codes}")
    if not _constructed[_OURS] or _constructed[_STOCK]:
        return Record(test, "fail", "passes, but not with pydist.DataParallel alone")
    return Record(test, "pass")
