"""Owns the tests of training over several hosts: sums of any split, narrow types between hosts
alone, and a host that is lost."""

import os
import signal
import time

import pytest
import torch
from torch import Tensor, nn

import pydist
from models import Transformer, mlp, wavy_loss
from pydist import DataParallel
from ranks import HOSTS, fresh_ranks, get_pool
from reference import (
    OneProcess,
    assert_same_on_all_ranks,
    assert_step_reduced,
    draw,
    expect_error,
    gradients,
)
from test_data_parallel_lifetime import make_and_drop

# Equal hosts, a larger one, one rank each, and ranks in no order of hosts.
SPLITS = ["aabb", "aab", "abc", "abca"]
LARGE = 300_000  # elements: several segments


def train(rank: int, world_size: int) -> None:
    """Buckets and large gradients, small models and large ones."""
    torch.manual_seed(1)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return wavy_loss(module(draw(rank, step, 4, width)))

    for width in (7, 160):
        module = mlp(width, 3)
        expected = OneProcess(module, world_size)
        model = DataParallel(module)
        for step in range(3):
            assert_step_reduced(model, expected, loss, rank, step)
        report = model.report()
        assert report.transport == "hosts"
        assert report.hidden_s > 0


def train_transformer(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    module = Transformer(64, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        tokens = draw(rank, step, 2, 12).abs().mul(100).long() % 512
        return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(1).flatten())

    for step in range(3):
        assert_step_reduced(model, expected, loss, rank, step)


@pytest.mark.parametrize("split", SPLITS)
def test_training_equals_one_process(split: str) -> None:
    """Whatever ranks are on which hosts, and however many: gradients are one process's mean, with
    the same bits on all ranks."""
    pool = get_pool(len(split), **{HOSTS: split})
    pool.run(train)
    pool.run(train_transformer)


class Weighted(nn.Module):
    """A parameter's gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(5))
        self.large = nn.Parameter(torch.ones(LARGE))
        self.wide = nn.Parameter(torch.ones(9, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(9).bfloat16())

    def forward(self, weights: list[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), weights, strict=True)
        return torch.stack([(p * w).double().sum() for p, w in pairs]).sum()


def weights_of(module: nn.Module, rank: int) -> list[Tensor]:
    return [draw(rank, i, p.numel(), dtype=p.dtype) for i, p in enumerate(module.parameters())]


def mean_over_hosts(weights: list[Tensor], split: str, wire: torch.dtype) -> Tensor:
    """By the definition: a host's mean, rounded into what travels; hosts added in float32, each as
    its part of the ranks, and rounded once."""
    total: Tensor | None = None
    hosts = sorted(set(split), key=split.index)
    even = len({split.count(host) for host in hosts}) == 1
    for host in hosts:
        own = [weight for weight, where in zip(weights, split, strict=True) if where == host]
        mean = sum(own[1:], own[0]) * (torch.tensor(1.0) / len(own))
        part = mean.to(wire).float()
        if not even:
            part = part * torch.tensor(len(own) / len(split))
        total = part if total is None else total + part
    assert total is not None
    if even:
        total = total * (torch.tensor(1.0) / len(hosts))
    return total.to(wire).float()


def train_narrow(rank: int, world_size: int, split: str, wire: torch.dtype) -> None:
    model = DataParallel(Weighted(), wire_dtype=wire)
    for _ in range(2):
        model.zero_grad()
        model(weights_of(model, rank)).backward()
        by_rank = [weights_of(model, r) for r in range(world_size)]
        for index, name in ((0, "small"), (1, "large")):
            parameter = model.module.get_parameter(name)
            expected = mean_over_hosts([weights[index] for weights in by_rank], split, wire)
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, expected), name
        wide = torch.stack([weights[2] for weights in by_rank]).mean(0)
        torch.testing.assert_close(model.module.wide.grad, wide, rtol=1e-14, atol=1e-15)
        assert_same_on_all_ranks(gradients(model))


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", ["aabb", "aab", "abc"])
def test_float32_is_narrow_between_hosts_alone(split: str, wire: torch.dtype) -> None:
    """With wire_dtype a host's mean is rounded once, and the mean of all once: the bits of that
    definition. What has another type travels as it is."""
    get_pool(len(split), **{HOSTS: split}).run(train_narrow, split, wire)


def lose_a_host(rank: int, world_size: int) -> tuple[str, float]:
    """Ranks 2 and 3, which are host b, die in the middle of a backward."""
    module = mlp(160, 4)
    model = DataParallel(module)

    def step(index: int) -> None:
        model.zero_grad()
        wavy_loss(model(draw(rank, index, 4, 160))).backward()

    for index in range(3):
        step(index)
    if rank >= 2:
        module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    told = str(expect_error(pydist.PeerError, lambda: [step(index) for index in range(3)]))
    seconds = time.monotonic() - start
    again = expect_error(pydist.PeerError, lambda: step(9))
    assert "host b" in str(again)
    return told, seconds


def test_a_lost_host_is_named() -> None:
    """Two ranks of one host are killed: the ranks of the other one raise PeerError that names the
    host, soon, and once more in the next backward."""
    outcomes = fresh_ranks(4, lose_a_host, env={HOSTS: "aabb"})
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.traceback
        told, seconds = outcome.value
        assert "host b" in told
        assert seconds < 15


def test_models_leave_nothing_behind() -> None:
    """Each has a communicator, threads and connections of its own, which end with it: at the latest
    when the next model is wrapped."""
    pool = get_pool(2, **{HOSTS: "ab"})
    before, after = (pool.run(make_and_drop, number) for number in (4, 16))
    for old, new in zip(before, after, strict=True):
        for kind in ("threads", "descriptors", "children"):
            assert new[kind] == old[kind], kind
