"""Owns the tests that training on several ranks equals the mean of one process per rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Transport
from models import Transformer, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_parameters_match,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    digest,
    draw,
    gradients,
)
from transport_differences import BITS_INDEPENDENT_OF_BUCKETS

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
}


def output_loss(module: nn.Module, rank: int, step: int, width: int, dtype: torch.dtype) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width, dtype=dtype)))


def train(rank: int, world_size: int, dtype_name: str, optimizer: str, width: int) -> None:
    dtype = DTYPES[dtype_name]
    module = mlp(width, 3, dtype)
    expected = OneProcess(module, world_size, OPTIMIZERS[optimizer])
    model = DataParallel(module)
    mine = OPTIMIZERS[optimizer](model.parameters())
    for step in range(3):
        mine.zero_grad()
        output_loss(model, rank, step, width, dtype).backward()
        mine.step()
        expected.step(output_loss, step, width, dtype)
        assert_reduced(model, expected)
        assert_parameters_match(model, expected.module)
        assert_same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("world_size", "width"), [(1, 160), (2, 160), (3, 160), (2, 7), (3, 7)])
def test_training_equals_one_process(
    transport: Transport, world_size: int, width: int, dtype: str
) -> None:
    """Three steps of SGD with momentum: gradients and parameters are those of one process, and
    the same in every bit on all ranks."""
    transport.pool(world_size).run(train, dtype, "sgd", width)


def test_adam_equals_one_process(transport: Transport) -> None:
    """Adam divides by the gradient's size, so a wrong scale or a missed rank shows at once."""
    transport.pool(3).run(train, "fp64", "adam", 40)


def test_eight_ranks_equal_one_process(transport: Transport) -> None:
    """More ranks than cores: nobody may spin away the time of the others, and eight add up."""
    transport.pool(8).run(train, "fp32", "sgd", 24)


def train_transformer(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    module = Transformer(64, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        tokens = draw(rank, step, 2, 12).abs().mul(100).long() % 512
        return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(1).flatten())

    for step in range(3):
        assert_step_reduced(model, expected, loss, rank, step)


def test_a_transformer_equals_one_process(transport: Transport) -> None:
    """Large and small parameters of many kinds, ready in an order that is not the declared one."""
    transport.pool(2).run(train_transformer)


def run_modes(rank: int, world_size: int, width: int) -> None:
    """One model through every way of preparing .grad for the next backward."""
    module = mlp(width, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step, mode in enumerate(["fresh", "none", "zero", "keep", "keep", "zero", "none"]):
        if mode in ("none", "zero"):
            model.zero_grad(set_to_none=mode == "none")
            expected.zero_grad(set_to_none=mode == "none")
        before = gradients(model)
        output_loss(model, rank, step, width, torch.float32).backward()
        expected.backward(output_loss, step, width, torch.float32)
        assert_reduced(model, expected)
        for old, new in zip(before, gradients(model), strict=True):
            assert old is None or old is new, "a gradient was replaced by another tensor"


@pytest.mark.parametrize("width", [8, 192])
def test_gradients_that_exist_are_added_to(transport: Transport, width: int) -> None:
    """zero_grad(set_to_none=True and False) and accumulation over several synced backwards; a
    gradient tensor that somebody may hold stays the same object."""
    transport.pool(2).run(run_modes, width)


def bits_for_cap(rank: int, world_size: int, cap_mb: float | None) -> str:
    module = mlp(150, 4)
    model = DataParallel(module, bucket_cap_mb=cap_mb)
    for step in range(3):
        model.zero_grad()
        output_loss(model, rank, step, 150, torch.float32).backward()
        assert_same_on_all_ranks(gradients(model))
    return digest(gradients(model))


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_do_not_depend_on_the_bucket_size(transport: Transport, world_size: int) -> None:
    """The same bits with one bucket for each parameter, a few, one for all, and the default: a
    result that changes with a tuning option cannot be debugged."""
    pool = transport.pool(world_size)
    found = {pool.run(bits_for_cap, cap)[0] for cap in (0.001, 0.1, 25, None)}
    if world_size in BITS_INDEPENDENT_OF_BUCKETS[transport.name]:
        assert len(found) == 1


def run_two_models(rank: int, world_size: int) -> None:
    first, second = mlp(40, 2), mlp(96, 3)
    expected = [OneProcess(first, world_size), OneProcess(second, world_size)]
    models = [DataParallel(first), DataParallel(second)]
    for step in range(3):
        losses = [
            output_loss(model, rank, step, width, torch.float32)
            for model, width in zip(models, (40, 96), strict=True)
        ]
        # One backward through both; they share neither buckets nor rounds.
        (losses[0] + losses[1]).backward()
        for reference, width in zip(expected, (40, 96), strict=True):
            reference.backward(output_loss, step, width, torch.float32)
        for model, reference in zip(models, expected, strict=True):
            assert_reduced(model, reference)


def test_two_models_in_one_backward(transport: Transport) -> None:
    """Losses of two wrapped models are added and one backward serves both."""
    transport.pool(2).run(run_two_models)


def run_with_stragglers(rank: int, world_size: int) -> None:
    module = mlp(96, 3)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def slow_hook(gradient: Tensor) -> None:
        deadline = 200_000 * ((rank + step) % 3)
        for _ in range(deadline // 20_000):
            torch.ones(20_000).sum()

    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            parameter.register_hook(slow_hook)
    for step in range(6):
        model.zero_grad()
        expected.zero_grad()
        output_loss(model, rank, step, 96, torch.float32).backward()
        expected.backward(output_loss, step, 96, torch.float32)
        assert_gradients_match(model, expected.module)
        assert_same_on_all_ranks(gradients(model))


def test_ranks_of_uneven_speed(transport: Transport) -> None:
    """Ranks take turns at being late; whoever is early does the reduction, with the same bits."""
    transport.pool(3).run(run_with_stragglers)
