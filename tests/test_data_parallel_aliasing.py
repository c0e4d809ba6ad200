"""Owns the tests of gradients that share memory, where reducing in place would corrupt another.

Autograd hands one block of memory to several owners: two parameters, or a parameter and a
gradient still on its way to other layers. Each test builds such a pair, large and small.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Transport
from models import WIDTHS, TwoLayers, wavy_loss
from pydist import DataParallel
from reference import OneProcess, assert_reduced, draw

# Rank 0 stops for so long in the middle of backward, while its peer reduces whatever both have
# published: long enough for a write to memory that is still in use to come in time.
PAUSE_S = 0.1


def loss_of(module: nn.Module, rank: int, step: int, width: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


class Pausing(nn.Module):
    """Calls `pause` when the gradient of some output is there, before it is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.pause: Callable[[], Any] = lambda: None

    def pause_at(self, output: Tensor) -> Tensor:
        output.register_hook(lambda _: self.pause())
        return output


class ViewsOfOneGradient(nn.Module):
    """x.view() + y.view(): both gradients are views of the sum's gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(width * width))
        self.y = nn.Parameter(torch.randn(width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        width = self.y.shape[0]
        return torch.mm(inputs, self.x.view(width, width) + self.y.view(width, width))


class PendingGradient(Pausing):
    """layer(h) + position.view(): the position's gradient is still needed by the layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layer = nn.Linear(width, width)
        self.position = nn.Parameter(torch.randn(width * width))

    def forward(self, inputs: Tensor) -> Tensor:
        width = self.layer.in_features
        inputs = inputs.repeat(width // inputs.shape[0], 1)
        hidden = self.pause_at(self.layer(torch.tanh(self.first(inputs))))
        # The gradient that the sum passes on is made by tanh, within the backward of this module.
        return torch.tanh(hidden + self.position.view(width, width))


class PendingBehindView(Pausing):
    """The same through several views, and with two parameters waiting for one gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.a = nn.Parameter(torch.randn(width, width))
        self.b = nn.Parameter(torch.randn(1, width * width))

    def forward(self, inputs: Tensor) -> Tensor:
        width = self.layer.in_features
        hidden = self.pause_at(self.layer(inputs.repeat(width // inputs.shape[0], 1)))
        return torch.tanh((hidden.view(1, -1) + self.b).view(width, width) + self.a)


class Concatenated(nn.Module):
    """torch.cat of parameters of unequal rows: gradients are parts of one block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(n * width, width) for n in (1, 2, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, torch.cat(list(self.parts)))


class Unbound(nn.Module):
    """One parameter taken apart, another used whole by two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.randn(2, width, width))
        self.shared = nn.Parameter(torch.randn(width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.pair.unbind()
        return torch.tanh(inputs @ (first + self.shared)) @ (second - self.shared)


SHARING: dict[str, Callable[[int], nn.Module]] = {
    "views": ViewsOfOneGradient,
    "pending": PendingGradient,
    "pending_behind_view": PendingBehindView,
    "cat": Concatenated,
    "unbind": Unbound,
}


def run_sharing(rank: int, world_size: int, name: str, size: str) -> None:
    torch.manual_seed(1)
    module = SHARING[name](WIDTHS[size])
    # Autograd itself adds twice into two .grad of one memory, so no step here accumulates.
    check_steps(rank, world_size, module, WIDTHS[size], num_accumulating=0)


def check_steps(
    rank: int,
    world_size: int,
    module: nn.Module,
    width: int,
    prepare: Callable[[nn.Module], Any] = lambda module: None,
    num_accumulating: int = 1,
) -> None:
    """Three fresh backwards and some that accumulate; prepare registers hooks on each replica."""
    expected = OneProcess(module, world_size)
    for replica in expected.replicas:
        prepare(replica)
    prepare(module)
    model = DataParallel(module)

    if rank == 0:
        model.module.pause = functools.partial(time.sleep, PAUSE_S)
    for step in range(3 + num_accumulating):
        if step < 3:
            model.zero_grad()
            expected.zero_grad()
        loss_of(model, rank, step, width).backward()
        expected.backward(loss_of, step, width)
        assert_reduced(model, expected)


@pytest.mark.parametrize("size", list(WIDTHS))
@pytest.mark.parametrize("name", list(SHARING))
def test_gradients_that_share_memory(transport: Transport, name: str, size: str) -> None:
    """Parameters whose gradients share one block, or a block with a gradient on its way to
    another layer: reducing one of them in place would silently change the other."""
    transport.pool(2).run(run_sharing, name, size)


kept: list[Tensor] = []  # what a hook keeps must outlive the backward


def keep_gradient(gradient: Tensor) -> None:
    kept.append(gradient)


def replace_by_scaled(gradient: Tensor) -> Tensor:
    return gradient * 2


def replace_by_kept(gradient: Tensor) -> Tensor:
    kept.append(gradient * 3)
    return kept[-1]


def replace_by_expanded(gradient: Tensor) -> Tensor:
    return gradient.mean().expand(gradient.shape)


def replace_by_transposed(gradient: Tensor) -> Tensor:
    return gradient.t() if gradient.dim() == 2 else gradient


def replace_by_slice(gradient: Tensor) -> Tensor:
    padded = torch.cat([gradient.flatten(), gradient.flatten()[:1]])
    return padded[: gradient.numel()].view(gradient.shape)


def use_and_drop(gradient: Tensor) -> None:
    gradient.abs().max().item()


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "keep": keep_gradient,
    "scale": replace_by_scaled,
    "replace_and_keep": replace_by_kept,
    "expand": replace_by_expanded,
    "transpose": replace_by_transposed,
    "slice": replace_by_slice,
    "look": use_and_drop,
}


def run_hooks(rank: int, world_size: int, name: str, size: str) -> None:
    torch.manual_seed(1)
    width = WIDTHS[size]
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def prepare(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.register_hook(HOOKS[name])

    kept.clear()
    check_steps(rank, world_size, module, width, prepare)
    kept.clear()


@pytest.mark.parametrize("size", list(WIDTHS))
@pytest.mark.parametrize("name", list(HOOKS))
def test_tensor_hooks(transport: Transport, name: str, size: str) -> None:
    """A hook that keeps the gradient, or puts another in its place of any layout: what the hook
    returns is what is averaged."""
    transport.pool(2).run(run_hooks, name, size)


# What a hook may keep: the tensor, which makes autograd copy it, or an alias that autograd, which
# counts tensors and not the users of their memory, does not see.
KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "view": lambda gradient: gradient.view(-1),
    "part": lambda gradient: gradient[0],
    "numpy": lambda gradient: torch.from_numpy(gradient.numpy()),
}


def run_keeping_hook(rank: int, world_size: int, what: str, width: int) -> None:
    torch.manual_seed(1)
    module = TwoLayers(width)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(gradient: Tensor) -> None:
        seen.append((KEEPING[what](gradient), KEEPING[what](gradient.clone())))

    def compare() -> None:
        time.sleep(PAUSE_S if rank == 0 else 0)
        assert torch.equal(*seen[-1]), "what the hook kept was changed in the middle of backward"

    module.last.weight.register_hook(keep)
    module.between = compare
    for step in range(2):
        model.zero_grad()
        expected.zero_grad()
        loss_of(model, rank, step, width).backward()
        expected.backward(loss_of, step, width)
        assert_reduced(model, expected)
    if what == "tensor":
        assert all(torch.equal(*pair) for pair in seen), "what the hook kept was changed"


@pytest.mark.parametrize("width", list(WIDTHS.values()))
@pytest.mark.parametrize("what", list(KEEPING))
def test_what_a_hook_kept_stays_local(transport: Transport, what: str, width: int) -> None:
    """A tensor hook keeps the gradient, or an alias of its memory, and looks at it again later in
    the backward, when a peer is already through: it still has this rank's own values."""
    transport.pool(2).run(run_keeping_hook, what, width)


def run_retain_grad(rank: int, world_size: int, size: str) -> None:
    torch.manual_seed(1)
    width = WIDTHS[size]
    module = PendingGradient(width)
    model, plain = DataParallel(module), PendingGradient(width)
    plain.load_state_dict(module.state_dict())

    def activation(model: nn.Module, step: int) -> Tensor:
        hidden: Tensor = model(draw(rank, step, 4, width))
        hidden.retain_grad()
        wavy_loss(hidden).backward()
        assert hidden.grad is not None
        return hidden.grad

    for step in range(3):
        assert torch.equal(activation(model, step), activation(plain, step))


@pytest.mark.parametrize("size", list(WIDTHS))
def test_retained_activation_gradients_stay_local(transport: Transport, size: str) -> None:
    """retain_grad on an output whose gradient a parameter shares: it keeps local values, to the
    bit those of the plain module."""
    transport.pool(2).run(run_retain_grad, size)
