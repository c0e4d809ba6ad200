"""Owns the tests of every kind of module, in sizes that are packed and in sizes that are not."""

import pytest
import torch
from torch import nn

from conftest import Transport
from models import KINDS, WIDTHS, Kind
from pydist import DataParallel
from reference import OneProcess, assert_reduced, draw, unwrapped


def run_kind(rank: int, world_size: int, name: str, size: str) -> None:
    """Fresh gradients, zeroed ones, absent ones and accumulated ones, in turn."""
    kind: Kind = KINDS[name]
    module = kind.module(size)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    layouts = [(parameter.shape, parameter.stride()) for parameter in module.parameters()]
    for step, mode in enumerate(["fresh", "zero", "none", "keep"]):
        if mode in ("zero", "none"):
            model.zero_grad(set_to_none=mode == "none")
            expected.zero_grad(set_to_none=mode == "none")
        kind.loss(model, rank, step, size).backward()
        expected.backward(kind.loss, step, size)
        assert_reduced(model, expected)
        for parameter, (shape, stride) in zip(unwrapped(model).parameters(), layouts, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.shape == shape
            if parameter.numel() > 1 and 1 not in shape:
                assert parameter.grad.stride() == stride


@pytest.mark.parametrize("size", list(WIDTHS))
@pytest.mark.parametrize("name", list(KINDS))
def test_module_kind(transport: Transport, name: str, size: str) -> None:
    """The gradients of this kind of module are the mean over ranks in four steps in a row, with
    the shape and strides of their parameters."""
    transport.pool(2).run(run_kind, name, size)


def run_create_graph(rank: int, world_size: int, width: int) -> list[str]:
    """What became of backward(create_graph=True): "right" or the error's text."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        return module(draw(rank, step, 4, width)).square().sum()  # type: ignore[no-any-return]

    found = []
    try:
        loss(model, rank, 0).backward(create_graph=True)
    except RuntimeError as error:
        found.append(str(error))
    else:
        expected.backward(loss, 0)
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.detach()
        assert_reduced(model, expected)
        found.append("right")
    model = DataParallel(module)
    model.zero_grad()
    expected.zero_grad()
    loss(model, rank, 1).backward()
    expected.backward(loss, 1)
    assert_reduced(model, expected)
    return found


@pytest.mark.parametrize("width", [8, 192])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph(transport: Transport, width: int) -> None:
    """backward(create_graph=True) leaves a gradient with a graph, which nothing may reduce in
    place: the mean is right, or the error says create_graph; an ordinary step works after it."""
    for (outcome,) in transport.pool(2).run(run_create_graph, width):
        assert outcome == "right" or "create_graph" in outcome
