"""A stage's backward in two parts gives the bits of the whole one, for every kind of module."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import cut_stage

BATCH, WIDTH = 4, 6


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], list[Tensor]]:
    def make(microbatch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(17 + microbatch)
        return [torch.randn(shape, generator=generator, dtype=dtype)]

    return make


class Stage(nn.Module):
    """A forward with some parameters: `weight` (WIDTH, WIDTH), `bias` (WIDTH,), `other`."""

    def __init__(self, forward: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.parts = nn.ModuleList(modules)
        self.function = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class OwnLinear(torch.autograd.Function):
    """A user's function: its backward computes everything at once, so it cannot be cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class OwnTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradients[0] * (1 - y * y)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, bidirectional=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x)
        return y, h, c


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def frozen_and_unused() -> nn.Module:
    stage = Stage(lambda s, x: F.linear(x, s.weight, s.bias).relu() @ s.parts[0].weight)
    stage.parts.append(nn.Linear(WIDTH, WIDTH))
    stage.bias.requires_grad_(False)
    return stage


def changes_views(s: Stage, x: Tensor) -> Tensor:
    y = x @ s.weight
    y[:, :2].mul_(s.bias[:2])
    y[1].add_(s.other[0])
    y.narrow(1, 0, 3).relu_()
    return torch.tanh(y)


def pieces(s: Stage, x: Tensor) -> Tensor:
    a, b = (x @ s.weight).chunk(2, dim=1)
    c, d = s.other.split([2, WIDTH - 2], dim=0)
    rows = torch.stack([row * s.bias for row in (a @ d[:3]).unbind(0)][::-1])
    y = torch.cat([rows @ d.t(), b[:, :2] @ c[:, :2]], dim=1)
    return y @ torch.stack(s.other.unbind(1))


def embeds(s: Stage, tokens: Tensor, x: Tensor) -> Tensor:
    return F.linear(s.parts[0](tokens) + x @ s.weight, s.parts[0].weight)


def tokens_and_floats(microbatch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return [torch.randint(9, (BATCH,), generator=generator), *floats(BATCH, WIDTH)(microbatch)]


def complex_stage() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, 2, dtype=torch.complex64))


IMAGES = floats(BATCH, 4, 6, 6)
ROWS = floats(BATCH, WIDTH)
SEQUENCES = floats(BATCH, 5, WIDTH)
# name: (module, inputs). All are cut such that no weight gradient exists before W.
CUT: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Sequence[Tensor]]]] = {
    "linear": (lambda: nn.Linear(WIDTH, 5), ROWS),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3)
        ),
        ROWS,
    ),
    "in place first": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 2)), ROWS),
    "conv and batch norm": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 2, 3),
        ),
        IMAGES,
    ),
    "conv and group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, bias=False), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2)
        ),
        IMAGES,
    ),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), ROWS),
    "embedding, tied to the head": (
        lambda: Stage(embeds, nn.Embedding(9, WIDTH)),
        tokens_and_floats,
    ),
    "attention with dropout": (Attention, SEQUENCES),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.1, batch_first=True),
        SEQUENCES,
    ),
    "lstm": (Lstm, SEQUENCES),
    "gru": (lambda: Stage(lambda s, x: s.parts[0](x)[0], nn.GRU(WIDTH, 4)), SEQUENCES),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 5)), ROWS),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), ROWS),
    # C100 (pytorch#180952): its gradient was counted twice.
    "a weight used twice": (lambda: Stage(lambda s, x: x @ s.weight @ s.weight), ROWS),
    "frozen and unused parameters": (frozen_and_unused, ROWS),
    "a function without weights": (
        lambda: Stage(lambda s, x: OwnTanh.apply(x @ s.weight) @ s.other),
        ROWS,
    ),
    "chunk, split, unbind, cat": (lambda: Stage(pieces), ROWS),
    "complex": (complex_stage, floats(BATCH, WIDTH, dtype=torch.complex64)),
    "a bias alone": (lambda: Stage(lambda s, x: x + s.bias), ROWS),
    "a residual": (lambda: Stage(lambda s, x: x + (x @ s.weight).tanh() * s.bias), ROWS),
    "an expanded scalar": (lambda: Stage(lambda s, x: x * s.bias[0] + s.bias.sum()), ROWS),
    "several outputs": (
        lambda: Stage(lambda s, x: (x @ s.weight, (x @ s.weight).relu() + s.bias, x.sum())),
        ROWS,
    ),
    "an output of parameters only": (
        lambda: Stage(lambda s, x: (x @ s.weight, s.weight.square().sum(), s.bias)),
        ROWS,
    ),
    "an output twice": (
        lambda: Stage(lambda s, x: [(x @ s.weight).tanh()] * 2 + [s.bias, s.bias]),
        ROWS,
    ),
    "the input as output": (
        lambda: Stage(lambda s, x: (x, x.detach(), x @ s.weight, x.view(-1), x)),
        ROWS,
    ),
    "outputs that are views": (
        lambda: Stage(lambda s, x: ((x @ s.weight)[:2], (x * s.bias).t(), s.other[1:])),
        ROWS,
    ),
}
# Parts of these cannot be cut: those weights get their gradients in I.
OPAQUE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Sequence[Tensor]]]] = {
    "a function with a weight": (
        lambda: Stage(lambda s, x: OwnLinear.apply(x @ s.other, s.weight).tanh() + s.bias),
        ROWS,
    ),
    "a function with a computed weight": (
        lambda: Stage(
            lambda s, x: OwnLinear.apply(x @ s.weight, (s.weight * s.other).tanh()) @ s.other
        ),
        ROWS,
    ),
    "in place on views": (lambda: Stage(changes_views), ROWS),
}


@pytest.mark.parametrize("name", [*CUT, *OPAQUE])
def test_the_two_parts_give_the_bits_of_the_whole(name: str) -> None:
    module, inputs = (CUT | OPAQUE)[name]
    whole = cut_stage.run(module, inputs, "B")
    assert any(gradient is not None for gradient in whole.parameters)
    assert any(gradient is not None for gradient in whole.inputs[0])
    if name != "in place first":  # on a leaf it would raise
        cut_stage.assert_same(cut_stage.run(module, inputs, "torch"), whole, story="B is torch's")
    cut_stage.assert_same(whole, cut_stage.run(module, inputs, "IW"), story="W right after I")
    deferred = cut_stage.run(module, inputs, "deferred")
    cut_stage.assert_same(whole, deferred, story="all W after all I")
    assert deferred.why_not == {""}
    assert deferred.weights_without_gradient_after_i == (name in CUT)


@pytest.mark.parametrize("way", ["B", "IW", "deferred"])
def test_an_output_without_gradient_takes_no_part(way: cut_stage.Way) -> None:
    def stage() -> nn.Module:
        return Stage(lambda s, x: (x @ s.weight, (x * s.bias).relu(), s.other.sum()))

    for dropped in ([0], [1], [0, 1], [2], [0, 1, 2]):
        expected = cut_stage.run(stage, ROWS, "torch", drop_roots=dropped)
        found = cut_stage.run(stage, ROWS, way, drop_roots=dropped)
        cut_stage.assert_same(expected, found, story=f"dropped {dropped}")


def test_a_stage_that_nobody_waits_for_runs_whole_in_i() -> None:
    """The first stage: its inputs are tokens."""

    def stage() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def tokens(microbatch: int) -> list[Tensor]:
        return tokens_and_floats(microbatch)[:1]

    whole = cut_stage.run(stage, tokens, "B")
    cut = cut_stage.run(stage, tokens, "deferred")
    cut_stage.assert_same(whole, cut)
    assert not cut.weights_without_gradient_after_i
    assert cut.why_not == {""}, "there was nothing to split"


def test_a_stage_without_parameters_has_nothing_for_w() -> None:
    whole = cut_stage.run(nn.Tanh, ROWS, "B", num_microbatches=1)
    cut = cut_stage.run(nn.Tanh, ROWS, "deferred", num_microbatches=1)
    cut_stage.assert_same(whole, cut)
    assert whole.inputs[0][0] is not None


@pytest.mark.parametrize("way", ["B", "IW", "deferred"])
def test_autocast_around_the_whole_step_is_autocast_around_the_forward(way: cut_stage.Way) -> None:
    """A step enters autocast once, so the node that casts a weight is shared by all microbatches,
    and backward, which torch wants outside of autocast, runs in it."""

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, 8), nn.Softmax(-1), nn.LayerNorm(8), nn.Linear(8, WIDTH)
            )
            self.exact = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.layers(x)
            with torch.autocast("cpu", enabled=False):  # its backward must not cast either
                return y.float() @ self.exact

    expected = cut_stage.run(Autocast, ROWS, "torch")
    with torch.autocast("cpu", torch.bfloat16):
        found = cut_stage.run(Autocast, ROWS, way)
    cut_stage.assert_same(expected, found)
    assert found.why_not <= {""}
