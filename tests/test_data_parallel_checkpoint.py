"""Owns the tests of activation checkpointing, where backwards nest and parameters come twice."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conftest import Transport
from models import WIDTHS, wavy_loss
from pydist import DataParallel
from reference import OneProcess, assert_reduced, assert_step_reduced, draw

Run = Callable[[nn.Module, Tensor], Tensor]


def reentrant(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=True)  # type: ignore[no-any-return]


def non_reentrant(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)  # type: ignore[no-any-return]


RUNS: dict[str, Run] = {"reentrant": reentrant, "non_reentrant": non_reentrant}


class Twice(nn.Module):
    """One layer under two checkpoints: its parameters are ready twice in one backward."""

    def __init__(self, width: int, run: Run) -> None:
        super().__init__()
        self.run = run
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, self.run(self.layer, x))


class TwiceAndOnce(nn.Module):
    """The layer is used under a checkpoint, outside one, and other layers before and after."""

    def __init__(self, width: int, run: Run) -> None:
        super().__init__()
        self.run = run
        self.first = nn.Linear(width, width)
        self.layer = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.run(self.layer, x))
        x = torch.tanh(self.layer(x))
        return self.run(self.last, self.run(self.layer, x))


class Last(nn.Module):
    """The last layers are checkpointed: the inner backward ends before most are ready."""

    def __init__(self, width: int, run: Run) -> None:
        super().__init__()
        self.run = run
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.last = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.last, self.first(x))


class Nested(nn.Module):
    """Checkpoints within checkpoints, with a layer outside on both sides."""

    def __init__(self, width: int, run: Run) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = self.run(_Inner(self.run, list(self.layers)[1:4]), x)
        return self.layers[4](x)  # type: ignore[no-any-return]


class _Inner(nn.Module):
    def __init__(self, run: Run, layers: list[nn.Module]) -> None:
        super().__init__()
        self.run = run
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.run(layer, x))
        return x


class Everything(nn.Module):
    """Nothing but a checkpoint: the outermost backward meets no parameter of its own."""

    def __init__(self, width: int, run: Run) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


SHAPES: dict[str, Callable[[int, Run], nn.Module]] = {
    "twice": Twice,
    "twice_and_once": TwiceAndOnce,
    "last": Last,
    "nested": Nested,
    "everything": Everything,
}


def run_checkpoints(
    rank: int, world_size: int, shape: str, kind: str, width: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    module = SHAPES[shape](width, RUNS[kind])
    expected = OneProcess(module, world_size)
    model = DataParallel(module, **options)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return wavy_loss(module(draw(rank, step, 4, width).requires_grad_()))

    for step in range(4):
        if step != 2:
            model.zero_grad(set_to_none=step != 3)
            expected.zero_grad(set_to_none=step != 3)
        loss(model, rank, step).backward()
        expected.backward(loss, step)
        assert_reduced(model, expected)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
@pytest.mark.parametrize("kind", list(RUNS))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_checkpoints(transport: Transport, shape: str, kind: str, width: int) -> None:
    """Layers under checkpoints, last, nested or used again: nested backwards neither end the round
    early nor write into what peers are reading."""
    transport.pool(2).run(run_checkpoints, shape, kind, width, {})


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
)
def test_c15_reentrant_checkpoint_of_a_shared_layer(
    transport: Transport, options: dict[str, Any]
) -> None:
    """One layer in two reentrant checkpoints was refused as "ready twice": its gradient is the sum
    of both uses, averaged, under every option."""
    pool = transport.pool(2)
    for width in WIDTHS.values():
        pool.run(run_checkpoints, "twice", "reentrant", width, options)


def run_deep(rank: int, world_size: int) -> None:
    """75 levels: beyond 60, autograd goes on in another thread, where no gradient is expected."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(75))

        def descend(self, x: Tensor, level: int) -> Tensor:
            if level == len(self.layers):
                return x
            x = torch.tanh(self.layers[level](x))
            return checkpoint(self.descend, x, level + 1, use_reentrant=True)  # type: ignore[no-any-return]

        def forward(self, x: Tensor) -> Tensor:
            return self.descend(x, 0)

    torch.manual_seed(1)
    module = Deep()
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return wavy_loss(module(draw(rank, step, 4, 8).requires_grad_()))

    for step in range(2):
        assert_step_reduced(model, expected, loss, rank, step)


def test_deeply_nested_checkpoints(transport: Transport) -> None:
    """75 nested backwards, which autograd spreads over two threads."""
    transport.pool(2).run(run_deep)


def run_under_no_sync(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    module = Twice(192, reentrant)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return wavy_loss(module(draw(rank, step, 4, 192).requires_grad_()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            if step % 2 == 0:
                with model.no_sync():
                    loss(model, rank, step).backward()
            else:
                loss(model, rank, step).backward()
            expected.backward(loss, step, synced=step % 2 == 1)
    assert_reduced(model, expected)


def test_checkpoints_under_no_sync(transport: Transport) -> None:
    """A layer ready twice, on top of gradients accumulated under no_sync."""
    transport.pool(2).run(run_under_no_sync)
