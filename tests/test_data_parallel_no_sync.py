"""Owns the tests of no_sync, of accumulation, and of parameters that some backward does not use."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Transport
from models import WIDTHS, Scalars, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    draw,
    gradients,
)


def loss_of(module: nn.Module, rank: int, step: int, width: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


def accumulate(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for first in range(0, 9, 3):
        if first < 6:  # the last three are added to what is there
            model.zero_grad(set_to_none=first == 0)
            expected.zero_grad(set_to_none=first == 0)
        for step in (first, first + 1):
            with model.no_sync():
                loss_of(model, rank, step, width).backward()
            expected.backward(loss_of, step, width, synced=False)
            assert_gradients_match(model, expected.replicas[rank])
        loss_of(model, rank, first + 2, width).backward()
        expected.backward(lambda replica, r, step=first + 2: loss_of(replica, r, step, width))
        assert_reduced(model, expected)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_gradients_accumulate_under_no_sync(transport: Transport, width: int) -> None:
    """Two backwards under no_sync stay local and are reduced with the third, three times over."""
    transport.pool(2).run(accumulate, width)


def nest_and_raise(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def check(step: int, synced: bool) -> None:
        model.zero_grad()
        expected.zero_grad()
        loss_of(model, rank, step, 8).backward()
        expected.backward(loss_of, step, 8, synced=synced)
        assert_gradients_match(model, expected.replicas[rank])

    with model.no_sync():
        check(0, synced=False)
        with model.no_sync():
            check(1, synced=False)
        check(2, synced=False)
    check(3, synced=True)
    try:
        with model.no_sync():
            raise KeyError
    except KeyError:
        pass
    check(4, synced=True)
    assert model.require_backward_grad_sync is True


def test_no_sync_nests_and_survives_exceptions(transport: Transport) -> None:
    """An inner no_sync does not end the outer one, and one that an exception leaves is over."""
    transport.pool(2).run(nest_and_raise)


def cross_contexts(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    model = DataParallel(module)

    def run(forward_inside: bool, backward_inside: bool) -> None:
        expected = OneProcess(module, world_size)
        model.zero_grad()
        expected.zero_grad()
        if forward_inside:
            with model.no_sync():
                loss = loss_of(model, rank, 0, 8)
        else:
            loss = loss_of(model, rank, 0, 8)
        if backward_inside:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        expected.backward(loss_of, 0, 8, synced=not forward_inside)
        assert_gradients_match(model, expected.replicas[rank])
        loss_of(model, rank, 1, 8).backward()
        assert_same_on_all_ranks(gradients(model))

    for forward_inside in (False, True):
        for backward_inside in (False, True):
            run(forward_inside, backward_inside)


def test_c25_no_sync_is_decided_at_forward(transport: Transport) -> None:
    """Putting only the backward inside no_sync reduces nonetheless; putting only the forward there
    does not; after the next synced backward the ranks agree in all four combinations."""
    transport.pool(2).run(cross_contexts)


def count_rounds(rank: int, world_size: int) -> int:
    model = DataParallel(mlp(8, 2))
    start = model.report().num_rounds
    for step in range(6):
        if step % 3 == 2:
            loss_of(model, rank, step, 8).backward()
        else:
            with model.no_sync():
                loss_of(model, rank, step, 8).backward()
    return int(model.report().num_rounds - start)


def test_no_sync_costs_no_round(transport: Transport) -> None:
    """Six backwards of which two are synced are two rounds, in the words of the report."""
    assert transport.pool(2).run(count_rounds) == [2, 2]


def values(model: nn.Module) -> dict[str, Any]:
    return {
        name.split(".")[-2]: None if parameter.grad is None else float(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def used_only_under_no_sync(rank: int, world_size: int) -> list[dict[str, Any]]:
    model = DataParallel(Scalars("ab"), find_unused_parameters=True)
    found = []
    with model.no_sync():
        model({"a": 10.0, "b": rank + 1.0}).backward()
    found.append(values(model))
    model({"a": 1.0}).backward()
    found.append(values(model))
    model({"a": 1.0, **({"b": 1.0} if rank == 0 else {})}).backward()
    found.append(values(model))
    return found


def test_used_only_under_no_sync(transport: Transport) -> None:
    """b was used only under no_sync: the next synced backward averages it, to 1.5 on both ranks.
    Then only rank 0 uses it: rank 1 contributes the gradient it has, (2.5 + 1.5) / 2 = 2.0."""
    first, second = transport.pool(2).run(used_only_under_no_sync)
    assert first == [{"a": 10.0, "b": 1.0}, {"a": 11.0, "b": 1.5}, {"a": 12.0, "b": 2.0}]
    assert second == [{"a": 10.0, "b": 2.0}, {"a": 11.0, "b": 1.5}, {"a": 12.0, "b": 2.0}]


def follow(module: nn.Module, rank: int, plan: list[dict[str, float]]) -> Tensor:
    return module(plan[rank])  # type: ignore[no-any-return]


def use_some(rank: int, world_size: int, find_unused: bool) -> None:
    """Every way for a parameter to be used by some, all or none, over several steps."""
    module = Scalars("abcd")
    expected = OneProcess(module, world_size)
    model = DataParallel(module, find_unused_parameters=find_unused)
    plans: list[list[dict[str, float]]] = [
        [{"a": 2.0}, {"b": 4.0}, {"b": 5.0}],
        [{"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 1.0}, {"a": 6.0, "b": 1.0}],
        [{"c": 2.0}, {"c": 4.0}, {"c": 6.0, "a": 1.0}],
        [{"b": 1.0}, {"b": 1.0}, {"b": 1.0}],
    ]
    for step, plan in enumerate(plans * 2):
        if step % 3 == 0:
            model.zero_grad()
            expected.zero_grad()
        follow(model, rank, plan).backward()
        expected.backward(follow, plan)
        assert_reduced(model, expected)
    assert module.get_parameter("d.weight").grad is None


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unused_on_some_or_all_ranks(transport: Transport, find_unused: bool) -> None:
    """Used on some ranks: the others contribute what they have, or zeros; used nowhere: .grad
    stays as it was. With and without find_unused_parameters, and changing from step to step."""
    transport.pool(3).run(use_some, find_unused)


def use_large(rank: int, world_size: int) -> None:
    """Each rank sends its inputs through another of three branches."""
    torch.manual_seed(1)
    branches = nn.ModuleList(nn.Linear(192, 192) for _ in range(4))

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = branches

        def forward(self, x: Tensor, index: int) -> Tensor:
            return self.branches[index](x)  # type: ignore[no-any-return]

    module = Branches()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, find_unused_parameters=True)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return wavy_loss(module(draw(rank, step, 4, 192), (rank + step) % 3))

    for step in range(5):
        if step != 3:
            model.zero_grad(set_to_none=step != 2)
            expected.zero_grad(set_to_none=step != 2)
        loss(model, rank, step).backward()
        expected.backward(loss, step)
        assert_reduced(model, expected)
    assert branches[3].weight.grad is None


def test_large_branches(transport: Transport) -> None:
    """Weights too large to be packed, each used by one rank in turn: the unit is reduced though
    only one rank's backward made it ready."""
    transport.pool(2).run(use_large)


class _ScalarsOrInput(Scalars):
    def forward(self, inputs: dict[str, float], x: float = 0.0) -> Tensor:
        return super().forward(inputs) + x * 1.0


def use_only_the_input(rank: int, world_size: int) -> None:
    module = _ScalarsOrInput("ab")
    expected = OneProcess(module, world_size)
    model = DataParallel(module, find_unused_parameters=True)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        if rank == 0:
            return module({"a": 2.0 + step, "b": 1.0})  # type: ignore[no-any-return]
        return module({}, torch.tensor(3.0, requires_grad=True))  # type: ignore[no-any-return]

    for step in range(3):
        assert_step_reduced(model, expected, loss, rank, step)


def test_a_rank_that_uses_no_parameter_joins(transport: Transport) -> None:
    """Rank 1's output depends on its input alone, so that no parameter of it is ever ready: its
    backward joins the round all the same, with zeros, instead of leaving rank 0 waiting."""
    transport.pool(2).run(use_only_the_input)


def warn_once(rank: int, world_size: int, find_unused: bool) -> list[str]:
    model = DataParallel(Scalars("ab"), find_unused_parameters=find_unused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            model({"a": 1.0}).backward()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_an_unused_parameter_is_named_once(transport: Transport) -> None:
    """Without find_unused_parameters the gradients are right too, and a warning says once which
    parameter got none; with it the user knows."""
    pool = transport.pool(2)
    for messages in pool.run(warn_once, False):
        assert len(messages) == 1
        assert "b.weight" in messages[0]
        assert "a.weight" not in messages[0]
    assert pool.run(warn_once, True) == [[], []]
