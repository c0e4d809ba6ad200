"""Owns the PEP 517 backend: setuptools, building against the torch that is already installed.

pip builds in an isolated environment. A torch among its requirements would be a second download
of gigabytes, and perhaps another version than the one that will run. So this backend looks for
torch where the wheel is going to be installed and lends that one to the build; only where there
is none it asks pip for one.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta

REQUIRED_TORCH = "torch>=2.9"


def candidate_folders() -> Iterator[Path]:
    """Where the target environment may keep torch, the likeliest first."""
    for kind in ("purelib", "platlib"):  # pip's isolation keeps the target's own prefix
        yield Path(sysconfig.get_path(kind))
    prefixes = [os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    # `python -m build` isolates in a venv of its own, made by the interpreter that runs it.
    prefixes.append(sys.base_prefix)
    for prefix in filter(None, prefixes):
        names = {"base": prefix, "platbase": prefix}
        for kind in ("purelib", "platlib"):
            yield Path(sysconfig.get_path(kind, scheme="posix_prefix", vars=names))
    user_scheme = sysconfig.get_preferred_scheme("user")
    yield Path(sysconfig.get_path("purelib", scheme=user_scheme))


def folder_of_torch() -> Path | None:
    """The first candidate that holds an installed torch."""
    for folder in candidate_folders():
        if (folder / "torch" / "version.py").exists():
            return folder
    return None


def lend_torch() -> bool:
    """Makes the installed torch importable here and in child processes; False where none is."""
    folder = folder_of_torch()
    if folder is None:
        return False
    if str(folder) not in sys.path:
        # Last, so that the build's own setuptools and ninja stay the ones that are found first.
        sys.path.append(str(folder))
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [inherited, str(folder)]))
    return True


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [] if lend_torch() else [REQUIRED_TORCH]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(directory: str, config_settings: Any = None) -> str:
    lend_torch()
    return str(build_meta.prepare_metadata_for_build_wheel(directory, config_settings))


def prepare_metadata_for_build_editable(directory: str, config_settings: Any = None) -> str:
    lend_torch()
    return str(build_meta.prepare_metadata_for_build_editable(directory, config_settings))


def build_wheel(directory: str, config_settings: Any = None, metadata: Any = None) -> str:
    lend_torch()
    return str(build_meta.build_wheel(directory, config_settings, metadata))


def build_editable(directory: str, config_settings: Any = None, metadata: Any = None) -> str:
    lend_torch()
    return str(build_meta.build_editable(directory, config_settings, metadata))


def build_sdist(directory: str, config_settings: Any = None) -> str:
    return str(build_meta.build_sdist(directory, config_settings))
