"""Owns the models that the backends' benchmark trains by torch's own parallelism."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from bench.models import WORKLOADS, Transformer, Workload

Group = dist.ProcessGroup


def _mesh(group: Group) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def _ddp(model: nn.Module, group: Group) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def _fsdp(model: nn.Module, group: Group) -> nn.Module:
    mesh = _mesh(group)
    layers = model.layers.layers if isinstance(model, Transformer) else model
    for layer in layers.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # changes it in place
    return model


def _tensor_parallel(model: nn.Module, group: Group) -> nn.Module:
    """Every second layer by columns, and those between by rows."""
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if number % 2 else ColwiseParallel()
        for number, name in enumerate(
            name for name, module in model.named_modules() if isinstance(module, nn.Linear)
        )
    }
    return parallelize_module(model, _mesh(group), plan)


@dataclass(frozen=True)
class Parallelism:
    """A row of the table: what is trained, and how it is spread over the ranks."""

    workload: str
    spread: Callable[[nn.Module, Group], nn.Module]
    same_batch: bool = False  # on all ranks


PARALLELISMS = {
    "DDP, MLP 8 x 1024": Parallelism("MLP 8 x 1024", _ddp),
    "DDP, transformer 6 x 256": Parallelism("transformer 6 x 256", _ddp),
    "FSDP2, MLP 8 x 1024": Parallelism("MLP 8 x 1024", _fsdp),
    "FSDP2, transformer 6 x 256": Parallelism("transformer 6 x 256", _fsdp),
    "tensor parallel, MLP 8 x 1024": Parallelism("MLP 8 x 1024", _tensor_parallel, same_batch=True),
    "DDP, tiny MLP": Parallelism("tiny MLP", _ddp),
    "FSDP2, tiny transformer": Parallelism("tiny transformer", _fsdp),
    "tensor parallel, tiny MLP": Parallelism("tiny MLP", _tensor_parallel, same_batch=True),
}
QUICK = ("DDP, tiny MLP", "FSDP2, tiny transformer", "tensor parallel, tiny MLP")
FULL = tuple(name for name in PARALLELISMS if name not in QUICK)


class Trainee:
    """A model on one backend's group, with the steps that it has taken."""

    def __init__(self, name: str, rank: int, group: Group) -> None:
        parallelism = PARALLELISMS[name]
        self.workload: Workload = WORKLOADS[parallelism.workload]
        torch.manual_seed(0 if parallelism.same_batch else rank)
        self._inputs, self._target = self.workload.make_input(), self.workload.make_target()
        torch.manual_seed(0)
        self._model = parallelism.spread(self.workload.make_model(), group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, foreach=False)

    def step(self) -> None:
        self.workload.loss(self._model(self._inputs), self._target).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        """Whole ones, which takes collectives."""
        return [
            p.full_tensor() if isinstance(p, DTensor) else p.detach()
            for p in self._model.parameters()
        ]
