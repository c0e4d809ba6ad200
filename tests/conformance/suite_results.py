"""Owns the results of torch's tests as they come in from run_cases.py, by world; and their fixture,
which a module has by importing it."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


@dataclasses.dataclass(frozen=True)
class World:
    """How tests are run: the options of run_cases.py, and variables of the environment."""

    name: str
    world_size: int
    suite: str
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name

    def start(self, tests: list[str]) -> "subprocess.Popen[str]":
        command = [sys.executable, str(HERE / "run_cases.py"), "--world-size", str(self.world_size)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            **dict(self.variables),
        }
        return subprocess.Popen(
            [*command, self.suite, *self.options, *tests],
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


@pytest.fixture(scope="module", name="results")
def gather_results(request: pytest.FixtureRequest) -> Iterator[AllResults]:
    """Of what is selected of the module's test_torch[world, test]."""
    selected: dict[World, list[str]] = {}
    for item in request.session.items:
        if (
            isinstance(item, pytest.Function)
            and item.module is request.module
            and item.originalname == "test_torch"
        ):
            parameters = item.callspec.params
            selected.setdefault(parameters["world"], []).append(parameters["test"])
    found = AllResults(selected)
    yield found
    found.close()
