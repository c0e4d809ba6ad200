"""Owns the tests of the harness itself: what it reports when ranks hang, raise or die."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import (
    FreshRanks,
    RankDied,
    RankHang,
    RankPool,
    fresh_ranks,
    get_pool,
    resource_snapshot,
    start_ranks,
)


class OwnError(ValueError):
    """An exception of a test module."""


def add_up(rank: int, world_size: int, start: int, scale: int = 1) -> float:
    tensor = torch.tensor([float(start + scale * rank)])
    dist.all_reduce(tensor)
    return float(tensor.item())


def wait_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def raise_on_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        raise OwnError("rank 1 has a reason")
    return "fine"


def compare_on_rank_1(rank: int, world_size: int) -> None:
    remarkable = 12345 + rank
    assert rank == 0 or remarkable == 0


def die_on_rank_1(rank: int, world_size: int, how: str) -> str:
    if rank == 1:
        print("last words", file=sys.stderr, flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(7)
    return "survived"


def read_variable(rank: int, world_size: int, name: str) -> Any:
    return os.environ.get(name), torch.get_num_threads(), dist.is_initialized()


def be_interrupted(rank: int, world_size: int, folder: str) -> None:
    Path(folder, str(rank)).touch()
    time.sleep(600)


def leave_an_orphan(rank: int, world_size: int) -> int:
    """A child that keeps the rank's end of the socket open after the rank's death."""
    pid = os.fork()
    if pid == 0:
        time.sleep(5)
        os._exit(0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 0


def test_results_come_by_rank_and_processes_stay() -> None:
    pool = get_pool(2)
    assert pool.run(add_up, 10, scale=3) == [23.0, 23.0]
    pids = pool.pids
    assert pool.run(add_up, 0) == [1.0, 1.0]
    assert pool.pids == pids
    assert get_pool(2) is pool


def test_a_hang_is_reported_with_every_ranks_traceback() -> None:
    pool = RankPool(2, watchdog_s=3)
    pool.run(add_up, 1)
    pids = pool.pids
    with pytest.raises(RankHang) as caught:
        pool.run(wait_on_rank_0)
    text = str(caught.value)
    assert "rank 0 of 2 did not answer" in text
    assert "in wait_on_rank_0" in text
    assert "rank 1 returned" in text
    assert pool.pids == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert pool.run(add_up, 1) == [3.0, 3.0]  # new ranks
    pool.close()


def test_an_exception_is_carried_with_its_traceback() -> None:
    pool = RankPool(2)
    with pytest.raises(OwnError, match="rank 1 has a reason") as caught:
        pool.run(raise_on_rank_1)
    assert "in raise_on_rank_1" in str(caught.value.__cause__)
    assert pool.pids == []


def test_a_failed_assert_shows_the_values_around_it() -> None:
    with pytest.raises(AssertionError) as caught:
        RankPool(2).run(compare_on_rank_1)
    assert "remarkable = 12346" in str(caught.value.__cause__)


def test_expected_errors_come_as_outcomes() -> None:
    outcomes = RankPool(2).run(raise_on_rank_1, expect_errors=True)
    assert [outcome.ok for outcome in outcomes] == [True, False]
    assert outcomes[0].value == "fine"
    assert outcomes[1].error == "test_ranks.OwnError"
    assert outcomes[1].message == "rank 1 has a reason"


def test_a_death_in_a_pool_is_noticed() -> None:
    with pytest.raises(RankDied, match=r"rank 1 .* ended with code -9") as caught:
        RankPool(2).run(die_on_rank_1, "kill")
    assert "last words" in str(caught.value)


def test_a_death_is_noticed_while_a_child_holds_the_socket() -> None:
    started = time.monotonic()
    outcomes = RankPool(2).run(leave_an_orphan, expect_errors=True)
    assert outcomes[1].error == "RankDied"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 7)])
def test_fresh_ranks_report_exit_codes_and_output(how: str, code: int) -> None:
    outcomes = fresh_ranks(2, die_on_rank_1, how)
    assert [outcome.exit_code for outcome in outcomes] == [0, code]
    assert outcomes[0].value == "survived"
    assert outcomes[1].error == "RankDied"
    assert "last words" in outcomes[1].stderr


def test_fresh_ranks_can_be_signalled(tmp_path: Path) -> None:
    ranks: FreshRanks = start_ranks(2, be_interrupted, str(tmp_path), init=False)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks.signal(0, signal.SIGINT)
    ranks.signal(1)
    outcomes = ranks.join(20)
    assert [outcome.error for outcome in outcomes] == ["KeyboardInterrupt", "RankDied"]


def test_environment_threads_and_set_up() -> None:
    outcomes = fresh_ranks(1, read_variable, "PYDIST_X", env={"PYDIST_X": "1"}, init=False)
    assert outcomes[0].value == ("1", 1, False)
    assert fresh_ranks(1, read_variable, "PYDIST_X")[0].value == (None, 1, True)


def test_a_rank_in_its_own_interpreter() -> None:
    outcomes = fresh_ranks(2, add_up, 1, own_interpreter=True)
    assert [outcome.value for outcome in outcomes] == [3.0, 3.0]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]


def test_resources_of_an_idle_pool_do_not_grow() -> None:
    pool = get_pool(2)
    pool.run(add_up, 1)
    before = pool.run(resource_snapshot)
    for _ in range(5):
        pool.run(add_up, 1)
    after = pool.run(resource_snapshot)
    for key in ("threads", "descriptors", "children"):
        assert [row[key] for row in after] == [row[key] for row in before]


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="not a function of a test module's top"):
        get_pool(2).run(lambda rank, world_size: None)
