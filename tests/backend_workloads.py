"""Owns what test_backend_interop.py runs on two backends: torch's own parallelism, small and exact.

Each workload is a function of a rank, on the default group of whatever backend it has, and returns
tensors (in lists and dicts) that must not depend on it.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH = 12
STEPS = 3


class Block(nn.Module):
    """A residual block, as a transformer's feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(nn.functional.gelu(self.first(self.norm(inputs))))
        return torch.add(inputs, hidden)


def _model(num_blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def _full(parameters: Any) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


def _train(
    rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool = False
) -> list[Tensor]:
    """The losses, with the norm of the gradients where they are clipped."""
    noted = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(_batch(rank, step)).square().mean()
        loss.backward()
        noted.append(loss.detach().clone())
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            noted += _full([norm])
        optimizer.step()
    return noted


def _train_ddp(
    rank: int, set_up: Callable[[Any], None] = lambda _: None, **options: Any
) -> list[Tensor]:
    # Several buckets.
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.005, **options)
    set_up(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    return _train(rank, ddp, optimizer, clip=True) + _full(ddp.parameters())


def ddp(rank: int, world_size: int) -> list[Tensor]:
    return _train_ddp(rank)


def ddp_static_graph(rank: int, world_size: int) -> list[Tensor]:
    return _train_ddp(rank, static_graph=True, gradient_as_bucket_view=True)


def ddp_half_hook(rank: int, world_size: int) -> list[Tensor]:
    """A hook whose future continues that of the group's work."""
    return _train_ddp(
        rank, lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    )


def ddp_power_sgd(rank: int, world_size: int) -> list[Tensor]:
    """A hook that chains collectives in callbacks."""

    def set_up(model: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    # One bucket: with several, callbacks run in different orders on the ranks.
    model = DistributedDataParallel(_model())
    set_up(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _train(rank, model, optimizer) + _full(model.parameters())


def ddp_uneven(rank: int, world_size: int) -> list[Tensor]:
    """join(): a rank runs out of inputs, and answers the others' collectives."""
    model = DistributedDataParallel(_model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
            optimizer.step()
    return _full(model.parameters())


def zero_optimizer(rank: int, world_size: int) -> list[Tensor]:
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = _train(rank, model, optimizer)
    optimizer.consolidate_state_dict(to=0)  # an object per rank
    return losses + _full(model.parameters())


def _fsdp_model(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model: nn.Module = _model()
    for block in model.children():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(rank: int, world_size: int) -> list[Tensor]:
    model = _fsdp_model(init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return _train(rank, model, optimizer, clip=True) + _full(model.parameters())


def fsdp_replicated(rank: int, world_size: int) -> list[Tensor]:
    """Sharded over half of the ranks, replicated over the others."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = _fsdp_model(mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return _train(rank, model, optimizer) + _full(model.parameters())


def _parallelize(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(
        block,
        mesh,
        {"first": ColwiseParallel(), "second": RowwiseParallel()},
    )


def tensor_parallel(rank: int, world_size: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = _model()
    for block in model:
        _parallelize(block, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return _train(0, model, optimizer) + _full(model.parameters())


def sequence_parallel(rank: int, world_size: int) -> list[Tensor]:
    """All-gathers and reduce-scatters around the parallel layers."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = _model()
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "first": ColwiseParallel(input_layouts=Shard(0)),
        "second": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(distribute_tensor(_batch(0, step), mesh, [Shard(0)])).square().mean()
        loss.backward()
        losses += _full([loss])
        optimizer.step()
    return losses + _full(model.parameters())


def two_dimensions(rank: int, world_size: int) -> list[Tensor]:
    """FSDP over tensor parallelism, on a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model: nn.Module = _model()
    for block in model.children():
        _parallelize(block, mesh["tp"])
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = _train(mesh["dp"].get_local_rank(), model, optimizer)
    return losses + _full(model.parameters())


def redistribution(rank: int, world_size: int) -> list[Tensor]:
    """DTensor alone: from shards of one dimension to those of another, and to replicas."""
    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(5 * 7, dtype=torch.float32).reshape(5, 7)  # uneven shards
    rows = distribute_tensor(full, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    replicas = columns.redistribute(mesh, [Replicate()])
    sums = rows.sum(dim=0).redistribute(mesh, [Replicate()])
    return [rows.to_local(), columns.to_local(), replicas.to_local(), sums.to_local()]


def _functional(inputs: Tensor, group: Any) -> list[Tensor]:
    size = dist.get_world_size(group)
    forward = [*range(1, size), 0]
    return [
        funcol.all_reduce(inputs, "sum", group),
        funcol.all_reduce(inputs, "max", group),
        funcol.all_gather_tensor(inputs, 0, group),
        funcol.all_gather_tensor(inputs, 1, group),
        funcol.reduce_scatter_tensor(inputs, "sum", 0, group),
        funcol.all_to_all_single(inputs, None, None, group),
        funcol.broadcast(inputs, 1, group),
        funcol.permute_tensor(inputs.flatten(), forward, group),
        *funcol.all_reduce_coalesced([inputs, 2 * inputs], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([inputs, 2 * inputs], group),
        *funcol.reduce_scatter_tensor_coalesced([inputs, 2 * inputs], "sum", [0, 0], group),
    ]


def _functional_input(rank: int, world_size: int) -> Tensor:
    return torch.arange(float(world_size * 6)).reshape(world_size * 2, 3) + 100 * rank


def functional(rank: int, world_size: int) -> list[Tensor]:
    group = dist.group.WORLD
    found = [t.clone() for t in _functional(_functional_input(rank, world_size), group)]
    leaf = _functional_input(rank, world_size).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(leaf, 0, group)
    scattered = funcol.reduce_scatter_tensor_autograd(gathered * (rank + 1), "sum", 0, group)
    exchanged = funcol.all_to_all_single_autograd(scattered, None, None, group)
    (exchanged * torch.arange(3.0)).sum().backward()
    assert leaf.grad is not None
    return [*found, exchanged.detach(), leaf.grad]


def functional_compiled(rank: int, world_size: int) -> list[Tensor]:
    """The same in one graph; what the graph holds counts, not the code that is made of it."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(inputs: Tensor) -> list[Tensor]:
        return [t + 1 for t in _functional(inputs * 2, dist.group.WORLD)]

    return [t.clone() for t in compiled(_functional_input(rank, world_size))]


def ddp_compiled(rank: int, world_size: int) -> list[Tensor]:
    model = DistributedDataParallel(_model())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _train(rank, compiled, optimizer) + _full(model.parameters())


def checkpoint(rank: int, world_size: int) -> list[Tensor]:
    """Sharded state is saved by all ranks, and loaded into another model."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = _fsdp_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(rank, model, optimizer)
    saved = _full(model.parameters())
    holder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(holder, src=0)
    folder = Path(holder[0])
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)

    other = _fsdp_model(mesh)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    whole = {"model": state, "optimizer": optimizer_state}
    dcp.load(whole, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=whole["model"],
        optim_state_dict=whole["optimizer"],
    )
    loaded = _full(other.parameters())
    assert all(map(torch.equal, saved, loaded))
    return loaded + _train(rank, other, other_optimizer)


def checkpoint_async(rank: int, world_size: int) -> list[Tensor]:
    """Ranks agree from a thread of their own while they train."""
    model = _fsdp_model(init_device_mesh("cpu", (world_size,)))
    holder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(holder, src=0)
    state = copy.copy(model.state_dict())
    group = dist.new_group()
    future = dcp.async_save(state, checkpoint_id=holder[0], process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = _train(rank, model, optimizer)
    future.result(timeout=30)
    loaded = _fsdp_model(init_device_mesh("cpu", (world_size,))).state_dict()
    dcp.load(loaded, checkpoint_id=holder[0])
    return losses + _full(loaded.values())


def _pipeline(rank: int, world_size: int, schedule: type) -> list[Tensor]:
    model = _model(world_size)
    stage = PipelineStage(model[rank], rank, world_size, torch.device("cpu"))
    run = schedule(
        stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean()
    )
    optimizer = torch.optim.SGD(model[rank].parameters(), lr=0.1)
    noted: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            run.step(_batch(0, step))
        elif rank == world_size - 1:
            noted.append(run.step(target=_batch(1, step), losses=losses).detach())
        else:
            run.step()
        noted += [loss.detach() for loss in losses]
        optimizer.step()
    return noted + _full(model[rank].parameters())


def pipeline_gpipe(rank: int, world_size: int) -> list[Tensor]:
    return _pipeline(rank, world_size, ScheduleGPipe)


def pipeline_1f1b(rank: int, world_size: int) -> list[Tensor]:
    return _pipeline(rank, world_size, Schedule1F1B)


def objects(rank: int, world_size: int) -> list[Any]:
    """torch sends objects as tensors of bytes, whose sizes differ."""
    mine = {"rank": rank, "text": "x" * (1 + 1000 * rank)}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, mine)
    on_last: list[Any] = [None] * world_size
    last = world_size - 1
    dist.gather_object(mine, on_last if rank == last else None, dst=last)
    sent = [mine, "second"]
    dist.broadcast_object_list(sent, src=last)
    received: list[Any] = [None]
    dist.scatter_object_list(received, gathered if rank == 0 else None, src=0)
    message = [mine]
    if rank == 0:
        dist.send_object_list(message, dst=last)
    elif rank == last:
        dist.recv_object_list(message, src=0)
    return [gathered, on_last, sent, received, message]


def pydist_ddp(rank: int, world_size: int) -> list[Tensor]:
    """pydist's own class, on whatever group."""
    import pydist

    model = pydist.DataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _train(rank, model, optimizer, clip=True) + _full(model.parameters())
