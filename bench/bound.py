"""Owns the bound of every reduction: buffers updated in place, each rank its slice, no waiting."""

import mmap
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.ranks import Rank
from pydist import _C

# Slices of buffers begin on cache lines, so that ranks never write the same one.
SLICE_ALIGNMENT = 64


def shared_buffers(rank: Rank, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
    """One buffer per rank, in memory that all ranks map; this rank's own is zeroed."""
    nbytes = max(num_elements * dtype.itemsize, mmap.PAGESIZE)
    fd = os.memfd_create("bound")
    os.ftruncate(fd, nbytes)
    paths = [""] * rank.size
    dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{fd}")
    buffers = []
    for path in paths:
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), nbytes)
        buffers.append(torch.frombuffer(mapped, dtype=dtype, count=num_elements))
    rank.barrier()
    os.close(fd)
    buffers[rank.index].zero_()
    return buffers


def slice_of(rank: Rank, buffers: Sequence[Tensor]) -> list[Tensor]:
    """This rank's share of all buffers."""
    num_elements = buffers[0].numel()
    share = -(-num_elements // rank.size)
    share = -(-share // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
    begin = min(rank.index * share, num_elements)
    end = min(begin + share, num_elements)
    return [buffer[begin:end] for buffer in buffers]


def update(slices: list[Tensor]) -> None:
    """Every slice becomes their sum: each input read once, each output written once."""
    _C.bound_update(slices)
