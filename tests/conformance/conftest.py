"""Owns which of torch's tests can be run: those of one version of torch, which the list names."""

import torch

TORCH_VERSION = "2.13"
_matches = torch.__version__.startswith(f"{TORCH_VERSION}.")

collect_ignore = [] if _matches else ["test_torch_ddp.py"]


def pytest_report_header() -> list[str]:
    if _matches:
        return []
    return [f"tests/conformance needs torch {TORCH_VERSION}, left out with {torch.__version__}"]
