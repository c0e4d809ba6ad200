"""Limits of the machine: what pydist needs it asks for, and says so when it cannot have it."""

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pydist
from ranks import fresh_ranks

MIB = 1024 * 1024
CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000


def shrink_shared_memory_folder() -> None:
    """Gives this process a /dev/shm of 64 KiB. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace")
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k") != 0:
        raise OSError(ctypes.get_errno(), "cannot mount a small /dev/shm")


def train_in_small_folder(rank: int, world_size: int) -> str:
    if os.geteuid() == 0:
        shrink_shared_memory_folder()
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 64 * 1024
    model = pydist.DataParallel(torch.nn.Linear(1024, 1024))
    model(torch.full((4, 1024), float(rank))).sum().backward()
    tensor = pydist.symmetric_empty(4 * MIB, dtype=torch.float32)
    pydist.all_reduce(tensor.fill_(rank + 1.0))
    assert torch.equal(tensor, torch.full_like(tensor, 3.0))
    assert list(Path("/dev/shm").iterdir()) == []
    return model.report().transport


def test_a_small_dev_shm_does_not_matter() -> None:
    """Containers give /dev/shm 64 MiB or less; memfd memory is not bound by that."""
    outcomes = fresh_ranks(2, train_in_small_folder)
    assert [outcome.value for outcome in outcomes] == ["shared_memory"] * 2


def exceed_file_limit(rank: int, world_size: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, 8 * MIB))
    small = pydist.symmetric_empty(MIB, dtype=torch.float32)
    pydist.all_reduce(small.fill_(1.0))
    assert torch.equal(small, torch.full_like(small, 2.0))
    try:
        pydist.symmetric_empty(16 * MIB, dtype=torch.float32)
    except pydist.ResourceError as error:
        return str(error)
    return "no error"


def test_a_file_size_limit_is_an_error_with_the_remedy() -> None:
    """Shared memory obeys ulimit -f: what does not fit raises, and never ends in SIGBUS."""
    for outcome in fresh_ranks(2, exceed_file_limit):
        assert "ulimit -f" in outcome.value


def train_under_file_limit(rank: int, world_size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, 8 * MIB))
    # 4 MiB of gradients: the second step's do not fit beside the first's.
    model = pydist.DataParallel(torch.nn.Linear(1024, 1024, bias=False))
    kept = []
    for step in range(3):
        model.zero_grad()
        model(torch.full((1, 1024), float(rank + step))).sum().backward()
        gradient = model.module.weight.grad
        assert torch.equal(gradient, torch.full_like(gradient, step + 0.5))
        kept.append(gradient)


def test_a_full_arena_says_what_to_do() -> None:
    """Gradients that users keep fill the arena; once there is no room to pack either, all ranks
    raise, and say what to do."""
    for outcome in fresh_ranks(2, train_under_file_limit):
        assert outcome.error in ("pydist.ResourceError", "pydist.PeerError"), outcome
        assert "keep fewer gradients alive" in outcome.message


MEMORY_CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A memory cgroup of 600 MiB, which ranks may enter."""
    for root, limit in zip(MEMORY_CGROUPS, LIMIT_FILES, strict=True):
        group = root / f"pydist-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(600 * MIB))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("needs a memory cgroup that can be made")


def exceed_memory(rank: int, world_size: int, group: Path) -> str:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    kept = []
    try:
        for _ in range(64):
            kept.append(pydist.symmetric_empty(8 * MIB, dtype=torch.float32).fill_(1.0))
    except pydist.ResourceError as error:
        return str(error)
    return f"no error after {len(kept)} tensors of 32 MiB"


def test_a_memory_limit_is_an_error_with_the_remedy(limited_cgroup: Path) -> None:
    """In a container with little memory the kernel killed a rank that asked for more."""
    for outcome in fresh_ranks(1, exceed_memory, limited_cgroup):
        assert outcome.value is not None, outcome
        assert "memory limit" in outcome.value


def limit_address_space(rank: int, world_size: int) -> str:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2048 * MIB, used + 2048 * MIB))
    tensor = pydist.symmetric_empty(MIB, dtype=torch.float32)
    pydist.all_reduce(tensor.fill_(1.0))
    return str(float(tensor[-1]))


def test_an_address_space_limit_is_respected() -> None:
    """Under ulimit -v the arena reserves less, and still works."""
    assert [outcome.value for outcome in fresh_ranks(2, limit_address_space)] == ["2.0"] * 2
