"""Owns the rank processes that the benchmarks under pytest share."""

from collections.abc import Iterator

import pytest

from bench.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks
