"""Owns what the machine has: the card, the driver and versions; and what it lacks, in a sentence.

    python environment.py       prints them as JSON; exit status 1 where something is missing

Nothing here imports pydist: it runs before the build.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from place import Place

# What this script was written for; others may do.
EXPECTED = {"python": "3.12", "torch": "2.11", "cuda": "13.0", "nvcc": "13.0", "nccl": "2.28"}
QUERY_TIMEOUT_S = 60


def describe(place: "Place", folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """For a record: what its machine and its versions have besides a CPU machine's."""
    if place.emulated:
        return {"card": "none (emulated on the CPU)", "driver": "none"}, {}
    # In a process of its own: sections are forked from this one, which must not touch the device.
    command = [sys.executable, str(Path(__file__).resolve())]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
    )
    found = json.loads(run.stdout.splitlines()[-1])
    return found["machine"], found["versions"]


def _output(*command: str) -> str:
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def _driver() -> str:
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return driver.splitlines()[0].strip() if driver else "unknown"


def machine() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"card": "none", "driver": _driver()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "driver": _driver(),
        "card_memory_gib": f"{properties.total_memory / 2**30:.0f}",
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
    }


def nvcc_path() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for candidate in (f"{home}/bin/nvcc" if home else None, "/usr/local/cuda/bin/nvcc"):
        if candidate and Path(candidate).exists():
            return candidate
    return shutil.which("nvcc")


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _nccl() -> str:
    """Of the copy that torch uses; its wheel's where torch cannot say."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, TypeError):
        return next((v for v in map(_package, _nccl_wheels()) if v != "none"), "none")


def _nccl_wheels() -> tuple[str, str]:
    return "nvidia-nccl-cu13", "nvidia-nccl-cu12"


def versions() -> dict[str, str]:
    nvcc = nvcc_path()
    release = re.search(r"release (\S+),", _output(nvcc, "--version")) if nvcc else None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or "none"),
        "nvcc": release[1] if release else "none",
        "nccl": _nccl(),
        "setuptools": _package("setuptools"),
        "ninja": (_output("ninja", "--version") or "none").split(".git")[0],
    }


def missing(found: dict[str, str]) -> list[str]:
    """Without which there is nothing to run."""
    problems = []
    if found["cuda"] == "none":
        problems.append(f"a torch with CUDA (this one is {found['torch']})")
    elif not torch.cuda.is_available():
        problems.append("a GPU that torch can use (torch.cuda.is_available() is False)")
    if found["nvcc"] == "none":
        problems.append("nvcc (on the path, in $CUDA_HOME/bin or in /usr/local/cuda/bin)")
    if found["nccl"] == "none":
        problems.append("NCCL (the nvidia-nccl wheel that belongs to torch)")
    if found["setuptools"] == "none":
        problems.append("setuptools")
    if found["ninja"] == "none":
        problems.append("ninja (without it the build takes many times as long as it may)")
    return problems


def main() -> int:
    found = versions()
    for name, expected in EXPECTED.items():
        if not re.match(re.escape(expected) + r"(\.|\+|$)", found[name]):
            print(f"note: {name} is {found[name]}; this was made for {expected}", file=sys.stderr)
    print(json.dumps({"machine": machine(), "versions": found}))
    problems = missing(found)
    if problems:
        print(f"This machine lacks {'; '.join(problems)}.", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
