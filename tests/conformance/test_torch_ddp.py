"""torch's own tests of its DistributedDataParallel, run with pydist.DataParallel in its place.

expected_data_parallel.py says which there are, and in which six ours does better than the test
allows. The tests of a world run in one process, several at once; each test here waits for its
result.
"""

from collections.abc import Iterator

import pytest
from expected_data_parallel import (
    DIFFERENCES,
    NOT_WITH_THREE_RANKS,
    TORCH_FAILS,
    TORCH_PASSES,
    WITHOUT_SHIM,
)
from suite_results import AllResults, World, gather_results

__all__ = ["gather_results"]  # a fixture


def _world(world_size: int, shim: bool = True, transport: str = "shared_memory") -> World:
    return World(
        f"{world_size}-ranks-{transport}" + ("" if shim else "-without-shim"),
        world_size,
        "data-parallel",
        ("--shim",) * shim,
        (("PYDIST_TRANSPORT", transport),),
    )


def _parameters() -> Iterator[object]:
    with_three = [test for test in TORCH_PASSES if test not in NOT_WITH_THREE_RANKS]
    slow = [pytest.mark.slow]
    for world, tests, marks in (
        (_world(2), TORCH_PASSES + TORCH_FAILS, []),
        (_world(2, shim=False), WITHOUT_SHIM, []),
        (_world(3), with_three + TORCH_FAILS, slow),
        (_world(3, shim=False), WITHOUT_SHIM, slow),
        (_world(2, transport="process_group"), TORCH_PASSES + TORCH_FAILS, slow),
    ):
        for test in tests:
            yield pytest.param(world, test, id=f"{world}-{test}", marks=marks)


@pytest.mark.parametrize(("world", "test"), list(_parameters()))
def test_torch(results: AllResults, world: World, test: str) -> None:
    record = results.of(world).wait_for(test)
    difference = next((d for d in DIFFERENCES if d.test == test), None)
    if difference is None:
        assert record["status"] == "pass", record["reason"]
    else:
        assert record["status"] == "fail", f"{test} passes: it is no difference any more"
        assert difference.assertion in record["reason"], record["reason"]


def test_the_differences_are_few() -> None:
    assert len(DIFFERENCES) < 10
    assert {difference.test for difference in DIFFERENCES} <= set(TORCH_PASSES)
    assert (len(TORCH_PASSES), len(NOT_WITH_THREE_RANKS), len(WITHOUT_SHIM)) == (79, 4, 11)
