"""Owns the tests of mixed_precision: torch's _MixedPrecision on ours.

The module computes in the low type; whoever looks at parameters, gradients, optimizers and state
dicts sees the types that were there before.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from conftest import Transport
from models import wavy_loss
from pydist import DataParallel
from reference import TOLERANCES, assert_same_on_all_ranks, draw, expect_error, gradients

HALF = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Notes the types that its forward sees; a layer is shared, a parameter frozen."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(40, 40)
        self.norm = nn.LayerNorm(40)
        self.last = nn.Linear(40, 40)
        self.last.weight = self.first.weight
        self.shift = nn.Parameter(torch.randn(40), requires_grad=False)
        self.register_buffer("scale", torch.full((40,), 1.25))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.checkpointing = checkpointing
        self.seen: dict[str, torch.dtype] = {}

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return layer(x)  # type: ignore[no-any-return]
        reentrant = self.checkpointing == "reentrant"
        return checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
        self.seen = {name: tensor.dtype for name, tensor in self.named_parameters()}
        self.seen |= {name: tensor.dtype for name, tensor in self.named_buffers()}
        self.seen["input"] = x.dtype
        if bias is not None:
            self.seen["keyword"] = bias.dtype
        hidden = torch.tanh(self.run(self.first, x)) * self.scale + self.shift
        hidden = hidden.to(self.norm.weight.dtype)
        return self.run(self.last, self.norm(hidden))


def local_gradients(module: Net, rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Of one rank, with casts made by hand."""
    cast = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    output = functional_call(module, cast, (draw(rank, step, 4, 40).to(dtype),), tie_weights=True)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(wavy_loss(output), trained))


def train(rank: int, world_size: int, dtype: torch.dtype, views: bool, checkpointing: str) -> None:
    module = Net(checkpointing)
    plain = copy.deepcopy(module)
    plain.checkpointing = "none"
    config = _MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    model = DataParallel(module, mixed_precision=config, gradient_as_bucket_view=views)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        inputs = draw(rank, step, 4, 40).requires_grad_(checkpointing == "reentrant")
        wavy_loss(model(inputs)).backward()
        assert set(module.seen.values()) == {dtype, torch.int64}
        parts = zip(
            *(local_gradients(plain, r, step, dtype) for r in range(world_size)), strict=True
        )
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter, part in zip(trained, parts, strict=True):
            mean = torch.stack(list(part)).mean(0)
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            scale = float(mean.abs().max())
            assert float((parameter.grad - mean).abs().max()) < 2 * TOLERANCES[dtype] * scale
            rounded = parameter.grad.to(dtype).float()
            assert views or torch.equal(parameter.grad, rounded), "did not travel in reduce_dtype"
        assert_same_on_all_ranks(gradients(model))
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
                theirs.copy_(mine)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert module.last.weight is module.first.weight
    assert {t.dtype for s in optimizer.state.values() for t in s.values()} == {torch.float32}
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert kinds.pop("module.scale") == dtype
    assert kinds.pop("module.count") == torch.int64
    assert set(kinds.values()) == {torch.float32}


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_training_in_a_low_type(
    transport: Transport, dtype: torch.dtype, views: bool, checkpointing: str
) -> None:
    """Three steps of Adam: the forward sees parameters, buffers and inputs of the low type;
    gradients are the mean of what casts by hand give, in float32, and carry the rounding of the
    type that they travelled in. Afterwards parameters are the same objects, in float32, shared
    ones still shared; also where layers are recomputed in backward, outside of the forward."""
    transport.pool(2).run(train, dtype, views, checkpointing)


def configure(rank: int, world_size: int) -> None:
    half, full = torch.bfloat16, torch.float32

    def seen(config: _MixedPrecision, **options: Any) -> tuple[Net, bool]:
        module = Net()
        model = DataParallel(module, mixed_precision=config, **options)
        x = draw(rank, 0, 4, 40)
        wavy_loss(model(x, bias=x)).backward()
        assert_same_on_all_ranks(gradients(model))
        rounded = [g is None or torch.equal(g, g.to(half).float()) for g in gradients(model)]
        assert all(gradient is None or gradient.dtype == full for gradient in gradients(model))
        return module, all(rounded)

    module, rounded = seen(_MixedPrecision(param_dtype=half))
    assert rounded
    assert module.seen["first.weight"] == module.seen["input"] == module.seen["keyword"] == half
    assert module.seen["scale"] == full
    module, rounded = seen(_MixedPrecision(param_dtype=half, reduce_dtype=full))
    assert not rounded
    module, rounded = seen(_MixedPrecision(reduce_dtype=half))
    assert rounded
    assert set(module.seen.values()) == {full, torch.int64}
    module, rounded = seen(_MixedPrecision(buffer_dtype=half))
    assert not rounded
    assert module.seen.pop("scale") == half
    assert set(module.seen.values()) == {full, torch.int64}
    module, rounded = seen(_MixedPrecision(param_dtype=half), wire_dtype=torch.float16)
    assert not rounded
    error = expect_error(ValueError, lambda: DataParallel(Net(), mixed_precision=half))
    assert "_MixedPrecision" in str(error)


def test_each_type_means_what_it_says(transport: Transport) -> None:
    """param_dtype, reduce_dtype and buffer_dtype alone and together; gradients travel in
    param_dtype where nothing else is said, and in wire_dtype where that is given."""
    transport.pool(2).run(configure)


def ignore(rank: int, world_size: int) -> None:
    module = Net()
    DataParallel._set_params_and_buffers_to_ignore_for_model(module, ["norm.bias", "scale"])
    half = torch.bfloat16
    config = _MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    model = DataParallel(module, mixed_precision=config)
    ignored: list[tuple[str, torch.dtype]] = []

    def forward(x: Tensor) -> Tensor:
        ignored.extend((n, t.dtype) for n, t in module.named_parameters())
        ignored.extend((n, t.dtype) for n, t in module.named_buffers())
        return module.last(torch.tanh(module.first(x))) + module.norm.bias

    module.forward = forward  # type: ignore[method-assign]
    wavy_loss(model(draw(rank, 0, 4, 40))).backward()
    kept = {name for name, dtype in ignored if dtype == torch.float32}
    assert kept == {"norm.bias", "scale"}
    assert not hasattr(module.norm.bias, "_mp_param")
    both: list[Any] = [None] * world_size
    dist.all_gather_object(both, module.norm.bias.grad)
    assert not torch.equal(both[0], both[1])  # left alone: local


def test_ignored_tensors_keep_their_types(transport: Transport) -> None:
    """Parameters and buffers that the wrapper was told to ignore are neither cast nor averaged."""
    transport.pool(2).run(ignore)


def leave_early(rank: int, world_size: int) -> None:
    module = Net()
    model = DataParallel(module, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    before = dict(module.named_parameters())
    expect_error(RuntimeError, lambda: model(torch.ones(4, 3)))
    assert all(dict(module.named_parameters())[name] is before[name] for name in before)
    with torch.no_grad():
        assert model(draw(rank, 0, 4, 40)).dtype == torch.bfloat16
    twin = copy.deepcopy(module)  # computes in the low type too, with parameters of its own
    assert twin(draw(rank, 0, 4, 40).bfloat16()).dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in twin.parameters())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_parameters_come_back_whatever_happens(transport: Transport) -> None:
    """A forward that raises in a submodule leaves the real parameters in place; so do one without
    gradients, and one of a copy."""
    transport.pool(2).run(leave_early)
