"""Owns counting what one call makes the device do, by torch's profiler."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from place import Place
from torch.profiler import ProfilerActivity, profile


def launches(place: Place, run: Callable[[], object]) -> tuple[int, int]:
    """Kernels; and copies and fills, that one call makes the device do, by torch's profiler."""
    run()
    place.settle()
    activities = [ProfilerActivity.CPU]
    if not place.emulated:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        run()
        place.settle()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    kinds = [event.get("cat") for event in events if event.get("ph") == "X"]
    if place.emulated:  # no kernels there: operations show at least that something was recorded
        return kinds.count("cpu_op"), 0
    return kinds.count("kernel"), kinds.count("gpu_memcpy") + kinds.count("gpu_memset")
