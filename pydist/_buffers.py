"""Owns the buffers of a wrapped module: giving all ranks the first rank's."""

from typing import TYPE_CHECKING

import torch

from pydist import _C
from pydist._device import on_device

if TYPE_CHECKING:
    from pydist._engine import Engine


def synchronize_buffers(
    engine: "Engine", module: torch.nn.Module, buffers: list[torch.Tensor], root: int = 0
) -> None:
    """Gives all ranks group rank `root`'s buffers, in one operation. Collective.

    They are written in place, but for a buffer that is held elsewhere: a graph whose backward is
    still to come may have saved it, and must find there what its forward used. Where such a buffer
    receives other values, a new tensor takes its place in the module. On a device, where comparing
    them would wait for it, one does in any case.
    """
    if not buffers:
        return
    held = _C.held_elsewhere(buffers) if engine.rank != root else []
    targets = list(buffers)
    for index in held:
        targets[index] = _empty_like(buffers[index])
    engine.broadcast_tensors(targets, root)
    for index in held:
        if on_device(buffers[index]) or not torch.equal(targets[index], buffers[index]):
            _exchange(module, buffers[index], targets[index])


def _empty_like(buffer: torch.Tensor) -> torch.Tensor:
    """With the same strides, also where elements share memory."""
    return torch.empty_strided(
        buffer.shape, buffer.stride(), dtype=buffer.dtype, device=buffer.device
    )


def _exchange(module: torch.nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    for part in module.modules():
        for name, buffer in list(part._buffers.items()):
            if buffer is old:
                setattr(part, name, new)
