"""Owns what the engine asks of torch's process groups: backends, time limits, stores."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pydist.errors import UsageError


def cpu_backend(group: dist.ProcessGroup) -> str:
    """The name of what serves tensors of the CPU; empty where nothing does, as with "nccl"."""
    try:
        return str(group._get_backend(torch.device("cpu")).name())
    except RuntimeError:
        return ""


def own_gloo_group(store: PrefixStore, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """With Gloo, and unknown to torch's registry, which names groups by what else is there, and
    that may differ between ranks. Collective."""
    kind = dist.ProcessGroup.BackendType.GLOO
    own = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    own._set_default_backend(kind)
    own._register_backend(torch.device("cpu"), kind, backend)
    return own


def forced_time_limit_s() -> float | None:
    """PYDIST_TIMEOUT_S; None where it is not set."""
    text = os.environ.get("PYDIST_TIMEOUT_S", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"PYDIST_TIMEOUT_S is {text!r}; expected a number of seconds above 0")
    return seconds


def time_limit_s(group: dist.ProcessGroup) -> float:
    """PYDIST_TIMEOUT_S, else the group's own, else torch's default."""
    forced = forced_time_limit_s()
    if forced is not None:
        return forced
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
            return float(timeout / timedelta(seconds=1))
        except (AttributeError, RuntimeError):  # no backend for it, or one without options
            continue
    return float(dist.default_pg_timeout / timedelta(seconds=1))


def own_store(group: dist.ProcessGroup, size: int) -> PrefixStore:
    """Keys outlive groups, and names of groups come again: a generation keeps them apart."""
    store = group.get_group_store()
    generation = (store.add("pydist/generation", 1) - 1) // size
    return PrefixStore(f"pydist/{generation}", store)
