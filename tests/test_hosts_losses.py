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

TIMEOUT_S = {"cut": 2.0, "kill": 60.0}  # of the ranks
SLACK_S = 15.0


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


# Layout, which host it loses (the store is in the first), and what the ranks were at.
LOSSES = (
    ((2, 2), 1, train_until_lost),
    ((1, 1, 1), 2, reduce_until_lost),
    ((2, 1), 1, train_until_lost),
    ((2, 2), 0, reduce_until_lost),
    ((2, 2), 1, reduce_until_lost),
    ((2, 2), 0, train_until_lost),
    ((1, 1, 1), 2, train_until_lost),
    ((2, 1), 1, reduce_until_lost),
)


def loss_cases(num_quick: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("layout", "lost", "function"),
        [
            pytest.param(*case, marks=[pytest.mark.slow] if index >= num_quick else [])
            for index, case in enumerate(LOSSES)
        ],
        ids=[f"{layout_name(layout)}, host {lost}, {f.__name__}" for layout, lost, f in LOSSES],
    )


def lost_outcomes(
    hosts: Hosts, lost: int, how: str, folder: Path, function: Any
) -> tuple[list[Outcome], float]:
    timeout_s = TIMEOUT_S[how]
    env = {"PYDIST_TIMEOUT_S": str(timeout_s)}
    ranks = hosts.start(function, str(folder), group_timeout_s=timeout_s, env=env)
    wait_until_under_way(folder, hosts.num_ranks)
    lost_at = time.monotonic()
    if how == "cut":
        hosts.network.cut(lost)
    else:
        hosts.kill(ranks, lost)
    return ranks.join(timeout_s=60), lost_at


def assert_accuses(outcome: Outcome, hosts: Hosts, accused: set[int]) -> None:
    """Of all hosts, those: as "host NAME #1 (rank 2 (pid 9, host NAME #1), rank 3 ...)"."""
    assert outcome.error in ("pydist.PeerError", "pydist.TimeoutError"), outcome
    named = {
        host
        for host in range(len(hosts.layout))
        if f"#{host} (rank {hosts.ranks_of(host)[0]} " in outcome.message
    }
    assert named == accused, outcome.message


@loss_cases(num_quick=3)
def test_a_cut_link_is_an_error_that_names_the_host(
    tmp_path: Path, layout: tuple[int, ...], lost: int, function: Any
) -> None:
    """Nothing comes any more, not even a reset. To the lost host's ranks, the others are gone."""
    with Hosts(layout) as hosts:
        outcomes, lost_at = lost_outcomes(hosts, lost, "cut", tmp_path, function)
        others = set(range(len(layout))) - {lost}
        for outcome in outcomes:
            is_lost = outcome.rank in hosts.ranks_of(lost)
            assert_accuses(outcome, hosts, others if is_lost else {lost})
            assert outcome.ended_at is not None
            assert outcome.ended_at - lost_at < TIMEOUT_S["cut"] + SLACK_S, outcome


@loss_cases(num_quick=4)
def test_a_killed_host_is_an_error_that_names_it(
    tmp_path: Path, layout: tuple[int, ...], lost: int, function: Any
) -> None:
    """Its kernel resets connections: nobody waits for the timeout."""
    with Hosts(layout) as hosts:
        outcomes, lost_at = lost_outcomes(hosts, lost, "kill", tmp_path, function)
        for outcome in outcomes:
            if outcome.rank in hosts.ranks_of(lost):
                assert outcome.error == "RankDied"
            else:
                assert_accuses(outcome, hosts, {lost})
                assert outcome.ended_at is not None
                assert outcome.ended_at - lost_at < SLACK_S, outcome
