"""Owns the tests of restarts: torchrun, ranks that die, and training that goes on bit by bit."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pydist

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Epochs of 5 steps, so that a resume lands within one and another begins after it.
JOB = ["--steps", "12", "--save-every", "4", "--batch", "16", "--max-characters", "2600"]
ALONE = ["--standalone", "--nproc-per-node", "2"]
LIMIT_S = 240  # of a busy machine; alone a run takes seconds


class Launch:
    """One torchrun with the example under it; the end of the block ends both."""

    def __init__(self, torchrun: list[str], example: list[str], **env: str) -> None:
        paths = os.pathsep.join(map(str, [Path(pydist.__file__).parents[1]]))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *torchrun),
                *(str(EXAMPLES / "train_resumable.py"), *JOB, *example),
            ],
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)  # torchrun ends its ranks, and then itself
        self.process.communicate(timeout=LIMIT_S)

    def wait(self) -> tuple[int, str]:
        """The exit status and all that was printed."""
        output, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, output


def run(torchrun: list[str], folder: Path, *example: str, **env: str) -> tuple[int, str]:
    with Launch(torchrun, ["--folder", str(folder), *example], **env) as launch:
        return launch.wait()


def told(output: str) -> list[str]:
    """The lines of the example itself, without what differs between runs."""
    mark = "train_resumable: "
    lines = [line[len(mark) :] for line in output.splitlines() if line.startswith(mark)]
    return [line.split(" from ")[0].split(",")[0] for line in lines]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a checkpoint, tensors as bytes."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from leaves(part, f"{path}/{i}")
    elif isinstance(value, torch.Tensor):
        yield path, (value.dtype, value.shape, value.numpy().tobytes())
    else:
        yield path, value


def load(folder: Path) -> dict[str, Any]:
    return dict(leaves(torch.load(folder / "checkpoint.pt", weights_only=True)))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which nobody died."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    status, output = run([*ALONE, "--max-restarts", "2"], folder, **env)
    assert status == 0, output
    advice, *steps = told(output)
    assert advice.startswith("torchrun keeps one store for all attempts")
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun" in output
    assert steps == ["saved step 4", "saved step 8", "saved step 12", "finished step 12"]
    return folder


def test_a_checkpoint_holds_all_that_the_next_step_depends_on(uninterrupted: Path) -> None:
    found = load(uninterrupted)
    for name in ("/step", "/position", "/rng_states/1", "/optimizer/state/0/exp_avg_sq"):
        assert name in found
    assert found["/step"] == 12
    assert found["/position"] == 12 * 16
    assert found["/rng_states/0"] != found["/rng_states/1"]


@pytest.mark.parametrize(("backend", "own_stores"), [("gloo", "1"), ("pydist", "0")])
def test_a_rank_that_is_killed(
    uninterrupted: Path, tmp_path: Path, backend: str, own_stores: str
) -> None:
    """torchrun starts all ranks again, and they end with the bits of the run without a death.

    The backend pydist needs no store of its own for each attempt: one restart is enough.
    """
    example = ["--crash-at", "6", "--crash-rank", "1", "--backend", backend]
    torchrun = [*ALONE, "--max-restarts", "1"]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_stores}
    status, output = run(torchrun, tmp_path, *example, **env)
    assert status == 0, output
    assert told(output) == [
        "saved step 4",
        "resumed at step 4",
        "saved step 8",
        "saved step 12",
        "finished step 12",
    ]
    assert "PeerError: rank 1 (pid" in output
    assert load(tmp_path) == load(uninterrupted)


def test_a_death_amid_a_checkpoint(uninterrupted: Path, tmp_path: Path) -> None:
    """What it leaves is never read; a job that is submitted again goes on from the last whole one.

    As a cluster's scheduler does it: no restart of torchrun, but another torchrun.
    """
    crash = ("--crash-at", "8", "--crash-in-save")
    status, output = run([*ALONE, "--max-restarts", "0"], tmp_path, *crash)
    assert status != 0, output
    partial = tmp_path / "checkpoint.pt.partial"
    whole_nbytes = (tmp_path / "checkpoint.pt").stat().st_size
    assert 0 < partial.stat().st_size < whole_nbytes
    with pytest.raises(RuntimeError):
        torch.load(partial, weights_only=True)

    status, output = run([*ALONE, "--max-restarts", "0"], tmp_path)
    assert status == 0, output
    assert told(output)[0] == "resumed at step 4"
    assert load(tmp_path) == load(uninterrupted)
    assert not partial.exists()


def test_another_number_of_ranks_is_refused(uninterrupted: Path) -> None:
    before = (uninterrupted / "checkpoint.pt").read_bytes()
    status, output = run(["--standalone", "--nproc-per-node", "1"], uninterrupted)
    assert status != 0
    assert "was written by another job (num_ranks 2 in the file, 1 now)" in output
    assert "or give another --folder" in output
    assert (uninterrupted / "checkpoint.pt").read_bytes() == before


@pytest.mark.slow
def test_a_death_on_one_of_two_hosts(uninterrupted: Path, tmp_path: Path) -> None:
    """Two torchruns, as on two hosts: the one without a death starts its ranks again as well."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = store.port
    del store  # the port is free again for the first torchrun
    torchrun = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    torchrun += ["--rdzv-id", "test", "--local-addr", "127.0.0.1"]
    example = ["--folder", str(tmp_path), "--crash-at", "6", "--crash-rank", "1"]
    with (
        Launch(torchrun, example, PYDIST_HOST="first") as first,
        Launch(torchrun, example, PYDIST_HOST="second") as second,
    ):
        ends = [first.wait(), second.wait()]
    output = ends[0][1] + ends[1][1]
    assert [status for status, _ in ends] == [0, 0], output
    assert sorted(told(output)) == sorted(
        ["saved step 4", "resumed at step 4", "saved step 8", "saved step 12", "finished step 12"]
    )
    assert load(tmp_path) == load(uninterrupted)
