"""Owns torch's tests of collectives on another backend than those that they know by name.

They ask for their backend's name in decorators and bodies, and skip or choose what they demand by
it. So they are shown a name that they know, while every process group is made of the backend under
test.
"""

import functools
import inspect
import mmap
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch_case import Suite, case_class, import_torch_tests

# What makes groups, by name, and so has to see the real one.
_MAKERS = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")
# Written by every rank, in memory shared with the case's process: groups of the backend were made.
_made = mmap.mmap(-1, 1)


def build(world_size: int, backend: str, shown: str, any_world_size: bool) -> Suite:
    """To be called once per process.

    Args:
        world_size: ranks per test.
        backend: what process groups are made of.
        shown: the name that the tests are given for it.
        any_world_size: run the tests too that are reserved for eight ranks or more.
    """
    if any_world_size:
        import torch.testing._internal.common_distributed as requirements

        requirements.skip_if_small_worldsize = lambda test: test
    if shown != backend:
        _show(shown, backend)
    if backend != "gloo":
        _refuse_gloo()
    torch_tests = import_torch_tests(world_size, shown)
    torch_tests.get_profiling_event = _renaming(torch_tests.get_profiling_event, shown, backend)
    _mark_groups(backend)
    return Suite(case_class(torch_tests), lambda: _complaint(backend))


def _complaint(backend: str) -> str:
    return "" if _made[0] else f"passes, but not with {backend}"


def _mark_groups(backend: str) -> None:
    make = c10d.init_process_group

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        name = dist.group.WORLD._get_backend(torch.device("cpu")).name()
        _made[0] = name.lower() == backend

    c10d.init_process_group = dist.init_process_group = init_process_group


def _show(shown: str, backend: str) -> None:
    for name in _MAKERS:
        _set(name, _with_backend(getattr(c10d, name), shown, backend))
    real_get = c10d.get_backend

    @functools.wraps(real_get)
    def get_backend(*args: Any, **kwargs: Any) -> str:
        name = real_get(*args, **kwargs)
        return c10d.Backend(shown) if name == backend else name

    _set("get_backend", get_backend)  # monitored_barrier asks too: it is for Gloo alone
    setattr(dist, f"is_{shown}_available", lambda: True)


def _set(name: str, function: Callable[..., Any]) -> None:
    setattr(c10d, name, function)
    setattr(dist, name, function)


def _with_backend(make: Callable[..., Any], shown: str, backend: str) -> Callable[..., Any]:
    """The same function, which understands the shown name as the backend's."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def with_real_name(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if str(bound.arguments.get("backend")).lower() == shown:
            bound.arguments["backend"] = backend
        return make(*bound.args, **bound.kwargs)

    return with_real_name


def _renaming(find: Callable[..., Any], shown: str, backend: str) -> Callable[..., Any]:
    """Finds the profiler's events of the backend's operations under the shown name."""

    def find_event(event_name: str, profiler: Any, *args: Any, **kwargs: Any) -> Any:
        kineto = isinstance(profiler, torch.profiler.profile)
        for event in profiler.events() if kineto else profiler.function_events:
            if event.name.startswith(f"{backend}:"):
                event.name = shown + event.name[len(backend) :]
        return find(event_name, profiler, *args, **kwargs)

    return find_event


def _refuse_gloo() -> None:
    """Nothing of what is tested may be done by Gloo.

    At the debug level DETAIL torch itself compares calls, through a group with Gloo beside each.
    """
    gloo, wrap = c10d.ProcessGroupGloo, c10d._create_process_group_wrapper

    class NoGloo(gloo):
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            raise AssertionError("a Gloo group is made")

    c10d.ProcessGroupGloo = NoGloo

    @functools.wraps(wrap)
    def wrap_with_gloo(*args: Any, **kwargs: Any) -> Any:
        c10d.ProcessGroupGloo = gloo
        try:
            return wrap(*args, **kwargs)
        finally:
            c10d.ProcessGroupGloo = NoGloo

    c10d._create_process_group_wrapper = wrap_with_gloo
