"""torch's own tests of collectives, run on the backend "pydist".

expected_collectives.py says which there are. Most know their backend by its name: they are shown
that of Gloo, and those that torch reserves for MPI are shown that.
"""

from collections.abc import Iterator

import pytest
from expected_collectives import (
    GLOO_PASSES,
    GLOO_PASSES_WITH_FOUR,
    MPI_PASSES,
    MPI_PASSES_WITH_FOUR,
)
from suite_results import AllResults, World, gather_results

__all__ = ["gather_results"]  # a fixture


def _world(world_size: int, shown: str, *options: str) -> World:
    return World(
        f"{world_size}-ranks-shown-{shown}",
        world_size,
        "collectives",
        ("--backend", "pydist", "--shown", shown, *options),
        (("PYDIST_TRANSPORT", "shared_memory"),),
    )


def _parameters() -> Iterator[object]:
    any_world_size = "--any-world-size"
    slow = [pytest.mark.slow]
    for world, tests, marks in (
        (_world(2, "gloo"), GLOO_PASSES, []),
        (_world(2, "mpi"), MPI_PASSES, []),
        (_world(4, "gloo", any_world_size), GLOO_PASSES + GLOO_PASSES_WITH_FOUR, slow),
        (_world(4, "mpi", any_world_size), MPI_PASSES + MPI_PASSES_WITH_FOUR, slow),
    ):
        for test in tests:
            yield pytest.param(world, test, id=f"{world}-{test}", marks=marks)


@pytest.mark.parametrize(("world", "test"), list(_parameters()))
def test_torch(results: AllResults, world: World, test: str) -> None:
    record = results.of(world).wait_for(test)
    assert record["status"] == "pass", record["reason"]


def test_as_many_as_with_gloo() -> None:
    assert len(set(GLOO_PASSES)) == 79
    assert len(set(GLOO_PASSES + GLOO_PASSES_WITH_FOUR)) == 103
