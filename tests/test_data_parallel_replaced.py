"""Owns the tests of parameters that are replaced, renamed, added or removed after wrapping."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import pydist
from conftest import Transport
from models import WIDTHS, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_parameters_match,
    assert_same_on_all_ranks,
    assert_step_reduced,
    draw,
    expect_error,
    gradients,
)


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    width = next(iter(module.parameters())).shape[-1]
    return wavy_loss(module(draw(rank, step, 4, width)))


def fresh_weight(layer: nn.Module, step: int) -> None:
    weight = layer.get_parameter("weight")
    layer.weight = nn.Parameter(draw(0, 100 + step, *weight.shape) / 4)


def fresh_layer(module: nn.Module) -> None:
    torch.manual_seed(5)
    width = module.get_parameter("2.weight").shape[0]
    module[2] = nn.Linear(width, width)  # type: ignore[operator]


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "weight": lambda module: fresh_weight(module.get_submodule("0"), 0),
    "layer": fresh_layer,
    "assign": lambda module: module.load_state_dict(
        {name: value / 2 for name, value in module.state_dict().items()}, assign=True
    ),
    "parametrize": lambda module: parametrize.register_parametrization(
        module.get_submodule("2"), "weight", nn.Tanh()
    ),
}


def replace(rank: int, world_size: int, width: int, change: str, as_view: bool) -> None:
    module = mlp(width, 3)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, gradient_as_bucket_view=as_view)
    for step in range(5):
        if step in (0, 2):
            for each in (module, *expected.replicas):
                if not (change == "parametrize" and step == 2):
                    CHANGES[change](each)
        assert_step_reduced(model, expected, loss_of, rank, step)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_replaced_parameters_are_averaged(
    transport: Transport, width: int, change: str, as_view: bool
) -> None:
    """load_state_dict(assign=True), an assignment of a new parameter or layer: their hooks were on
    the old ones, and ranks would have gone apart without a word. A parametrization only renames."""
    transport.pool(2).run(replace, width, change, as_view)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def continue_training(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size, make_sgd)
    model = DataParallel(module)
    optimizer = make_sgd(model.parameters())
    for step in range(6):
        if step == 3:
            for each in (module, *expected.replicas):
                CHANGES["assign"](each)
            optimizer = make_sgd(model.parameters())
            expected.optimizers = [make_sgd(each.parameters()) for each in expected.replicas]
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        expected.step(loss_of, step)
        assert_parameters_match(model, expected.module)
        assert_same_on_all_ranks(model.parameters())


def test_an_optimizer_of_the_new_parameters(transport: Transport) -> None:
    transport.pool(2).run(continue_training)


def replace_on_one_rank(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(4):
        if rank == 1 and step == 2:
            module.load_state_dict(
                {name: value.clone() for name, value in module.state_dict().items()}, assign=True
            )
        assert_step_reduced(model, expected, loss_of, rank, step)


def test_one_rank_alone_may_replace(transport: Transport) -> None:
    """A rank that loads its checkpoint by assignment, the others by copy: nobody is left alone."""
    transport.pool(2).run(replace_on_one_rank)


def drop_the_old(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    model = DataParallel(module)
    loss_of(model, rank, 0).backward()
    old = weakref.ref(module.get_parameter("0.weight"))
    fresh_weight(module[0], 0)
    loss_of(model, rank, 1).backward()
    gc.collect()
    assert old() is None
    held = weakref.ref(module[2])
    fresh_layer(module)
    loss_of(model, rank, 2).backward()
    gc.collect()
    assert held() is None


def test_nothing_holds_what_was_replaced(transport: Transport) -> None:
    transport.pool(2).run(drop_the_old)


class TwoNames(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def wider(module: TwoNames) -> None:
    module.last.bias = nn.Parameter(torch.zeros(9))


def to_double(module: TwoNames) -> None:
    module.last.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))


def add_frozen(module: TwoNames) -> None:
    module.register_parameter("extra", nn.Parameter(torch.zeros(2), requires_grad=False))


def untie(module: TwoNames) -> None:
    module.last.weight = nn.Parameter(torch.zeros(8, 8))


def remove(module: TwoNames) -> None:
    del module.last.bias


REFUSED: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "wider": (wider, "last.bias", "shape [9]"),
    "to_double": (to_double, "last.bias", "Double"),
    "add": (lambda m: m.add_module("new", nn.Linear(2, 2)), "new.weight", "added"),
    "add_frozen": (add_frozen, "extra", "added"),
    "untie": (untie, "last.weight", "added"),
    "tie": (lambda m: setattr(m.last, "bias", m.first.bias), "last.bias", "removed"),
    "remove": (remove, "last.bias", "removed"),
    "none": (lambda m: setattr(m.last, "bias", None), "last.bias", "removed"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m.last), "original", "added"),
    "meta": (lambda m: setattr(m.last, "bias", nn.Parameter(m.last.bias.to("meta"))), "bias", ""),
}


def refuse(rank: int, world_size: int, changing: list[int]) -> dict[str, str]:
    """The error's text by case."""
    found = {}
    for case, (change, _, _) in REFUSED.items():
        module = TwoNames()
        group = dist.new_group()  # a round that failed leaves a process group out of step
        model = DataParallel(module, process_group=group)
        model(torch.ones(1, 8)).sum().backward()
        dist.barrier()  # a peer that fails must not end the round before
        if rank in changing:
            change(module)
        kind = pydist.UsageError if rank in changing else pydist.PeerError
        error = expect_error(kind, lambda model=model: model(torch.ones(1, 8)).sum().backward())
        found[case] = str(error)
    return found


@pytest.mark.parametrize("changing", [[0, 1], [1]])
def test_other_changes_are_refused(transport: Transport, changing: list[int]) -> None:
    """What has no place in the ranks' agreement raises at the next forward, and where one rank
    alone has changed its module, its peers raise in that backward; all name the parameter."""
    texts = transport.pool(2).run(refuse, changing)
    for rank, by_case in enumerate(texts):
        for case, (_, name, word) in REFUSED.items():
            assert name in by_case[case], case
            assert word in by_case[case], case
            assert f"rank {rank if rank in changing else 1}" in by_case[case], case


def call_functionally(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    x = draw(rank, 0, 4, 8)

    def own(module: nn.Module, rank: int, step: int) -> Tensor:
        named = dict(module.named_parameters())
        return wavy_loss(functional_call(module, named, (draw(rank, step, 4, 8),)))

    assert_step_reduced(model, expected, own, rank, 0)
    others = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        functional_call(model, others, (x,))
    frozen_input = x.clone().requires_grad_()
    functional_call(model, others, (frozen_input,)).sum().backward()
    assert frozen_input.grad is not None
    for tensor in others.values():
        tensor.requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            functional_call(model, others, (x,)).sum().backward()
        torch.func.grad(lambda p: functional_call(model, p, (x,)).sum())(
            {name: p.detach() for name, p in model.named_parameters()}
        )
    (text,) = [str(each.message) for each in caught if "functional_call" in str(each.message)]
    assert "0.weight" in text
    assert "model.module" in text
    assert all(tensor.grad is not None for tensor in others.values())
    for step in range(2):  # nothing is left of all that
        assert_step_reduced(model, expected, loss_of, rank, step)


def test_functional_call(transport: Transport) -> None:
    """functional_call puts other tensors in the parameters' places for one forward. With the
    wrapped ones all is as usual, with others that need no gradient too; else their gradients stay
    local, as with torch's class, and a warning says so."""
    transport.pool(2).run(call_functionally)


def transform_the_module(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    x = draw(rank, 0, 4, 8)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return wavy_loss(functional_call(module, parameters, (row.unsqueeze(0),)))

    per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert all(gradient is None for gradient in gradients(model))
    expected.backward(loss_of, 0, synced=False)
    loss_of(model, rank, 0).backward()
    local = dict(expected.replicas[rank].named_parameters())
    for name, rows in per_row.items():
        assert torch.allclose(rows.mean(0), local[name].grad, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    expected.average()
    assert_gradients_match(model, expected.module)


def test_function_transforms_of_the_module(transport: Transport) -> None:
    """Gradients per sample by vmap and grad of the inner module are local, and open no round."""
    transport.pool(2).run(transform_the_module)
