"""Owns the build of the extension pydist._C; everything declarative is in pyproject.toml."""

import platform
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ImportError:  # metadata and source distributions need no torch, only the extension does
    torch = None

OLDEST_TORCH = (2, 9)

# -g0: cpp_extension inherits Python's -g, which would multiply the size of the library by 20.
# No instruction-set flag: the hot loops choose their variant at run time, so that a build made
# on one machine runs on every other of its architecture.
COMPILE_ARGS = ["-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]

SOURCES = sorted(
    str(path) for path in Path("csrc").rglob("*.cpp") if not path.name.endswith("_test.cpp")
)
# Headers too: distutils looks at this list before it asks ninja what has to be compiled.
DEPENDS = sorted(
    str(path) for pattern in ("*.h", "*.cuh", "*.inl") for path in Path("csrc").rglob(pattern)
)


class WithoutTorch(build_ext):
    """Stands in for the build where torch is missing."""

    def run(self) -> None:
        sys.exit(
            "pydist is built against an installed torch and found none: `pip install torch` "
            "first, then `pip install .`, or `pip install --no-build-isolation -e .`."
        )


def torch_release() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def build_command() -> type:
    """The build_ext command: torch's with ninja, which also writes down what it built against."""
    if torch is None:
        return WithoutTorch
    if torch_release() < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        sys.exit(f"pydist needs torch {oldest} or later and found {torch.__version__}.")

    class BuildAgainstTorch(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # One place for objects, whichever command builds (pip uses a fresh folder), so that
            # only what changed is compiled; another torch or Python gets another place.
            python = sys.implementation.cache_tag
            name = f"{platform.machine()}-{python}-torch-{torch.__version__}"
            self.build_temp = str(Path("build") / name)

        def run(self) -> None:
            super().run()
            package = Path(self.get_ext_fullpath("pydist._C")).parent
            (package / "_build_info.py").write_text(
                '"""Written by setup.py: what this build of the extension was made for."""\n\n'
                f'TORCH_VERSION = "{torch.__version__}"\n'
            )

    return BuildAgainstTorch.with_options(use_ninja=True)


def extension() -> Extension:
    arguments = {
        "sources": SOURCES,
        "depends": DEPENDS,
        "extra_compile_args": COMPILE_ARGS,
    }
    # Absolute, because ninja compiles in the folder of the objects.
    include = [str(Path("csrc").resolve())]
    if torch is None:
        return Extension("pydist._C", include_dirs=include, **arguments)
    # As system headers, torch's own do not drown the warnings about ours.
    arguments["extra_compile_args"] = COMPILE_ARGS + [f"-isystem{path}" for path in include_paths()]
    return CppExtension("pydist._C", include_dirs=include, **arguments)


setup(ext_modules=[extension()], cmdclass={"build_ext": build_command()})
