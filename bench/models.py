"""Owns the models that the data-parallel benchmarks train, with their batches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model, and one rank's batch and loss; the seed decides values alone."""

    name: str
    make_model: Callable[[], nn.Module]
    make_input: Callable[[], Tensor]
    make_target: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    steps: int  # timed in a row


def mlp(num_layers: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ResidualStack(nn.Module):
    """Equal smooth layers, each added to its input: any of them can be left out of a step."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, inputs: Tensor, skipped: int | None = None) -> Tensor:
        """Without every third layer, from `skipped` (modulo 3) on."""
        for index, layer in enumerate(self.layers):
            if skipped is None or (index - skipped) % 3 != 0:
                inputs = torch.add(inputs, torch.tanh(layer(inputs)), alpha=1 / len(self.layers))
        return inputs


class Transformer(nn.Module):
    """A decoder's shape: embedding, six layers, projection to the vocabulary."""

    def __init__(self, num_layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits.flatten(0, 1)


def _mlp_workload(name: str, num_layers: int, width: int, batch: int, steps: int) -> Workload:
    return Workload(
        name,
        lambda: mlp(num_layers, width),
        lambda: torch.randn(batch, width),
        lambda: torch.randn(batch, width),
        nn.functional.mse_loss,
        steps,
    )


def _transformer_workload(
    name: str, num_layers: int, width: int, batch: int, length: int, steps: int
) -> Workload:
    vocabulary = 512
    return Workload(
        name,
        lambda: Transformer(num_layers, width, vocabulary),
        lambda: torch.randint(vocabulary, (batch, length)),
        lambda: torch.randint(vocabulary, (batch * length,)),
        nn.functional.cross_entropy,
        steps,
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        _mlp_workload("MLP 8 x 1024", 8, 1024, batch=16, steps=4),
        _mlp_workload("200 layers of 32", 200, 32, batch=16, steps=10),
        _transformer_workload("transformer 6 x 256", 6, 256, batch=4, length=64, steps=2),
        _mlp_workload("tiny MLP", 2, 32, batch=4, steps=2),
        _transformer_workload("tiny transformer", 1, 32, batch=2, length=8, steps=2),
    )
}
FULL = ("MLP 8 x 1024", "200 layers of 32", "transformer 6 x 256")
QUICK = ("tiny MLP", "tiny transformer")
