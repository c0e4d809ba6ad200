"""Owns the tests of hosts that are lost: a link that is cut, which tells nobody, and processes that
die all at once. Survivors raise an error that names who is gone."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pydist
from hosts import Hosts
from models import mlp
from pydist import DataParallel
from ranks import Outcome
from test_hosts_network import layout_name, mlp_loss

TIMEOUT_S = 4.0  # of the ranks


def train_until_lost(rank: int, world_size: int, folder: str) -> None:
    """Training goes on until something happens; a file says that it is well under way."""
    torch.manual_seed(1)
    model = DataParallel(mlp(160, 3))
    for step in range(100_000):
        model.zero_grad()
        mlp_loss(model, rank, step % 10).backward()
        if step == 5:
            Path(folder, f"rank{rank}").touch()


def reduce_until_lost(rank: int, world_size: int, folder: str) -> None:
    mine = torch.zeros(30_000)
    for step in range(100_000):
        pydist.all_reduce(mine)
        if step == 5:
            Path(folder, f"rank{rank}").touch()


def wait_until_under_way(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(list(folder.glob("rank*"))) < count:
        assert time.monotonic() < deadline, "the ranks did not get going"
        time.sleep(0.02)


# What each layout loses: the last host, and the first, where the store is.
LOSSES = [((2, 2), 1), ((2, 2), 0), ((1, 1, 1), 2), ((2, 1), 1)]
loss_cases = pytest.mark.parametrize(
    ("layout", "lost"), LOSSES, ids=[f"{layout_name(la)}, host {lo}" for la, lo in LOSSES]
)


def lost_outcomes(
    layout: tuple[int, ...], lost: int, how: str, folder: Path, function: Any
) -> tuple[Hosts, list[Outcome], float]:
    with Hosts(layout, env={"PYDIST_TIMEOUT_S": str(TIMEOUT_S)}) as hosts:
        ranks = hosts.start(function, str(folder), group_timeout_s=TIMEOUT_S)
        wait_until_under_way(folder, hosts.num_ranks)
        lost_at = time.monotonic()
        if how == "cut":
            hosts.network.cut(lost)
        else:
            hosts.kill(ranks, lost)
        outcomes = ranks.join(timeout_s=60)
        return hosts, outcomes, lost_at


def assert_names_the_lost(outcome: Outcome, hosts: Hosts, lost: int) -> None:
    assert outcome.error in ("pydist.errors.PeerError", "pydist.errors.TimeoutError"), outcome
    ranks = hosts.ranks_of(lost)
    assert any(f"rank {rank}" in outcome.message for rank in ranks), outcome.message


@pytest.mark.parametrize("function", [reduce_until_lost, train_until_lost])
@loss_cases
def test_a_cut_link_is_an_error_that_names_the_host(
    tmp_path: Path, layout: tuple[int, ...], lost: int, function: Any
) -> None:
    """Nothing comes any more, not even a reset. Survivors name who is gone; to the lost host's
    ranks, it is the others."""
    hosts, outcomes, lost_at = lost_outcomes(layout, lost, "cut", tmp_path, function)
    for outcome in outcomes:
        print(outcome.rank, outcome.error, outcome.ended_at - lost_at, outcome.message)
    for outcome in outcomes:
        if outcome.rank not in hosts.ranks_of(lost):
            assert_names_the_lost(outcome, hosts, lost)
        assert outcome.error in ("pydist.errors.PeerError", "pydist.errors.TimeoutError")


@pytest.mark.parametrize("function", [reduce_until_lost, train_until_lost])
@loss_cases
def test_a_killed_host_is_an_error_that_names_it(
    tmp_path: Path, layout: tuple[int, ...], lost: int, function: Any
) -> None:
    hosts, outcomes, lost_at = lost_outcomes(layout, lost, "kill", tmp_path, function)
    for outcome in outcomes:
        print(outcome.rank, outcome.error, outcome.ended_at - lost_at, outcome.message)
    for outcome in outcomes:
        if outcome.rank in hosts.ranks_of(lost):
            assert outcome.error == "RankDied"
        else:
            assert_names_the_lost(outcome, hosts, lost)
