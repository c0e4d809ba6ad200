"""Owns a benchmark's result file: every raw sample, and where, when and how it was measured."""

import json
import os
import platform
import re
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

import pydist

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

Parameter = int | float | str


@dataclass
class Case:
    """One row of a benchmark: the same work done by several contenders in turn."""

    name: str
    parameters: dict[str, Parameter]
    samples_s: dict[str, list[float]]  # contender -> seconds of one operation, by repetition
    wrong_results: dict[str, int]  # contender -> elements that differ from the expected value
    facts: dict[str, Parameter] = field(default_factory=dict)
    medians_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples_s = {name: [round(s, 10) for s in v] for name, v in self.samples_s.items()}
        if not self.medians_s:
            self.medians_s = self.recomputed_medians_s()

    def recomputed_medians_s(self) -> dict[str, float]:
        return {name: round(statistics.median(s), 10) for name, s in self.samples_s.items()}


@dataclass
class Record:
    """The content of one result file."""

    benchmark: str
    command: str
    mode: str  # "full" or "quick"
    ranks: list[int]
    cases: list[Case]
    commit: str = field(default_factory=lambda: _commit())
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat("T", "seconds"))
    machine: dict[str, Parameter] = field(default_factory=lambda: _machine())
    versions: dict[str, str] = field(default_factory=lambda: _versions())

    def case(self, name: str) -> Case:
        return next(case for case in self.cases if case.name == name)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_dumps(asdict(self)))


def load(path: Path) -> Record:
    content = json.loads(path.read_text())
    content["cases"] = [Case(**case) for case in content["cases"]]
    return Record(**content)


def _dumps(content: object) -> str:
    """Indented, with every list of numbers on one line."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda m: re.sub(r"\s+", " ", m[0]), text) + "\n"


def _commit() -> str:
    """The checked-out commit, marked where the code that was measured differs from it."""
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", "csrc", "pydist", "bench/*.py", "setup.py")
    return (commit or "none") + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _machine() -> dict[str, Parameter]:
    models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_nbytes / 2**30, 1),
        "kernel": platform.release(),
    }


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pydist": pydist.__version__,
    }
