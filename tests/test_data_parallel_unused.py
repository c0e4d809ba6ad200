"""Owns the tests of unused_parameters: what DataParallel makes of a parameter that nobody used."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Transport
from models import OneUnused, TwoHeads, mlp, wavy_loss
from pydist import DataParallel, MismatchError, UsageError
from reference import OneProcess, assert_reduced, draw, expect_error

WIDTH = 192  # weights are units of their own, biases share a bucket


class Chosen(nn.Module):
    """Uses the parts that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = torch.tanh(self.parts[name](x))
        return x


def loss(model: nn.Module, rank: int, step: int, choose: Callable[[int, int], str]) -> Tensor:
    return wavy_loss(model(draw(rank, step, 4, WIDTH), choose(rank, step)))


def choice(rank: int, step: int) -> str:
    """Step 0: all use all. 1: nobody c. 2: rank 1 not a. 3: all again."""
    return ("abc", "ab", "bc" if rank == 1 else "abc", "cab")[step]


def step_by_step(rank: int, world_size: int, views: bool) -> list[str]:
    module = Chosen()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, unused_parameters="error", gradient_as_bucket_view=views)
    texts = []
    for step in range(4):
        model.zero_grad()
        expected.zero_grad()
        local = loss(model, rank, step, choice)
        try:
            local.backward()
            texts.append("")
        except MismatchError as error:
            texts.append(str(error))
        expected.backward(loss, step, choice)
        assert_reduced(model, expected)
    return texts


def test_error_raises_in_that_backward_on_every_rank(transport: Transport) -> None:
    """The error names parameters and ranks; gradients are the right mean nevertheless, and steps
    that use everything go on before and after."""
    for views in (False, True):
        for texts in transport.pool(3).run(step_by_step, views):
            assert (texts[0], texts[3]) == ("", "")
            assert (
                "parameter parts.c.weight (every rank), parameter parts.c.bias (every" in texts[1]
            )
            assert "parts.a" not in texts[1]
            assert "parts.b" not in texts[1]
            assert "parameter parts.a.weight (rank 1" in texts[2]
            assert "rank 0" not in texts[2]
            assert "rank 2" not in texts[2]
            assert "parts.c" not in texts[2]


def spread_over_steps(rank: int, world_size: int) -> None:
    """What was used under no_sync counts; a frozen parameter need not be used."""
    model = DataParallel(Chosen(), unused_parameters="error")
    for step in range(2):
        with model.no_sync():
            loss(model, rank, step, lambda rank, step: "a").backward()
        loss(model, rank, step, lambda rank, step: "bc").backward()
    model.module.parts["b"].requires_grad_(False)
    loss(model, rank, 0, lambda rank, step: "ac").backward()
    # Outputs of which a loss uses one.
    heads = DataParallel(TwoHeads(), unused_parameters="error")
    first, _ = heads(draw(rank, 0, 4, 10))
    error = expect_error(MismatchError, first.sum().backward)
    assert "head_b.weight (every rank), parameter head_b.bias (every rank)" in str(error)
    # Gradients only asked for are no round, and nobody's error.
    torch.autograd.grad(heads(draw(rank, 0, 4, 10))[0].sum(), heads.module.head_a.weight)
    sum(output.sum() for output in heads(draw(rank, 0, 4, 10))).backward()


def test_error_looks_at_what_the_round_covers(transport: Transport) -> None:
    transport.pool(2).run(spread_over_steps)


class Hiding(nn.Module):
    """Gives its output as an object that hides the tensor, so that parameters open the round."""

    def __init__(self) -> None:
        super().__init__()
        self.net = OneUnused()

    def forward(self, x: Tensor) -> Any:
        class Output:
            __slots__ = ("get",)

        output = Output()
        value = self.net(x)
        output.get = lambda: value
        return output


def hidden_outputs(rank: int, world_size: int) -> None:
    model = DataParallel(Hiding(), unused_parameters="error")
    for step in range(2):
        model(draw(rank, step, 4, 10)).get().sum().backward()


def test_parts_of_a_backward_are_not_judged(transport: Transport) -> None:
    """Where outputs are hidden a round may be a part of a backward: no false alarm."""
    transport.pool(2).run(hidden_outputs)


def many_names(rank: int, world_size: int) -> str:
    model = DataParallel(mlp(8, 12), unused_parameters="error")
    output = model.module[0](draw(rank, 0, 4, 8))
    model.module.forward = lambda x: output  # type: ignore[method-assign]
    return str(expect_error(MismatchError, model(output).sum().backward))


def test_many_names_are_cut_short(transport: Transport) -> None:
    for text in transport.pool(2).run(many_names):
        assert text.count("(every rank)") == 10
        assert "(every rank), and 12 more; " in text


def warnings_of(rank: int, world_size: int, setting: dict[str, Any]) -> list[str]:
    model = DataParallel(OneUnused(), **setting)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model(draw(rank, step, 4, 10)).sum().backward()
    return [str(warning.message) for warning in caught]


def test_warn_and_ignore(pool2: Any) -> None:
    """The default warns once, with the names; "ignore" and find_unused_parameters are silent."""
    for setting in ({}, {"unused_parameters": "warn"}):
        for texts in pool2.run(warnings_of, setting):
            assert len(texts) == 1
            assert "net1.weight, net1.bias" in texts[0]
    for setting in ({"unused_parameters": "ignore"}, {"find_unused_parameters": True}):
        assert pool2.run(warnings_of, setting) == [[], []]


def arguments(rank: int, world_size: int) -> None:
    def wrap(**settings: Any) -> DataParallel:
        return DataParallel(mlp(4, 1), **settings)

    error = expect_error(
        UsageError, lambda: wrap(unused_parameters="error", find_unused_parameters=True)
    )
    assert "find_unused_parameters=True" in str(error)
    error = expect_error(UsageError, lambda: wrap(unused_parameters="raise"))
    assert "unused_parameters is 'raise'; expected one of warn, ignore, error" in str(error)
    setting = "error" if rank == 0 else "warn"
    error = expect_error(MismatchError, lambda: wrap(unused_parameters=setting))
    assert "unused_parameters is warn on rank 1, and error on rank 0" in str(error)


def test_arguments_are_checked(pool2: Any) -> None:
    pool2.run(arguments)


def test_it_is_a_keyword() -> None:
    """A positional argument more would be taken for one of torch's to come."""
    with pytest.raises(TypeError):
        DataParallel(*[None] * 21)
