"""Owns the communicators of the tests of NCCL, made from the Store of a pool's ranks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from emulated import EmulatedPool
from pydist import _C

SUM, MEAN, MIN, MAX, PRODUCT = range(5)
_names = itertools.count()


def make(
    name: str, rank: int, size: int, timeout_s: float = 20.0, ranks: list[int] | None = None
) -> Any:
    """Collective: the communicator of that name."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return _C.NcclCommunicator(
        store, rank, size, 0, timeout_s, "the group", "start anew", ranks or []
    )


def run(pool: EmulatedPool, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(rank, size, name, *args) in every rank, with a name that no other call has."""
    return pool.run(function, fresh_name(), *args, **options)


def fresh_name() -> str:
    """Of a communicator; made where the ranks are started from."""
    return f"nccl{next(_names)}"


@contextlib.contextmanager
def in_order(comm: Any) -> Iterator[None]:
    """The calls come after what the current stream has, and before what it will have."""
    comm.after_current_stream()
    yield
    comm.before_current_stream()


def values(dtype: torch.dtype, rank: int, count: int) -> torch.Tensor:
    """Small integers that depend on rank and place, so that sums are exact in every type."""
    numbers = (torch.arange(count) * 7 + rank * 3) % 5
    if dtype == torch.bool:
        return numbers > 2
    return numbers.to(dtype)
