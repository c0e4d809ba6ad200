"""Owns the bound of every reduction: buffers updated in place, each rank its slice, no waiting."""

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.ranks import Rank

SOURCE = Path(__file__).parent / "bound.cpp"
LIBRARY = Path(__file__).parent.parent / "build" / "bench" / "libbound.so"
# For this very machine, unlike the engine's kernels.
COMPILE_ARGS = ("-O3", "-march=native", "-shared", "-fPIC")
SIZES = (2, 4)

# Slices of buffers begin on cache lines, so that ranks never write the same one.
SLICE_ALIGNMENT = 64


def shared_buffers(rank: Rank, num_elements: int) -> list[Tensor]:
    """One float32 buffer per rank, in memory that all ranks map; this rank's own is zeroed."""
    nbytes = max(num_elements * torch.float32.itemsize, mmap.PAGESIZE)
    fd = os.memfd_create("bound")
    os.ftruncate(fd, nbytes)
    paths = [""] * rank.size
    dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{fd}")
    buffers = []
    for path in paths:
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), nbytes)
        buffers.append(torch.frombuffer(mapped, dtype=torch.float32, count=num_elements))
    rank.barrier()
    os.close(fd)
    buffers[rank.index].zero_()
    return buffers


def updater(rank: Rank, buffers: Sequence[Tensor]) -> Callable[[], None]:
    """Makes this rank's slice of every buffer their sum: each read once, each written once."""
    begin, end = _slice_of(rank, buffers[0].numel())
    slices = [buffer[begin:end] for buffer in buffers]
    pointers = (ctypes.c_void_p * len(slices))(*(piece.data_ptr() for piece in slices))
    num_elements = ctypes.c_int64(end - begin)
    function = ctypes.CDLL(str(_library(rank)))[f"update_{rank.size}"]

    def update(keep_alive: Sequence[Tensor] = slices) -> None:
        function(pointers, num_elements)

    return update


def _slice_of(rank: Rank, num_elements: int) -> tuple[int, int]:
    share = -(-num_elements // rank.size)
    share = -(-share // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
    begin = min(rank.index * share, num_elements)
    return begin, min(begin + share, num_elements)


def _library(rank: Rank) -> Path:
    """Compiled by the first rank where the source is newer."""
    if rank.size not in SIZES:
        raise ValueError(f"the bound is there for {SIZES} ranks, found {rank.size}")
    stale = not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime
    if stale and rank.index == 0:
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        made = LIBRARY.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *COMPILE_ARGS, str(SOURCE), "-o", str(made)], check=True)
        made.replace(LIBRARY)  # in one step: another benchmark may be loading it
    rank.barrier()
    return LIBRARY
