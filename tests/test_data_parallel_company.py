"""Owns the tests of what goes on beside a wrapper: other collectives and wrappers, bare modules."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conftest import Transport
from models import mlp, wavy_loss
from pydist import DataParallel
from reference import OneProcess, assert_gradients_match, assert_reduced, draw

WIDTH = 24
STEPS = 10


class SumInBackward(torch.autograd.Function):
    """Identity; its backward adds the gradient up over ranks, in the default group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total)
        return gradient + 0 * total


class Talking(nn.Module):
    """Layers whose backward communicates between them; some ranks leave one out."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.skips and index == 2:
                continue
            x = layer(x)
            if dist.is_initialized() and getattr(self, "talks", True):
                x = SumInBackward.apply(x)
        return x


def own_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, WIDTH)))


def talk(rank: int, world_size: int, hooked: bool) -> None:
    module = Talking()
    expected = OneProcess(module, world_size)
    for replica in (expected.module, *expected.replicas):
        replica.talks = False  # type: ignore[assignment]
    model = DataParallel(module, bucket_cap_mb=0.001)
    if hooked:
        model.register_comm_hook(None, own_hook)
    for step in range(STEPS):
        model.zero_grad()
        expected.zero_grad()
        loss_of(model, rank, step).backward()
        expected.backward(loss_of, step)
        assert_reduced(model, expected)


def test_a_backward_that_communicates(transport: Transport) -> None:
    """A hook's collectives were mixed, by timing, with those of the user's own functions in the
    same group: wrong gradients without a word."""
    for hooked in (False, True):
        transport.pool(2).run(talk, hooked)


def train_two(rank: int, world_size: int, hooked: bool) -> None:
    both = nn.Sequential(mlp(WIDTH, 3), Talking())
    both[1].talks = False  # type: ignore[assignment]
    expected = OneProcess(both, world_size)
    for index, replica in enumerate(expected.replicas):
        replica[1].skips = index == 1 and not hooked  # type: ignore[index]
    both[1].skips = rank == 1 and not hooked  # type: ignore[assignment]
    models = nn.Sequential(
        *(DataParallel(part, bucket_cap_mb=0.001, find_unused_parameters=True) for part in both)
    )
    if hooked:
        for model in models:
            model.register_comm_hook(None, own_hook)  # type: ignore[operator]
    for step in range(STEPS):
        both.zero_grad()
        expected.zero_grad()
        loss_of(models, rank, step).backward()
        expected.backward(loss_of, step)
        assert_gradients_match(both, expected.module)


def test_two_wrappers_in_one_backward(transport: Transport) -> None:
    """Over a process group the rounds of two wrappers were mixed where ranks use different
    parameters, and two wrappers with hooks waited for each other."""
    for hooked in (False, True):
        transport.pool(2).run(train_two, hooked)


def freeze_between(rank: int, world_size: int, has_gradient: bool) -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    output = model(draw(rank, 0, 4, 8))
    outputs = [replica(draw(r, 0, 4, 8)) for r, replica in enumerate(expected.replicas)]
    for frozen in (module, expected.module, *expected.replicas):
        if has_gradient:
            frozen[1].weight.grad = torch.zeros(8, 8)  # type: ignore[index]
        frozen[1].weight.requires_grad_(False)  # type: ignore[index]
    wavy_loss(output).backward()
    for each in outputs:
        wavy_loss(each).backward()
    mean = torch.stack([r[0].weight.grad for r in expected.replicas]).mean(0)  # type: ignore[index]
    torch.testing.assert_close(module[0].weight.grad, mean)


def test_a_parameter_frozen_between_forward_and_backward(transport: Transport) -> None:
    """Its bucket went before its neighbour's gradient had come, which was lost."""
    for has_gradient in (False, True):
        transport.pool(2).run(freeze_between, has_gradient)


def count_hooks(rank: int, world_size: int) -> None:
    module = mlp(WIDTH, 2)
    model = DataParallel(module)
    calls = []
    weight = next(module.parameters())
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
    loss_of(model, rank, 0).backward()
    assert len(calls) == 1
    for step in range(2):
        loss_of(module, rank, step).backward()
        assert len(calls) == 2 + step
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    assert len(calls) == 3  # waits for the mean
    loss_of(model, rank, 1).backward()
    assert len(calls) == 4


def test_hooks_of_the_bare_module_run(transport: Transport) -> None:
    """A backward that does not go through the wrapper is local, and its hooks run as ever."""
    transport.pool(2).run(count_hooks)


def evaluate_a_copy(rank: int, world_size: int) -> None:
    model = DataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    loss_of(model, rank, 0).backward()
    if rank == 0:
        average = copy.deepcopy(model).eval()
        with torch.no_grad():
            assert average(draw(0, 0, 4, WIDTH)).shape == (4, WIDTH)
    loss_of(model, rank, 1).backward()


def test_one_rank_evaluates_a_copy(transport: Transport) -> None:
    """A moving average that one rank keeps waited for its peers at its first forward."""
    transport.pool(2).run(evaluate_a_copy)
