"""Owns `make cuda-check`: builds for CUDA where there is no GPU, and checks what comes out.

Runs in the environment of requirements.txt, in which it installs pydist; prints a table, and fails
if any row does.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SITE_PACKAGES = Path(torch.__file__).parents[1]
TOOLKIT = SITE_PACKAGES / "nvidia" / "cu13"
NCCL = SITE_PACKAGES / "nvidia" / "nccl" / "include"
ARCHITECTURES = "8.0;9.0+PTX;10.0"
# Of each part of the engine one, as what counts is that this build works too.
CPU_TESTS = [
    "test_device.py",
    "test_cuda_build.py",
    "test_collectives.py",
    "test_data_parallel_gradients.py",
    "test_pipeline_hand_over.py",
]
IMPORT = """
import torch, pydist
from pydist import _C
assert _C.device_name() is None
import pydist._cuda
_C.register_device_runtime(pydist._cuda.runtime)
driver = "with" if torch.cuda.is_available() else "without"
print(f"torch {torch.__version__}, {driver} a driver: {_C.device_name()}")
"""


class CheckError(Exception):
    """A check did not hold; the text is all there is to know."""


def run(*command: str | Path, timeout_s: float = 600, **variables: str) -> str:
    """The output of a command; in an empty folder, lest the source tree is found as pydist."""
    with tempfile.TemporaryDirectory() as empty:
        result = subprocess.run(
            command,
            env=dict(os.environ, CUDA_HOME=str(TOOLKIT), **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            cwd=empty,
        )
    if result.returncode != 0:
        shown = " ".join(map(str, command))
        raise CheckError(f"{shown} ended with {result.returncode}:\n{result.stdout[-8000:]}")
    return result.stdout


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip("= ")


def build() -> str:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v")
    options = ("--no-build-isolation", "--no-deps", "--force-reinstall")
    variables = {"PYDIST_CUDA": "1", "TORCH_CUDA_ARCH_LIST": ARCHITECTURES}
    variables["MAX_JOBS"] = os.environ.get("MAX_JOBS", str(os.cpu_count()))  # ninja takes two more
    output = run(*pip, *options, ROOT, timeout_s=1800, **variables)
    warnings = [line for line in output.splitlines() if "csrc/" in line and "warning" in line]
    if warnings:
        raise CheckError("warnings:\n" + "\n".join(warnings))
    return f"pydist._C and pydist._cuda, for {ARCHITECTURES}"


def load() -> str:
    return last_line(run(sys.executable, "-c", IMPORT))


def compare_nccl() -> str:
    ours = ROOT / "csrc" / "cuda" / "nccl_abi_check.cpp"
    emulated = TESTS / "emulation" / "nccl_functions.cpp"
    options = ["-std=c++17", "-Wall", "-Wextra", "-DPYDIST_REAL_NCCL_HEADER", "-fsyntax-only"]
    include = [f"-I{ROOT / 'csrc'}", f"-isystem{NCCL}", f"-isystem{TOOLKIT / 'include'}"]
    for source in (ours, emulated):
        run("g++", *options, *include, source)
    return "the engine and the emulated library declare what nccl.h does"


def inspect_kernels() -> str:
    (library,) = (SITE_PACKAGES / "pydist").glob("_cuda*.so")
    script = Path(__file__).with_name("inspect_kernels.py")
    table = run(sys.executable, script, library)
    print(table.rstrip())
    return last_line(table)


def test_on_cpu() -> str:
    tests = [TESTS / name for name in CPU_TESTS]
    # Not `python -m pytest`, which would put the current folder on the path.
    pytest = Path(sys.executable).with_name("pytest")
    options = ("-q", "-m", "not slow", "-c", ROOT / "pyproject.toml", f"--rootdir={ROOT}")
    return last_line(run(pytest, *options, "-p", "no:cacheprovider", *tests))


CHECKS: dict[str, Callable[[], str]] = {
    "build": build,
    "import": load,
    "NCCL's header": compare_nccl,
    "machine code": inspect_kernels,
    "tests on the CPU": test_on_cpu,
}


def main() -> int:
    rows, failures = [], []
    for name, check in CHECKS.items():
        print(f"cuda-check: {name} ...", flush=True)
        started = time.monotonic()
        try:
            mark, detail = "ok", check()
        except (CheckError, subprocess.TimeoutExpired) as error:
            mark, detail = "FAILED", str(error).splitlines()[0]
            failures.append(f"{name}: {error}")
        rows.append(f"{name:18} {mark:6} {time.monotonic() - started:6.1f} s  {detail}")
        if failures and name == "build":
            break
    print("\n".join([*failures, *rows]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
