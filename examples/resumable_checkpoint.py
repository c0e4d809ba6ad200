"""Owns the checkpoint of train_resumable.py: one file, whole or absent, whenever a rank dies.

Rank 0 alone reads and writes, so that ranks cannot disagree about what is there: on a file system
of several hosts, one of them may still see the file before last.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FILE_NAME = "checkpoint.pt"
# Never read; the next checkpoint overwrites what a death has left of it.
PARTIAL_NAME = FILE_NAME + ".partial"


class CheckpointError(RuntimeError):
    """The checkpoint there is belongs to another job."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the next step depends on."""

    job: dict[str, Any]  # what decides the bits of the result
    step: int
    position: int  # in the data
    model: dict[str, Any]
    optimizer: dict[str, Any]
    rng_states: list[Tensor]  # by rank


def save_checkpoint(
    checkpoint: Checkpoint, folder: Path, half_written: Callable[[], None] = lambda: None
) -> None:
    """Replaces the checkpoint in `folder` at once: a reader finds the old one or the new one.

    `half_written` is called where a death would leave the most behind.
    """
    # No asdict, which would copy the tensors.
    buffer = io.BytesIO()
    torch.save(vars(checkpoint), buffer)
    content = buffer.getbuffer()
    partial = folder / PARTIAL_NAME
    with partial.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        half_written()
        file.write(content[len(content) // 2 :])
        file.flush()
        # Before the rename, or a power cut could leave the new name with nothing behind it.
        os.fsync(file.fileno())
    partial.replace(folder / FILE_NAME)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(folder: Path, job: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint in `folder` as rank 0 sees it, on all ranks; None where there is none.

    Raises CheckpointError on all ranks if it is of another job than `job`.
    """
    path = folder / FILE_NAME
    found: list[dict[str, Any] | None] = [None]
    if dist.get_rank() == 0 and path.exists():
        # weights_only: tensors and plain values, no code of whoever wrote the file.
        found[0] = torch.load(path, map_location="cpu", weights_only=True)
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    checkpoint = Checkpoint(**found[0])
    differences = [
        f"{name} {checkpoint.job.get(name)} in the file, {value} now"
        for name, value in job.items()
        if checkpoint.job.get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"{path} was written by another job ({'; '.join(differences)}), so that going on from "
            "it would train something else; start with the options and the number of ranks of "
            "that job, or give another --folder"
        )
    return checkpoint
