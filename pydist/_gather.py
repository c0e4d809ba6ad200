"""Owns the exchange of nested values between ranks: tensors travel as such, the rest as bytes."""

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pydist._engine import Engine
from pydist._trees import map_tensors, take_apart

_BATCH_NBYTES = 256 << 20  # that travel together, so that few are there twice


class _Place:
    """Of a tensor in a value that travels without it. No dataclass: those are taken apart."""

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index = index
        self.shape = tensor.shape
        self.dtype = tensor.dtype


def gather_values(engine: Engine, mine: Any, to_all: bool = True) -> list[Any] | None:
    """Everybody's values by rank, with copies of their tensors on the CPU; DTensors come whole.
    Collective.

    Without `to_all` only group rank 0 gets them, and the others None.
    """
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Place:
        tensors.append(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        return _Place(len(tensors) - 1, tensors[-1])

    with torch.no_grad(), engine.all_or_none("collecting the state"):
        packed = pickle.dumps(map_tensors(take, mine))
    frames = [pickle.loads(text) for text in engine.exchange_bytes(packed)]
    wanted = to_all or engine.rank == 0
    found: list[Any] = []
    for root, frame in enumerate(frames):
        leaves, structure = take_apart(frame)
        places = [leaf for leaf in leaves if isinstance(leaf, _Place)]
        own = tensors if engine.rank == root else []
        received = _broadcast(engine, root, places, own, keep=wanted)
        if wanted:
            found.append(
                structure.build([received[x.index] if isinstance(x, _Place) else x for x in leaves])
            )
    return found if wanted else None


def _broadcast(
    engine: Engine, root: int, places: list[_Place], own: list[Tensor], keep: bool
) -> dict[int, Tensor]:
    """Copies of rank `root`'s tensors, by their index."""
    found: dict[int, Tensor] = {}
    for batch in _batches(places):
        if engine.rank == root:
            tensors = [_copy(own[place.index]) for place in batch]
        else:
            tensors = [torch.empty(place.shape, dtype=place.dtype) for place in batch]
        engine.broadcast_tensors(tensors, root)
        if keep:
            found.update(zip((place.index for place in batch), tensors, strict=True))
    return found


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, where there is room for a whole model."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _batches(places: list[_Place]) -> Iterator[list[_Place]]:
    batch: list[_Place] = []
    nbytes = 0
    for place in places:
        batch.append(place)
        nbytes += place.shape.numel() * place.dtype.itemsize
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
