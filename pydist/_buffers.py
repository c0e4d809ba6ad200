"""Owns the buffers of a wrapped module: giving all ranks the first rank's."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pydist._engine import Engine


def synchronize_buffers(engine: "Engine", buffers: list[torch.Tensor], root: int = 0) -> None:
    """Gives all ranks group rank `root`'s buffers, in one operation. Collective."""
    if buffers:
        engine.broadcast_tensors(buffers, root)
