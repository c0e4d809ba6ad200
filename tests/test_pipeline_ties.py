"""Holds what training does to the tied weights of a whole pipeline: hooks, memory that is replaced,
freezing. For sums and copies of any placement see test_tied_weights.py.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_reference import assert_same_gradients, draw_batch, reference_step
from pydist import PeerError, PipelineParallel, UsageError
from ranks import get_pool
from reference import expect_error

mse = nn.functional.mse_loss

# The first and the last layer, which share their weight, are in two stages: of one rank, of two
# ranks, and of one of two.
KINDS = {1: ["looped-bfs"], 2: ["gpipe", "zb-v"]}


def tied_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    first, middle, last = (nn.Linear(6, 6) for _ in range(3))
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last)


def make_pipeline(model: nn.Module, kind: str, **options: Any) -> PipelineParallel:
    stages_per_rank = 1 if kind == "gpipe" else 2
    return PipelineParallel(model, 4, mse, kind, stages_per_rank, balance="uniform", **options)


def clip(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def clip_grad(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


HOOKS = {"register_hook": clip, "register_post_accumulate_grad_hook": clip_grad}


def refuse_hook(rank: int, kind: str, method: str) -> None:
    x, target = draw_batch(0)
    model, single = tied_model(), tied_model()
    handle = getattr(model[0].weight, method)(HOOKS[method])
    for _ in range(2):  # the first attempt has changed nothing
        error = expect_error((UsageError, PeerError), lambda: make_pipeline(model, kind))
        assert f".weight has a hook ({method})" in str(error)
    handle.remove()
    pipeline = make_pipeline(model, kind)
    pipeline.step(x, target=target)
    before = [p.grad.clone() for p in pipeline.parameters()]
    if rank == 0:
        handle = getattr(next(iter(pipeline.parameters())), method)(HOOKS[method])
    raised = UsageError if rank == 0 else PeerError
    error = expect_error(raised, lambda: pipeline.step(x, target=target))
    assert f"the tied parameter 0.weight has a hook ({method})" in str(error)
    assert all(map(torch.equal, before, (p.grad for p in pipeline.parameters())))
    pipeline.evaluate(x, target=target)  # has no gradients
    handle.remove()
    pipeline.zero_grad()
    pipeline.step(x, target=target)
    reference_step(single, mse, x, target, 4)
    for name, parameter in pipeline.named_parameters():
        expected = single.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)


def refuse_hooks(rank: int, world_size: int) -> None:
    for kind in KINDS[world_size]:
        for method in HOOKS:
            refuse_hook(rank, kind, method)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_on_tied_parameters_are_refused(num_ranks: int) -> None:
    """A hook that halves the gradient of a tied weight was lost where two stages of one rank share
    it, and the gradient wrong in silence; one that clips was wrong on any placement, as it saw
    each stage's gradient by itself. Both are named: when the pipeline is made, or, if registered
    later and on one rank only, on all ranks before the step."""
    get_pool(num_ranks).run(refuse_hooks)


def replace_memory(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    for kind in KINDS[world_size]:
        pipeline, single = make_pipeline(tied_model(), kind), tied_model()
        for value in (0.1, 0.2):
            for parameter in (*pipeline.parameters(), *single.parameters()):
                parameter.data = torch.full_like(parameter, value)
            outputs = pipeline(x)
            if pipeline.has_last_stage:
                expected = torch.cat([single(piece) for piece in x.tensor_split(4)])
                assert torch.equal(outputs, expected)
            loss = pipeline.evaluate(x, target=target)
            assert torch.equal(loss, reference_step(single, mse, x, target, 4))
        for dtype in (torch.float64, torch.float32):
            loss = pipeline.to(dtype).evaluate(x.to(dtype), target=target.to(dtype))
            assert loss.dtype == dtype


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluation_uses_memory_that_parameters_have_got(num_ranks: int) -> None:
    """After `p.data = ...`, as vector_to_parameters and a swap of averaged weights do it, evaluate
    and forward still computed with the old values in the later ones of stages on one rank."""
    get_pool(num_ranks).run(replace_memory)


def freeze(rank: int, world_size: int) -> None:
    """Each rank is a whole pipeline, and the replica of the other one."""
    groups = [dist.new_group([r]) for r in range(world_size)]
    x, target = draw_batch(rank)
    model, trained = tied_model(), tied_model()
    model[0].weight.requires_grad_(False)
    for module in (model, trained):
        pipeline = make_pipeline(
            module,
            "looped-bfs",
            process_group=groups[rank],
            data_parallel_group=dist.group.WORLD,
        )
        with pipeline.no_sync():
            pipeline.step(x, target=target)
        pipeline.step(x, target=target)
        own = dict(pipeline.named_parameters())
        if module is model:
            assert own["0.weight"].grad is None
            frozen = own
    del own["0.weight"], frozen["0.weight"]
    assert_same_gradients(frozen, own)


def test_a_frozen_tied_parameter_has_no_gradient_after_no_sync() -> None:
    """It got zeros in the first averaged step after no_sync(), and weight decay moved it."""
    get_pool(2).run(freeze)
