"""Owns the process groups of a section, and a DataParallel that reduces though it is alone."""

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from place import Place

import pydist

GROUP_TIMEOUT_S = 40


class AloneDataParallel(pydist.DataParallel):
    """In a group of one rank, goes the whole way that gradients go among several."""

    def _reducer_settings(self, *arguments: Any) -> dict[str, Any]:
        return {**super()._reducer_settings(*arguments), "reduces_alone": True}


def make_store() -> dist.TCPStore:
    """Of this process; its port is its own."""
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def join_group(
    place: Place, store: dist.Store, rank: int, size: int, backend: str | None = None
) -> None:
    backend = backend or place.backend
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    options: dict[str, Any] = {"device_id": place.device} if backend == "nccl" else {}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, **options
    )


@contextlib.contextmanager
def lone_group(place: Place) -> Iterator[None]:
    """torch's default group, of this process alone."""
    join_group(place, make_store(), 0, 1)
    try:
        yield
    finally:
        dist.destroy_process_group()
