"""Random graphs: whatever a forward builds, its backward in two parts gives the same bits."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cut_stage

NUM_GRAPHS = 500
NUM_PER_TEST = 50
ROWS, WIDTH = 3, 4


class Product(torch.autograd.Function):
    """Both arguments' gradients at once: a node that cannot be cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradients[0] * y, gradients[0] * x


class RandomStage(nn.Module):
    """The same graph for the same seed. All values have ROWS x WIDTH elements; some depend on
    inputs only, some on parameters only, most on both."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.matrices = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(3)])
        self.rows = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])
        self.full = nn.ParameterList([torch.randn(ROWS, WIDTH) for _ in range(2)])
        choose = random.Random(seed)
        for parameter in self.parameters():
            parameter.requires_grad_(choose.random() < 0.9)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        choose = random.Random(self.seed)
        values = [*inputs, *self.full]
        for _ in range(choose.randint(1, 14)):
            values.append(self.grow(choose, values))
        outputs = choose.choices(values, k=choose.randint(1, 4))
        if choose.random() < 0.8:
            outputs.append(values[-1])
        return outputs

    def grow(self, choose: random.Random, values: list[Tensor]) -> Tensor:
        x, y = choose.choice(values), choose.choice(values)
        matrix, row = choose.choice(self.matrices), choose.choice(self.rows)
        match choose.randrange(18):
            case 0 | 1 | 2:
                return F.linear(x, matrix, row if choose.random() < 0.5 else None)
            case 3:
                return x @ matrix @ matrix
            case 4:
                return x + y
            case 5:
                return x * y
            case 6:
                return torch.tanh(x) * row
            case 7:
                return F.layer_norm(x, (WIDTH,), row, choose.choice(self.rows))
            case 8:
                return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)
            case 9:
                return torch.stack([row * one for one in x.unbind(0)])
            case 10:
                left, right = matrix.split([1, WIDTH - 1], dim=0)
                return x @ torch.cat([right, left])
            case 11:
                changed = x.clone()
                changed[:, :2].mul_(row[:2])
                return changed.relu_()
            case 12:
                changed = x * 1.5
                changed[1:].add_(y[1:])
                return changed
            case 13:
                return x.t().contiguous().view(WIDTH, ROWS).t()
            case 14:
                return Product.apply(x, y)
            case 15:
                return torch.softmax(x @ matrix.t(), dim=1)
            case 16:
                return x.detach() + y if choose.random() < 0.3 else x.expand_as(y) - y
            case _:
                return F.embedding(torch.arange(ROWS) % 2, matrix.tanh()) + x


def inputs_of(seed: int) -> list[bool]:
    """How many inputs, and which of them are received without grad."""
    choose = random.Random(-seed - 1)
    return [choose.random() < 0.85 for _ in range(choose.randint(1, 3))]


class ReceivesSome(nn.Module):
    """Detaches the inputs that come without grad."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.stage = RandomStage(seed)
        self.wanted = inputs_of(seed)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        received = zip(inputs, self.wanted, strict=True)
        return self.stage(*[x if wanted else x.detach() for x, wanted in received])


@pytest.mark.parametrize("first", range(0, NUM_GRAPHS, NUM_PER_TEST))
def test_random_graphs(first: int) -> None:
    cut_somewhere = 0
    for seed in range(first, first + NUM_PER_TEST):

        def inputs(microbatch: int, seed: int = seed) -> Sequence[Tensor]:
            generator = torch.Generator().manual_seed(1000 * seed + microbatch)
            return [torch.randn(ROWS, WIDTH, generator=generator) for _ in inputs_of(seed)]

        def stage(seed: int = seed) -> nn.Module:
            return ReceivesSome(seed)

        story = f"graph {seed}"
        dropped = [0] if seed % 7 == 0 else []
        whole = cut_stage.run(stage, inputs, "torch", 2, drop_roots=dropped)
        for way in ("B", "IW", "deferred"):
            found = cut_stage.run(stage, inputs, way, 2, drop_roots=dropped)
            cut_stage.assert_same(whole, found, story=f"{story}, {way}")
            assert found.why_not <= {""}, story
        with_weights = any(gradient is not None for gradient in found.parameters)
        cut_somewhere += found.weights_without_gradient_after_i and with_weights
    assert cut_somewhere > NUM_PER_TEST / 4, "too few of these graphs test anything"
