"""Owns the device that the tests emulate: its library, the pools of ranks that have it, what a test
sets and what the library has found to be wrong.

    emulated_pool(2).run(function, *args)   # function(rank, world_size, *args) in every rank

In such a rank tensors of the CPU are the device's (`pydist._device.on_device` is true for them),
streams run late and in random order, and NCCL's functions work between the ranks. A fault of order
or use (tests/emulation/device.h) raises in the rank, or at the latest when the function returns; a
test that wants one asks for it: `with fault("is freed"): ...`.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ranks

HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
BUILD = HERE.parent / "build" / "emulation"
LIBRARY = "PYDIST_EMULATED_LIBRARY"  # in the environment of ranks
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread"]
# Versions of NCCL that the library can be built as, by what they lack.
NCCL_VERSIONS = {"2.18": 21805, "2.19": 21903, "2.28": 22807}
OF_THE_VERSION = "nccl_functions.cpp"


@cache
def library(nccl: str = "2.28") -> str:
    """The path of the library, of which is built what has changed."""
    headers = [*sorted((HERE / "emulation").glob("*.h")), HERE / "cpp" / "half_formats.h"]
    headers += [CSRC / "base" / name for name in ("device_runtime.h", "error.h", "check.h")]
    headers.append(CSRC / "transport" / "nccl_api.h")
    included = b"".join(path.read_bytes() for path in headers)
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock, ThreadPoolExecutor(os.cpu_count()) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def compiled(source: Path) -> Path:
            label, flags = "any", [*FLAGS, f"-I{CSRC}"]
            if source.name == OF_THE_VERSION:
                label = nccl
                flags.append(f"-DPYDIST_EMULATED_NCCL_VERSION={NCCL_VERSIONS[nccl]}")
            content = included + source.read_bytes() + repr(flags).encode()
            arguments = [*flags, "-c", str(source)]
            return _made(BUILD / f"{source.stem}-{label}", ".o", content, arguments)

        objects = list(threads.map(compiled, sorted((HERE / "emulation").glob("*.cpp"))))
        # The name that the engine looks for among what is loaded.
        arguments = ["-shared", "-Wl,-soname,libnccl.so.2", *map(str, objects), "-pthread"]
        content = repr(arguments).encode()
        return str(_made(BUILD / f"libnccl-{nccl}", ".so.2", content, arguments))


def _made(stem: Path, ending: str, content: bytes, arguments: list[str]) -> Path:
    """The compiler's output that is there, or made now, in the place of that of other content."""
    target = stem.with_name(f"{stem.name}-{hashlib.sha256(content).hexdigest()[:16]}{ending}")
    if not target.exists():
        for old in stem.parent.glob(f"{stem.name}-*{ending}"):
            old.unlink()
        _run_compiler([*arguments, "-o", f"{target}.new"])
        os.rename(f"{target}.new", target)
    return target


def _run_compiler(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class EmulatedPool:
    """Ranks that have the device; as ranks.RankPool otherwise."""

    def __init__(self, world_size: int, nccl: str, env: dict[str, str]) -> None:
        self._pool = ranks.get_pool(world_size, **{LIBRARY: library(nccl), **env})

    def run(
        self, function: Callable[..., Any], *args: Any, seed: int = 0, **options: Any
    ) -> list[Any]:
        """`seed`: of the order in which streams run. options: of RankPool.run, and the
        function's."""
        return self._pool.run(run_on_device, function, args, seed, **options)

    def discard(self) -> None:
        """Ends the ranks at once, after a test that has broken their engines."""
        self._pool.discard()

    @property
    def pids(self) -> list[int]:
        return self._pool.pids


def emulated_pool(world_size: int, nccl: str = "2.28", **env: str) -> EmulatedPool:
    """The pool of that size whose ranks have the device; made at the first use."""
    return EmulatedPool(world_size, nccl, env)


def run_on_device(
    rank: int, size: int, function: Callable[..., Any], args: Any, seed: int, **keywords: Any
) -> Any:
    """What a rank of such a pool runs: the function, between looks at the device's faults."""
    load()
    reset(seed)
    try:
        result = function(rank, size, *args, **keywords)
    except BaseException as error:
        found = take_faults()
        if found and "the emulated device found a fault" not in str(error):
            raise AssertionError(f"the emulated device found faults: {found}") from error
        raise
    synchronize()
    found = take_faults()
    assert not found, f"the emulated device found faults: {found}"
    return result


@cache
def load() -> ctypes.CDLL:
    """Makes the device this process's, once."""
    from pydist import _C

    path = os.environ[LIBRARY]
    loaded = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    loaded.emulation_error.restype = ctypes.c_char_p
    loaded.emulation_take_faults.restype = ctypes.c_char_p
    loaded.ncclGetErrorString.restype = ctypes.c_char_p
    loaded.ncclGetLastError.restype = ctypes.c_char_p
    _C.testing.load_device(path)
    return loaded


def call(name: str, *arguments: Any) -> None:
    """A function of tests/emulation/control.h; what it reports is raised."""
    function = getattr(load(), f"emulation_{name}")
    if function(*[_as_c(argument) for argument in arguments]) != 0:
        raise RuntimeError(load().emulation_error().decode())


def call_for(kind: Any, name: str, *arguments: Any) -> Any:
    """The same where the last argument is what it gives."""
    result = kind()
    call(name, *arguments, ctypes.byref(result))
    return result.value


def _as_c(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return ctypes.c_int(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_uint64(value) if isinstance(value, int) else value


def reset(seed: int) -> None:
    """Waits for the device, forgets options and planted bugs."""
    call("reset", seed)


def synchronize() -> None:
    """Waits for the device."""
    call("synchronize")


def set_option(name: str, value: float) -> None:
    """How the device behaves until the test ends: see tests/emulation/options.h."""
    call("set_option", name, float(value))


def plant(bug: str, nth: int = 0) -> None:
    """Plants a bug at the nth of the occasions to come: see tests/emulation/planted.h."""
    call("plant", bug, nth)


def take_faults() -> list[str]:
    """What was found to be wrong so far, which is forgotten."""
    return list(load().emulation_take_faults().decode().splitlines())


@contextlib.contextmanager
def fault(text: str) -> Iterator[None]:
    """The body must make the device find a fault whose text has this in it. Afterwards the device
    is synchronized, so that the host, and what it enqueues, comes after everything before."""
    with contextlib.suppress(RuntimeError):
        yield
    with contextlib.suppress(RuntimeError):
        synchronize()
    found = take_faults()
    assert any(text in each for each in found), f"{text!r} is not in {found}"


def make_torch_stream() -> int:
    """One that torch's operations may run on."""
    return int(call_for(ctypes.c_void_p, "make_torch_stream"))


@contextlib.contextmanager
def current_stream(stream: int) -> Iterator[None]:
    """As torch.cuda.stream()."""
    call("set_current_stream", stream)
    try:
        yield
    finally:
        call("set_current_stream", 0)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Nothing runs meanwhile but what a call waits for."""
    call("hold", True)
    try:
        yield
    finally:
        call("hold", False)


# The device's seam, for tests of the emulation itself. Streams, events and memory by handle; the
# stream 0 is the default one, which is the current one in these ranks.


def make_stream() -> int:
    return int(call_for(ctypes.c_void_p, "make_stream"))


def make_event() -> int:
    return int(call_for(ctypes.c_void_p, "make_event"))


def record(event: int, stream: int) -> None:
    call("record", event, stream)


def wait(stream: int, event: int) -> None:
    call("wait", stream, event)


def is_complete(event: int) -> bool:
    return bool(call_for(ctypes.c_int, "is_complete", event))


def copy(target: Tensor, source: Tensor, stream: int) -> None:
    call("copy", target.data_ptr(), source.data_ptr(), source.nbytes, stream)


def fill_zero(target: Tensor, stream: int) -> None:
    call("fill_zero", target.data_ptr(), target.nbytes, stream)


def launch(
    target: Tensor, source: Tensor, factor: float, stream: int, declares: bool = True
) -> None:
    """target = target * factor + source, of float32; its accesses may be kept secret."""
    arguments = (target.data_ptr(), source.data_ptr(), ctypes.c_float(factor), target.numel())
    call("launch", *arguments, declares, stream)


def touch(actor: str, tensor: Tensor, writes: bool) -> None:
    """Declares an access of the host's, or of torch's on the current stream ("host", "torch")."""
    call("touch", actor, writes, tensor.data_ptr(), tensor.nbytes)


class Graph:
    """As torch.cuda.CUDAGraph: `with graph.capture(): ...`, then `graph.replay()`. What torch's
    operations do meanwhile is no part of it."""

    def __init__(self) -> None:
        self._handle = 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[int]:
        stream = make_torch_stream()
        with current_stream(stream):
            call("begin_capture", stream)
            yield stream
            self._handle = int(call_for(ctypes.c_void_p, "end_capture", stream))

    def replay(self) -> None:
        call("replay", self._handle, 0)


class WatchedTorch(TorchDispatchMode):
    """Declares what torch's operations read and write, as work on the current stream: `with
    WatchedTorch(): ...`. Without it the device knows of torch only where tensors end."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.is_view:
            return result
        arguments = dict(zip(function._schema.arguments, args, strict=False))
        for argument, value in arguments.items():
            writes = argument.alias_info is not None and argument.alias_info.is_write
            _touch_all(value, writes)
        _touch_all(result, True)
        return result


def _touch_all(value: Any, writes: bool) -> None:
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.numel() > 0:
            last = sum(
                (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            nbytes = (last + 1) * tensor.element_size()
            call("touch", "torch", writes, tensor.data_ptr(), nbytes)
