"""Owns the one process that a pipeline is compared with: it goes through the same microbatches."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pydist import PipelineParallel

Loss = Callable[[Any, Any], Tensor]


def make_mlp(num_layers: int = 8, width: int = 6) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for index in range(num_layers):
        layers.append(nn.Linear(width, width) if index % 2 == 0 else nn.Tanh())
    return nn.Sequential(*layers)


def draw_batch(step: int, rows: int = 8, width: int = 6) -> tuple[Tensor, Tensor]:
    """Input and target of one step."""
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(rows, width, generator=generator),
        torch.randn(rows, width, generator=generator),
    )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, so that a step depends on the gradients of those before it."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def reference_step(
    model: nn.Module,
    loss_fn: Loss,
    x: Tensor,
    target: Tensor,
    num_microbatches: int,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Forward and backward, microbatch by microbatch; the loss of the batch."""
    pieces = min(num_microbatches, len(x))
    xs, targets = x.tensor_split(pieces), target.tensor_split(pieces)
    total = None
    for index, (piece, goal) in enumerate(zip(xs, targets, strict=True)):
        loss = loss_fn(model(piece), goal)
        weight = len(piece) / len(x) if weights is None else weights[index]
        loss.backward(torch.full_like(loss, weight))
        term = loss.detach() * weight
        total = term if total is None else total + term
    assert total is not None
    return total


def train_both(
    model: nn.Sequential,
    pipeline: PipelineParallel,
    loss_fn: Loss,
    num_microbatches: int,
    num_steps: int = 3,
    rows: int = 8,
) -> None:
    """Asserts that losses, gradients and parameters are equal in every bit, step by step."""
    single = copy.deepcopy(model)
    own = dict(pipeline.named_parameters())
    theirs = dict(single.named_parameters())
    optimizers = [sgd(single.parameters())] + ([sgd(own.values())] if own else [])
    for step in range(num_steps):
        x, target = draw_batch(step, rows)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = reference_step(single, loss_fn, x, target, num_microbatches)
        loss = pipeline.step(
            x if pipeline.has_first_stage else None,
            target=target if pipeline.has_last_stage else None,
        )
        assert not loss.requires_grad
        assert loss.shape == ()
        assert torch.equal(loss, expected), (loss, expected)
        assert_same_gradients(own, theirs)
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in own.items():
            assert torch.equal(parameter, theirs[name]), name


def assert_same_gradients(own: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter]) -> None:
    """`own` are some of `theirs`, by name."""
    for name, parameter in own.items():
        gradient, expected = parameter.grad, theirs[name].grad
        if expected is None:
            assert gradient is None, name
        else:
            assert gradient is not None, name
            assert torch.equal(gradient, expected), f"{name}: {gradient} {expected}"
