"""Owns the tests of reported numeric troubles: bucket views, complex and half types, bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Transport
from models import Scalar, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_reduced,
    assert_same_on_all_ranks,
    digest,
    draw,
    gradients,
)
from transport_differences import BITS_INDEPENDENT_OF_BUCKETS, CONTROLS_ROUNDING


def loss_of(module: nn.Module, rank: int, step: int, width: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


def accumulate_from_the_start(rank: int, world_size: int, as_view: bool, preset: bool) -> None:
    module = mlp(40, 2)
    if preset:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
    expected = OneProcess(module, world_size)
    if preset:
        for r, replica in enumerate(expected.replicas):
            for parameter in replica.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + r)
    model = DataParallel(module, gradient_as_bucket_view=as_view)
    for step in range(4):
        loss_of(model, rank, step, 40).backward()
        expected.backward(loss_of, step, 40)
        assert_reduced(model, expected)


@pytest.mark.parametrize("preset", [False, True])
@pytest.mark.parametrize("as_view", [False, True])
def test_c27_accumulation_while_buckets_change(
    transport: Transport, as_view: bool, preset: bool
) -> None:
    """The first synced backwards of a job without zero_grad between them, while the layout of
    buckets follows the order of readiness: nothing of an earlier step is lost, nor what the user
    had put into .grad before wrapping, which is averaged with the rest."""
    transport.pool(2).run(accumulate_from_the_start, as_view, preset)


def absent(parameter: nn.Parameter) -> None:
    parameter.grad = None


def zeroed(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def replaced(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone().zero_()


def detached(parameter: nn.Parameter) -> None:
    """What zero_grad of older libraries does; torch refuses detach_ of a view."""
    assert parameter.grad is not None
    try:
        parameter.grad.detach_()
    except RuntimeError:
        parameter.grad = parameter.grad.detach()
    parameter.grad.zero_()


def clear_in_every_way(rank: int, world_size: int, as_view: bool, width: int) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ways: list[Callable[[nn.Parameter], None]] = [absent, zeroed, replaced, detached]
    for step in range(12):
        if step % 3 == 0:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        else:
            for index, parameter in enumerate(model.parameters()):
                ways[(step + index) % len(ways)](parameter)
        expected.zero_grad()
        loss_of(model, rank, step, width).backward()
        expected.backward(loss_of, step, width)
        assert_reduced(model, expected)


@pytest.mark.parametrize("width", [8, 192])
@pytest.mark.parametrize("as_view", [False, True])
def test_c28_every_way_to_clear_a_gradient(transport: Transport, as_view: bool, width: int) -> None:
    """zero_grad of both kinds, None, zero_, detach_ and a clone in its place, mixed over
    parameters and steps, broke bucket views."""
    transport.pool(2).run(clear_in_every_way, as_view, width)


class ComplexModule(nn.Module):
    """Complex parameters of two widths beside a real one."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(num_elements, dtype=torch.complex64))
        self.q = nn.Parameter(torch.randn(num_elements, dtype=torch.complex128))
        self.r = nn.Parameter(torch.randn(num_elements))

    def forward(self, z: Tensor) -> Tensor:
        first = (self.p * z.conj()).real.sum() + (self.p * self.r).imag.square().sum()
        # The gradient of a conjugated parameter is a lazily conjugated view.
        return first + (self.q.conj() * z).imag.square().sum()


def train_complex(rank: int, world_size: int, num_elements: int) -> None:
    torch.manual_seed(1)
    module = ComplexModule(num_elements)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        parts = draw(rank, step, 2, num_elements, dtype=torch.float64)
        return module(torch.complex(parts[0], parts[1]))  # type: ignore[no-any-return]

    for step in range(4):
        if step < 3:
            model.zero_grad(set_to_none=step < 2)
            expected.zero_grad(set_to_none=step < 2)
        loss(model, rank, step).backward()
        expected.backward(loss, step)
        assert_reduced(model, expected)
    assert module.p.grad is not None
    assert bool((module.p.grad.imag != 0).all())


@pytest.mark.parametrize("num_elements", [3, 20_000])
def test_c34_complex_parameters(transport: Transport, num_elements: int) -> None:
    """The imaginary part of gradients was lost. complex64, complex128 and real parameters in one
    module, gradients of conjugated uses among them, small and large."""
    transport.pool(2).run(train_complex, num_elements)


class Half(nn.Module):
    def __init__(self, num_elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_elements, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def average_halves(
    rank: int, world_size: int, num_elements: int, dtype: torch.dtype, values: list[float]
) -> float:
    module = Half(num_elements, dtype)
    model = DataParallel(module)
    x = torch.full((num_elements,), values[rank], dtype=dtype)
    first = 0.0
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        found = module.weight.grad
        assert found is not None
        assert found.unique().numel() == 1
        first = float(found[0])
    return first


@pytest.mark.parametrize("num_elements", [5, 50_000])
def test_c36_means_of_half_types(transport: Transport, num_elements: int) -> None:
    """A sum in fp16 overflows before the division, and dividing first underflows: neither 40000
    on every rank nor the smallest subnormal may get lost, and bf16 is rounded once."""
    pool = transport.pool(2)

    def mean(dtype: torch.dtype, *values: float) -> Any:
        return pool.run(average_halves, num_elements, dtype, list(values))

    assert mean(torch.float16, 40000.0, 40000.0) == [40000.0] * 2
    exact = (1 + 2.0**-9) / 2
    for found in mean(torch.bfloat16, 1.0, 2.0**-9):
        assert abs(found - exact) <= 2.0**-8
    assert mean(torch.float16, 2.0**-24, 2.0**-24) == [2.0**-24] * 2
    assert mean(torch.float16, 65504.0, 65504.0) == [65504.0] * 2


class OneHuge(nn.Module):
    """A weight larger than any bucket among small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(30, 30) for _ in range(6))
        self.huge = nn.Linear(30, 3000)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.small:
            x = torch.tanh(layer(x))
        return self.huge(x)  # type: ignore[no-any-return]


def bits_for_cap(rank: int, world_size: int, cap_mb: float, as_view: bool) -> str:
    torch.manual_seed(1)
    model = DataParallel(OneHuge(), bucket_cap_mb=cap_mb, gradient_as_bucket_view=as_view)
    expected = OneProcess(model.module, world_size)
    for step in range(2):
        model.zero_grad()
        expected.zero_grad()
        loss_of(model, rank, step, 30).backward()
        expected.backward(loss_of, step, 30)
        assert_reduced(model, expected)
    return digest(gradients(model))


@pytest.mark.parametrize("world_size", [2, 3])
def test_c45_bits_and_bucket_sizes(transport: Transport, world_size: int) -> None:
    """Another bucket_cap_mb gave other bits. Caps of 1 KiB, 64 KiB and 25 MiB, below and above the
    largest parameter, with and without bucket views, give the same ones."""
    pool = transport.pool(world_size)
    found = {
        pool.run(bits_for_cap, cap, as_view)[0]
        for cap in (1 / 1024, 1 / 16, 25)
        for as_view in (False, True)
    }
    if world_size in BITS_INDEPENDENT_OF_BUCKETS[transport.name]:
        assert len(found) == 1


def flush_denormals(rank: int, world_size: int, num_elements: int, same_bits: bool) -> None:
    """Ranks disagree about flushing; who reduces an element must not decide about its bits."""
    module = Half(num_elements, torch.float32)
    model = DataParallel(module)
    x = torch.full((num_elements,), 1e-39)
    if rank == 0:
        torch.set_flush_denormal(True)
    try:
        for _ in range(3):
            module.weight.grad = x.clone()
            model(torch.zeros(num_elements)).sum().backward()
            if same_bits:
                assert_same_on_all_ranks(gradients(model))
        assert rank or float(torch.tensor(1e-39) * 1) == 0, "the setting was not restored"
    finally:
        torch.set_flush_denormal(False)


def test_flushing_of_denormals_does_not_split_the_ranks(transport: Transport) -> None:
    """set_flush_denormal on one rank alone: all ranks still get the same bits, and the setting of
    the user is in force afterwards."""
    transport.pool(2).run(flush_denormals, 30_000, CONTROLS_ROUNDING[transport.name])


def infinities(rank: int, world_size: int) -> list[float]:
    model = DataParallel(Scalar())
    found = []
    for value in (float("inf"), float("nan"), 1.0):
        model.zero_grad()
        model(value if rank == 0 else 1.0).backward()
        found.append(float(model.module.weight.grad))
    return found


def test_infinity_and_nan_reach_all_ranks(transport: Transport) -> None:
    """What went wrong on one rank is seen by all of them, in that step and in no later one."""
    for found in transport.pool(2).run(infinities):
        assert found[0] == float("inf")
        assert found[1] != found[1]
        assert found[2] == 1.0
