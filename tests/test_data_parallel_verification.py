"""Owns the tests that models which differ between ranks are refused, on every rank, at once."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pydist
from conftest import Transport
from models import Scalar
from pydist import DataParallel
from reference import expect_error


def base() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def other_shape() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))


def transposed_shape() -> nn.Module:
    """As many elements, in another arrangement."""
    module = base()
    module.get_submodule("1").weight = nn.Parameter(torch.zeros(6, 3))
    return module


def other_stride() -> nn.Module:
    module = base()
    module.get_submodule("1").weight = nn.Parameter(torch.zeros(6, 3).t())
    return module


def one_more() -> nn.Module:
    module = base()
    module.extra = nn.Parameter(torch.zeros(2))
    return module


def one_less() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))


def other_dtype() -> nn.Module:
    module = base()
    module.get_submodule("1").double()
    return module


def other_requires_grad() -> nn.Module:
    module = base()
    module.get_parameter("1.weight").requires_grad_(False)
    return module


def other_name() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6))
    module.add_module("head", nn.Linear(6, 3))
    return module


def other_buffer() -> nn.Module:
    module = base()
    module.register_buffer("extra", torch.zeros(2))
    return module


# The model of the odd rank, and a name that every rank must be told.
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (other_shape, "1.weight"),
    "transposed_shape": (transposed_shape, "1.weight"),
    "stride": (other_stride, "1.weight"),
    "one_more": (one_more, "extra"),
    "one_less": (one_less, "1.bias"),
    "dtype": (other_dtype, "1.weight"),
    "requires_grad": (other_requires_grad, "1.weight"),
    "name": (other_name, "head.weight"),
    "buffer": (other_buffer, "extra"),
}


def wrap_differently(rank: int, world_size: int, case: str, odd_rank: int) -> str:
    module = CASES[case][0]() if rank == odd_rank else base()
    error = expect_error(pydist.MismatchError, lambda: DataParallel(module))
    # The group is as good as before.
    model = DataParallel(Scalar())
    model(1.0 + rank).backward()
    assert float(model.module.weight.grad) == (world_size + 1) / 2
    return str(error)


@pytest.mark.parametrize("case", list(CASES))
def test_c73_models_that_differ(transport: Transport, case: str) -> None:
    """One rank's model has another shape, order of elements, stride, count, dtype, requires_grad
    or name: hung, or only some ranks were told. Every rank raises and names rank and parameter."""
    for message in transport.pool(2).run(wrap_differently, case, 1):
        assert CASES[case][1] in message
        assert "rank 1" in message


@pytest.mark.parametrize("odd_rank", [0, 1, 2])
def test_c73_any_rank_may_be_the_odd_one(transport: Transport, odd_rank: int) -> None:
    """With three ranks, whichever differs, all three raise and say which."""
    messages = transport.pool(3).run(wrap_differently, "shape", odd_rank)
    assert len(set(messages)) == 1
    assert f"rank {odd_rank}" in messages[0]
    assert "1.weight" in messages[0]
