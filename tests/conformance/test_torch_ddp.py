"""torch's own tests of its DistributedDataParallel, run with pydist.DataParallel in its place.

expectations.py says which there are, and in which six ours does better than the test allows. The
tests of a world run in one process, several at once; each test here waits for its result.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from expectations import (
    DIFFERENCES,
    NOT_WITH_THREE_RANKS,
    TORCH_FAILS,
    TORCH_PASSES,
    WITHOUT_SHIM,
)

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


@dataclasses.dataclass(frozen=True)
class World:
    """How tests are run."""

    world_size: int
    shim: bool = True
    transport: str = "shared_memory"

    def __str__(self) -> str:
        shim = "" if self.shim else "-without-shim"
        return f"{self.world_size}-ranks-{self.transport}{shim}"

    def start(self, tests: list[str]) -> "subprocess.Popen[str]":
        command = [sys.executable, str(HERE / "run_cases.py"), "--world-size", str(self.world_size)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "PYDIST_TRANSPORT": self.transport,
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            command + ["--shim"] * self.shim + tests,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )


class Results:
    """What the tests of one world came to, as far as they have ended."""

    def __init__(self, world: World, tests: list[str]) -> None:
        self._process = world.start(tests)
        self._ended: dict[str, dict[str, str]] = {}

    def wait_for(self, test: str) -> dict[str, str]:
        assert self._process.stdout is not None
        while test not in self._ended:
            line = self._process.stdout.readline()
            assert line, f"run_cases.py ended with {self._process.wait()} before {test} was run"
            record = json.loads(line)
            self._ended[record["test"]] = record
        return self._ended[test]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class AllResults:
    """Those of every world; a world is started when the first of its results is wanted."""

    def __init__(self, selected: dict[World, list[str]]) -> None:
        self._selected = selected
        self._started: dict[World, Results] = {}

    def of(self, world: World) -> Results:
        if world not in self._started:
            self._started[world] = Results(world, self._selected[world])
        return self._started[world]

    def close(self) -> None:
        for results in self._started.values():
            results.close()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[AllResults]:
    selected: dict[World, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == "test_torch":
            selected.setdefault(item.callspec.params["world"], []).append(
                item.callspec.params["test"]
            )
    found = AllResults(selected)
    yield found
    found.close()


def _parameters() -> Iterator[object]:
    with_three = [test for test in TORCH_PASSES if test not in NOT_WITH_THREE_RANKS]
    slow = [pytest.mark.slow]
    for world, tests, marks in (
        (World(2), TORCH_PASSES + TORCH_FAILS, []),
        (World(2, shim=False), WITHOUT_SHIM, []),
        (World(3), with_three + TORCH_FAILS, slow),
        (World(3, shim=False), WITHOUT_SHIM, slow),
        (World(2, transport="process_group"), TORCH_PASSES + TORCH_FAILS, slow),
    ):
        for test in tests:
            yield pytest.param(world, test, id=f"{world}-{test}", marks=marks)


@pytest.mark.parametrize(("world", "test"), _parameters())
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
