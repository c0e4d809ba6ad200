"""Owns the shim that lets torch's accelerator tests run on the CPU: it makes device ids inert.

It shows nothing about devices or streams. It changes torch for good, so only processes that do
nothing but run such tests may install it.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

# fmt: off
_FACTORIES = [
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint",
    "randperm", "arange", "linspace", "eye", "empty_strided", "sparse_coo_tensor", "empty_like",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "scalar_tensor",
]
_IDLE = ["set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "_sleep"]
# fmt: on


class _Inert:
    """Stands for a stream, an event or a device guard: takes every call and does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def elapsed_time(self, *_args: Any) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing()


def _nothing() -> Callable[..., None]:
    """A function of its own each time: torch.compile tells torch's functions by identity."""
    return lambda *_args, **_kwargs: None


def meet_requirements() -> None:
    """Lets every test believe that it has its GPUs; to be called before torch's tests are imported.

    They ask in decorators, while they are imported.
    """
    import torch.testing._internal.common_distributed as requirements

    def keep(function: Any) -> Any:
        return function

    def always(*_args: Any, **_kwargs: Any) -> Any:
        return keep

    requirements.skip_if_no_gpu = keep
    requirements.skip_if_lt_x_gpu = always
    requirements.nccl_skip_if_lt_x_gpu = always
    requirements.require_n_gpus_for_nccl_backend = always
    requirements.init_multigpu_helper = lambda size, _backend: {i: [i] for i in range(int(size))}


def install(world_size: int) -> None:
    """Places everything that asks for a GPU on the CPU."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _moved_to_cpu(torch.Tensor.to)
    torch.nn.Module.to = _moved_to_cpu(torch.nn.Module.to)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    torch.set_default_device = _nothing()
    _replace_cuda(world_size)


def torch_without_devices() -> types.ModuleType:
    """torch as torch's tests are to see it: torch.device(rank) would ask for an accelerator."""
    shown: Any = types.ModuleType("torch")
    shown.__getattr__ = lambda name: getattr(torch, name)
    shown.device = lambda value, *index: torch.device(_cpu_instead(value), *index)
    return shown


def _replace_cuda(world_size: int) -> None:
    cuda: Any = torch.cuda
    cuda.device_count = lambda: world_size
    cuda.current_device = lambda: 0
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_args, **_kwargs: 0
    for name in _IDLE:
        setattr(cuda, name, _nothing())
    cuda.device = cuda.stream = cuda.Stream = cuda.Event = _Inert
    torch.Stream = torch.Event = _Inert
    cuda.nccl.version = lambda: (2, 7, 0)  # torch's logger asks when a call fails
    for place, name in (
        (cuda, "current_stream"),
        (cuda, "default_stream"),
        (torch.accelerator, "current_stream"),
    ):
        setattr(place, name, lambda *_args, **_kwargs: _Inert())
    torch.accelerator.synchronize = _nothing()


def _cpu_instead(value: Any) -> Any:
    """The CPU for what names a GPU; any other value is returned as it is."""
    names_gpu = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, str) and value.split(":")[0] == "cuda"
    )
    if names_gpu or (isinstance(value, torch.device) and value.type == "cuda"):
        return torch.device("cpu")
    return value


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu_instead(kwargs["device"])
        return factory(*args, **kwargs)

    return make


def _moved_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """`to` takes the device first, or by its keyword."""

    @functools.wraps(to)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_cpu_instead(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _cpu_instead(kwargs["device"])
        return to(self, *args, **kwargs)

    return move
