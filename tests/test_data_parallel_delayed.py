"""Owns the tests of parameters whose reduction waits for another parameter's gradient."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from conftest import Transport
from models import TwoHeads, wavy_loss
from pydist import DataParallel, MismatchError, UsageError
from reference import (
    OneProcess,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    draw,
    expect_error,
)


class Layers(nn.Module):
    """Gradients become ready from the last layer to the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.width = width
        self.first = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    width = next(module.parameters()).shape[-1]
    return wavy_loss(module(draw(rank, step, 4, width)))


def part_of(module: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if name.startswith(prefix)]


def wrap(module: Layers, delayed: str = "last", **options: Any) -> DataParallel:
    return DataParallel(
        module,
        delay_all_reduce_named_params=part_of(module, delayed),
        param_to_hook_all_reduce=module.middle.weight,
        bucket_cap_mb=1e-9,
        **options,
    )


def published_names(model: DataParallel) -> set[str]:
    units = model._reducer.units()
    members = [units[unit][2] for unit in model._reducer.published()]
    return {model._names[index] for indices in members for index in indices}


def watch_publishing(model: DataParallel, rank: int) -> dict[str, set[str]]:
    """What was published when the gradient of each layer's weight arrived."""
    seen: dict[str, set[str]] = {}
    hooks = [
        parameter.register_hook(lambda _, name=name: seen.__setitem__(name, published_names(model)))
        for name, parameter in model.module.named_parameters()
        if name.endswith("weight")
    ]
    loss_of(model, rank, 0).backward()
    for hook in hooks:
        hook.remove()
    return seen


LAST = {"last.weight", "last.bias"}


def delay_the_last_layer(rank: int, world_size: int, width: int) -> None:
    plain = watch_publishing(DataParallel(Layers(width), bucket_cap_mb=1e-9), rank)
    assert plain["middle.weight"] >= LAST
    model = wrap(Layers(width))
    flat = [[model._names[i] for i in members] for _, _, members in model._reducer.units()]
    assert sorted(flat[-1]) == sorted(LAST)
    seen = watch_publishing(model, rank)
    assert not seen["middle.weight"] & LAST
    assert seen["first.weight"] >= LAST


@pytest.mark.parametrize("width", [8, 192])
def test_a_delayed_parameter_waits_for_the_gate(transport: Transport, width: int) -> None:
    """The last layer is ready first, and without the arguments published before the middle one's
    gradient comes. Delayed until then it is published with it, and not later; both its parameters
    are one unit, also where they are large."""
    transport.pool(2).run(delay_the_last_layer, width)


def train_delayed(rank: int, world_size: int, width: int, options: dict[str, Any]) -> None:
    for delayed in ("last", "first", "middle", ""):  # the gate among them, and all of them
        module = Layers(width)
        expected = OneProcess(module, world_size)
        model = wrap(module, delayed, **options)
        assert model.state_dict().keys() == {f"module.{name}" for name in module.state_dict()}
        for step in range(3):
            assert_step_reduced(model, expected, loss_of, rank, step)
        with model.no_sync():
            loss_of(model, rank, 3).backward()
        expected.backward(loss_of, 3, synced=False)
        loss_of(model, rank, 4).backward()
        expected.backward(loss_of, 4)
        assert_reduced(model, expected)
        again = copy.deepcopy(model)
        again.zero_grad()
        loss_of(again, rank, 5).backward()
        assert again._reducer.units() == model._reducer.units()
        expected.zero_grad()
        expected.backward(loss_of, 5)
        assert_reduced(again, expected)


def train_with_hook(rank: int, world_size: int, width: int) -> None:
    module = Layers(width)
    expected = OneProcess(module, world_size)
    model = wrap(module)
    module.last.weight = nn.Parameter(module.last.weight.detach().clone())
    model.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        assert_step_reduced(model, expected, loss_of, rank, step)
    model.zero_grad()
    seen = watch_publishing(model, rank)
    assert not seen["middle.weight"] & LAST
    assert seen["first.weight"] >= LAST


def test_a_communication_hook_gets_the_delayed_bucket_too(transport: Transport) -> None:
    """The delayed parameters are the hook's last bucket, and still wait for the gate; also one that
    took another's place meanwhile."""
    transport.pool(2).run(train_with_hook, 192)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("width", [8, 192])
def test_delayed_gradients_are_the_mean(
    transport: Transport, width: int, options: dict[str, Any]
) -> None:
    """Steps, accumulation and a copy of the wrapper, with some, the gate's own or all parameters
    delayed: the same means as ever."""
    transport.pool(2).run(train_delayed, width, options)


def leave_the_gate_out(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    module = TwoHeads()
    expected = OneProcess(module, world_size)
    model = DataParallel(
        module,
        find_unused_parameters=True,
        delay_all_reduce_named_params=part_of(module, "trunk"),
        param_to_hook_all_reduce=module.head_b.weight,
    )

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        a, b = module(draw(rank, step, 4, 10))
        return wavy_loss(b if step == 1 or (step == 2 and rank == 0) else a)

    for step in range(4):  # nobody, all, one rank, nobody again use the gate
        assert_step_reduced(model, expected, loss, rank, step)


def test_a_gate_that_is_not_used(transport: Transport) -> None:
    """Where the gate's gradient does not come, on all ranks or on one, delayed gradients are
    averaged at the end of backward."""
    transport.pool(2).run(leave_the_gate_out)


def average_outside(rank: int, world_size: int) -> None:
    module = Layers(8)
    outside = nn.Parameter(torch.full((8,), 2.0 + rank))
    unused = nn.Parameter(torch.ones(3))
    model = DataParallel(
        module,
        delay_all_reduce_named_params=[("scale", outside), ("unused", unused)],
        param_to_hook_all_reduce=module.first.weight,
        find_unused_parameters=True,
    )
    assert outside.tolist() == [2.0] * 8
    for step in range(2):
        outside.grad = None
        (model(draw(rank, step, 4, 8)) * outside).sum().backward()
        outputs = [module(draw(r, step, 4, 8)).sum(0) for r in range(world_size)]
        wanted = sum(outputs[1:], outputs[0]) / world_size
        assert outside.grad is not None
        torch.testing.assert_close(outside.grad, wanted)
        assert unused.grad is None
        assert_same_on_all_ranks([outside.grad, *[p.grad for p in module.parameters()]])


def test_parameters_outside_the_module(transport: Transport) -> None:
    """A delayed parameter may be one that only the loss uses: it starts as the first rank has it,
    and gets the mean of its gradients."""
    transport.pool(2).run(average_outside)


def refuse(rank: int, world_size: int) -> None:
    module = Layers(8)
    last = part_of(module, "last")
    both = (
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
    )
    foreign, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4), requires_grad=False)
    module.register_parameter("frozen", frozen)
    cases: list[tuple[Any, Any, str]] = [
        (last, None, both),
        (None, module.first.weight, both),
        (last, foreign, "got none of them"),
        (last, frozen, "got frozen, which does not"),
        ([("last.weight", foreign)], module.first.weight, "names last.weight, but another"),
    ]
    for named, gate, text in cases:
        error = expect_error(
            UsageError,
            functools.partial(
                DataParallel,
                module,
                delay_all_reduce_named_params=named,
                param_to_hook_all_reduce=gate,
            ),
        )
        assert text in str(error)
    delayed = "last" if rank == 0 else "first"
    error = expect_error(MismatchError, lambda: wrap(Layers(8), delayed))
    assert "delayed" in str(error)


def test_refusals(transport: Transport) -> None:
    """One argument without the other, gates that give no gradient, names that are taken, and ranks
    that delay different parameters."""
    transport.pool(2).run(refuse)
