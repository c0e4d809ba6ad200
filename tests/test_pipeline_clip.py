"""Owns the tests of clipping by the norm over all stages, and of the scaler whose ranks agree."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

from conftest import Transport
from pydist import GradScaler, PeerError, UsageError
from pydist._clip import GradientClip
from ranks import RankPool
from reference import assert_same_on_all_ranks, expect_error
from split_models import Split, loss_of, model

# -- clipping --------------------------------------------------------------------------------------

NORMS = [2.0, 1, 3.5, math.inf, "inf", -math.inf, 0.0]


def reference_gradients(tied: bool) -> nn.Module:
    module = model(tied)
    loss_of(module, 0).backward()
    return module


def clip(rank: int, world_size: int, tied: bool, norm_type: Any, foreach: bool | None) -> None:
    module = reference_gradients(tied)
    split = Split(model(tied), 2 * world_size)
    split.backward(0)
    clipper = GradientClip(split)
    for max_norm in (1e6, 0.05):
        expected = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type)
        total = clipper.clip_grad_norm_(max_norm, norm_type, foreach=foreach)
        assert_same_on_all_ranks([total])
        if tied:  # summed in another order
            assert torch.allclose(total, expected)
        else:
            assert torch.equal(total, expected)
        assert total.dtype == expected.dtype
        for name, parameter in split.module.named_parameters(remove_duplicate=False):
            layer = name.partition(".")[0]
            if layer in dict(split.local_layers):
                gradient = module.get_parameter(name).grad
                assert torch.allclose(parameter.grad, gradient), name
                assert tied or torch.equal(parameter.grad, gradient), name


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_norm_is_that_of_the_unsplit_model(pool2: RankPool, tied: bool, norm_type: Any) -> None:
    """In every bit, gradients too; a tied weight counts once."""
    pool2.run(clip, tied, norm_type, None)


def test_the_norm_on_both_transports(transport: Transport) -> None:
    transport.pool(3).run(clip, True, 2.0, False)


def many_gradients(rank: int, world_size: int) -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    split = Split(module, 4)
    clipper = GradientClip(split)
    for _ in range(20):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        expected = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        assert torch.equal(clipper.clip_grad_norm_(1e6), expected)


def test_norms_are_added_in_the_unsplit_model_s_order(pool2: RankPool) -> None:
    """Stages 0 and 2 are on one rank, 1 and 3 on the other: rank by rank gives other bits."""
    pool2.run(many_gradients)


def some_without(rank: int, world_size: int) -> None:
    module = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)))
    split = Split(module, 4)
    clipper = GradientClip(split)
    assert float(clipper.clip_grad_norm_(1.0)) == 0.0
    module(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
    # Without those of one layer, then without all of rank 1; -1 is no norm that zeros add 0 to.
    for layers in ([0, 1, 2], [0, 2]):
        left = [p.grad for i in layers for p in module[i].parameters()]
        for i in {0, 1, 2, 3} - set(layers):
            for parameter in module[i].parameters():
                parameter.grad = None
        for norm_type in (2.0, -1.0):
            expected = torch.nn.utils.get_total_norm(left, norm_type)
            total = clipper.clip_grad_norm_(1e6, norm_type)
            assert torch.equal(total, expected)
            assert total.dtype == torch.float64


def test_gradients_that_are_none(pool2: RankPool) -> None:
    """Of some parameters, of all of a rank, of everybody: as torch, which leaves them out, also
    where a zero in their place would be another norm."""
    pool2.run(some_without)


def mixed_types(rank: int, world_size: int) -> None:
    types = [torch.bfloat16, torch.float32, torch.float16, torch.float32]
    module = nn.Sequential(*(nn.Linear(5, 5, dtype=dtype) for dtype in types))
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    split = Split(module, 2)
    expected = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
    total = GradientClip(split).clip_grad_norm_(1e6)
    assert torch.allclose(total, expected)
    assert total.dtype == expected.dtype == torch.float32
    for parameter in module.parameters():
        if parameter.dtype != torch.bfloat16:
            parameter.grad = None
    assert GradientClip(split).clip_grad_norm_(1e6).dtype == torch.bfloat16


def test_gradients_of_several_types(pool2: RankPool) -> None:
    pool2.run(mixed_types)


def non_finite(rank: int, world_size: int) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    split = Split(module, 2)
    clipper = GradientClip(split)
    module[0].weight.grad[0, 0] = math.inf if rank == 0 else 1.0
    before = module[rank].bias.grad.clone()
    error = expect_error(
        RuntimeError, lambda: clipper.clip_grad_norm_(1.0, error_if_nonfinite=True)
    )
    assert "is inf, so they cannot be clipped" in str(error)
    assert torch.equal(module[rank].bias.grad, before)
    assert math.isinf(float(clipper.clip_grad_norm_(1.0)))
    # A rank that cannot take part tells the others why.
    module[0].register_parameter("late", nn.Parameter(torch.ones(1)))
    kind = UsageError if rank == 0 else PeerError
    error = expect_error(kind, lambda: clipper.clip_grad_norm_(1.0))
    assert "0.late was added to a stage" in str(error)


def test_infinite_norms_and_errors_reach_every_rank(pool2: RankPool) -> None:
    pool2.run(non_finite)


# -- the scaler ------------------------------------------------------------------------------------


def scaled_steps(rank: int, world_size: int, fused: bool) -> list[float]:
    """An infinity on rank 1 in the second step, and on rank 0 in the third."""
    module = nn.Linear(3, 3)
    optimizer: Any = (
        Adam(module.parameters(), fused=True) if fused else SGD(module.parameters(), lr=0.1)
    )
    scaler = GradScaler(init_scale=16.0, growth_interval=2)
    scales: list[float] = []
    for step, culprit in enumerate([None, 1, 0, None, None]):
        optimizer.zero_grad()
        loss = module(torch.ones(2, 3)).sum()
        has_loss = rank == world_size - 1  # elsewhere there is none to be scaled
        (scaler.scale(loss) if has_loss else loss * scaler.get_scale()).backward()
        if culprit == rank:
            module.bias.grad[1] = math.inf
        before = module.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(module.weight, before) == (culprit is not None), step
        scales.append(scaler.get_scale())
    assert_same_on_all_ranks(list(module.parameters()))
    return scales


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_step_or_none(pool2: RankPool, fused: bool) -> None:
    """C110: optimizers that look for infinities themselves (fused) are told the same."""
    for scales in pool2.run(scaled_steps, fused):
        assert scales == [16.0, 8.0, 4.0, 4.0, 8.0]


def test_scaler_on_both_transports(transport: Transport) -> None:
    transport.pool(3).run(scaled_steps, False)


def unscale_and_clip(rank: int, world_size: int) -> None:
    """Rank 0 has no parameters; rank 1's are unscaled once, clipped, and stepped."""
    group = dist.new_group([0, 1])
    scaler = GradScaler(init_scale=4.0, process_group=[group, dist.group.WORLD])
    module = nn.Linear(2, 2, bias=False)
    optimizer = SGD(module.parameters(), lr=1.0) if rank == 1 else None
    module.weight.grad = torch.full((2, 2), 8.0)
    scaler.unscale_(optimizer)
    if rank == 1:
        assert torch.equal(module.weight.grad, torch.full((2, 2), 2.0))
    before = module.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(module.weight, before) == (rank == 0)
    text = str(expect_error(RuntimeError, lambda: twice(scaler, optimizer)))
    assert "unscale_() has already been called" in text
    state = scaler.state_dict()
    other = GradScaler()
    other.load_state_dict(state)
    assert other.state_dict() == state


def twice(scaler: GradScaler, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def test_a_rank_without_parameters_takes_part(pool2: RankPool) -> None:
    pool2.run(unscale_and_clip)


def half_gradients(rank: int, world_size: int) -> None:
    """torch refuses to unscale float16 gradients, here on rank 0 alone."""
    module = nn.Linear(2, 2, dtype=torch.float16 if rank == 0 else torch.float32)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = SGD(module.parameters(), lr=1.0)
    error = expect_error((ValueError, RuntimeError), lambda: GradScaler().unscale_(optimizer))
    assert "FP16" in str(error) if rank == 0 else "another rank raised" in str(error)


def test_an_error_on_one_rank_is_one_on_all(pool2: RankPool) -> None:
    pool2.run(half_gradients)


def disabled(rank: int, world_size: int) -> None:
    scaler = GradScaler(enabled=False)
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    if rank == 0:  # nothing to agree about
        scaler.step(SGD([parameter], lr=1.0))
        assert float(parameter) == 0.0
    scaler.step(None)
    scaler.update()


def test_a_scaler_that_is_off_does_not_communicate(pool2: RankPool) -> None:
    pool2.run(disabled)
