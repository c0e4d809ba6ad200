"""Owns what checks the commands of launch recipes: stand-ins, torchrun's parser, the example's."""

import importlib
import os
import re
import stat
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from torch.distributed.run import config_from_args, get_args_parser

PROJECT = Path(__file__).resolve().parents[1]
RECIPES = PROJECT / "docs" / "launch"
# Of every recipe with torchrun.
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
    """By the example's own parser; exits where the example would."""
    sys.path.insert(0, str(PROJECT / "examples"))
    try:
        example = importlib.import_module("train_resumable")
    finally:
        sys.path.pop(0)
    options = example.parse_options(arguments)
    assert options.batch % num_ranks == 0
    assert options.crash_at is None


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
