"""Holds that whatever one rank refuses, before a step's actions or after them, all ranks raise at
once and as one: no rank goes on to optimizer.step(), and the next step is the same one everywhere.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_reference import draw_batch, make_mlp, train_both
from pydist import PeerError, PipelineParallel, UsageError
from ranks import get_pool
from reference import expect_error

mse = nn.functional.mse_loss


def expect_on(rank: int, victim: int, words: str, call: Callable[[], Any]) -> None:
    error = expect_error(UsageError if rank == victim else PeerError, call)
    assert words in str(error), error


def dropout_model() -> nn.Sequential:
    model = make_mlp(4)
    return nn.Sequential(*model[:2], nn.Dropout(0.5), *model[2:], nn.Dropout(0.5))


def refuse_on_one_rank(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    model = dropout_model()
    torch.manual_seed(1)
    pipeline = PipelineParallel(copy.deepcopy(model), 2, mse)
    torch.manual_seed(1)
    other = PipelineParallel(copy.deepcopy(model), 2, mse)

    def step(is_victim: bool, what: str) -> Any:
        if not is_victim:
            return pipeline.step(x, target=target)
        if what == "no_grad":
            with torch.no_grad():
                return pipeline.step(x, target=target)
        if what == "scale":
            return pipeline.step(x, target=target, loss_scale="2")  # type: ignore[arg-type]
        return pipeline.step(x, target=target, **({"flag": 1} if what == "flag" else {"flop": x}))

    words_by_cause = {"no_grad": "no_grad", "scale": "loss_scale", "flag": "flag", "flop": "flop"}
    for index, (cause, words) in enumerate(words_by_cause.items()):
        for victim in range(world_size):
            expect_on(rank, victim, words, lambda v=victim, c=cause: step(rank == v, c))
        # Masks of dropout are those of a pipeline whose steps have all succeeded.
        for each in (pipeline, other):
            each.zero_grad()
        assert torch.equal(pipeline.step(x, target=target), other.step(x, target=target)), index
        for p, q in zip(pipeline.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_a_rank_that_refuses_takes_all_with_it() -> None:
    """step() within no_grad() on one rank raised there alone: the others waited, every later step
    was one behind, and seeds of dropout, which count steps, differed between ranks for good."""
    get_pool(2).run(refuse_on_one_rank)


def fail_after_the_end(rank: int, world_size: int) -> tuple[int, list[int]]:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    pipeline = PipelineParallel(model, 2, mse, deferred_batch_norm=True)
    x, target = draw_batch(0)
    [norm] = [layer for layer in pipeline.children() if isinstance(layer, nn.BatchNorm1d)]
    if rank == 0:
        norm.momentum = "none"  # which is read when the step has ended
        expect_error(TypeError, lambda: pipeline.step(x, target=target))
        norm.momentum = 0.1
    else:
        pipeline.step(x, target=target)
    numbers = [pipeline._num_steps]
    pipeline.step(x, target=target)
    return rank, [*numbers, pipeline._num_steps]


def test_numbers_of_steps_are_equal_again() -> None:
    """A rank that raises when the step has ended on all of them, as at a Ctrl-C, has not counted
    it. The next step makes up for that."""
    assert get_pool(2).run(fail_after_the_end) == [(0, [0, 2]), (1, [1, 2])]


class Ragged(nn.Module):
    """Outputs of microbatches have different widths."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 2 + int(x[0, 0] > 100)]


def mean_of_output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def merge_what_does_not_fit(rank: int, world_size: int) -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
        layer.bias.zero_()
    pipeline = PipelineParallel(nn.Sequential(layer, Ragged()), 4, mean_of_output, "gpipe")
    even, uneven = torch.zeros(8, 4), torch.zeros(8, 4)
    uneven[-2:, 0] = 1000.0
    words = "outputs of microbatches cannot be concatenated"
    for call in (
        lambda x: pipeline.step(x, target=x, return_outputs=True),
        lambda x: pipeline.evaluate(x, target=x, return_outputs=True),
        lambda x: pipeline(x),
    ):
        expect_on(rank, 1, words, lambda call=call: call(uneven))
        result = call(even)
        outputs = getattr(result, "outputs", result)
        assert outputs.shape == (8, 2) if rank == 1 else outputs is None


def test_outputs_that_cannot_be_merged_fail_the_step_on_all_ranks() -> None:
    """The last stage's rank raised when the step had ended: the others went on to their optimizer's
    step, and weights were of different ages."""
    get_pool(2).run(merge_what_does_not_fit)


class Masked(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.in_place = in_place

    def forward(self, x: Tensor, masks: dict[str, Tensor] | None = None) -> Tensor:
        if masks is None:
            return self.layer(x)
        mask = masks["rows"]  # which a sum does not save for backward: autograd cannot notice
        hidden: Tensor = self.layer(x)
        return hidden + (mask.mul_(0.5) if self.in_place else mask)


def change_arguments(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    for kind, num_microbatches in (("1f1b", 2), ("zb-v", 2), ("1f1b", 1)):
        for culprit in (0, 1):
            layers = [Masked(index == culprit) for index in range(4)]
            pipeline = PipelineParallel(
                nn.Sequential(*layers), num_microbatches, mse, kind, balance="uniform"
            )
            for run in (pipeline.step, pipeline.evaluate):
                masks = {"rows": torch.ones(8, 6)}
                call = functools.partial(run, x, target=target, masks=masks)
                error = expect_error((UsageError, PeerError), call)
                assert "a stage changed a tensor of masks" in str(error)
            layers[culprit].in_place = False
            pipeline.step(x, target=target, masks=masks)
            with torch.inference_mode():  # whose tensors do not tell
                pipeline.evaluate(x * 1, target=target * 1, masks={"rows": torch.ones(8, 6)})
    # Where one stage alone gets the argument, it may do what it likes to it.
    only = [lambda: Masked(True), lambda: nn.Linear(6, 6)]
    pipeline = PipelineParallel(only, 2, mse)
    pipeline.step(x, target=target, masks={"rows": torch.ones(8, 6)})


def test_arguments_of_several_stages_must_not_be_changed_in_place() -> None:
    """A stage that wrote to its mask changed it for later stages of its own rank, but not for those
    of other ranks: with another placement the same model gave other gradients."""
    get_pool(2).run(change_arguments)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.layer(x)
        return hidden if bias is None else hidden + bias


def misspell(rank: int, world_size: int) -> None:
    model = nn.Sequential(Two(), nn.Linear(6, 6))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"replicate": ("bais",)}, "replicate names bais, which"),
        ({"replicate": ("output",)}, "it may name bias, target, x"),
        ({"chunk_dim": {"y": 1}}, "it may name bias, output, target, x"),
    ]
    for options, words in wrong:
        make = functools.partial(PipelineParallel, model, 2, mse, **options)
        assert words in str(expect_error(UsageError, make))
    right = {"replicate": ("bias",), "chunk_dim": {"x": 0, "target": 0, "output": 0}}
    pipeline = PipelineParallel(model, 2, mse, **right)
    x, target = draw_batch(0)
    pipeline.step(x, target=target, bias=torch.ones(6))
    pipeline.zero_grad()
    train_both(model, PipelineParallel(copy.deepcopy(model), 2, mse, **right), mse, 2, num_steps=1)


def test_options_that_name_no_argument() -> None:
    """A misspelt name in replicate or chunk_dim had no effect, and nobody was told."""
    get_pool(2).run(misspell)
