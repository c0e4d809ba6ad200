"""Owns the tests of hooks that run when a gradient is complete, such as optimizers in backward.

A gradient is complete when ranks have averaged it. Until then users' hooks wait, so that no
optimizer ever steps on a local gradient.
"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import pydist
from conftest import Transport
from models import WIDTHS, Scalars, mlp, wavy_loss
from pydist import DataParallel
from ranks import fresh_ranks
from reference import (
    OneProcess,
    assert_parameters_match,
    assert_same_on_all_ranks,
    draw,
    expect_error,
)

LR = 0.05


def loss_of(module: nn.Module, rank: int, step: int, width: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


def descend(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter -= LR * parameter.grad
    parameter.grad = None


def hook_all(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(descend)


def optimizer_for_all(module: nn.Module) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": LR})


def train(rank: int, world_size: int, width: int, way: Any, views: bool, before: bool) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size, lambda ps: torch.optim.SGD(ps, lr=LR))
    if before:
        way(module)
    model = DataParallel(module, gradient_as_bucket_view=views)
    if not before:
        way(module)
    for step in range(4):
        loss_of(model, rank, step, width).backward()
        expected.step(loss_of, step, width)
        assert all(parameter.grad is None for parameter in module.parameters())
    assert_parameters_match(model, expected.module)
    # The mean of the sum, after two backwards that stay local.
    before_sync = [parameter.clone() for parameter in module.parameters()]
    for optimizer in expected.optimizers:
        optimizer.zero_grad()
    with model.no_sync():
        for step in (4, 5):
            loss_of(model, rank, step, width).backward()
            expected.backward(loss_of, step, width, synced=False)
    for parameter, old in zip(module.parameters(), before_sync, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter, old)
    loss_of(model, rank, 6, width).backward()
    expected.backward(loss_of, 6, width)
    for optimizer in expected.optimizers:
        optimizer.step()
    assert_parameters_match(model, expected.module)
    assert_same_on_all_ranks(module.parameters())


@pytest.mark.parametrize("width", list(WIDTHS.values()))
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("way", [hook_all, optimizer_for_all])
def test_c63_optimizers_in_backward_step_on_means(
    transport: Transport, way: Any, views: bool, width: int
) -> None:
    """A post-accumulate hook that steps and drops the gradient, and torch's own
    _apply_optimizer_in_backward, put on before and after wrapping: parameters are those of SGD in
    one process, the same on all ranks. Backwards under no_sync step nothing; the next synchronised
    one steps on the mean of all that came together."""
    for before in (True, False):
        transport.pool(2).run(train, width, way, views, before)


def use_on_one(rank: int, world_size: int) -> None:
    module = Scalars("abc")
    model = DataParallel(module, find_unused_parameters=True)
    calls: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for name, parameter in module.named_parameters():
        seen = calls[name.split(".")[0]]
        parameter.register_post_accumulate_grad_hook(
            lambda p, seen=seen: seen.append(float(p.grad))
        )
    output = model([{"a": 2.0}, {"b": 4.0}][rank])
    output.backward()
    assert calls == {"a": [1.0], "b": [2.0], "c": []}


def test_hooks_run_where_another_rank_used_the_parameter(transport: Transport) -> None:
    """Rank 0 uses a, rank 1 b, nobody c: on both ranks the hooks of a and b run, once, on the mean,
    or an optimizer in them would let replicas drift; that of c does not."""
    transport.pool(2).run(use_on_one)


def fail_in_between(rank: int, world_size: int) -> None:
    module = mlp(192, 2)
    model = DataParallel(module)
    calls: list[int] = []
    module[2].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))

    def accident(_: Tensor) -> None:
        raise ArithmeticError

    if rank == 1:
        module[0].weight.register_hook(accident)
    kind = ArithmeticError if rank == 1 else pydist.PeerError
    expect_error(kind, lambda: loss_of(model, rank, 0, 192).backward())
    assert calls == []


def test_no_hook_runs_when_the_round_fails(transport: Transport) -> None:
    """Rank 1 raises in the middle of backward: hooks of gradients that were ready do not run, on no
    rank."""
    for outcome in fresh_ranks(2, fail_in_between, env=transport.env):
        assert outcome.ok, outcome.traceback


def change_hooks(rank: int, world_size: int) -> None:
    module = mlp(8, 1)
    weight = module[0].weight
    models = [DataParallel(module)]
    calls: list[str] = []

    def backward() -> list[str]:
        calls.clear()
        module.zero_grad()
        loss_of(models[0], rank, 0, 8).backward()
        return list(calls)

    assert backward() == []
    first = weight.register_post_accumulate_grad_hook(lambda _: calls.append("first"))
    assert backward() == ["first"]
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("second"))
    assert backward() == ["first", "second"]
    first.remove()
    assert backward() == ["second"]

    def complain(_: Tensor) -> None:
        raise KeyError("a full table")

    broken = weight.register_post_accumulate_grad_hook(complain)
    assert "a full table" in str(expect_error(KeyError, backward))
    broken.remove()
    assert backward() == ["second"]  # the round was over when it raised
    models[0]._remove_autograd_hooks()  # gradients stay local, and are complete at once
    calls.clear()
    wavy_loss(module(draw(rank, 0, 4, 8))).backward()
    assert calls == ["second"]
    backward()
    models.clear()
    gc.collect()
    calls.clear()
    wavy_loss(module(draw(rank, 0, 4, 8))).backward()
    assert calls == ["second"]
    models.append(DataParallel(module))
    assert backward() == ["second"]


def test_hooks_come_and_go(transport: Transport) -> None:
    """Hooks put on and taken off between backwards run accordingly, in their order, once each; what
    one raises is raised by backward, and training goes on. When the wrapper leaves gradients alone,
    or is gone, they run at once, as torch has it; a new wrapper puts them off again."""
    transport.pool(2).run(change_hooks)


def train_with_a_comm_hook(rank: int, world_size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    module = mlp(24, 2)
    expected = OneProcess(module, world_size, lambda ps: torch.optim.SGD(ps, lr=LR))
    optimizer_for_all(module)
    model = DataParallel(module, bucket_cap_mb=0.002)
    model.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        loss_of(model, rank, step, 24).backward()
        expected.step(loss_of, step, 24)
    assert_parameters_match(model, expected.module)


def test_optimizers_in_backward_with_a_communication_hook(transport: Transport) -> None:
    """Torch has either; here the optimizer steps on what the communication hook returned."""
    transport.pool(2).run(train_with_a_comm_hook)
