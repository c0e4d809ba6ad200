"""Holds that what tensor parallelism has cut is saved whole, loaded in parts, and counted once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.tensor import DTensor, Replicate, Shard

import pydist
from cut_gpt import (
    NUM_SEQUENCES,
    WIDTH,
    assert_close,
    assert_state,
    backward_alone,
    draw_batch,
    loss_fn,
    make_gpt,
    mesh_of,
    parallelized,
    sgd,
)
from pydist import PipelineParallel, UsageError
from pydist._mesh import norms
from ranks import get_pool
from reference import expect_error


@torch.no_grad()
def set_to_zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


class Trained:
    """A pipeline with tensor-parallel stages and its optimizer."""

    def __init__(self, mesh: Any, zeros: bool = False) -> None:
        own = parallelized(make_gpt(), mesh["tp"])
        if zeros:
            set_to_zero(own)
        self.pipeline = PipelineParallel(own, NUM_SEQUENCES, loss_fn, device_mesh=mesh)
        self.optimizer = sgd(self.pipeline.parameters())

    def train(self, step: int) -> None:
        x, target = draw_batch(step)
        self.pipeline.step(x, target=target)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """This rank's."""
        optim = self.pipeline.optim_state_dict(self.optimizer)
        return {"model": self.pipeline.state_dict(), "optim": optim}

    def load(self, model: Any, optim: Any) -> None:
        self.pipeline.load_state_dict(model)
        self.pipeline.load_optim_state_dict(self.optimizer, optim)


def assert_same_training(first: Trained, second: Trained) -> None:
    for trained in (first, second):
        trained.train(1)
    expected = first.pipeline.full_state_dict()
    for name, value in second.pipeline.full_state_dict().items():
        assert_close(value, expected[name], name)


def keep_state(rank: int, world_size: int) -> None:
    mesh = mesh_of("pp", "tp")
    first = Trained(mesh)
    first.train(0)
    weights = first.pipeline.full_state_dict()
    moments = first.pipeline.full_optim_state_dict(first.optimizer)
    assert moments["state"]["1.query.weight"]["momentum_buffer"].shape == (WIDTH, WIDTH)
    model = make_gpt()
    optimizer = sgd(model.parameters())
    backward_alone(model, 0, 1)
    optimizer.step()
    assert_state(weights, model)
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            found = moments["state"][name]["momentum_buffer"]
            assert_close(found, optimizer.state[parameter]["momentum_buffer"], name)
    own = copy.deepcopy(first.state())
    assert any(isinstance(value, DTensor) for value in own["model"].values())
    parts = {name: _local(value) for name, value in own["model"].items()}
    for saved, optim in ((weights, moments), (own["model"], own["optim"]), (parts, moments)):
        second = Trained(mesh, zeros=True)
        second.load(saved, optim)
        assert_state(second.pipeline.full_state_dict(), model)
    assert_same_training(first, second)
    weights["1.query.weight"] = weights["1.query.weight"][1:]
    error = expect_error(RuntimeError, lambda: second.pipeline.load_state_dict(weights))
    assert "size mismatch for 1.query.weight" in str(error)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def test_state_of_pipelines() -> None:
    """State dicts are whole under the unsplit model's names; whole ones, DTensors and parts go back
    into parts."""
    get_pool(4).run(keep_state)


def save_and_load(rank: int, world_size: int, folder: str) -> None:
    first = Trained(mesh_of("pp", "tp"))
    first.train(0)
    dcp.save(first.state(), checkpoint_id=folder)
    second = Trained(mesh_of("tp", "pp"), zeros=True)
    state = second.state()
    # A parameter that nobody uses has no moments, except in a new optimizer that is asked for them.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=folder, planner=planner)
    second.load(state["model"], state["optim"])
    assert_same_training(first, second)

    plain = make_gpt().apply(set_to_zero)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    other = Trained(mesh_of("pp", "tp"))
    other.train(0)
    assert_state(other.pipeline.full_state_dict(), plain)


def test_checkpoints(tmp_path: Path) -> None:
    """torch.distributed.checkpoint: into the same model, its ranks laid out in another way, and
    into one process's."""
    get_pool(4).run(save_and_load, str(tmp_path))


def keep_replica(rank: int, world_size: int, folder: str) -> None:
    mesh = mesh_of("dp", "tp")

    def make() -> pydist.DataParallel:
        return pydist.DataParallel(parallelized(make_gpt(), mesh["tp"]), device_mesh=mesh["dp"])

    first, second = make(), make()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(2.0)
    dcp.save({"model": first.state_dict()}, checkpoint_id=folder)
    state = {"model": second.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    second.load_state_dict(state["model"])
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert not isinstance(one, DTensor)
        assert torch.equal(one, other), name
    assert (
        first.state_dict(keep_vars=True)["module.1.query.weight"]
        is dict(first.named_parameters())["module.1.query.weight"]
    )


def test_checkpoints_of_replicas(tmp_path: Path) -> None:
    """Ranks' parts had the same names in a checkpoint, which kept one of them for all."""
    get_pool(4).run(keep_replica, str(tmp_path))


def compare_norms(rank: int, world_size: int, norm_type: float, foreach: bool | None) -> None:
    mesh = mesh_of("tp", shape=(4,))
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    like = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    chunks = [*whole.chunk(4), whole[:0]]  # 2, 2, 2 and no rows
    given = [
        whole,
        DTensor.from_local(chunks[rank], mesh, [Shard(0)], **like),
        DTensor.from_local(whole, mesh, [Replicate()], **like),
    ]
    expected = torch.linalg.vector_norm(whole, norm_type)
    found = norms(given, norm_type, foreach)
    for kind, norm in zip(("plain", "cut", "copy"), found, strict=True):
        assert_close(norm, expected, kind)
    error = expect_error(UsageError, lambda: norms(given, 0.0, foreach))
    assert "norms of order 0.0 of DTensors cannot be added up" in str(error)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
def test_norms(norm_type: float, foreach: bool | None) -> None:
    """Of parts, one of them empty, and of copies: each element counts once."""
    get_pool(4).run(compare_norms, norm_type, foreach)
