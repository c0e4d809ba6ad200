"""Owns the tests of stores that are older than the ranks: what dead ones left must not be read."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pydist._fresh_store import fresh_store
from pydist.errors import TimeoutError

TIMEOUT_S = 20.0


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "hash":
        yield HashStore()
    else:
        yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(store: Store, size: int, times: int = 1) -> list[list[PrefixStore]]:
    """What each rank of a group gets, `times` in a row; ranks are threads."""

    def run(rank: int) -> list[PrefixStore]:
        return [fresh_store(store, rank, size, TIMEOUT_S, "name") for _ in range(times)]

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def assert_shared(found: list[PrefixStore], key: str) -> None:
    """All see one store, which had no such key."""
    assert not any(part.check([key]) for part in found)
    found[-1].set(key, "value")
    assert all(part.get(key) == b"value" for part in found)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_time_all_ranks_get_the_same_new_store(store: Store, size: int) -> None:
    by_rank = meet(store, size, times=20)
    for found in zip(*by_rank, strict=True):
        assert_shared(list(found), "key")


def start_and_abandon(store: Store, rank: int, size: int) -> None:
    """A rank that dies while it waits for its peers."""
    with pytest.raises(TimeoutError):
        fresh_store(store, rank, size, 0.05, "name")


@pytest.mark.parametrize("dead", [[0], [1], [2], [0, 2], [1, 2]])
def test_ranks_that_died_while_they_met_are_not_heard(store: Store, dead: list[int]) -> None:
    for rank in dead:
        start_and_abandon(store, rank, 3)
    found = [parts[0] for parts in meet(store, 3)]
    assert_shared(found, "key")


def test_ranks_that_died_together_are_not_heard(store: Store) -> None:
    """An attempt in which some ranks had met already, and one never came."""
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(fresh_store, store, rank, 3, 0.5, "name") for rank in (0, 1)]
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.5 s for rank 2 to join group 'name'"):
        ends[0].result()
    old = ends[1].result()
    old.set("key", "of the dead")
    found = [parts[0] for parts in meet(store, 3)]
    assert_shared(found, "key")


@pytest.mark.parametrize(("rank", "awaited"), [(0, 1), (1, 0)])
def test_a_rank_that_stays_away_is_named(store: Store, rank: int, awaited: int) -> None:
    began = time.monotonic()
    with pytest.raises(
        TimeoutError, match=rf"rank {rank} waited 0\.2 s for rank {awaited} to join"
    ):
        fresh_store(store, rank, 2, 0.2, "name")
    assert time.monotonic() - began < 5


def test_a_late_rank_is_waited_for(store: Store) -> None:
    start_and_abandon(store, 1, 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fresh_store, store, 0, 2, TIMEOUT_S, "name")
        time.sleep(0.3)
        assert not first.done()
        late = pool.submit(fresh_store, store, 1, 2, TIMEOUT_S, "name")
    assert_shared([first.result(), late.result()], "key")
