"""Owns the fixture with the results of a module's tests of torch's."""

from collections.abc import Iterator

import pytest
from suite_results import AllResults, World


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[AllResults]:
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
