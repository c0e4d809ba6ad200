"""Owns communication hooks on the Python side: what may be registered, and how it is called."""

import importlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from pydist.errors import UsageError

HookResult = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, GradBucket], HookResult]

_BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: "allreduce_hook",
    BuiltinCommHookType.FP16_COMPRESS: "fp16_compress_hook",
}


# What these do is the engine's own mean, in a narrower type or not: it does it without a copy, and
# rounds once where they round at every rank.
_ENGINE_HOOKS = {
    "allreduce_hook": None,
    "fp16_compress_hook": "float16",
    "bf16_compress_hook": "bfloat16",
}


class HookedModel(Protocol):
    """What has hooks: a DataParallel."""

    _comm_hooks: list[tuple[Hook, Any]]
    process_group: dist.ProcessGroup
    gradient_as_bucket_view: bool


def check_comm_hook(hook: Any) -> None:
    """Raises, in torch's words, where this is not hook(state, bucket) -> Future[Tensor]."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise UsageError(
            "Communication hook must have a parameter named bucket: hook(state, bucket), "
            f"but it takes {signature}."
        )
    if not _says(signature.parameters["bucket"].annotation, GradBucket, "GradBucket"):
        raise UsageError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not _says(signature.return_annotation, HookResult, "Future[torch.Tensor]"):
        raise UsageError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def _says(annotation: Any, expected: Any, text: str) -> bool:
    """An annotation may be missing, say nothing, or be a string (from __future__)."""
    if isinstance(annotation, str):
        return annotation == "Any" or annotation.endswith(text)
    return annotation in (inspect.Parameter.empty, Any, expected)


def hook_name(hook: Any) -> str:
    """What logging data calls the hook; its type's name where it has none, as a partial."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def builtin_hook(kind: Any) -> Hook:
    """The hook that one of torch's BuiltinCommHookType stands for."""
    if kind not in _BUILTIN_HOOKS:
        known = ", ".join(str(name) for name in _BUILTIN_HOOKS)
        raise UsageError(f"unknown built-in communication hook {kind!r}; expected one of {known}")
    hook: Hook = getattr(_default_hooks(), _BUILTIN_HOOKS[kind])
    return hook


def _default_hooks() -> Any:
    """Where torch keeps its plainest hooks; slow to import, and rarely needed."""
    return importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")


def engine_wire_dtype(model: HookedModel) -> str | None:
    """The type that a hook which the engine stands in for lets gradients travel in."""
    return _ENGINE_HOOKS[model._comm_hooks[0][0].__name__] if _is_engines(model) else None


def _is_engines(model: HookedModel) -> bool:
    if not model._comm_hooks:
        return False
    hook, state = model._comm_hooks[0]
    name = getattr(hook, "__name__", "")
    if name not in _ENGINE_HOOKS or hook is not getattr(_default_hooks(), name):
        return False
    own_group = state is None or state is model.process_group
    return own_group and not (_ENGINE_HOOKS[name] and model.gradient_as_bucket_view)


def reducer_hook(model: HookedModel) -> tuple[Any, Any] | None:
    """The state and the hook that the C++ reducer calls: those registered, looked up in the model.

    The reducer must not hold them itself: a hook that refers to its model would keep both alive.
    None without a hook, and for torch's plainest ones, which the engine stands in for.
    """
    if not model._comm_hooks or _is_engines(model):
        return None
    return weakref.ref(model), _run_registered


def _run_registered(reference: "weakref.ref[HookedModel]", bucket: GradBucket) -> HookResult:
    model = reference()
    if model is None:
        raise RuntimeError("the model of a communication hook was destroyed during backward")
    return run_hooks(model, bucket)


def run_hooks(model: HookedModel, bucket: GradBucket) -> HookResult:
    """What the registered hook makes of a bucket."""
    ((hook, state),) = model._comm_hooks
    return hook(state, bucket)


def sum_over_ranks(group: dist.ProcessGroup, bucket: GradBucket) -> Any:
    """A future of the bucket's sum, in place; torch's hooks build on it and divide themselves."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future()
