"""torch's own parallelism on the backend "pydist" gives what it gives on Gloo, without Gloo.

With two ranks it does so in every bit, as there is only one order in which two values can be added.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ranks import fresh_ranks, get_pool

TWO_RANKS = (
    "ddp",
    "ddp_static_graph",
    "ddp_half_hook",
    "ddp_power_sgd",
    "ddp_uneven",
    "ddp_compiled",
    "zero_optimizer",
    "fsdp",
    "tensor_parallel",
    "sequence_parallel",
    "redistribution",
    "functional",
    "functional_compiled",
    "checkpoint",
    "checkpoint_async",
    "pipeline_gpipe",
    "pipeline_1f1b",
    "objects",
    "pydist_ddp",
)
FOUR_RANKS = ("fsdp_replicated", "two_dimensions", "functional", "pipeline_1f1b", "objects")


def _run(workload: str, rank: int, world_size: int) -> Any:
    """Imported in the ranks alone: it takes seconds."""
    return getattr(importlib.import_module("backend_workloads"), workload)(rank, world_size)


def _refuse_gloo() -> None:
    class NoGloo(c10d.ProcessGroupGloo):
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            raise AssertionError("a Gloo group is made")

    c10d.ProcessGroupGloo = NoGloo


def _threads() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def _check_that_nothing_is_gloo() -> None:
    for group in c10d._world.pg_map:
        assert group._get_backend(torch.device("cpu")).name().lower() == "pydist"
    assert not [name for name in _threads() if "gloo" in name]


def on_gloo(rank: int, world_size: int, workload: str) -> Any:
    assert dist.get_backend() == "gloo"
    assert any("gloo" in name for name in _threads())  # so it is a name to look for
    return _run(workload, rank, world_size)


def on_pydist(rank: int, world_size: int, workload: str) -> Any:
    assert dist.get_backend() == "pydist"
    _refuse_gloo()
    found = _run(workload, rank, world_size)
    _check_that_nothing_is_gloo()
    return found


def start_without_gloo(rank: int, world_size: int, folder: str) -> int:
    """The whole life of a group, from before it is made."""
    _refuse_gloo()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("pydist", store=store, rank=rank, world_size=world_size)
    sums = _run("functional", rank, world_size)
    subgroup = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(sums[0], group=subgroup)
    _check_that_nothing_is_gloo()
    dist.destroy_process_group()
    return os.getpid()


def _check_equal(found: Any, expected: Any, exact: bool) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        if exact:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _check_equal(one, other, exact)
    else:
        assert found == expected


@pytest.mark.parametrize("workload", TWO_RANKS)
def test_two_ranks(workload: str) -> None:
    found = get_pool(2, backend="pydist").run(on_pydist, workload)
    _check_equal(found, get_pool(2).run(on_gloo, workload), exact=True)


@pytest.mark.parametrize("workload", FOUR_RANKS)
def test_four_ranks(workload: str) -> None:
    found = get_pool(4, backend="pydist").run(on_pydist, workload)
    _check_equal(found, get_pool(4).run(on_gloo, workload), exact=False)


def test_a_group_never_needs_gloo(tmp_path: Path) -> None:
    outcomes = fresh_ranks(2, start_without_gloo, str(tmp_path), init=False)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].traceback
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
