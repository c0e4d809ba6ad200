"""Runs a stage's forward and backward for some microbatches: whole, cut, or as torch does it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from pydist._C import testing

# "torch": leaves as inputs, torch.autograd.backward. "deferred": every W after the last I.
Way: TypeAlias = Literal["torch", "B", "IW", "deferred"]


@dataclass
class Outcome:
    parameters: list[Tensor | None] = field(default_factory=list)  # their gradients
    inputs: list[list[Tensor | None]] = field(default_factory=list)  # by microbatch
    outputs: list[list[Tensor]] = field(default_factory=list)
    why_not: set[str] = field(default_factory=set)
    weights_without_gradient_after_i: bool = True


def tensors_of(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def root_gradients(outputs: list[Tensor], seed: int) -> list[Tensor | None]:
    """One per output that requires grad, never zero, the same for the same seed and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(output.shape, generator=generator).to(output.dtype)
        if output.requires_grad
        else None
        for output in outputs
    ]


def receive(tensor: Tensor) -> tuple[Tensor, testing.ReceivedEdge | None]:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor, None
    return testing.receive(tensor)


def run(
    make_module: Callable[[], nn.Module],
    make_inputs: Callable[[int], Sequence[Tensor]],
    way: Way,
    num_microbatches: int = 3,
    *,
    split_checkpointed: bool = False,
    drop_roots: Sequence[int] = (),
) -> Outcome:
    """Gradients after all microbatches. `drop_roots`: outputs that nobody sends a gradient for."""
    torch.manual_seed(3)
    module = make_module()
    outcome = Outcome()
    waiting: list[tuple[testing.StageBackward, list[Tensor | None]]] = []
    for microbatch in range(num_microbatches):
        data = [tensor.clone() for tensor in make_inputs(microbatch)]
        torch.manual_seed(100 + microbatch)
        if way == "torch":
            leaves = [x.requires_grad_(receive(x)[1] is not None) for x in data]
            outputs = tensors_of(module(*leaves))
            edges = []
        else:
            received = [receive(x) for x in data]
            outputs = tensors_of(module(*[x for x, _ in received]))
            edges = [edge for _, edge in received if edge is not None]
        gradients = root_gradients(outputs, seed=microbatch)
        for index in drop_roots:
            gradients[index] = None
        outcome.outputs.append([output.detach().clone() for output in outputs])
        if way == "torch":
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            outcome.inputs.append([x.grad for x in leaves if x.requires_grad])
            continue
        stage = testing.StageBackward(outputs, edges)
        del outputs, received
        if way == "B":
            stage.backward(gradients)
        else:
            stage.input(gradients, split_checkpointed)
            outcome.why_not.add(stage.why_not_split)
        outcome.inputs.append(stage.input_gradients())
        if way == "IW":
            stage.weight()
        waiting.append((stage, gradients))
    if way == "deferred":
        outcome.weights_without_gradient_after_i = all(p.grad is None for p in module.parameters())
        for stage, _ in waiting:
            stage.weight()
    outcome.parameters = [parameter.grad for parameter in module.parameters()]
    return outcome


def assert_same(expected: Outcome, found: Outcome, *, story: str = "") -> None:
    """The same bits everywhere, and None in the same places."""

    def check(what: str, left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> None:
        assert len(left) == len(right), f"{story}: {what}"
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert (one is None) == (other is None), f"{story}: {what} {index}: {one} {other}"
            if one is not None and other is not None:
                same = one.dtype == other.dtype and torch.equal(one, other)
                assert same, f"{story}: {what} {index}: {one} {other}"

    check("gradient of parameter", expected.parameters, found.parameters)
    for microbatch, (one, other) in enumerate(zip(expected.inputs, found.inputs, strict=True)):
        check(f"microbatch {microbatch}, gradient of input", one, other)
    for microbatch, (one, other) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        check(f"microbatch {microbatch}, output", one, other)
