"""Owns the tests of starting, leaving and repeating: launchers, clean exits, and no growth."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from conftest import Transport
from models import mlp, wavy_loss
from pydist import DataParallel
from ranks import fresh_ranks, resource_snapshot
from reference import OneProcess, assert_reduced, draw


def step(model: nn.Module, rank: int, number: int, width: int) -> None:
    model.zero_grad()
    wavy_loss(model(draw(rank, number, 4, width))).backward()


def make_and_drop(rank: int, world_size: int, num_rounds: int) -> dict[str, int]:
    for number in range(num_rounds):
        width = 192 if number % 10 == 0 else 16
        model = DataParallel(mlp(width, 2))
        step(model, rank, 0, width)
        step(model, rank, 1, width)
        del model
    gc.collect()
    return resource_snapshot(rank, world_size)


def test_c69_200_models_leave_nothing_behind(transport: Transport) -> None:
    """200 models are wrapped, trained and dropped: threads and descriptors stay as they are, memory
    grows by less than 20 MB, and /dev/shm stays empty."""
    shared_before = set(os.listdir("/dev/shm"))
    pool = transport.pool(2)
    before = pool.run(make_and_drop, 20)
    after = pool.run(make_and_drop, 200)
    for old, new in zip(before, after, strict=True):
        assert new["threads"] == old["threads"]
        assert new["descriptors"] == old["descriptors"]
        assert new["children"] == old["children"]
        assert new["resident_nbytes"] - old["resident_nbytes"] < 20e6
    assert not {name for name in set(os.listdir("/dev/shm")) - shared_before if "torch" not in name}


def use_groups(rank: int, world_size: int, num_rounds: int) -> dict[str, int]:
    for number in range(num_rounds):
        group = dist.new_group([0, 1] if number % 2 else [1, 0])
        model = DataParallel(mlp(16, 2), process_group=group)
        step(model, rank, 0, 16)
        if number % 3 == 0:
            dist.destroy_process_group(group)  # before its model
            del model
        else:
            del model
            dist.destroy_process_group(group)
    gc.collect()
    return resource_snapshot(rank, world_size)


def test_groups_come_and_go(transport: Transport) -> None:
    """A new group for each of 30 models, destroyed before or after its model: nothing piles up."""
    pool = transport.pool(2)
    before = pool.run(use_groups, 5)
    after = pool.run(use_groups, 30)
    for old, new in zip(before, after, strict=True):
        # Fewer than one for each group; torch's own groups sometimes keep a descriptor.
        assert new["threads"] < old["threads"] + 10
        assert new["descriptors"] < old["descriptors"] + 10


def leave_early(rank: int, world_size: int, order: str) -> None:
    """Rank 1 ends at once; rank 0 stays for a while without needing anybody."""
    global kept
    kept = model = DataParallel(mlp(192, 2))  # alive until the interpreter ends
    step(model, rank, 0, 192)
    if order == "destroy_group" and rank == 0:
        time.sleep(0.3)
        dist.destroy_process_group()
    if order == "keep_gradients":
        kept = [parameter.grad for parameter in model.parameters()]
    if rank == 1:
        sys.exit(0)
    time.sleep(0.3)
    sys.exit(0)


kept: object = None


def test_a_rank_that_finishes_early(transport: Transport) -> None:
    """Rank 1 leaves while rank 0 still runs, without any call to clean up, or with one, the model
    or only its gradients being alive: both exit with 0 and print no error."""
    for order in ("nothing", "destroy_group", "keep_gradients"):
        outcomes = fresh_ranks(2, leave_early, order, env=transport.env)
        assert [outcome.exit_code for outcome in outcomes] == [0, 0]
        for outcome in outcomes:
            assert "Error" not in outcome.stderr
            assert "terminate" not in outcome.stderr


class Squares(Dataset[Tensor]):
    """A data set whose workers are forked from a rank that has trained already."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((16,), float(index)).square() / 50


def scaled_loss(module: nn.Module, rank: int, batch: Tensor) -> Tensor:
    return wavy_loss(module(batch * (rank + 1)))


def train_with_workers(rank: int, world_size: int) -> None:
    module = mlp(16, 2)
    model = DataParallel(module)
    step(model, rank, 0, 16)
    expected = OneProcess(module, world_size)
    expected.zero_grad()
    for _ in range(2):
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            model.zero_grad()
            expected.zero_grad()
            scaled_loss(model, rank, batch).backward()
            expected.backward(scaled_loss, batch)
            assert_reduced(model, expected)


def test_forked_data_workers(transport: Transport) -> None:
    """DataLoader workers forked in the middle of training hold up neither a step nor the end."""
    transport.pool(2).run(train_with_workers)


SCRIPT = r"""
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pydist import DataParallel

def main(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DataParallel(torch.nn.Linear(200, 200))
    model(torch.full((1, 200), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.unique().tolist() == [1.5]
    os.write(1, b"rank %d done\n" % rank)  # in one piece

if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        mp.spawn(main, (2,), nprocs=2)
"""


def run_script(tmp_path: Path, *launcher: str, **env: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_mp_spawn(tmp_path: Path) -> None:
    """Ranks started by torch.multiprocessing.spawn train and end without destroying the group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = store.port
    del store  # the port is free again for rank 0
    output = run_script(tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert sorted(output.splitlines()) == ["rank 0 done", "rank 1 done"]


def test_torchrun(tmp_path: Path) -> None:
    """Ranks started by torchrun train and end without destroying the group."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run_script(tmp_path, *launcher)
    assert sorted(output.splitlines()) == ["rank 0 done", "rank 1 done"]
