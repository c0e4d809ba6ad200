"""Trainings by real packages end with torch's numbers when pydist.DataParallel takes the place of
torch's class.

`make test-all` installs requirements.txt and runs them; each writes its lines of report.txt.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
REPORT = HERE / "report.txt"
WORLD_SIZE = 2
TIMEOUT_S = 300
# Sums of two ranks' gradients are the same in any order, but a mean may round differently from a
# sum of halves; over some dozens of steps that grows.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Framework:
    package: str
    script: str
    num_losses: int  # that each rank notes


FRAMEWORKS = (
    Framework("accelerate", "train_accelerate.py", 14),
    Framework("lightning", "train_lightning.py", 28),
    Framework("transformers", "train_transformers.py", 6),
)


def train(framework: Framework, kind: str, folder: Path) -> list[dict[str, Any]]:
    """Every rank's outcome; see rank_main.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD_SIZE}", str(HERE / framework.script), kind, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with (folder / f"{kind}.log").open("w+") as log:
        launcher = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            launcher.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        log.seek(0)
        assert launcher.returncode == 0, log.read()[-8000:]
    return [torch.load(folder / f"{kind}-{rank}.pt") for rank in range(WORLD_SIZE)]


def distance(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest value."""
    a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def largest_difference(ours: dict[str, Any], torchs: dict[str, Any]) -> float:
    pairs = [(ours[key], torchs[key]) for key in ("losses", "grad_norms") if torchs[key]]
    for kind in ("parameters", "buffers"):
        assert ours[kind].keys() == torchs[kind].keys()
        pairs += [(value, torchs[kind][name]) for name, value in ours[kind].items()]
    return max(distance(*pair) for pair in pairs)


def write_report(framework: Framework, line: str) -> None:
    """Replaces the framework's line; the first one names what all ran on."""
    lines = REPORT.read_text().splitlines()[1:] if REPORT.exists() else []
    kept = [old for old in lines if old.split()[0] != framework.package]
    head = f"{WORLD_SIZE} ranks on the CPU, torch {torch.__version__}"
    REPORT.write_text("\n".join([head, *sorted([*kept, line])]) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.package)
def test_trains_as_with_torch(framework: Framework, tmp_path: Path) -> None:
    torchs = train(framework, "torch", tmp_path)
    ours = train(framework, "pydist", tmp_path)
    assert {outcome["wrapper"] for outcome in torchs} == {"DistributedDataParallel"}
    assert {outcome["wrapper"] for outcome in ours} == {"DataParallel"}
    for outcome in ours:
        assert len(outcome["losses"]) == framework.num_losses
        assert outcome["losses"][-1] < outcome["losses"][0]
        for name, value in outcome["parameters"].items():
            assert torch.equal(value, ours[0]["parameters"][name]), f"{name} differs between ranks"
    difference = max(map(largest_difference, ours, torchs))
    assert difference < TOLERANCE
    write_report(
        framework,
        f"{framework.package} {version(framework.package)}: passed; {framework.num_losses} steps, "
        f"loss {ours[0]['losses'][0]:.4f} to {ours[0]['losses'][-1]:.4f}; replicas equal; largest "
        f"difference from torch's class {difference:.1e}",
    )
