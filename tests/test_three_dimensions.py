"""Holds the promise of three dimensions: replicas of pipelines whose stages are tensor-parallel by
torch's DTensor train like one process.

Eight ranks: dp 2 x pp 2 x tp 2. float64, so that only the order of sums tells them apart.
"""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pydist
from pydist import PipelineParallel, UsageError
from ranks import get_pool
from reference import assert_same_on_all_ranks, expect_error

WIDTH, SYMBOLS, HEADS = 8, 12, 4
MICROBATCHES = 4
MAX_NORM = 0.05  # below what every step has
TOLERANCE = 1e-10


class Block(nn.Module):
    """Attention and an MLP with heads and hidden units that ranks can share out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)  # nobody uses it

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        heads = [
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(attended.transpose(-2, -3).flatten(-2))
        return x + self.narrow(torch.tanh(self.wide(x)))


PLAN = {
    **dict.fromkeys(("query", "key", "value", "wide", "spare"), ColwiseParallel()),
    **dict.fromkeys(("mixed", "narrow"), RowwiseParallel()),
}


def make_gpt(num_blocks: int = 2) -> nn.Sequential:
    """With one matrix as embedding and as head; the same on every rank."""
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
    own = copy.deepcopy(model)
    parallelize_module(own[0], mesh, RowwiseParallel(input_layouts=Replicate()))
    for block in own[1:-2]:
        parallelize_module(block, mesh, PLAN)
    parallelize_module(own[-1], mesh, ColwiseParallel(output_layouts=Replicate()))
    own[-1].weight = own[0].weight
    return own


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def draw_batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    symbols = torch.randint(SYMBOLS, (MICROBATCHES, 7), generator=generator)
    return symbols[:, :-1], symbols[:, 1:]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def step_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, replicas: int
) -> tuple[list[float], Tensor]:
    """The losses of all replicas, and the norm of the mean gradient."""
    losses = []
    for replica in range(replicas):
        x, target = draw_batch(step, replica)
        loss = loss_fn(model(x), target)
        (loss / replicas).backward()
        losses.append(float(loss.detach()))
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    """Made once per process."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
    apart = float((found - expected).abs().max())
    assert apart <= TOLERANCE, f"{what} is {apart} away"


def assert_whole(found: dict[str, Tensor], model: nn.Module) -> None:
    """A full state is that of the model."""
    expected = model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_close(found[name], value, name)


def train_pipelines(
    rank: int, world_size: int, kind: str, dims: tuple[str, ...], clip: float
) -> None:
    mesh = mesh_of(*(2 for _ in dims), names=dims)
    model = make_gpt(2 if kind == "1f1b" else 4)
    replicas = 2 if "dp" in dims else 1
    own = parallelized(model, mesh["tp"])
    stages_per_rank = None if kind in ("1f1b", "zb-h1") else 2
    pipeline = PipelineParallel(
        own,
        num_microbatches=MICROBATCHES,
        loss_fn=loss_fn,
        schedule=kind,
        stages_per_rank=stages_per_rank,
        balance="uniform",
        device_mesh=mesh,
    )
    optimizer, expected = sgd(pipeline.parameters()), sgd(model.parameters())
    replica = mesh.get_local_rank("dp") if "dp" in dims else 0
    for step in range(3):
        x, target = draw_batch(step, replica)
        loss = pipeline.step(
            x if pipeline.has_first_stage else None,
            target=target if pipeline.has_last_stage else None,
        )
        losses, norm = step_alone(model, expected, step, replicas)
        assert abs(float(loss) - losses[replica]) <= TOLERANCE, f"step {step}"
        assert_close(pipeline.clip_grad_norm_(clip), norm, f"norm of step {step}")
        optimizer.step()
        optimizer.zero_grad()
    assert_whole(pipeline.full_state_dict(), model)
    if replicas > 1:
        assert_same_on_all_ranks(pipeline.parameters(), mesh.get_group("dp"))


def test_eight_ranks() -> None:
    """Losses, norms, weights of dp 2 x pp 2 x tp 2 with a tied, cut embedding."""
    get_pool(8).run(train_pipelines, "1f1b", ("dp", "pp", "tp"), MAX_NORM)


@pytest.mark.parametrize("kind", ["zb-h1", "interleaved-1f1b", "zb-v"])
def test_schedules(kind: str) -> None:
    """Backward split into gradients of inputs and of weights, and several stages per rank."""
    get_pool(4).run(train_pipelines, kind, ("pp", "tp"), MAX_NORM)


def keep_state(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2, names=("pp", "tp"))
    make = functools.partial(
        PipelineParallel, num_microbatches=MICROBATCHES, loss_fn=loss_fn, device_mesh=mesh
    )
    first = make(parallelized(make_gpt(), mesh["tp"]))
    optimizer = sgd(first.parameters())

    def train(pipeline: PipelineParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        x, target = draw_batch(step, 0)
        pipeline.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()

    train(first, optimizer, 0)
    local = first.state_dict()
    cut = [name for name, value in local.items() if isinstance(value, DTensor)]
    assert any("query.weight" in name for name in cut)
    weights, momenta = first.full_state_dict(), first.full_optim_state_dict(optimizer)
    assert momenta["state"]["1.query.weight"]["momentum_buffer"].shape == (WIDTH, WIDTH)
    for saved in (weights, {name: copy.deepcopy(value) for name, value in local.items()}):
        other = make(parallelized(make_gpt().apply(lambda m: None), mesh["tp"]))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(saved)
        other_optimizer = sgd(other.parameters())
        other.load_optim_state_dict(other_optimizer, momenta)
        if saved is weights:
            keep = other, other_optimizer
    train(first, optimizer, 1)
    train(*keep, 1)
    for name, value in first.full_state_dict().items():
        assert torch.equal(value, keep[0].full_state_dict()[name]), name


def test_state_of_cut_parameters() -> None:
    """State dicts have whole tensors under the unsplit model's names, and go back into parts."""
    get_pool(4).run(keep_state)


def train_replicas(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = make_gpt()
    ddp = pydist.DataParallel(parallelized(model, mesh["tp"]), device_mesh=mesh["dp"])
    optimizer, expected = sgd(ddp.parameters()), sgd(model.parameters())
    replica = mesh.get_local_rank("dp")
    for step in range(3):
        x, target = draw_batch(2 * step, replica)
        with ddp.no_sync():
            loss_fn(ddp(x), target).backward()
        x, target = draw_batch(2 * step + 1, replica)
        loss_fn(ddp(x), target).backward()
        for number in (2 * step, 2 * step + 1):
            for other in range(2):
                x, target = draw_batch(number, other)
                (loss_fn(model(x), target) / 2).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert_same_on_all_ranks(ddp.parameters(), mesh.get_group("dp"))
    for (name, part), whole in zip(ddp.module.named_parameters(), model.parameters(), strict=True):
        if part.shape != whole.shape:
            dim = next(d for d in range(whole.dim()) if part.shape[d] != whole.shape[d])
            whole = whole.chunk(2, dim)[mesh.get_local_rank("tp")]
        assert_close(part.detach(), whole.detach(), name)


def test_tensor_parallel_replicas() -> None:
    """DataParallel alone over tensor-parallel ranks, with gradients accumulated without rounds."""
    get_pool(4).run(train_replicas)


def refuse_names(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2, names=("pp", "tensor"))
    with expect_error(UsageError, "device_mesh", "tensor"):
        PipelineParallel(make_gpt(), num_microbatches=2, loss_fn=loss_fn, device_mesh=mesh)
    dist.barrier()


def test_unknown_dimension() -> None:
    """A dimension of another name may be a slip of the pen, and is refused."""
    get_pool(4).run(refuse_names)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms(norm_type: float) -> None:
    """Of parts, copies and pending sums, each counted once."""
    get_pool(4).run(compare_norms, norm_type)


def compare_norms(rank: int, world_size: int, norm_type: float) -> None:
    from torch.distributed.tensor import Partial, Shard

    from pydist._mesh import norms

    mesh = mesh_of(4, names=("tp",))
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    parts = list(whole.tensor_split(4))
    shapes = {"shape": whole.shape, "stride": whole.stride()}
    cut = torch.chunk(whole, 4)
    mine = cut[rank] if rank < len(cut) else whole[:0]
    given = [
        whole,
        DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, **shapes),
        DTensor.from_local(whole, mesh, [Replicate()], run_check=False),
        DTensor.from_local(whole / 4, mesh, [Partial()], run_check=False),
    ]
    expected = torch.linalg.vector_norm(whole, norm_type)
    assert len(parts) == 4
    for kind, found in zip(("plain", "cut", "copy", "sum"), norms(given, norm_type, None)):
        assert_close(found, expected, kind)
