"""Owns the checks of the recipes in docs/launch, whose launchers are not here to run them.

What can be executed is: scripts run with stand-ins for the cluster's commands, and the torchrun
commands that come out go through torchrun's own parser, and then the example's.
"""

import ast
import copy
import json
import os
import re
import stat
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.run import config_from_args, get_args_parser

from launch_schemas import KINDS

PROJECT = Path(__file__).resolve().parents[1]
RECIPES = PROJECT / "docs" / "launch"
# Of `man sbatch` (Slurm 24.05): the options that a recipe may use, and what their values look like.
SBATCH_OPTIONS = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": r"\S+",
    "partition": r"\S+",
}
# What Ray 2.60.0 has, by reading its source: keywords of each callable that the recipe uses.
RAY_NAMES = {
    "ray.init": {"runtime_env", "address"},
    "ray.train.report": {"metrics", "checkpoint"},
    "ray.train.FailureConfig": {"max_failures"},
    "ray.train.RunConfig": {"name", "storage_path", "failure_config", "checkpoint_config"},
    "ray.train.ScalingConfig": {
        *("num_workers", "use_gpu", "resources_per_worker", "placement_strategy")
    },
    "ray.train.torch.TorchConfig": {"backend", "init_method", "timeout_s"},
    "ray.train.torch.TorchTrainer": {
        *("train_loop_config", "torch_config", "scaling_config", "run_config")
    },
    "ray.train.torch.TorchTrainer.fit": set(),
}
NUM_HOSTS = 2
RANKS_PER_HOST = 8


def parse_torchrun(arguments: list[str]) -> Namespace:
    """By torchrun's own parser and by what it makes of it; raises or exits where it would."""
    options = get_args_parser().parse_args(arguments)
    config, _, _ = config_from_args(options)
    assert config.min_nodes == config.max_nodes == NUM_HOSTS
    assert config.nproc_per_node == RANKS_PER_HOST
    assert config.max_restarts > 0
    assert config.rdzv_backend == "c10d"
    assert re.fullmatch(r"[\w.-]+:\d+", config.rdzv_endpoint)
    assert config.run_id not in ("", "none")
    script = Path(options.training_script)
    assert (PROJECT / script).resolve() == PROJECT / "examples" / "train_resumable.py"
    options.rdzv_configs = config.rdzv_configs
    return options


def check_example(arguments: list[str], num_ranks: int) -> None:
    """By the example's own parser, in a process of its own, for it imports by name."""
    check = (
        "import sys, train_resumable as t; o = t.parse_options(sys.argv[2:]);"
        "assert o.batch % int(sys.argv[1]) == 0; assert o.crash_at is None"
    )
    paths = os.pathsep.join([str(PROJECT / "examples"), str(PROJECT)])
    done = subprocess.run(
        [sys.executable, "-c", check, str(num_ranks), *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def check_environment(variables: dict[str, str]) -> None:
    """The names that docs/launch.md explains, with values that they can have."""
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert variables["OMP_NUM_THREADS"].isdigit()
    assert variables["GLOO_SOCKET_IFNAME"]
    assert variables.keys() <= {
        *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"),
        *("PYDIST_HOST", "POD_IP"),
    }


def stand_in(folder: Path, name: str, body: str) -> None:
    """A command of that name in `folder`, in Python."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_with(folder: Path, command: list[str], **env: str) -> str:
    """`command` with the stand-ins in `folder` before all other commands."""
    done = subprocess.run(
        command,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SHOW = "print(json.dumps([sys.argv[1:], dict(os.environ)]))"


# -- SLURM ----------------------------------------------------------------------------------------


def sbatch_directives(text: str) -> dict[str, str | None]:
    """As sbatch finds them: up to the first line that is neither empty nor a comment."""
    found: dict[str, str | None] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
            assert option is not None, line
            found[option[1]] = option[2]
    return found


def check_directives(text: str) -> None:
    directives = sbatch_directives(text)
    assert len(directives) == text.count("#SBATCH --"), "a directive comes after a command"
    for name, value in directives.items():
        pattern = SBATCH_OPTIONS[name]
        assert (value is None) == (pattern is None), name
        assert pattern is None or re.fullmatch(pattern, value or ""), f"{name}={value}"
    assert directives["ntasks-per-node"] == "1", "a task is a torchrun, not a rank"


def test_slurm_directives() -> None:
    script = RECIPES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    text = script.read_text()
    check_directives(text)
    assert sbatch_directives(text)["nodes"] == str(NUM_HOSTS)
    assert "requeue" in sbatch_directives(text)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("--nodes=2", "--nodes=two"),
        ("--requeue", "--re-queue"),
        ("--ntasks-per-node=1", "--ntasks-per-node=8"),
        ("#SBATCH --mem=16G", "true\n#SBATCH --mem=16G"),
    ],
)
def test_wrong_slurm_directives_are_seen(line: str, other: str) -> None:
    text = (RECIPES / "slurm.sbatch").read_text()
    assert line in text
    with pytest.raises((AssertionError, KeyError)):
        check_directives(text.replace(line, other))


def test_slurm_command(tmp_path: Path) -> None:
    """The script runs, with stand-ins for srun and scontrol."""
    stand_in(tmp_path, "srun", SHOW)
    stand_in(
        tmp_path,
        "scontrol",
        "assert sys.argv[1:] == ['show', 'hostnames', 'node[7-8]']; print('node7\\nnode8')",
    )
    output = run_with(
        tmp_path,
        ["bash", str(RECIPES / "slurm.sbatch")],
        SLURM_SUBMIT_DIR=str(PROJECT),
        SLURM_CPUS_PER_TASK=str(RANKS_PER_HOST),
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_JOB_NUM_NODES=str(NUM_HOSTS),
        SLURM_JOB_ID="4123456",
    )
    arguments, environment = json.loads(output)
    assert arguments[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    options = parse_torchrun(arguments[2:])
    assert options.rdzv_endpoint == "node7:23456"
    check_example(options.training_script_args, NUM_HOSTS * RANKS_PER_HOST)
    ours = {name for name in environment if name.startswith(("TORCH_", "OMP_", "GLOO_", "PYDIST_"))}
    check_environment({name: environment[name] for name in ours})
