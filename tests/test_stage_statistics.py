"""Owns running statistics of normalisation layers in stages: each microbatch counts once, or the
step does.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pydist
from pydist._running_statistics import Moments, RunningStatistics, StageStatistics, merge


class Block(nn.Module):
    """BatchNorm in the middle of what may be a checkpoint of either kind."""

    def __init__(self, norm: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.norm = norm
        self.last = nn.Conv2d(4, 3, 1)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())

    def forward(self, x: Tensor) -> Any:
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def block(norm: nn.Module, reentrant: bool | None = None) -> Block:
    torch.manual_seed(0)
    return Block(norm, reentrant)


def microbatches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(size, 3, 4, 4) for size in sizes]
    drawn = [torch.randn(shape, generator=generator) * 2 + 1 for shape in shapes]
    return [x.requires_grad_() for x in drawn]


def train(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """All forwards and then all backwards, as in a pipeline's warm-up."""
    outputs = [module(x) for x in inputs]
    for output in outputs:
        output.square().sum().backward()
    return outputs


def assert_equal_state(one: nn.Module, other: nn.Module) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[name], right[name]) for name in left)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


NORMS = (
    lambda: nn.BatchNorm2d(4),
    lambda: nn.BatchNorm2d(4, momentum=None),
    lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    lambda: nn.BatchNorm2d(4, track_running_stats=False),
)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_recomputation_is_not_counted(reentrant: bool | None) -> None:
    """With a checkpoint, num_batches_tracked was 2 after one batch; the mean had moved twice."""
    for make_norm in NORMS:
        module, reference = block(make_norm(), reentrant), block(make_norm())
        statistics = StageStatistics(module)
        for _ in range(2):
            statistics.begin_step()
            outputs = train(module, microbatches(2, 2, 3))
            statistics.end_step()
            expected = train(reference, microbatches(2, 2, 3))
            assert all(map(torch.equal, outputs, expected))
        assert_equal_state(module, reference)
        assert module.norm.momentum == reference.norm.momentum


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_statistics_are_those_of_the_whole_batch(
    reentrant: bool | None, momentum: float | None
) -> None:
    """More microbatches made running statistics noisier and faster; deferred, they do not."""
    module = block(nn.BatchNorm2d(4, momentum=momentum), reentrant)
    whole = block(nn.BatchNorm2d(4, momentum=momentum))
    looping = block(nn.BatchNorm2d(4, momentum=momentum))
    statistics = StageStatistics(module, deferred=True)
    for _ in range(3):
        before = {name: value.clone() for name, value in module.norm.named_buffers()}
        statistics.begin_step()
        outputs = train(module, microbatches(3, 3, 2))
        for name, value in module.norm.named_buffers():
            assert torch.equal(before[name], value)  # nothing before the step's end
        statistics.end_step()
        whole(torch.cat(microbatches(3, 3, 2)))
        # Normalisation itself is by microbatch, as are gradients.
        expected = train(looping, microbatches(3, 3, 2))
        assert all(map(torch.equal, outputs, expected))
    for p, q in zip(module.parameters(), looping.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)
    found, wanted = module.norm.state_dict(), whole.norm.state_dict()
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert module.norm.num_batches_tracked == 3


def test_merged_moments_are_exact_far_from_zero() -> None:
    """Sums of squares would lose all digits of a variance of 1 around a mean of 10,000."""
    parts = [torch.randn(n, 2).double() + 1e4 for n in (2, 50, 7)]
    moments = [Moments(len(p), p.mean(0).float(), p.var(0).float()) for p in parts]
    whole = torch.cat(parts)
    # The means themselves are float32, so known to 1e-3.
    torch.testing.assert_close(merge(moments).variance, whole.var(0), rtol=1e-2, atol=0)
    exact = merge([Moments(len(p), p.mean(0), p.var(0)) for p in parts])
    torch.testing.assert_close(exact.variance, whole.var(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(exact.mean, whole.mean(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("deferred", [False, True])
def test_evaluation_uses_running_statistics_and_leaves_them(deferred: bool) -> None:
    module, reference = block(nn.BatchNorm2d(4)), block(nn.BatchNorm2d(4))
    for each in (module, reference):
        each.norm(torch.randn(9, 4, 2, 2, generator=torch.Generator().manual_seed(1)))
        each.eval()
    statistics = StageStatistics(module, deferred)
    statistics.begin_step()
    outputs = train(module, microbatches(1, 4))
    statistics.end_step()
    assert all(map(torch.equal, outputs, train(reference, microbatches(1, 4))))
    assert_equal_state(module, reference)


def test_a_step_that_failed_leaves_nothing() -> None:
    """Its microbatches must not be in the next step's statistics, nor scratch buffers in place."""
    module, reference = block(nn.BatchNorm2d(4)), block(nn.BatchNorm2d(4))
    statistics = StageStatistics(module, deferred=True)
    statistics.begin_step()
    module(microbatches(3)[0])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(torch.randn(1, 3, 1, 1))
    assert module.norm.momentum == 0.1
    statistics.begin_step()
    for part in microbatches(5, 4):
        module(part)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            module(torch.randn(1, 3, 1, 1))  # and the model goes on without it
    statistics.end_step()
    reference(torch.cat(microbatches(5, 4)))
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-6, atol=1e-7)


def test_synchronised_layers_cannot_be_deferred() -> None:
    module = nn.Sequential(block(nn.SyncBatchNorm(4)))
    StageStatistics(module)
    with pytest.raises(pydist.UsageError, match=r"not for 0\.norm, a SyncBatchNorm"):
        StageStatistics(module, deferred=True)


def test_copies_of_a_stage_have_statistics_of_their_own() -> None:
    """torch.save of a module, and deepcopy for an average of weights, go on working. A copy that
    was made within a step is in none: it counts as layers do without a pipeline."""
    module = block(nn.BatchNorm2d(4), False)
    statistics = StageStatistics(module, deferred=True)
    statistics.begin_step()
    module(microbatches(3)[0])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        before = copy.deepcopy(module.state_dict())
        plain = block(nn.BatchNorm2d(4), False)
        train(other, microbatches(4))
        train(plain, microbatches(4))
        torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=0, atol=0)
        assert not find_statistics(other)._moments
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def find_statistics(module: nn.Module) -> RunningStatistics:
    [hook] = module.norm._forward_hooks.values()
    found = hook.__self__
    assert isinstance(found, RunningStatistics)
    return found


def test_layers_outside_of_steps_do_as_they_always_did() -> None:
    """With deferred statistics, plain model(x) in train mode, after the pipeline or beside it,
    updated nothing, and kept the moments of every call."""
    module, plain = block(nn.BatchNorm2d(4)), block(nn.BatchNorm2d(4))
    statistics = StageStatistics(module, deferred=True)
    statistics.begin_step()
    module(microbatches(4)[0])
    statistics.end_step()
    plain(microbatches(4)[0])
    for _ in range(3):
        for each in (module, plain):
            each(microbatches(2)[0])
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
    assert not find_statistics(module)._moments


class Interrupted(nn.BatchNorm2d):
    """Gets a Ctrl-C in its forward, when told."""

    interrupt = False

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("ends", ["drop_step", "begin_step"])
def test_an_interrupt_in_a_forward_leaves_the_layer_as_it_was(in_backward: bool, ends: str) -> None:
    """Torch calls no hook after a KeyboardInterrupt: a momentum of 1.0, or of 0.0 after one in a
    recomputation, and the scratch buffers stayed in the layer for good."""
    module, plain = block(Interrupted(4), False), block(nn.BatchNorm2d(4), False)
    before = dict(module.norm.named_buffers())
    statistics = StageStatistics(module, deferred=True)
    statistics.begin_step()
    if in_backward:
        output = module(microbatches(3)[0])
    module.norm.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward() if in_backward else module(microbatches(3)[0])
    getattr(statistics, ends)()
    assert module.norm.momentum == 0.1
    assert all(buffer is before[name] for name, buffer in module.norm.named_buffers())
    statistics.begin_step()
    module(microbatches(4)[0])
    statistics.end_step()
    plain(microbatches(4)[0])
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)


def test_a_second_pipeline_takes_over() -> None:
    """The same module in a new PipelineParallel, with another schedule and other options."""
    module, reference = block(nn.BatchNorm2d(4), False), block(nn.BatchNorm2d(4))
    for deferred in (True, False, True, False):
        statistics = StageStatistics(module, deferred)
    statistics.begin_step()
    for each in (module, reference):
        train(each, microbatches(4, 2))
    statistics.end_step()
    assert_equal_state(module, reference)
    assert module.norm.momentum == 0.1
    assert len(module.norm._forward_hooks) == len(module.norm._forward_hooks_always_called) == 1


def test_a_layer_used_twice_counts_twice() -> None:
    norm = nn.BatchNorm2d(3)
    module = nn.Sequential(norm, nn.Tanh(), norm)
    reference = copy.deepcopy(module)
    statistics = StageStatistics(module)
    statistics.begin_step()
    for each in (module, reference):
        train(each, microbatches(4, 2))
    statistics.end_step()
    assert_equal_state(module, reference)
    assert norm.num_batches_tracked == 4
