"""Owns the checks before the extension is loaded; a failure is one sentence with its remedy."""

import importlib.util
import re
import sys
from pathlib import Path

Version = tuple[int, ...]

_REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps ."
_BUILD_IN_PLACE = "pip install --no-build-isolation -e ."


def parse_version(text: str) -> Version | None:
    """(major, minor, patch) of "2.13.0+cpu" or "2.14.0a0+git12"; None where there is none."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else None


def check_platform(platform: str = sys.platform) -> None:
    """pydist needs memfd, futex and pidfd, which Linux alone has."""
    if not platform.startswith("linux"):
        raise ImportError(
            f"pydist runs on Linux only, and this is {platform!r}; use a Linux machine."
        )


def check_torch() -> str:
    """Returns the version of a torch that has torch.distributed; raises where there is none."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # torch is there and lacks something of its own: its message says what
        raise ImportError(
            "pydist needs PyTorch and found none in this environment; "
            f"`pip install torch`, then reinstall pydist with `{_REINSTALL}` in its source tree."
        ) from None
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available():
        raise ImportError(
            f"pydist needs torch.distributed and this torch {torch.__version__} was built without "
            "it (USE_DISTRIBUTED=0); install an official Linux build of torch."
        )
    return str(torch.__version__)


def check_built(package: Path) -> None:
    """A source tree on sys.path shadows an installed pydist: say so, not "no module named _C"."""
    if importlib.util.find_spec("pydist._C") is None or not (package / "_build_info.py").exists():
        raise ImportError(
            f"pydist was imported from {package}, where its extension is not built; leave that "
            f"directory to use an installed pydist, or run `{_BUILD_IN_PLACE}` there."
        )


def check_built_for(torch_version: str, built_for: str) -> None:
    """torch's C++ interface changes with every release: another one would crash, not fail."""
    if parse_version(torch_version) != parse_version(built_for):
        raise ImportError(
            f"pydist was built for torch {built_for} but found torch {torch_version}; reinstall "
            f"pydist with `{_REINSTALL}` in its source tree."
        )


def check_all() -> None:
    """Everything that can be wrong before the extension is loaded."""
    check_platform()
    torch_version = check_torch()
    check_built(Path(__file__).parent)
    from pydist._build_info import TORCH_VERSION

    check_built_for(torch_version, TORCH_VERSION)
