"""Owns the tests of the demo, examples/train_gpt.py, and of the example of three dimensions,
examples/train_gpt_3d.py: they train, and they notice wrong engines.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import pydist

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = ["--model", "tiny", "--steps", "15"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# Runs the demo with a function of this file in pydist's place.
RUN_WITH_WRAPPER = """
import sys, test_demo, train_gpt
sys.exit(train_gpt.main(sys.argv[2:], pydist_wrapper=getattr(test_demo, sys.argv[1])))
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in `folder`, so that the picture lands there."""
    # The pydist that these tests see, installed or not.
    folders = [EXAMPLES, Path(__file__).parent, Path(pydist.__file__).parents[1]]
    paths = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
    )


def leave_alone(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that reduces nothing."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def double(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that sums where it should average, with two ranks."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


def wrap_without_reduction(module: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(module, process_group=group)
    wrapped.register_comm_hook(None, leave_alone)
    return wrapped


def wrap_with_sum(module: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(module, process_group=group)
    wrapped.register_comm_hook(group, double)
    return wrapped


def wrap_only_on_rank_0(module: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    if dist.get_rank() == 1:
        raise RuntimeError("this rank has no engine")
    return DistributedDataParallel(module, process_group=group)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_trains_the_same_model_by_all_engines(tmp_path: Path, num_ranks: int) -> None:
    demo = run([str(EXAMPLES / "train_gpt.py"), *TINY, "--ranks", str(num_ranks)], tmp_path)

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "Python Software Foundation License" in demo.stdout
    lines = demo.stdout.splitlines()
    header = next(line for line in lines if "train loss" in line)
    for column in ("held-out loss", "samples/s", "step", "communication", "vs. DDP"):
        assert column in header
    table = [re.split(r"\s{2,}", row) for row in lines[lines.index(header) + 2 :][:5]]
    assert [row[0] for row in table] == [
        "single process",
        "torch DDP",
        "pydist",
        "pydist 1f1b",
        "pydist 2 x 2",
    ]
    assert table[1][-1] == "1.00x"
    for column in (1, 2):  # train loss, held-out loss
        single, *others = (float(row[column]) for row in table)
        assert others == pytest.approx([single] * 4, rel=1e-4)
    # Without a terminal: a line for each tenth of the way.
    assert sum(" %  step " in line for line in lines) == 10
    for picture in ("demo_loss.png", "demo_schedule.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG_SIGNATURE)
    bubble = next(line for line in lines if line.startswith("Bubble of 1f1b"))
    assert "measured" in bubble
    # 1 of 5 for 4 microbatches on 2 ranks, if all actions of a kind took the same time.
    predicted = re.search(r"([\d.]+)% of [\d.]+ ms predicted", bubble)
    assert predicted is not None
    assert 5 < float(predicted[1]) < 60
    assert "trained the same model" in demo.stdout


@pytest.mark.parametrize(
    ("wrapper", "complaint"),
    [
        ("wrap_without_reduction", "the ranks of 'pydist' ended with different weights"),
        pytest.param("wrap_with_sum", "the gradient norm of 'pydist' is", marks=pytest.mark.slow),
    ],
)
def test_fails_when_an_engine_reduces_wrongly(tmp_path: Path, wrapper: str, complaint: str) -> None:
    demo = run(["-c", RUN_WITH_WRAPPER, wrapper, *TINY], tmp_path)

    assert demo.returncode == 1, demo.stdout + demo.stderr
    assert complaint in demo.stderr
    assert "trained the same model" not in demo.stdout


def test_shows_the_error_of_a_rank(tmp_path: Path) -> None:
    demo = run(["-c", RUN_WITH_WRAPPER, "wrap_only_on_rank_0", *TINY], tmp_path)

    assert demo.returncode == 1
    assert "rank 1 failed" in demo.stderr
    assert "RuntimeError: this rank has no engine" in demo.stderr


def test_says_what_is_wrong_with_an_argument(tmp_path: Path) -> None:
    demo = run([str(EXAMPLES / "train_gpt.py"), "--ranks", "2", "--batch", "3"], tmp_path)

    assert demo.returncode == 2
    assert "expected --batch to be a multiple of 2, for --ranks 2" in demo.stderr
    assert "found 3" in demo.stderr


def test_trains_in_three_dimensions(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    options = ["--model", "tiny", "--steps", "3", "--compare"]
    example = run([*torchrun, str(EXAMPLES / "train_gpt_3d.py"), *options], tmp_path)

    assert example.returncode == 0, example.stdout + example.stderr
    assert len(re.findall(r"step \d: loss \d", example.stdout)) == 3
    apart = re.search(r"difference to the losses of one process: (\S+) of", example.stdout)
    assert apart is not None
    assert float(apart[1]) < 1e-5


@pytest.mark.parametrize("loss", ["2.1", "math.nan"])
def test_notices_other_losses_in_three_dimensions(tmp_path: Path, loss: str) -> None:
    code = f"import math, sys, train_gpt_3d; sys.exit(train_gpt_3d.compare([1, {loss}], [1, 2]))"
    example = run(["-c", code], tmp_path)

    assert example.returncode == 1
    assert "more than rounding explains" in example.stderr
