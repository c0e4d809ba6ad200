"""Owns the decision whether pydist._cuda is built, and with which toolkit, for which chips.

PYDIST_CUDA=1 demands it, 0 forbids it; unset, it is built where torch has CUDA and nvcc is found.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Blackwell's only where nvcc knows it.
ARCHITECTURES = ["8.0", "9.0+PTX", "10.0"]


class Unavailable(Exception):
    """What is missing for the CUDA build, as the second half of a sentence."""


@dataclass(frozen=True)
class CudaBuild:
    """What pydist._cuda is compiled and linked with."""

    home: Path
    release: str  # "13.0"
    architectures: str  # as TORCH_CUDA_ARCH_LIST
    runtime_library: Path
    nccl_include: Path | None  # None: its declarations go unchecked

    def describe(self) -> str:
        checked = f"the header in {self.nccl_include}" if self.nccl_include else "no header"
        return (
            f"pydist: building for CUDA {self.release} in {self.home}, architectures "
            f"{self.architectures}; NCCL's declarations checked against {checked}"
        )

    def export(self) -> None:
        """For torch.utils.cpp_extension, which looks at these when it is imported."""
        os.environ["CUDA_HOME"] = str(self.home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = self.architectures


def _output_of(*command: str | Path) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"`{' '.join(map(str, command))}` does not work: {error}") from None
    return result.stdout + result.stderr


def _home_of(nvcc: str) -> Path:
    """The toolkit of the nvcc on PATH, which may be a script that calls one elsewhere."""
    dry_run = _output_of(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull)
    top = re.search(r"^#\$ TOP=(.*)$", dry_run, re.MULTILINE)
    if top is None:
        raise Unavailable(f"{nvcc} does not say where its toolkit is; set CUDA_HOME")
    return Path(top[1]).resolve()


def find_home(site_packages: Path, cuda_version: str) -> Path:
    """The root of the toolkit: CUDA_HOME, that of the nvcc on PATH, or at a usual place."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            home = Path(os.environ[name])
            if not (home / "bin" / "nvcc").exists():
                raise Unavailable(f"{name}={home} has no bin/nvcc")
            return home
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return _home_of(on_path)
    # The second is where `pip install nvidia-cuda-nvcc` puts it.
    wheels = site_packages / "nvidia" / f"cu{cuda_version.split('.')[0]}"
    for home in (Path("/usr/local/cuda"), wheels):
        if (home / "bin" / "nvcc").exists():
            return home
    raise Unavailable(
        f"nvcc was not found; install CUDA's toolkit {cuda_version}, or set CUDA_HOME"
    )


def _runtime_library(home: Path, major: str) -> Path:
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        for name in ("libcudart.so", f"libcudart.so.{major}"):
            if (home / folder / name).exists():
                return home / folder / name
    raise Unavailable(f"the toolkit in {home} has no libcudart.so")


def _nccl_include(site_packages: Path, home: Path, major: str) -> Path | None:
    """Of the wheel that torch's CUDA goes with, else of the toolkit or the system."""
    candidates = [home / "include", Path("/usr/include")]
    for wheel in metadata.distributions(name=f"nvidia-nccl-cu{major}", path=[str(site_packages)]):
        candidates.insert(0, Path(str(wheel.locate_file("nvidia/nccl/include"))))
    return next((folder for folder in candidates if (folder / "nccl.h").exists()), None)


def find(torch_version: str, cuda_version: str | None, site_packages: Path) -> CudaBuild:
    """What to build with; raises Unavailable. `site_packages` is where torch is installed."""
    if cuda_version is None:
        raise Unavailable(f"torch {torch_version} was built without CUDA")
    home = find_home(site_packages, cuda_version)
    nvcc = home / "bin" / "nvcc"
    release = re.search(r"release (\d+\.\d+)", _output_of(nvcc, "--version"))
    if release is None:
        raise Unavailable(f"`{nvcc} --version` does not name a release")
    major = cuda_version.split(".")[0]
    if release[1].split(".")[0] != major:
        raise Unavailable(
            f"torch {torch_version} is for CUDA {cuda_version}, but {nvcc} is of {release[1]}"
        )
    known = _output_of(nvcc, "--list-gpu-arch").split()
    default = ";".join(
        name for name in ARCHITECTURES if f"compute_{re.sub('[^0-9]', '', name)}" in known
    )
    return CudaBuild(
        home=home,
        release=release[1],
        architectures=os.environ.get("TORCH_CUDA_ARCH_LIST") or default,
        runtime_library=_runtime_library(home, major),
        nccl_include=_nccl_include(site_packages, home, major),
    )


def decide(
    torch_version: str, cuda_version: str | None, site_packages: Path
) -> tuple[CudaBuild | None, str]:
    """What to build with, if at all, and the line to print; raises Unavailable on PYDIST_CUDA=1."""
    wish = os.environ.get("PYDIST_CUDA", "")
    if wish not in ("", "0", "1"):
        raise Unavailable(f"it may be 0, 1 or unset, not {wish!r}")
    if wish == "0":
        return None, "pydist: building without CUDA, as PYDIST_CUDA=0 says"
    try:
        build = find(torch_version, cuda_version, site_packages)
    except Unavailable as reason:
        if wish == "1":
            raise
        return None, f"pydist: building without CUDA: {reason}"
    return build, build.describe()
