"""Owns the tests of wire_dtype: what is rounded, when, and how many bytes travel."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conftest import Transport
from models import Scalar, Scalars, mlp, wavy_loss
from pydist import DataParallel, MismatchError, UsageError
from reference import assert_same_on_all_ranks, draw, expect_error, gradients
from transport_differences import HAS_ARENA

HALVES = [torch.bfloat16, torch.float16]


class Weighted(nn.Module):
    """Parameters of all types and layouts; the loss weighs them, so that a gradient is its weight
    (conjugated, where it is complex)."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(7))
        self.large = nn.Parameter(torch.randn(130, 131))
        self.real64 = nn.Parameter(torch.randn(9001, dtype=torch.float64))
        self.complex64 = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.complex128 = nn.Parameter(torch.randn(20_001, dtype=torch.complex128))
        self.bfloat16_ = nn.Parameter(torch.randn(33).bfloat16())
        self.float16_ = nn.Parameter(torch.randn(40_001).half())
        self.scalar = nn.Parameter(torch.randn(()))
        images = torch.randn(20, 30, 4, 4).to(memory_format=torch.channels_last)
        self.channels_last = nn.Parameter(images)
        self.transposed = nn.Parameter(torch.randn(40, 5).t())
        self.gaps = nn.Parameter(torch.randn(6, 10)[:, ::2])

    def forward(self, weights: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for parameter, weight in zip(self.parameters(), weights, strict=True):
            product = parameter * weight
            total = total + (product.real if product.is_complex() else product).double().sum()
        return total


def weights_of(module: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Of all magnitudes; the first element is more than float16 can hold."""
    weights = []
    for index, parameter in enumerate(module.parameters()):
        drawn = draw(rank, 20 * step + index, 2, parameter.numel(), dtype=torch.float64)
        values = drawn[0] * torch.exp(6 * drawn[1])
        if parameter.dtype in (torch.float32, torch.float64):
            values[0] = 65_600.0 + rank
        if parameter.is_complex():
            values = torch.complex(values, values.flip(0))
        weights.append(values.to(parameter.dtype).view(parameter.shape))
    return weights


def mean_on_wire(contributions: list[Tensor], wire: torch.dtype) -> Tensor:
    """By the definition: rounded once, added in float32 in the order of ranks, rounded once."""
    own = contributions[0]
    if own.is_complex():
        parts = [torch.view_as_real(c.resolve_conj()) for c in contributions]
        return torch.view_as_complex(mean_on_wire(parts, wire))
    travelling = wire if wire.itemsize < own.dtype.itemsize else own.dtype
    total = contributions[0].to(travelling).float()
    for contribution in contributions[1:]:
        total = total + contribution.to(travelling).float()
    scale = torch.tensor(1.0) / len(contributions)
    return (total * scale).to(travelling).to(own.dtype)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


def train_on_wire(rank: int, world_size: int, wire: torch.dtype, cap_mb: float | None) -> None:
    torch.manual_seed(1)
    model = DataParallel(Weighted(), wire_dtype=wire, bucket_cap_mb=cap_mb)
    before: list[Tensor | None] = [None for _ in model.parameters()]
    for step, mode in enumerate(["fresh", "absent", "zeros", "kept", "other strides"]):
        if mode in ("absent", "zeros"):
            model.zero_grad(set_to_none=mode == "absent")
            before = [None for _ in before]
        elif mode == "other strides":
            for parameter in model.parameters():
                assert parameter.grad is not None
                if parameter.dim() == 2:
                    parameter.grad = parameter.grad.t().contiguous().t()
        model(weights_of(model, rank, step)).backward()
        by_rank = [weights_of(model, r, step) for r in range(world_size)]
        for index, parameter in enumerate(model.parameters()):
            contributions = [weights[index].conj() for weights in by_rank]
            old = before[index]
            if old is not None:
                contributions = [old + contribution for contribution in contributions]
            found = parameter.grad
            assert found is not None
            assert_same_bits(found, mean_on_wire(contributions, wire))
            before[index] = found.clone()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire", HALVES)
def test_bits_are_those_of_the_definition(
    transport: Transport, wire: torch.dtype, world_size: int
) -> None:
    """float32, float64 and complex gradients, small and large, dense and not, fresh and
    accumulated, next to those of half types: every bit is that of rounding a contribution once,
    adding in float32 in rank order and rounding the mean once, on both transports and in buckets
    of any size. float16 makes infinities of what is too large for it."""
    pool = transport.pool(world_size)
    for cap_mb in (None, 1 / 1024, 1 / 16):
        pool.run(train_on_wire, wire, cap_mb)


TIMES_SENT = {"c10d::allreduce_": 2, "c10d::alltoall_base_": 1, "c10d::_allgather_base_": 1}


class GroupBytes(TorchDispatchMode):
    """Counts what a rank gives to its process group for units: an all-reduce sends everything
    twice, its two halves once each. (How ranks agree on a round is an allgather_ of its own.)"""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        times = TIMES_SENT.get(func.name().partition(".")[0], 0)
        if times:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.nbytes += times * sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def count_bytes(rank: int, world_size: int, wire: torch.dtype | None) -> dict[str, int]:
    """What a step reports, and what another gives to the group (watching it changes the first)."""
    model = DataParallel(mlp(200, 3), wire_dtype=wire)
    before = model.report()
    wavy_loss(model(draw(rank, 0, 4, 200))).backward()
    after = model.report()
    model.zero_grad()
    loss = wavy_loss(model(draw(rank, 1, 4, 200)))
    with GroupBytes() as given:
        loss.backward()
    return {
        "moved": after.moved_nbytes - before.moved_nbytes,
        "in place": after.born_nbytes - before.born_nbytes,
        "packed": sum(after.packed_nbytes.values()) - sum(before.packed_nbytes.values()),
        "group": given.nbytes,
        "gradients": sum(parameter.nbytes for parameter in model.parameters()),
    }


@pytest.mark.parametrize("wire", HALVES)
def test_half_the_bytes_travel(transport: Transport, wire: torch.dtype) -> None:
    """Of float32 gradients half the bytes are reduced, and half are given to a process group,
    which is given the half type itself; none is born in place."""
    pool = transport.pool(2)
    full, half = (pool.run(count_bytes, w)[0] for w in (None, wire))
    nbytes = full["gradients"]
    assert full["moved"] == nbytes
    assert (full["in place"] > 0) == HAS_ARENA[transport.name]
    assert half == {
        "moved": nbytes // 2,
        "in place": 0,
        "packed": nbytes // 2,
        "group": 0 if HAS_ARENA[transport.name] else nbytes,
        "gradients": nbytes,
    }
    assert full["group"] == 2 * half["group"]


def scale_overflowing_gradients(rank: int, world_size: int) -> None:
    model = DataParallel(Scalar(), wire_dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model.module.weight
    for x, finite in ((20_000.0, False), (10_000.0, True)):
        optimizer.zero_grad()
        before = float(weight)
        scaler.scale(model(x if rank == 0 else 1.0)).backward()
        assert weight.grad is not None
        assert bool(weight.grad.isfinite()) == finite
        assert_same_on_all_ranks([weight.grad])
        scaler.step(optimizer)
        scaler.update()
        assert (float(weight) != before) == finite
        assert scaler.get_scale() == 2.0


def test_an_overflow_is_infinite_on_all_ranks(transport: Transport) -> None:
    """80000 on one rank does not fit float16: all ranks get infinity, so that every GradScaler
    skips the step and halves its scale, after which the next step fits."""
    transport.pool(2).run(scale_overflowing_gradients)


class Checkpointed(nn.Module):
    """Reentrant checkpointing of one layer twice: its parameters are ready twice in a backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def use_parameters_oddly(rank: int, world_size: int) -> None:
    for width in (8, 192):
        torch.manual_seed(1)
        module = Checkpointed(width)
        model = DataParallel(module, wire_dtype=torch.bfloat16)
        model(draw(rank, 0, 4, width)).square().mean().backward()
        found = [gradient.clone() for gradient in gradients(model) if gradient is not None]
        assert_same_on_all_ranks(found)
        total = [torch.zeros_like(parameter) for parameter in module.parameters()]
        for r in range(world_size):
            module.zero_grad()
            with model.no_sync():
                model(draw(r, 0, 4, width)).square().mean().backward()
            for whole, gradient in zip(total, gradients(model), strict=True):
                whole += gradient
        for gradient, whole in zip(found, total, strict=True):
            expected = whole / world_size
            assert (gradient - expected).abs().max() <= 2**-7 * expected.abs().max()

    model = DataParallel(Scalars("abc"), wire_dtype=torch.bfloat16, find_unused_parameters=True)
    with model.no_sync():
        model({"a": 1.0 + rank}).backward()
    model.module.c.weight.grad = torch.tensor(1.0 + 2.0**-20)
    model({"b": 3.0 * (1 - rank)}).backward()
    assert [float(gradient) for gradient in gradients(model)] == [1.5, 1.5, 1.0 + 2.0**-20]


def test_unused_accumulated_and_twice_ready(transport: Transport) -> None:
    """Gradients of no_sync, of one rank alone and of a second readiness in one backward take the
    same way; one that nobody used keeps its bits, though its bucket travelled."""
    transport.pool(2).run(use_parameters_oddly)


def leave_half_parameters_alone(rank: int, world_size: int) -> None:
    """A wire that is not narrower changes nothing: neither the bits nor what is born in place."""
    for own, wire in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        found = []
        for wire_dtype in (None, wire):
            torch.manual_seed(1)
            module = mlp(192, 2, dtype=own)
            model = DataParallel(
                module, wire_dtype=wire_dtype, gradient_as_bucket_view=wire_dtype is not None
            )
            wavy_loss(model(draw(rank, 0, 4, 192, dtype=own))).backward()
            found.append(gradients(model))
        for first, second in zip(*found, strict=True):
            assert first is not None
            assert second is not None
            assert_same_bits(first, second)


def test_a_type_that_is_not_narrower(transport: Transport) -> None:
    """Half parameters travel as they are, with bucket views too, whatever wire_dtype says."""
    transport.pool(2).run(leave_half_parameters_alone)


def refuse(rank: int, world_size: int) -> None:
    wrong: list[Any] = [torch.float32, torch.int16, "bfloat16", torch.float8_e5m2]
    for wire in wrong:
        error = expect_error(UsageError, functools.partial(DataParallel, Scalar(), wire_dtype=wire))
        assert "wire_dtype must be torch.bfloat16, torch.float16 or None" in str(error)
    error = expect_error(
        UsageError,
        lambda: DataParallel(Scalar(), wire_dtype=torch.float16, gradient_as_bucket_view=True),
    )
    assert "parameter weight" in str(error)
    assert "either gradient_as_bucket_view=True or wire_dtype" in str(error)
    model = DataParallel(Scalar(), wire_dtype=torch.float16)
    error = expect_error(UsageError, lambda: model.register_comm_hook(None, allreduce_hook))
    assert "made with wire_dtype" in str(error)
    model(2.0 * rank).backward()
    assert float(model.module.weight.grad) == 1.0
    wire = HALVES[rank]
    error = expect_error(MismatchError, lambda: DataParallel(Scalar(), wire_dtype=wire))
    assert "wire_dtype" in str(error)
    assert "bfloat16" in str(error)
    assert "float16" in str(error)


def test_refusals(transport: Transport) -> None:
    """Other types, views of what is not stored in the gradient's type, communication hooks, which
    leave the model as it was, and ranks that disagree."""
    transport.pool(2).run(refuse)


def one_rank(rank: int, world_size: int) -> None:
    model = DataParallel(Scalar(), wire_dtype=torch.bfloat16)
    model(1 + 2.0**-20).backward()
    assert float(model.module.weight.grad) == 1 + 2.0**-20


def test_one_rank_rounds_nothing(transport: Transport) -> None:
    """Nothing travels, so nothing is rounded."""
    transport.pool(1).run(one_rank)
