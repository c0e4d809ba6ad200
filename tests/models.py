"""Owns the models that the data-parallel tests train: small ones, and a zoo of module kinds.

Every kind comes in two widths: tiny, where all gradients are packed into buckets, and large,
where the weights exceed the 64 KiB from which on gradients may be reduced where they are.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from reference import draw

WIDTHS = {"tiny": 8, "large": 192}


class Scalar(nn.Module):
    """y = w x with w = 1, so that the gradient of w is x."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Any) -> Tensor:
        return torch.mul(self.weight, x)


class Scalars(nn.Module):
    """Named scalar weights of which a forward uses those that it is told to."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, Scalar())

    def forward(self, inputs: dict[str, float]) -> Tensor:
        """The sum of w x over the named weights; zero, without a graph, if none is named."""
        total = torch.zeros(())
        for name, x in inputs.items():
            total = total + getattr(self, name)(x)
        return total


class TwoHeads(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.trunk = nn.Linear(width, width)
        self.head_a = nn.Linear(width, 5)
        self.head_b = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.head_a(hidden), self.head_b(hidden)


class OneUnused(nn.Module):
    """Declares net1 and uses net2 alone."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.net1 = nn.Linear(width, width)
        self.net2 = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(x)  # type: ignore[no-any-return]


class TwoLayers(nn.Module):
    """Calls `between` in backward when the last layer's gradients are there, the first's not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.between: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden.register_hook(lambda _: self.between())
        return self.last(hidden)  # type: ignore[no-any-return]


def mlp(width: int, num_layers: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """An encoder with an embedding in front and a projection to the vocabulary behind."""

    def __init__(self, width: int, num_layers: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(64, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.layers(hidden))  # type: ignore[no-any-return]


def wavy_loss(output: Tensor) -> Tensor:
    """Gradients are of order 1 and depend on the data, those of a normalisation's bias too."""
    if output.dtype in (torch.bfloat16, torch.float16):
        output = output.float()
    return (output.square() + 4 * torch.sin(output + 1)).sum() / output.shape[0]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of module: how to build it, what to feed it, and how to call it."""

    build: Callable[[int], nn.Module]
    inputs: Callable[[int, int, int], tuple[Any, ...]]  # of rank, step, width
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def module(self, size: str) -> nn.Module:
        torch.manual_seed(1)
        return self.build(WIDTHS[size])

    def loss(self, module: nn.Module, rank: int, step: int, size: str) -> Tensor:
        with self.context():
            output = module(*self.inputs(rank, step, WIDTHS[size]))
        if isinstance(output, tuple):  # LSTM, GRU, attention: the second is a state or None
            output = output[0]
        return wavy_loss(output)


def _batch(*extra: int, dtype: torch.dtype = torch.float32) -> Callable[..., tuple[Tensor]]:
    """Inputs of shape (4, *extra, width)."""
    return lambda rank, step, width: (draw(rank, step, 4, *extra, width, dtype=dtype),)


def _images(*extra: int, factor: int = 1, channels_last: bool = False) -> Callable[..., Any]:
    """Inputs of shape (2, factor * width, *extra)."""

    def inputs(rank: int, step: int, width: int) -> tuple[Tensor]:
        images = draw(rank, step, 2, factor * width, *extra)
        return (images.to(memory_format=torch.channels_last) if channels_last else images,)

    return inputs


def _tokens(rank: int, step: int, width: int) -> tuple[Tensor]:
    return (draw(rank, step, 4, 6).abs().mul(width).long() % (4 * width),)


def _norm_inputs(rank: int, step: int, width: int) -> tuple[Tensor]:
    return (draw(rank, step, 4, width * width),)


class _Call(nn.Module):
    """Parameters of given shapes and a function of them and the input."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], function: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.3 * torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _call(function: Callable[[Any, Tensor], Tensor], **dims: int) -> Callable[[int], nn.Module]:
    """Parameters named by the keywords, with width elements along each of so many dimensions."""
    return lambda width: _Call({k: (width,) * n for k, n in dims.items()}, function)


class _SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)


class _CrossAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        memory = torch.cos(x[..., : self.kdim])
        return super().forward(x, memory, memory, need_weights=False)


class _Tied(nn.Module):
    """One weight as embedding and as output projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4 * width, width)
        self.output = nn.Linear(width, 4 * width, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(tokens)))  # type: ignore[no-any-return]


class _MixedDtypes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.single = nn.Linear(width, width)
        self.wide = nn.Linear(width, width, dtype=torch.float64)
        self.narrow = nn.Linear(width, width, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(self.single(x).double())
        return self.narrow(hidden.bfloat16())  # type: ignore[no-any-return]


class _OddShapes(nn.Module):
    """A 0-dimensional, an empty, a transposed and an ordinary parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, width))
        self.transposed = nn.Parameter(torch.randn(2 * width, width).t())
        self.bias = nn.Parameter(torch.zeros(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.transposed) + self.bias + self.empty.sum()


def _channels_last_conv(width: int) -> nn.Module:
    return nn.Conv2d(width // 2, width // 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _half_width_images(channels_last: bool = False) -> Callable[..., Any]:
    images = _images(5, 5, channels_last=channels_last)
    return lambda rank, step, width: images(rank, step, width // 2)


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def _embedding_bag(width: int) -> nn.Module:
    return nn.EmbeddingBag(4 * width, width, mode="mean")


KINDS: dict[str, Kind] = {
    "linear_2d": Kind(lambda n: nn.Linear(n, n), _batch()),
    "linear_3d": Kind(lambda n: nn.Linear(n, n), _batch(3)),
    "linear_fp64": Kind(lambda n: nn.Linear(n, n).double(), _batch(dtype=torch.float64)),
    "linear_autocast": Kind(lambda n: nn.Linear(n, n), _batch(), _autocast),
    "linear_bf16": Kind(lambda n: nn.Linear(n, n).bfloat16(), _batch(dtype=torch.bfloat16)),
    "linear_fp16": Kind(lambda n: nn.Linear(n, n).half(), _batch(dtype=torch.float16)),
    "conv1d": Kind(lambda n: nn.Conv1d(n, n, 3), _images(6)),
    "conv2d": Kind(lambda n: nn.Conv2d(n // 2, n // 2, 3), _half_width_images()),
    "conv2d_1x1": Kind(lambda n: nn.Conv2d(n, n, 1), _images(3, 3)),
    "conv2d_depthwise": Kind(
        lambda n: nn.Conv2d(12 * n, 12 * n, 3, groups=12 * n), _images(4, 4, factor=12)
    ),
    "conv_transpose2d": Kind(lambda n: nn.ConvTranspose2d(n // 2, n // 2, 3), _half_width_images()),
    "conv2d_channels_last": Kind(_channels_last_conv, _half_width_images(channels_last=True)),
    "conv2d_channels_last_input": Kind(
        lambda n: nn.Conv2d(n // 2, n // 2, 3), _half_width_images(channels_last=True)
    ),
    "layer_norm": Kind(lambda n: nn.LayerNorm(n * n), _norm_inputs),
    "batch_norm": Kind(lambda n: nn.BatchNorm1d(n * n), _norm_inputs),
    "group_norm": Kind(lambda n: nn.GroupNorm(4, n * n), _norm_inputs),
    "rms_norm": Kind(lambda n: nn.RMSNorm(n * n), _norm_inputs),
    "expanded": Kind(_call(lambda m, x: 0.01 * (m.w.sum() + m.v.sum() * x), w=2, v=2), _batch()),
    "one_gradient_for_two": Kind(_call(lambda m, x: x @ (m.w + m.v), w=2, v=2), _batch()),
    "weight_norm": Kind(lambda n: parametrizations.weight_norm(nn.Linear(n, n)), _batch()),
    "einsum": Kind(_call(lambda m, x: torch.einsum("bi,ji->bj", x, m.w), w=2), _batch()),
    "bmm": Kind(
        _call(lambda m, x: torch.bmm(x, m.w.unsqueeze(0).expand(4, -1, -1)), w=2), _batch(3)
    ),
    "broadcast_add": Kind(_call(lambda m, x: x @ m.w + m.b, w=2, b=1), _batch(5)),
    "transposed_use": Kind(_call(lambda m, x: F.linear(x, m.w.t()), w=2), _batch()),
    "self_attention": Kind(lambda n: _SelfAttention(n, 4, batch_first=True), _batch(5)),
    "cross_attention": Kind(
        lambda n: _CrossAttention(n, 4, kdim=n // 2, vdim=n // 2, batch_first=True), _batch(5)
    ),
    "lstm": Kind(lambda n: nn.LSTM(n, n, batch_first=True), _batch(4)),
    "gru": Kind(lambda n: nn.GRU(n, n, num_layers=2, batch_first=True), _batch(4)),
    "embedding": Kind(lambda n: nn.Embedding(4 * n, n), _tokens),
    "embedding_bag": Kind(_embedding_bag, _tokens),
    "tied": Kind(_Tied, _tokens),
    "cat": Kind(_call(lambda m, x: F.linear(x, torch.cat([m.w, m.v])), w=2, v=2), _batch()),
    "cat_columns": Kind(_call(lambda m, x: x @ torch.cat([m.w, m.v], 1), w=2, v=2), _batch()),
    "stack": Kind(_call(lambda m, x: x @ torch.stack([m.w, m.v]), w=2, v=2), _batch()),
    "mixed_dtypes": Kind(_MixedDtypes, _batch()),
    "odd_shapes": Kind(_OddShapes, _batch()),
}
