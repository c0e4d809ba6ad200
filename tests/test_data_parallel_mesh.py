"""Tests of device_mesh: the ranks as a mesh, and tensor parallelism inside data parallelism."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from pydist import DataParallel, UsageError
from ranks import get_pool
from reference import expect_error


def scaled_loss(model: nn.Module, row: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(row)
    loss = model(torch.randn(3, 8, generator=generator)).pow(2).mean()
    assert isinstance(loss, torch.Tensor)
    return loss


def two_layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def mean_gradients(rows: int) -> list[torch.Tensor]:
    module = two_layers()
    for row in range(rows):
        (scaled_loss(module, row) / rows).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def train_on_1d_mesh(rank: int, world_size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    model = DataParallel(two_layers(), device_mesh=mesh)
    assert model.device_mesh is mesh
    assert model.process_group == mesh.get_group()
    scaled_loss(model, rank).backward()
    for found, wanted in zip(model.parameters(), mean_gradients(world_size), strict=True):
        torch.testing.assert_close(found.grad, wanted)


def test_1d_mesh() -> None:
    """A 1-D mesh names the ranks that average."""
    get_pool(2).run(train_on_1d_mesh)


def train_on_columns(rank: int, world_size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    module = two_layers()
    parallelize_module(module, mesh["shards"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = DataParallel(module, device_mesh=mesh["replicas"])
    row, column = rank // 2, rank % 2
    first, bias, second, last_bias = mean_gradients(2)
    wanted = {
        "module.0.weight": first.chunk(2, dim=0)[column],
        "module.0.bias": bias.chunk(2)[column],
        "module.2.weight": second.chunk(2, dim=1)[column],
        "module.2.bias": last_bias,
    }
    for _ in range(2):
        scaled_loss(model, row).backward()
        found = dict(model.named_parameters())
        assert found.keys() == wanted.keys() == model.state_dict().keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name].grad, gradient)
        model.zero_grad()


def test_slice_of_a_larger_mesh() -> None:
    """On one dimension of a 2-D mesh, with torch's tensor parallelism along the other, each rank's
    part of every gradient is averaged over the ranks that hold the same part, step after step."""
    get_pool(4).run(train_on_columns)


def refuse_meshes(rank: int, world_size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size, 1))
    error = expect_error(
        RuntimeError, functools.partial(DataParallel, two_layers(), device_mesh=mesh)
    )
    assert "1D device mesh" in str(error)
    line = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    error = expect_error(
        RuntimeError,
        functools.partial(
            DataParallel, two_layers(), device_mesh=line, process_group=dist.group.WORLD
        ),
    )
    assert "process_group and device_mesh" in str(error)
    error = expect_error(UsageError, functools.partial(DataParallel, two_layers(), None, "cpu"))
    assert "device_ids" in str(error)


def test_meshes_that_make_no_sense() -> None:
    """A 2-D mesh, and a mesh beside a group, are refused as torch refuses them."""
    get_pool(2).run(refuse_meshes)
