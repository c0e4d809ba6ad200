"""Owns the tests of what happens behind DataParallel's back: changed or hidden things."""

import copy
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pydist
from conftest import Transport
from models import WIDTHS, mlp, wavy_loss
from pydist import DataParallel
from ranks import fresh_ranks
from reference import (
    OneProcess,
    assert_reduced,
    assert_step_reduced,
    difference,
    draw,
    expect_error,
)


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    width = next(iter(module.parameters())).shape[-1]
    return wavy_loss(module(draw(rank, step, 4, width)))


# -- parameters ----------------------------------------------------------------------------------


def convert(rank: int, world_size: int, width: int, steps_before: int, change: str) -> str:
    module = mlp(width, 2)
    model = DataParallel(module)
    for step in range(steps_before):
        loss_of(model, rank, step).backward()
    first = next(iter(module.parameters()))
    if change == "dtype":
        module.to(torch.bfloat16)
    elif change == "shape":
        first.data = first.data[:1].clone()
    else:
        first.data = first.data.t().contiguous().t()
    return str(expect_error(pydist.UsageError, lambda: model(torch.zeros(1, width))))


@pytest.mark.parametrize("change", ["dtype", "shape", "strides"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_a_parameter_of_another_layout_is_refused(
    transport: Transport, width: int, steps_before: int, change: str
) -> None:
    """`model.bfloat16()` after wrapping left units laid out for other bytes: memory was
    overwritten. Now the next forward names the parameter, and what it was and is."""
    for message in transport.pool(2).run(convert, width, steps_before, change):
        assert "0.weight" in message
        assert "wrap" in message


def set_data(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(4):
        if step == 2:  # of the same layout, as weight averaging and checkpoints do
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
        assert_step_reduced(model, expected, loss_of, rank, step)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_data_of_the_same_layout_may_be_set(transport: Transport, width: int) -> None:
    transport.pool(2).run(set_data, width)


# -- settings ------------------------------------------------------------------------------------


def differ(rank: int, world_size: int, name: str, values: list[Any]) -> str:
    def wrap() -> DataParallel:
        return DataParallel(mlp(8, 2), **{name: values[rank]})

    return str(expect_error(pydist.MismatchError, wrap))


@pytest.mark.parametrize(
    ("name", "values"),
    [("bucket_cap_mb", [25, 0.0001]), ("gradient_as_bucket_view", [True, False])],
)
def test_settings_that_differ_are_refused(
    transport: Transport, name: str, values: list[Any]
) -> None:
    """Ranks with other buckets would add up gradients of different parameters."""
    for message in transport.pool(2).run(differ, name, values):
        assert name in message
        assert "rank 1" in message


def wrap_badly_on_one_rank(rank: int, world_size: int) -> str:
    module = mlp(8, 2)
    if rank == 1:
        module.requires_grad_(False)
    expected: type[Exception] = pydist.UsageError if rank == 1 else pydist.PeerError
    message = str(expect_error(expected, lambda: DataParallel(module)))
    DataParallel(mlp(8, 2))  # nothing is left of the failed try
    return message


def test_a_rank_that_cannot_wrap_tells_the_others(transport: Transport) -> None:
    """A check that fails on one rank alone left the others waiting for the group's timeout."""
    found = transport.pool(2).run(wrap_badly_on_one_rank)
    assert "require a gradient" in found[1]
    assert "rank 1" in found[0]
    assert "require a gradient" in found[0]


def copy_on_one_rank(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    if rank == 0:
        copy.deepcopy(model)  # an average of weights, say, that only rank 0 keeps
    loss_of(model, rank, 0).backward()
    expected.backward(loss_of, 0)
    assert_reduced(model, expected)


def test_one_rank_alone_may_copy_the_model(transport: Transport) -> None:
    transport.pool(2).run(copy_on_one_rank)


class Expanded(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor(float(rank + 1)).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask  # type: ignore[no-any-return]


def broadcast_expanded(rank: int, world_size: int) -> None:
    model = DataParallel(Expanded(rank))
    assert torch.equal(model.module.mask, torch.ones(4))


def test_an_expanded_buffer_is_sent(transport: Transport) -> None:
    """Its elements share memory, so it cannot be written element by element."""
    transport.pool(2).run(broadcast_expanded)


# -- hidden outputs, changed gradients ------------------------------------------------------------


class HiddenLoss(nn.Module):
    """Keeps its loss to itself, behind two reentrant checkpoints."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> None:
        y = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        self.loss = wavy_loss(checkpoint(self.second, y, use_reentrant=True))


def hidden_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    inner = module.module if isinstance(module, DataParallel) else module
    module(draw(rank, step, 4, inner.first.in_features))  # type: ignore[union-attr]
    return inner.loss  # type: ignore[union-attr, return-value]


class Sliced(nn.Module):
    """Returns a view, which its user then writes to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        y = checkpoint(self.second, y, use_reentrant=True)
        return y[:, : y.shape[1] // 2]  # type: ignore[no-any-return]


def sliced_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    inner = module.module if isinstance(module, DataParallel) else module
    out = module(draw(rank, step, 4, inner.first.in_features))  # type: ignore[union-attr]
    return wavy_loss(out.mul_(2))


CASES: dict[str, tuple[Callable[[int], nn.Module], Callable[..., Tensor]]] = {
    "hidden": (HiddenLoss, hidden_loss),
    "sliced": (Sliced, sliced_loss),
}


def train_hidden(rank: int, world_size: int, case: str, width: int) -> None:
    make, loss = CASES[case]
    torch.manual_seed(0)
    module = make(width)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, find_unused_parameters=True)
    for step in range(3):
        assert_step_reduced(model, expected, loss, rank, step)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
@pytest.mark.parametrize("case", list(CASES))
def test_checkpoints_behind_outputs_that_no_hook_sees(
    transport: Transport, case: str, width: int
) -> None:
    """With reentrant checkpoints each segment is a backward of its own. Where no hook on an output
    marks the outermost one, the round closed after the first segment, and the rest stayed local."""
    transport.pool(2).run(train_hidden, case, width)


class NoneForSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * 2, None


class GivesNone(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.ones(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return NoneForSecond.apply(self.layer(x), self.unused)  # type: ignore[no-any-return]


def train_with_none(rank: int, world_size: int, width: int) -> None:
    module = GivesNone(width)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, find_unused_parameters=True)
    for step in range(2):
        loss_of(model, rank, step).backward()
        expected.backward(loss_of, step)
        assert module.unused.grad is None
        for found, mean in zip(
            module.layer.parameters(), expected.module.layer.parameters(), strict=True
        ):
            assert difference(found.grad, mean.grad) is None


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_a_function_may_give_none_for_a_parameter(transport: Transport, width: int) -> None:
    """The parameter's node runs, but brings nothing: it is unused, not lost."""
    transport.pool(2).run(train_with_none, width)


def scale_late(rank: int, world_size: int, width: int) -> str:
    module = mlp(width, 2)
    model = DataParallel(module)
    loss_of(model, rank, 0).backward()
    last = list(module.parameters())[-2]
    node = last.view_as(last).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def scale(*_: Any) -> None:
        last.grad.mul_(2)  # type: ignore[union-attr]

    node.register_hook(scale)
    model.zero_grad()
    try:
        loss_of(model, rank, 1).backward()
    except (pydist.UsageError, pydist.PeerError) as error:
        return str(error)
    return " ".join(str(float(value)) for value in last.grad.flatten()[:3])  # type: ignore[union-attr]


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_a_gradient_changed_while_it_is_averaged(transport: Transport, width: int) -> None:
    """A hook that runs after the gradient was handed over scaled some ranks' results only:
    now ranks get the same values, where it was still to be handed over, or every rank learns."""
    found = transport.pool(2).run(scale_late, width)
    assert all("modified during backward" in text for text in found) or len(set(found)) == 1


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.always(x)
        return self.sometimes(y) if both else y  # type: ignore[no-any-return]


def use_only_once(rank: int, world_size: int) -> None:
    module = Choice()
    model = DataParallel(module, gradient_as_bucket_view=True, find_unused_parameters=True)
    wavy_loss(model(draw(rank, 0, 4, 16), True)).backward()
    gradient = module.sometimes.weight.grad
    assert gradient is not None
    before = gradient.clone()
    wavy_loss(model(draw(rank, 1, 4, 16), False)).backward()
    assert module.sometimes.weight.grad is gradient
    assert torch.equal(gradient, before)


def test_an_unused_gradient_in_a_shared_bucket_keeps_its_bits(transport: Transport) -> None:
    """Its bucket is reduced for its neighbours' sake; the mean of three equal numbers is not always
    that number."""
    transport.pool(3).run(use_only_once)


# -- forked children ------------------------------------------------------------------------------


def fork_twice(rank: int, world_size: int) -> int:
    DataParallel(mlp(8, 2))
    read, write = os.pipe()
    if os.fork() == 0:
        try:  # the child's own files take the numbers that closed descriptors have left
            sockets = [socket.socket() for _ in range(16)]
            grandchild = os.fork()
            if grandchild == 0:
                alive = all(one.fileno() >= 0 and os.fstat(one.fileno()) for one in sockets)
                os.write(write, b"y" if alive else b"n")
                os._exit(0)
            os.waitpid(grandchild, 0)
        finally:
            os._exit(0)
    os.wait()
    os.close(write)
    return os.read(read, 1) == b"y"


def test_a_grandchild_keeps_its_files() -> None:
    """The handler that closes our socket in a child closed a stranger's in the child's child."""
    assert all(outcome.value for outcome in fresh_ranks(2, fork_twice))
