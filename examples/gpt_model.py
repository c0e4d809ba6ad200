"""Owns the model of the demo: a small character-level GPT, its sizes, and sampling from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelSize:
    """What decides the shape of a GPT."""

    width: int
    num_layers: int
    num_heads: int
    context: int


MODEL_SIZES = {
    "small": ModelSize(width=128, num_layers=4, num_heads=4, context=64),
    "tiny": ModelSize(width=32, num_layers=2, num_heads=2, context=32),
}


class Block(nn.Module):
    """One transformer layer: causal attention, then an MLP, each behind a norm and a shortcut."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_output = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_input = nn.Linear(size.width, 4 * size.width)
        self.mlp_output = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (sequences, positions, width) to the same shape."""
        x = x + self.attend(self.attention_norm(x))
        hidden = F.gelu(self.mlp_input(self.mlp_norm(x)))
        output: Tensor = x + self.mlp_output(hidden)
        return output

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention over the positions."""
        num_sequences, num_positions, width = x.shape
        turns = position_turns(num_positions, width // self.num_heads, x.dtype, x.device)
        heads = (num_sequences, num_positions, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.query_key_value(x).view(heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            place(query, turns), place(key, turns), value, is_causal=True
        )
        output: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(x.shape))
        return output


class Gpt(nn.Module):
    """A GPT without dropout, so that the same seed and batches mean the same training."""

    def __init__(self, size: ModelSize, num_symbols: int) -> None:
        super().__init__()
        self.size = size
        head = nn.Linear(size.width, num_symbols)
        # From symbols to the scores of the symbol that follows each position; a pipeline may cut
        # between any two of them.
        self.layers = nn.Sequential(
            nn.Embedding(num_symbols, size.width),
            *(Block(size) for _ in range(size.num_layers)),
            nn.LayerNorm(size.width),
            head,
        )
        self.apply(initialize)
        nn.init.zeros_(head.weight)

    def forward(self, symbols: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the predictions for `targets`, in nats per character."""
        return mean_cross_entropy(self.layers(symbols), targets)

    @torch.no_grad()
    def generate(self, prompt: list[int], num_symbols: int, seed: int) -> list[int]:
        """Continues `prompt` by `num_symbols` sampled symbols, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        symbols = list(prompt)
        for _ in range(num_symbols):
            window = torch.tensor([symbols[-self.size.context :]])
            # Colder than 1: most of what a small model finds improbable is a mistake.
            chances = F.softmax(self.layers(window)[0, -1] / 0.7, dim=-1)
            symbols.append(int(torch.multinomial(chances, 1, generator=generator)))
        return symbols


def mean_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Of scores (sequences, positions, symbols) for the symbols that follow, in nats."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@functools.cache
def position_turns(
    num_positions: int, head_width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which each position turns pairs of a head's entries.

    No buffers of the model: those would be broadcast in each step.
    """
    num_pairs = head_width // 2
    speeds = 100.0 ** (-torch.arange(num_pairs) / num_pairs)
    angles = torch.arange(num_positions)[:, None] * speeds
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def place(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Normalises queries or keys and turns them by their position (rotary embedding).

    Both make the few hundred steps of the demo go much further: 500 steps reach a loss of 1.7
    with them, 2.2 with a learned embedding of positions.
    """
    cosines, sines = turns
    first, second = F.rms_norm(heads, heads.shape[-1:]).mul(1.5).chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


def initialize(module: nn.Module) -> None:
    """Draws initial weights; what adds to the shortcut starts at zero, as does the head."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)
    elif isinstance(module, Block):
        nn.init.zeros_(module.attention_output.weight)
        nn.init.zeros_(module.mlp_output.weight)
