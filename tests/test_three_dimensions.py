"""Holds the promise of three dimensions: replicas of pipelines whose stages are tensor-parallel by
torch's DTensor train like one process.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from cut_gpt import (
    NUM_SEQUENCES,
    assert_close,
    assert_gradients,
    assert_state,
    backward_alone,
    draw_batch,
    loss_fn,
    make_gpt,
    mesh_of,
    parallelized,
    sgd,
)
from pydist import PeerError, PipelineParallel, UsageError
from ranks import get_pool
from reference import assert_same_on_all_ranks, expect_error

NUM_STEPS = 3
MAX_NORM = 0.05  # below what every step has
DIMENSIONS = ("dp", "pp", "tp")
HALVES = (slice(0, 2), slice(2, 5))  # of the model's layers


def make_pipeline(model: Any, mesh: Any = None, **options: Any) -> PipelineParallel:
    return PipelineParallel(model, NUM_SEQUENCES, loss_fn, device_mesh=mesh, **options)


def run_step(pipeline: PipelineParallel, step: int, replica: int = 0) -> float:
    x, target = draw_batch(step, replica)
    loss = pipeline.step(
        x if pipeline.has_first_stage else None,
        target=target if pipeline.has_last_stage else None,
    )
    return float(loss)


def compare_steps(
    pipeline: PipelineParallel, model: nn.Sequential, mesh: Any, accumulate: bool = False
) -> None:
    """Losses, gradients, norms and weights of some steps."""
    has_replicas = "dp" in mesh.mesh_dim_names
    replica, replicas = (mesh.get_local_rank("dp"), 2) if has_replicas else (0, 1)
    optimizer, expected = sgd(pipeline.parameters()), sgd(model.parameters())
    for step in range(NUM_STEPS):
        if accumulate:
            with pipeline.no_sync():
                loss = run_step(pipeline, NUM_STEPS + step, replica)
            losses = backward_alone(model, NUM_STEPS + step, replicas)
            assert abs(loss - losses[replica]) < 1e-10
        loss = run_step(pipeline, step, replica)
        losses = backward_alone(model, step, replicas)
        assert abs(loss - losses[replica]) < 1e-10, f"step {step}: {loss}, not {losses[replica]}"
        assert_gradients(pipeline, model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        assert_close(pipeline.clip_grad_norm_(MAX_NORM), norm, f"norm of step {step}")
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert_state(pipeline.full_state_dict(), model)
    if has_replicas:
        assert_same_on_all_ranks(pipeline.parameters(), mesh.get_group("dp"))


def train_eight(rank: int, world_size: int, way: str) -> None:
    mesh = mesh_of(*DIMENSIONS)
    model = make_gpt()
    given: Any = mesh
    options: dict[str, Any] = {}
    if way == "frozen":
        for name in ("0.weight", "1.wide.weight", "2.query.bias"):
            model.get_parameter(name).requires_grad_(False)
    elif way == "slice":
        given = mesh["dp", "pp"]
    elif way == "groups":
        given = None
        options["process_group"] = mesh.get_group("pp")
        options["data_parallel_group"] = mesh.get_group("dp")
    elif way == "views":
        options["data_parallel_options"] = {"gradient_as_bucket_view": True}
    pipeline = make_pipeline(parallelized(model, mesh["tp"]), given, **options)
    compare_steps(pipeline, model, mesh, accumulate=way == "groups")


@pytest.mark.parametrize("way", ["mesh", "slice", "groups", "frozen", "views"])
def test_eight_ranks(way: str) -> None:
    """dp 2 x pp 2 x tp 2: given as a mesh, as two of its dimensions, or as groups, with gradients
    that accumulate under no_sync(); with frozen parameters; and with gradients in buckets."""
    get_pool(8).run(train_eight, way)


def train_four(rank: int, world_size: int, kind: str) -> None:
    mesh = mesh_of("pp", "tp")
    model = make_gpt(4)
    stages_per_rank = 1 if kind == "zb-h1" else 2
    options = {"schedule": kind, "stages_per_rank": stages_per_rank, "balance": "uniform"}
    pipeline = make_pipeline(parallelized(model, mesh["tp"]), mesh, **options)
    compare_steps(pipeline, model, mesh)


@pytest.mark.parametrize("kind", ["zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_schedules(kind: str) -> None:
    """Backwards cut into gradients of inputs and of weights; several stages of a rank, of which
    one has the embedding and another the head (zb-v), which are one parameter."""
    get_pool(4).run(train_four, kind)


def train_callables(rank: int, world_size: int) -> None:
    mesh = mesh_of("pp", "tp")
    model = make_gpt()
    stages = [lambda part=part: parallelized(make_gpt(), mesh["tp"])[part] for part in HALVES]
    pipeline = make_pipeline(stages, mesh, tied=[("0.0.weight", "1.4.weight")])
    whole = nn.Sequential(*(model[part] for part in HALVES))
    assert whole[0][0].weight is whole[1][-1].weight
    compare_steps(pipeline, whole, mesh)


def test_stages_made_by_callables() -> None:
    """Each rank makes and cuts its own stage alone."""
    get_pool(4).run(train_callables)


def drop_out(rank: int, world_size: int) -> None:
    def with_dropout(model: nn.Sequential) -> nn.Sequential:
        return nn.Sequential(model[0], nn.Dropout(0.5), *model[1:3], nn.Dropout(0.5), *model[3:])

    mesh = mesh_of("pp", "tp")
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    torch.manual_seed(9)
    expected = make_pipeline(with_dropout(make_gpt()), process_group=alone)
    torch.manual_seed(9)
    found = make_pipeline(with_dropout(parallelized(make_gpt(), mesh["tp"])), mesh)
    for step in range(NUM_STEPS):
        assert abs(run_step(found, step) - run_step(expected, step)) < 1e-10
    assert_gradients(found, expected)


def test_dropout() -> None:
    """Ranks of a stage draw the masks of an unsplit model."""
    get_pool(4).run(drop_out)


def train_replicas(rank: int, world_size: int) -> None:
    mesh = mesh_of("dp", "tp")
    model = make_gpt()
    ddp = pydist.DataParallel(
        parallelized(model, mesh["tp"]), device_mesh=mesh["dp"], unused_parameters="ignore"
    )
    optimizer, expected = sgd(ddp.parameters()), sgd(model.parameters())
    replica = mesh.get_local_rank("dp")

    def backward(step: int) -> None:
        x, target = draw_batch(step, replica)
        loss = loss_fn(ddp(x), target)
        loss.backward()
        assert abs(float(loss) - backward_alone(model, step, 2)[replica]) < 1e-10

    for step in range(NUM_STEPS):
        with ddp.no_sync():
            backward(2 * step)
        backward(2 * step + 1)
        assert_gradients(ddp.module, model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        assert_close(ddp.clip_grad_norm_(MAX_NORM), norm, f"norm of step {step}")
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert_state(ddp.module.state_dict(), model)
    assert_same_on_all_ranks(ddp.parameters(), mesh.get_group("dp"))


def test_tensor_parallel_replicas() -> None:
    """DataParallel alone over tensor-parallel ranks, with gradients accumulated without rounds."""
    get_pool(4).run(train_replicas)


def refuse_names(rank: int, world_size: int) -> None:
    for names in (("pp", "tensor"), ("dp", "tp")):
        make = functools.partial(
            PipelineParallel, make_gpt(), 2, loss_fn, device_mesh=mesh_of(*names)
        )
        text = str(expect_error(UsageError, make))
        assert 'must have a dimension "pp" and may have "dp" and "tp"' in text
        assert str(names) in text


def test_other_dimensions_are_refused() -> None:
    """A dimension of another name may be a slip of the pen."""
    get_pool(4).run(refuse_names)


def refuse_groups(rank: int, world_size: int) -> None:
    mesh = mesh_of("dp", "pp", "tp", shape=(1, 2, 2))
    own = functools.partial(parallelized, make_gpt(), mesh["tp"])
    wrong, right = mesh.get_group("tp"), mesh.get_group("pp")
    make = functools.partial(PipelineParallel, num_microbatches=2, loss_fn=loss_fn)
    for call in (
        lambda: make(own()),
        lambda: make(own(), process_group=right, data_parallel_group=wrong),
        lambda: pydist.DataParallel(own(), device_mesh=mesh["tp"]),
    ):
        text = str(expect_error(UsageError, call))
        assert "hold parts of " in text
        assert "weight, a DTensor, so they cannot be in one group" in text
    for group in (None, right):
        make_replica = functools.partial(pydist.DataParallel, own(), process_group=group)
        text = str(expect_error(UsageError, make_replica))
        assert "is a DTensor; instead of process_group give device_mesh" in text


def test_groups_that_hold_several_parts_are_refused() -> None:
    """They would average parts of different things, or wait for each other in vain."""
    get_pool(4).run(refuse_groups)


class Fragile(nn.Module):
    """Raises in the last forward of the step that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls_left = 2 * NUM_SEQUENCES

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls_left -= 1
        if self.num_calls_left == 0:
            raise RuntimeError("this layer is broken")
        return x


def break_a_stage(rank: int, world_size: int) -> None:
    """Of gpipe, whose first stage has nothing to do at that time that could wait for a peer."""
    mesh = mesh_of("pp", "tp")
    layers = nn.Sequential(*parallelized(make_gpt(), mesh["tp"]), Fragile())
    pipeline = PipelineParallel(layers, NUM_SEQUENCES, loss_fn, "gpipe", device_mesh=mesh)
    run_step(pipeline, 0)
    kind = RuntimeError if pipeline.has_last_stage else PeerError
    assert "broken" in str(expect_error(kind, lambda: run_step(pipeline, 1)))
    for _ in range(2):
        text = str(expect_error(UsageError, lambda: run_step(pipeline, 2)))
        assert "an earlier step failed" in text
        assert "from a checkpoint" in text


def test_a_stage_that_fails() -> None:
    """The other stages hear of it. Steps after it would mix up the values of tensor-parallel ranks
    that have left different collectives, so there are none."""
    get_pool(4).run(break_a_stage)
