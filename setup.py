"""Owns the build of the extensions pydist._C and, where there is CUDA, pydist._cuda.

Everything declarative is in pyproject.toml; build_backend/cuda_build.py says if there is CUDA.
"""

import os
import platform
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, "build_backend")  # where no frontend has done so: `python setup.py`

import cuda_build

try:  # metadata and source distributions need no torch, only the extensions do
    import torch
except ImportError:
    torch = None

OLDEST_TORCH = (2, 9)

# -g0: cpp_extension inherits Python's -g, which would multiply the size of the library by 20.
# No instruction-set flag: the hot loops choose their variant at run time, so that a build made
# on one machine runs on every other of its architecture.
COMPILE_ARGS = ["-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
NVCC_ARGS = ["-O3", "-Xcompiler=-fvisibility=hidden,-Wall,-Wextra"]

CSRC = Path("csrc")
CUDA = CSRC / "cuda"
NCCL_CHECK = CUDA / "nccl_abi_check.cpp"


def files(*patterns: str, within: Path = CSRC) -> list[Path]:
    return sorted(path for pattern in patterns for path in within.rglob(pattern))


class WithoutTorch(build_ext):
    """Stands in for the build where torch is missing."""

    def run(self) -> None:
        sys.exit(
            "pydist is built against an installed torch and found none: `pip install torch` "
            "first, then `pip install .`, or `pip install --no-build-isolation -e .`."
        )


def torch_release() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def build_command(cuda: cuda_build.CudaBuild | None, decision: str) -> type:
    """The build_ext command: torch's with ninja, which also writes down what it built against."""
    if torch is None:
        return WithoutTorch
    if torch_release() < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        sys.exit(f"pydist needs torch {oldest} or later and found {torch.__version__}.")
    from torch.utils.cpp_extension import BuildExtension

    class BuildAgainstTorch(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # One place for objects, whichever command builds (pip uses a fresh folder), so that
            # only what changed is compiled; another torch or Python gets another place.
            python = sys.implementation.cache_tag
            name = f"{platform.machine()}-{python}-torch-{torch.__version__}"
            self.build_temp = str(Path("build") / name)
            # distutils would look at times alone, and they tell nothing of other architectures or
            # another torch; ninja knows what has to be compiled.
            self.force = True

        def run(self) -> None:
            print(decision, flush=True)
            super().run()
            package = Path(self.get_ext_fullpath("pydist._C")).parent
            (package / "_build_info.py").write_text(
                '"""Written by setup.py: what this build of the extension was made for."""\n\n'
                f'TORCH_VERSION = "{torch.__version__}"\n'
            )
            if cuda is None:  # one of an earlier build in place would not fit
                Path(self.get_ext_fullpath("pydist._cuda")).unlink(missing_ok=True)

        def build_extension(self, extension: Extension) -> None:
            if extension.name == "pydist._cuda":
                self.build_temp += "-cuda"  # ninja has one file in each place
            super().build_extension(extension)

    return BuildAgainstTorch.with_options(use_ninja=True)


def extension() -> Extension:
    """pydist._C: the engine."""
    sources = [
        path
        for path in files("*.cpp")
        if path.parent != CUDA and not path.name.endswith("_test.cpp")
    ]
    arguments = {
        "sources": list(map(str, sources)),
        # Absolute, because ninja compiles in the folder of the objects.
        "include_dirs": [str(CSRC.resolve())],
    }
    if torch is None:
        return Extension("pydist._C", **arguments)
    from torch.utils.cpp_extension import CppExtension, include_paths

    # As system headers, torch's own do not drown the warnings about ours.
    system = [f"-isystem{path}" for path in include_paths()]
    return CppExtension("pydist._C", extra_compile_args=COMPILE_ARGS + system, **arguments)


def cuda_extension(cuda: cuda_build.CudaBuild) -> Extension:
    """pydist._cuda: streams, memory and kernels, which pydist._C calls through pointers."""
    from torch.utils.cpp_extension import include_paths, library_paths

    sources = [path for path in files("*.cpp", "*.cu", within=CUDA) if path != NCCL_CHECK]
    system = [*include_paths(), str(cuda.home / "include")]
    if cuda.nccl_include is not None:
        sources.append(NCCL_CHECK)
        system.append(str(cuda.nccl_include))
    return Extension(
        "pydist._cuda",
        sources=list(map(str, sources)),
        include_dirs=[str(CSRC.resolve())],
        extra_compile_args={
            # The compiler's own order of these must stay as it is.
            "cxx": COMPILE_ARGS + [f"-isystem{path}" for path in system if path != "/usr/include"],
            "nvcc": NVCC_ARGS,
        },
        library_dirs=library_paths(),
        libraries=["c10", "c10_cuda"],
        # By its path: pip's wheels have no libcudart.so without a version.
        extra_objects=[str(cuda.runtime_library)],
        language="c++",
    )


def main() -> None:
    cuda, decision = None, ""
    if torch is not None:
        try:
            site_packages = Path(torch.__file__).parents[1]
            cuda, decision = cuda_build.decide(torch.__version__, torch.version.cuda, site_packages)
        except cuda_build.Unavailable as reason:
            sys.exit(f"PYDIST_CUDA={os.environ['PYDIST_CUDA']}: {reason}")
    if cuda is not None:
        cuda.export()
    extensions = [extension()] if cuda is None else [extension(), cuda_extension(cuda)]
    setup(ext_modules=extensions, cmdclass={"build_ext": build_command(cuda, decision)})


main()
