"""Owns the way to the device: pydist._cuda is imported when the first CUDA tensor comes along."""

import importlib
import threading

import torch
from torch import Tensor

from pydist import _C
from pydist.errors import UsageError

EMULATED = "emulated"  # of the tests: memory of the CPU is the device's

_REINSTALL = "PYDIST_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps ."
_lock = threading.Lock()
_why_missing: str | None = None


def _why_no_cuda() -> str | None:
    """Imports pydist._cuda, once; the reason where that does not work."""
    global _why_missing
    with _lock:
        if _C.device_name() is None and _why_missing is None:
            _why_missing = _register_cuda()
        return _why_missing


def _register_cuda() -> str | None:
    try:
        module = importlib.import_module("pydist._cuda")
    except ModuleNotFoundError:
        return (
            "this pydist was built without CUDA; where torch has CUDA and nvcc is installed, "
            f"run `{_REINSTALL}` in its source tree"
        )
    except ImportError as error:  # a library that it is linked with
        return (
            f"pydist._cuda does not load with torch {torch.__version__} (CUDA "
            f"{torch.version.cuda}): {error}; run `{_REINSTALL}` in its source tree"
        )
    _C.register_device_runtime(module.runtime)
    return None


def on_device(tensor: Tensor) -> bool:
    """Whether this tensor's work goes over the device: streams, kernels, NCCL.

    False too for a CUDA tensor that pydist cannot serve; `require_device` says why.
    """
    name = _C.device_name()
    if name == EMULATED:
        return True
    return tensor.is_cuda and (name is not None or _why_no_cuda() is None)


def require_device(tensor: Tensor, what: str) -> None:
    """Raises UsageError where this CUDA tensor cannot be served; `what` begins the sentence."""
    if _C.device_name() == EMULATED:
        return
    if not tensor.is_cuda:
        raise UsageError(f"{what} is on {tensor.device}; pydist works on the CPU and on CUDA")
    reason = _why_no_cuda()
    if reason is not None:
        raise UsageError(f"{what} is on {tensor.device}, and {reason}")
