"""Owns torch's data-parallel tests with DataParallel in the place of torch's class."""

import functools
import mmap
import sys
import types
from typing import Any

import cpu_shim
import torch.nn.parallel.distributed as stock_module
from torch_case import Suite, case_class, import_torch_tests

import pydist

# Written by every rank, in memory shared with the case's process: who was constructed.
_OURS, _STOCK = 0, 1
_constructed = mmap.mmap(-1, 2)


def build(world_size: int, shim: bool) -> Suite:
    """To be called once per process.

    Args:
        world_size: ranks per test.
        shim: run the tests that want GPUs, on the CPU.
    """
    if shim:
        cpu_shim.meet_requirements()
    torch_tests = import_torch_tests(world_size, "gloo")
    _substitute(shim)
    if shim:
        cpu_shim.install(world_size)
        torch_tests.torch = cpu_shim.torch_without_devices()
    return Suite(case_class(torch_tests), _complaint)


def _complaint() -> str:
    if _constructed[_OURS] and not _constructed[_STOCK]:
        return ""
    return "passes, but not with pydist.DataParallel alone"


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
