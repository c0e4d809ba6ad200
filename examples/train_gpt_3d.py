"""Owns the example of three dimensions: a GPT on dp x pp x tp ranks, compared with one process.

    torchrun --nproc-per-node 8 examples/train_gpt_3d.py --dp 2 --pp 2 --tp 2 --compare

dp replicas of a pipeline of pp stages, each of which tp ranks compute together:

    ranks 0 1 | 2 3     replica 0: stage 0 | stage 1
    ranks 4 5 | 6 7     replica 1: stage 0 | stage 1

torch's parallelize_module cuts the layers, pydist.PipelineParallel does the rest. With --compare,
rank 0 then trains the same model alone, and the exit status is 1 if the losses are not the same.

`--backend nccl` puts each rank on a GPU of its own. That is written with care, but nobody has run
it on GPUs yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pydist
from gpt_model import (
    MODEL_SIZES,
    Block,
    ModelSize,
    initialize,
    mean_cross_entropy,
    place,
    position_turns,
)
from stdlib_text import StdlibText, draw_batch, read_stdlib
from trainees import SEED, Batch

MAX_NORM = 1.0
# Of losses, relative. Rounding differs in each sum, and training amplifies it slowly.
BOUND = 1e-3


class SeparateBlock(Block):
    """A block whose queries, keys and values have a matrix each, so that each can be cut by heads.

    Every rank computes with the heads that its parts of the matrices have.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__(size)
        del self.query_key_value
        self.head_width = size.width // size.num_heads
        self.query, self.key, self.value = (nn.Linear(size.width, size.width) for _ in range(3))

    def attend(self, x: Tensor) -> Tensor:
        turns = position_turns(x.shape[1], self.head_width, x.dtype, x.device)
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            place(query, turns), place(key, turns), value, is_causal=True
        )
        output: Tensor = self.attention_output(mixed.transpose(1, 2).flatten(2))
        return output


def make_layers(size: ModelSize, num_symbols: int) -> nn.Sequential:
    """The same on every rank. One matrix is the embedding and the head."""
    torch.manual_seed(SEED)
    head = nn.Linear(size.width, num_symbols, bias=False)
    embedding = nn.Embedding(num_symbols, size.width)
    embedding.weight = head.weight
    blocks = (SeparateBlock(size).apply(initialize) for _ in range(size.num_layers))
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(size.width), head)


def cut(layers: nn.Sequential, mesh: DeviceMesh) -> None:
    """Tensor parallelism, in place: blocks by heads and hidden units, the symbols' matrix by
    symbols."""
    rows = dict.fromkeys(("attention_output", "mlp_output"), RowwiseParallel())
    columns = dict.fromkeys(("query", "key", "value", "mlp_input"), ColwiseParallel())
    embedding, *blocks, _, head = layers
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    for block in blocks:
        parallelize_module(block, mesh, {**columns, **rows})
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    head.weight = embedding.weight


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """A large epsilon keeps rounding from growing in the first steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


@dataclass(frozen=True)
class Task:
    """What is trained, in any number of ranks."""

    text: StdlibText
    size: ModelSize
    num_steps: int
    num_sequences: int

    def layers(self, device: torch.device) -> nn.Sequential:
        return make_layers(self.size, len(self.text.alphabet)).to(device)

    def batch(self, step: int, device: torch.device) -> Batch:
        symbols, targets = draw_batch(
            self.text.train, self.num_sequences, self.size.context, seed=step
        )
        return symbols.to(device), targets.to(device)


def train_together(
    task: Task, mesh: DeviceMesh, device: torch.device, options: argparse.Namespace
) -> list[float]:
    """The losses, means over the replicas."""
    layers = task.layers(device)
    cut(layers, mesh["tp"])
    pipeline = pydist.PipelineParallel(
        layers,
        num_microbatches=options.microbatches,
        loss_fn=mean_cross_entropy,
        schedule=options.schedule,
        device_mesh=mesh,
    )
    optimizer = make_optimizer(pipeline)
    losses = []
    for step in range(task.num_steps):
        symbols, targets = (
            each.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
            for each in task.batch(step, device)
        )
        loss = pipeline.step(symbols, target=targets)
        norm = pipeline.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=mesh.get_group("dp"))
        losses.append(float(loss) / mesh["dp"].size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, norm {float(norm):.4f}", flush=True)
    return losses


def train_alone(task: Task, device: torch.device) -> list[float]:
    """The losses of one process."""
    layers = task.layers(device)
    optimizer = make_optimizer(layers)
    losses = []
    for step in range(task.num_steps):
        symbols, targets = task.batch(step, device)
        loss = mean_cross_entropy(layers(symbols), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(layers.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(found: list[float], expected: list[float]) -> int:
    """Prints how far apart the losses are; the exit status for it."""
    one, other = (torch.tensor(losses, dtype=torch.float64) for losses in (found, expected))
    apart = float((one / other - 1).abs().max())  # NaN if a loss is
    print(f"largest difference to the losses of one process: {apart:.1e} of the loss", flush=True)
    if apart <= BOUND:
        return 0
    print(f"train_gpt_3d: more than rounding explains (allowed: {BOUND:.0e})", file=sys.stderr)
    return 1


def parse_options(num_ranks: int) -> argparse.Namespace:
    """The command line, checked before the ranks meet."""
    parser = argparse.ArgumentParser(
        prog="train_gpt_3d", description="Trains a small GPT in three dimensions, under torchrun."
    )
    parser.add_argument("--dp", type=int, default=2, help="replicas (default: 2)")
    parser.add_argument("--pp", type=int, default=2, help="stages of a pipeline (default: 2)")
    parser.add_argument("--tp", type=int, default=2, help="ranks of a stage (default: 2)")
    parser.add_argument("--backend", choices=("gloo", "pydist", "nccl"), default="gloo")
    parser.add_argument("--schedule", choices=pydist.schedule.kinds(), default="1f1b")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", choices=sorted(MODEL_SIZES), default="small")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step (default: 16)")
    parser.add_argument("--microbatches", type=int, default=4, help="of a replica (default: 4)")
    parser.add_argument("--compare", action="store_true", help="with training in one process")
    options = parser.parse_args()
    if options.dp * options.pp * options.tp != num_ranks:
        parser.error(
            f"expected --dp x --pp x --tp to be the {num_ranks} ranks that torchrun started, found "
            f"{options.dp} x {options.pp} x {options.tp}"
        )
    if options.batch % (options.dp * options.microbatches) != 0:
        parser.error(
            f"expected --batch to be a multiple of {options.dp * options.microbatches}, for --dp "
            f"{options.dp} and --microbatches {options.microbatches}, found {options.batch}"
        )
    if MODEL_SIZES[options.model].num_heads % options.tp != 0:
        parser.error(
            f"expected --tp to divide the {MODEL_SIZES[options.model].num_heads} heads of the "
            f"{options.model} model, found {options.tp}"
        )
    return options


def main() -> int:
    """Returns the exit status of this rank."""
    options = parse_options(int(os.environ.get("WORLD_SIZE", "1")))
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    shape = (options.dp, options.pp, options.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "pp", "tp"))
    task = Task(read_stdlib(), MODEL_SIZES[options.model], options.steps, options.batch)
    losses = train_together(task, mesh, device, options)
    status = 0
    if options.compare and dist.get_rank() == 0:
        status = compare(losses, train_alone(task, device))
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
