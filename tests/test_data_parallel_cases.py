"""Owns the tests of what users of data parallelism reported: unused, frozen and shared parts.

The numbers are those of a list of public bug reports; each docstring tells what went wrong there.
"""

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Transport
from models import OneUnused, Scalar, Scalars, TwoHeads, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_parameters_match,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    draw,
    expect_error,
    gradients,
)

Sgd = Callable[[Any], torch.optim.Optimizer]


def loss_of(module: nn.Module, rank: int, step: int, width: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def decaying_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def decay_unused(rank: int, world_size: int) -> None:
    module = Scalars("abc")
    expected = OneProcess(module, world_size, decaying_sgd)
    model = DataParallel(module, find_unused_parameters=True)
    optimizer = decaying_sgd(model.parameters())

    def loss(module: nn.Module, rank: int) -> Tensor:
        return module({"a": 2.0} if rank == 0 else {"b": 4.0})  # type: ignore[no-any-return]

    for _ in range(3):
        optimizer.zero_grad()
        loss(model, rank).backward()
        optimizer.step()
        expected.step(loss)
        assert_reduced(model, expected)
        assert_parameters_match(model, expected.module)
    assert module.get_parameter("c.weight").grad is None
    assert float(module.get_parameter("c.weight").detach()) == 1.0


def test_c02_an_unused_parameter_is_not_decayed(transport: Transport) -> None:
    """A parameter that nobody used got a gradient of zeros, so weight decay and momentum moved it.
    Used by nobody it keeps no gradient; used by one rank it is averaged."""
    transport.pool(2).run(decay_unused)


class SharedName(nn.Module):
    """One parameter under two names, of which the first one's module is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))
        self.net1 = nn.Linear(10, 10)
        self.net1.bias = self.bias
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(x)  # type: ignore[no-any-return]


def check_three_steps(model: nn.Module, expected: OneProcess, rank: int) -> None:
    """Fresh gradients, three times, from inputs of ten columns."""
    for step in range(3):
        model.zero_grad()
        expected.zero_grad()
        loss_of(model, rank, step, 10).backward()
        expected.backward(loss_of, step, 10)
        assert_reduced(model, expected)


def leave_shared_unused(rank: int, world_size: int) -> None:
    module = SharedName()
    expected = OneProcess(module, world_size)
    check_three_steps(DataParallel(module, find_unused_parameters=True), expected, rank)
    assert module.bias.grad is None


def test_c04_one_parameter_under_two_names(transport: Transport) -> None:
    """A bias registered twice, in an unused layer, confused the search for unused parameters."""
    transport.pool(2).run(leave_shared_unused)


def leave_one_unused(rank: int, world_size: int) -> None:
    module = OneUnused()
    expected = OneProcess(module, world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check_three_steps(DataParallel(module), expected, rank)


def test_c05_an_unused_layer_without_the_flag(transport: Transport) -> None:
    """One declared layer was not used and the flag was off: the first step gave each rank other
    gradients without a word. They are right, in that very backward."""
    transport.pool(2).run(leave_one_unused)


def use_one_head(rank: int, world_size: int) -> None:
    module = TwoHeads()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, static_graph=True)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return wavy_loss(module(draw(rank, step, 4, 10))[0])

    for step in range(6):
        assert_step_reduced(model, expected, loss, rank, step)


def test_c07_static_graph_with_an_unused_output(transport: Transport) -> None:
    """static_graph=True and an output that never enters the loss crashed in the second step."""
    transport.pool(2).run(use_one_head)


@dataclasses.dataclass
class DataOutput:
    a: Tensor
    b: Any


class CustomOutput:
    """Holds tensors where no search finds them."""

    __slots__ = ("a", "b")

    def __init__(self, a: Tensor, b: Any) -> None:
        self.a = a
        self.b = b


NamedOutput = collections.namedtuple("NamedOutput", ["a", "b"])
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": lambda t: DataOutput(t, None),
    "nested_dataclass": lambda t: DataOutput(t, DataOutput(t * 2, [t])),
    "namedtuple": lambda t: NamedOutput(t, {"c": t}),
    "custom": lambda t: CustomOutput(t, None),
    "dict_of_custom": lambda t: {"out": CustomOutput(t, None)},
    "none_and_tensor": lambda t: (None, t),
    "generator_free_list": lambda t: [[t], 3, "text"],
}


class WithOutput(nn.Module):
    """Has an unused layer, and wraps its output in some structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.used = nn.Linear(10, 5)
        self.unused = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.kind](self.used(x))


def find_tensor(output: Any) -> Tensor:
    if isinstance(output, dict):
        return find_tensor(output["out"])
    if hasattr(output, "a"):
        return output.a  # type: ignore[no-any-return]
    if isinstance(output, tuple):
        return output[1]  # type: ignore[no-any-return]
    return output[0][0]  # type: ignore[no-any-return]


def return_structures(rank: int, world_size: int) -> None:
    for kind in OUTPUTS:
        module = WithOutput(kind)
        expected = OneProcess(module, world_size)
        model = DataParallel(module, find_unused_parameters=True)

        def loss(module: nn.Module, rank: int, step: int) -> Tensor:
            return wavy_loss(find_tensor(module(draw(rank, step, 4, 10))))

        for step in range(3):
            assert_step_reduced(model, expected, loss, rank, step)


def test_c09_outputs_of_any_type(transport: Transport) -> None:
    """Tensors in a dataclass or an object of the user's were not found, and gradients were
    silently wrong."""
    transport.pool(2).run(return_structures)


def return_nothing(rank: int, world_size: int) -> None:
    class KeepsLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.loss: Tensor | None = None

        def forward(self, x: float) -> None:
            self.loss = self.weight * x

    model = DataParallel(KeepsLoss())
    for _ in range(3):
        model.zero_grad()
        model(1.0 + rank)
        model.module.loss.backward()
        assert float(model.module.weight.grad) == 1.5


def test_c09_no_output_at_all(transport: Transport) -> None:
    """forward returns None and leaves its loss in an attribute: parameters alone tell."""
    transport.pool(2).run(return_nothing)


def forward_thrice(rank: int, world_size: int) -> None:
    module = Scalars("abc")
    model = DataParallel(module, find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        x = 1.0 + rank + step
        (model({"a": x}) + model({"b": 2 * x}) + model({"c": 3 * x})).backward()
        mean = 1.5 + step
        assert [float(g) for g in gradients(model) if g is not None] == [mean, 2 * mean, 3 * mean]


def test_c10_several_forwards_before_one_backward(transport: Transport) -> None:
    """Three forwards, each through another weight, and one backward: "ready twice"."""
    transport.pool(2).run(forward_thrice)


class Gan(nn.Module):
    """Generator and discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(2, 2)
        self.d = nn.Linear(2, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.d(torch.tanh(self.g(z)))  # type: ignore[no-any-return]


def set_trained(module: nn.Module, trained: str) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in trained)


def freeze_in_turn(rank: int, world_size: int) -> None:
    module = Gan()
    expected = OneProcess(module, world_size, plain_sgd)
    model = DataParallel(module)
    optimizer = plain_sgd(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(4):
            for each in (module, *expected.replicas):
                set_trained(each, "dg"[step % 2])
            optimizer.zero_grad()
            loss_of(model, rank, step, 2).backward()
            optimizer.step()
            expected.step(loss_of, step, 2)
            assert_parameters_match(model, expected.module)
            assert_same_on_all_ranks(model.parameters())


def test_c11_halves_frozen_in_turn(transport: Transport) -> None:
    """One wrapper holds generator and discriminator, and requires_grad of one half is switched
    off in each step: refused by torch; here it trains as one process does."""
    transport.pool(2).run(freeze_in_turn)


def train_gan(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    parts = [nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))]
    expected = OneProcess(nn.ModuleList(parts), world_size)
    g, d = (DataParallel(part) for part in parts)
    mine = [plain_sgd(g.parameters()), plain_sgd(d.parameters())]
    theirs = [[plain_sgd(part.parameters()) for part in replica] for replica in expected.replicas]  # type: ignore[attr-defined]

    def g_loss(g: nn.Module, d: nn.Module, rank: int, step: int) -> Tensor:
        return -d(g(draw(rank, step, 4, 2))).mean()  # type: ignore[no-any-return]

    def d_loss(g: nn.Module, d: nn.Module, rank: int, step: int) -> Tensor:
        fake = g(draw(rank, step, 4, 2)).detach()
        return d(draw(rank, step + 50, 4, 3)).mean() - d(fake).square().mean()  # type: ignore[no-any-return]

    def loss_of_pair(pair: Any, rank: int, loss: Callable[..., Tensor], step: int) -> Tensor:
        return loss(*pair, rank, step)

    for step in range(4):
        for index, loss in enumerate((g_loss, d_loss)):
            for optimizers in (mine, *theirs):
                optimizers[index].zero_grad()
            loss(g, d, rank, step).backward()
            expected.backward(loss_of_pair, loss, step)
            for optimizers in (mine, *theirs):
                optimizers[index].step()
        for index, part in enumerate((g, d)):
            assert_parameters_match(part, expected.module[index])  # type: ignore[index]
            assert_same_on_all_ranks(part.parameters())


def test_c12_two_wrappers_one_through_the_other(transport: Transport) -> None:
    """The generator's loss goes through the discriminator, whose hooks so fire in both steps."""
    transport.pool(2).run(train_gan)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(torch.tanh(self.net1(x)))  # type: ignore[no-any-return]


PLANS = {
    "unfreeze": ("net2", ["net2", "net2", "net1net2", "net1net2"]),
    "freeze": ("net1net2", ["net1net2", "net2", "net2", "net1"]),
    "toggle": ("net1net2", ["net1", "net2", "net1", "net2", "net1net2"]),
}


def follow_plan(rank: int, world_size: int, plan: str) -> None:
    module = Frozen()
    at_start, steps = PLANS[plan]
    set_trained(module, at_start)
    expected = OneProcess(module, world_size, plain_sgd)
    model = DataParallel(module)
    optimizer = plain_sgd(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step, trained in enumerate(steps):
            for each in (module, *expected.replicas):
                set_trained(each, trained)
            optimizer.zero_grad()
            loss_of(model, rank, step, 10).backward()
            optimizer.step()
            expected.step(loss_of, step, 10)
            assert_parameters_match(model, expected.module)
            assert_same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("plan", list(PLANS))
def test_c57_requires_grad_changes_after_wrapping(transport: Transport, plan: str) -> None:
    """Layers frozen at wrap time and unfrozen later drifted apart silently. Unfreezing, freezing
    and switching in every step all train as one process does."""
    transport.pool(2).run(follow_plan, plan)


def wrap_frozen(rank: int, world_size: int) -> str | None:
    module = nn.Linear(4, 2)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data += rank
    try:
        model = DataParallel(module)
    except (ValueError, RuntimeError) as error:
        return str(error)
    assert not model(torch.ones(1, 4)).requires_grad
    assert_same_on_all_ranks(module.parameters())
    return None


def test_c59_nothing_requires_a_gradient(transport: Transport) -> None:
    """All parameters are frozen: a clear error, or a wrapper that passes through; the same on all
    ranks and no internal assertion."""
    messages = transport.pool(2).run(wrap_frozen)
    assert len(set(messages)) == 1
    assert messages[0] is None or "gradient" in messages[0] or "requires_grad" in messages[0]


def wrap_lazy(rank: int, world_size: int) -> str:
    error = expect_error(Exception, lambda: DataParallel(nn.LazyLinear(3)))
    assert isinstance(error, (ValueError, RuntimeError))
    model = DataParallel(Scalar())
    model(1.0 + rank).backward()
    assert_gradients_match(model, model.module)
    return str(error)


def test_c67_lazy_parameters_are_refused(transport: Transport) -> None:
    """A parameter without a shape yet cannot be laid out; the error says to run it once first."""
    for message in transport.pool(2).run(wrap_lazy):
        assert "ninitialized" in message
