"""Owns the tests of the way to the device where there is none: what is refused, and how."""

import ctypes
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import pydist
from pydist import _C, _device

HAS_CUDA_MODULE = importlib.util.find_spec("pydist._cuda") is not None

# In a process of its own, as the device that a process has found stays. Fake tensors are on CUDA
# as far as anybody can see, without a driver.
ASKS_FOR_CUDA = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pydist import UsageError, _C, _device

assert _C.device_name() is None
with FakeTensorMode():
    tensor = torch.empty(2, device="cuda")
print(_device.on_device(tensor), _C.device_name())
try:
    _device.require_device(tensor, "parameter w")
except UsageError as error:
    print(error)
"""


# The error is thrown by pydist._cuda, and translated by pydist._C.
ALLOCATES_WITHOUT_A_DRIVER = """
import torch

from pydist import ResourceError, _C, _cuda

_C.register_device_runtime(_cuda.runtime)
assert not torch.cuda.is_available()
try:
    _C.testing.allocate_on_device(512)
except ResourceError as error:
    print(error)
"""


def run(code: str, environment: dict[str, str] | None = None) -> list[str]:
    """The lines that a new interpreter prints."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_cuda_tensor_finds_the_cuda_module_or_hears_that_it_is_not_built() -> None:
    lines = run(ASKS_FOR_CUDA)
    if HAS_CUDA_MODULE:
        assert lines == ["True cuda"]
    else:
        assert lines[0] == "False None"
        assert "parameter w is on cuda:0" in lines[1]
        assert "built without CUDA" in lines[1]
        assert "PYDIST_CUDA=1 pip install" in lines[1]


def test_the_cpu_is_no_device() -> None:
    assert not _device.on_device(torch.empty(2))
    assert _C.device_name() is None


def test_other_devices_are_refused() -> None:
    tensor = torch.empty(2, device="meta")
    assert not _device.on_device(tensor)
    with pytest.raises(pydist.UsageError, match="parameter w is on meta; pydist works on the CPU"):
        _device.require_device(tensor, "parameter w")


def test_a_runtime_of_another_build_is_refused() -> None:
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = b"pydist.DeviceRuntime.0"
    with pytest.raises(pydist.UsageError, match="of different builds; reinstall pydist"):
        _C.register_device_runtime(new_capsule(1, name, None))
    assert _C.device_name() is None


def test_memory_needs_a_device() -> None:
    with pytest.raises(pydist.UsageError, match="this process has no device"):
        _C.testing.allocate_on_device(512)


@pytest.mark.skipif(not HAS_CUDA_MODULE, reason="pydist is built without CUDA")
def test_errors_of_the_cuda_module_are_those_of_the_engine() -> None:
    hidden = dict(os.environ, CUDA_VISIBLE_DEVICES="")  # where there is a driver
    (line,) = run(ALLOCATES_WITHOUT_A_DRIVER, hidden)
    assert line.startswith("cudaMalloc of 512 bytes"), line
