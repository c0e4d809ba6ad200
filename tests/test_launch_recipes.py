"""Owns the checks of the recipes in docs/launch for SLURM and Ray, which are not here to run them.

What can be executed is: scripts run with stand-ins for the cluster's commands, and the torchrun
commands that come out go through torchrun's own parser, and then the example's. The Kubernetes
recipes have tests of their own.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_commands import (
    NUM_HOSTS,
    PROJECT,
    RANKS_PER_HOST,
    RECIPES,
    SHOW,
    check_environment,
    check_example,
    parse_torchrun,
    run_with,
    stand_in,
)

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


# -- Ray ------------------------------------------------------------------------------------------


def imported_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name of Ray's stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name: a.name for a in node.names if a.name == "ray"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray"):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Such as ray.train.report, or "" for what is not Ray's."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = full_name(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call):
        return full_name(node.func, names)  # a method of what the call returns
    return ""


def ray_calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each call of something of Ray's, with its keywords."""
    tree = ast.parse(text)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := full_name(node.func, names)):
            yield name, [keyword.arg or "**" for keyword in node.keywords]


def check_ray(text: str) -> list[str]:
    calls = list(ray_calls(text))
    for name, keywords in calls:
        assert set(keywords) <= RAY_NAMES[name], name
    for name in imported_names(ast.parse(text)).values():
        assert name == "ray" or name in RAY_NAMES, name
    return [name for name, _ in calls]


def test_ray_names() -> None:
    text = (RECIPES / "ray_train.py").read_text()
    compile(text, "ray_train.py", "exec")
    called = check_ray(text)
    assert called.count("ray.train.report") == 1
    assert "ray.train.torch.TorchTrainer.fit" in called


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("max_failures=", "max_failure="),
        ("ray.train.report", "ray.train.reports"),
        ("import TorchConfig, TorchTrainer", "import TorchConf, TorchTrainer"),
        (").fit()", ").run()"),
    ],
)
def test_wrong_ray_names_are_seen(part: str, other: str) -> None:
    text = (RECIPES / "ray_train.py").read_text()
    assert part in text
    with pytest.raises((AssertionError, KeyError)):
        check_ray(text.replace(part, other))


def test_ray_arguments() -> None:
    """The worker's calls are of functions that the example has, and its arguments are right."""
    tree = ast.parse((RECIPES / "ray_train.py").read_text())
    made: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            exec(compile(ast.Module([node], []), "ray_train.py", "exec"), {}, made)
    arguments = made["ARGUMENTS"]
    assert isinstance(arguments, list)
    workers = [
        int(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg == "num_workers"
        and isinstance(node.value, ast.Constant)
    ]
    check_example(arguments, *workers)
    example = ast.parse((PROJECT / "examples" / "train_resumable.py").read_text())
    functions = {node.name for node in example.body if isinstance(node, ast.FunctionDef)}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "train_resumable"
    }
    assert used == {"parse_options", "prepare", "train"}
    assert used <= functions
