"""Owns a small GPT, how tensor parallelism cuts it, and what one process makes of it.

Embedding and head are one matrix, cut by symbols. float64, so that only the order of sums tells
engines apart.
"""

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pydist._mesh import whole

WIDTH, SYMBOLS, HEADS = 8, 12, 4
NUM_SEQUENCES = 4
TOLERANCE = 1e-10


class Block(nn.Module):
    """Attention and an MLP with heads and hidden units that ranks can share out."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance = nn.Identity()  # from here on, ranks have some positions each
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)  # nobody uses it

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.entrance(x))
        heads = [
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(attended.transpose(-2, -3).flatten(-2))
        return x + self.narrow(torch.tanh(self.wide(x)))


PLAN = {
    "entrance": PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
    ),
    "norm": SequenceParallel(),  # its gradients are sums over ranks
    **dict.fromkeys(("query", "key", "value"), ColwiseParallel(input_layouts=Shard(1))),
    **dict.fromkeys(("wide", "spare"), ColwiseParallel()),
    **dict.fromkeys(("mixed", "narrow"), RowwiseParallel()),
}


def make_gpt(num_blocks: int = 2) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Embedding(SYMBOLS, WIDTH),
        *(Block() for _ in range(num_blocks)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, SYMBOLS, bias=False),
    )
    model[-1].weight = model[0].weight
    return model.double()


def parallelized(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """A copy, cut."""
    own = copy.deepcopy(model)
    parallelize_module(own[0], mesh, RowwiseParallel(input_layouts=Replicate()))
    for block in own[1:-2]:
        parallelize_module(block, mesh, PLAN)
    parallelize_module(own[-1], mesh, ColwiseParallel(output_layouts=Replicate()))
    own[-1].weight = own[0].weight
    return own


@functools.cache
def mesh_of(*names: str, shape: tuple[int, ...] = ()) -> DeviceMesh:
    """Two ranks along each dimension, unless given; made once per process."""
    return init_device_mesh("cpu", shape or (2,) * len(names), mesh_dim_names=names)


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def draw_batch(step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    symbols = torch.randint(SYMBOLS, (NUM_SEQUENCES, 7), generator=generator)
    return symbols[:, :-1], symbols[:, 1:]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def backward_alone(model: nn.Module, step: int, num_replicas: int) -> list[float]:
    """Adds the mean gradient over the replicas' batches; their losses."""
    losses = []
    for replica in range(num_replicas):
        x, target = draw_batch(step, replica)
        loss = loss_fn(model(x), target)
        (loss / num_replicas).backward()
        losses.append(float(loss.detach()))
    return losses


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
    apart = float((found - expected).abs().max())
    assert apart <= TOLERANCE, f"{what} is {apart} away"


def assert_gradients(own: nn.Module, model: nn.Module, prefix: str = "") -> None:
    """Those that this rank has part of, under the names of `model`, are its. Collective."""
    for name, parameter in own.named_parameters():
        expected = model.get_parameter(name.removeprefix(prefix)).grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            assert_close(_full(whole(parameter, parameter.grad)), expected, f"gradient of {name}")


def assert_state(found: Mapping[str, Any], model: nn.Module) -> None:
    """All of the model's. Collective where it has DTensors."""
    expected = model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_close(_full(found[name]), value, name)


def _full(value: Any) -> Tensor:
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full
