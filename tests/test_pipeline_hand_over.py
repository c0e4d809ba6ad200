"""Holds what stages of one rank hand to each other, by no message: nobody else may change it."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline_reference import assert_same_gradients, draw_batch, reference_step
from pydist import PipelineParallel
from pydist.schedule import Schedule
from ranks import get_pool

mse = nn.functional.mse_loss


def assert_one_step(
    model: nn.Sequential,
    kind: str | Schedule,
    shape: tuple[int, ...],
    num_microbatches: int = 4,
    loss_fn: Any = mse,
    **options: Any,
) -> None:
    """A training step and an evaluation have the bits of one process."""
    single = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    x, target = (torch.randn(shape, generator=generator) for _ in range(2))
    pipeline = PipelineParallel(model, num_microbatches, loss_fn, kind, **options)
    loss = pipeline.step(x, target=target)
    expected = reference_step(single, loss_fn, x, target, num_microbatches)
    assert torch.equal(loss, expected), (loss, expected)
    own, theirs = dict(pipeline.named_parameters()), dict(single.named_parameters())
    assert_same_gradients(own, theirs)
    with torch.inference_mode():
        assert torch.equal(pipeline.evaluate(x, target=target), expected)


# -- gradients -------------------------------------------------------------------------------------


class Position(nn.Module):
    """The gradient of its parameter is a view of that of its input, for a microbatch of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position[None]


def with_position(index: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(3)]
    layers.insert(index, Position())
    return nn.Sequential(*layers)


def gradients_are_taken(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"stages_per_rank": 2, "balance": [1, 3]}
    assert_one_step(with_position(1), "looped-bfs", (4, 3, 4), **options)


def test_a_gradient_that_a_leaf_takes_does_not_change_under_way() -> None:
    """AccumulateGrad makes a view of what arrived at the stage's input the parameter's `.grad`, and
    the next microbatch adds to that in place. With all backwards of a stage in a row, the stage
    before, on the same rank, then got sums over microbatches: its gradients were wrong, and nothing
    told."""
    get_pool(1).run(gradients_are_taken)


OUTER = "0F0,0F1,0F2,0F3,3F0,3F1,3F2,3F3,3B0,3B1,3B2,3B3,0B0,0B1,0B2,0B3"
INNER = (
    "1F0,1F1,1F2,1F3,2F0,2F1,2F2,2F3,2B0,2B1,2B2,2B3,1B0,1B1,1B2,1B3",
    "1F0,1F1,1F2,1F3,2F0,2F1,2F2,2F3,2I0,2I1,2W0,2W1,2I2,2I3,2W2,2W3,"
    "1I0,1I1,1I2,1I3,1W0,1W1,1W2,1W3",
    "1F0,1F1,1F2,1F3,2F0,2F1,2F2,2F3,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1,"
    "2I2,1I2,2I3,1I3,2W2,2W3,1W2,1W3",
)


def stages_of_the_second_rank(rank: int, world_size: int) -> None:
    for inner in INNER:
        schedule = Schedule([OUTER.split(","), inner.split(",")])
        assert_one_step(with_position(2), schedule, (4, 3, 4))


def test_a_gradient_is_kept_by_two_stages_for_their_w() -> None:
    """Stages 1 and 2 are on one rank, and both keep the gradient between them until their W: that
    of stage 2 takes it as a `.grad`. Split or not, the sums were wrong; and where W of stage 2 ran
    before that of stage 1, that raised, and blamed the user's hooks."""
    get_pool(2).run(stages_of_the_second_rank)


class Uncertain(nn.Module):
    """Its loss has a parameter that gets the loss's gradient itself, as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.log_variance = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.log_variance


def uncertain_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mse(output[0], target) + output[1].view(())


def losses_share_a_gradient(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Uncertain())
    for kind in ("interleaved-1f1b", "interleaved-zb", "gpipe"):
        options: dict[str, Any] = {"stages_per_rank": 1 if kind == "gpipe" else 2}
        if kind == "gpipe":
            options["balance"] = [2]
        assert_one_step(copy.deepcopy(model), kind, (8, 4), loss_fn=uncertain_loss, **options)


def test_a_leaf_may_take_the_gradient_of_the_loss() -> None:
    """So backwards of several microbatches must not start from one tensor, even where they weigh
    the same: added to itself, it would be twice as large for the rest of the next backward."""
    get_pool(1).run(losses_share_a_gradient)


# -- values ----------------------------------------------------------------------------------------


class Workspace(nn.Module):
    """A frozen layer that writes its output into the same memory again and again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.output: Tensor | None = None
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.output is None or self.output.is_inference() != y.is_inference():
            self.output = torch.empty_like(y)
        if self.way == "data":  # counts no version
            self.output.data.copy_(y)
        else:
            self.output.copy_(y)
        return self.output[:] if self.way == "view" else self.output


def outputs_are_used_again(rank: int, world_size: int) -> None:
    for way in ("itself", "data", "view"):
        torch.manual_seed(0)
        layers = [Workspace(way), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        options: dict[str, Any] = {"stages_per_rank": 2}
        if world_size == 1:
            options["balance"] = [1, 3]
        assert_one_step(nn.Sequential(*layers), "looped-bfs", (8, 4), **options)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stage_may_write_its_next_output_into_the_same_memory(num_ranks: int) -> None:
    """One process reads each output before the next is made. Here all forwards of the first stage
    come first, and the second one, on the same rank, saw the last output only."""
    get_pool(num_ranks).run(outputs_are_used_again)


def results_are_used_again(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Workspace("itself"))
    x = torch.randn(8, 4)
    single = copy.deepcopy(model)
    with torch.no_grad():  # by microbatches: a kernel of more rows may round otherwise
        expected = torch.cat([single(part).clone() for part in x.chunk(4)])
    pipeline = PipelineParallel(model, 4, mse, "gpipe")
    found = [pipeline(x), pipeline.evaluate(x, target=x, return_outputs=True).outputs]
    for output in found if pipeline.has_last_stage else []:
        assert torch.equal(output, expected)


def test_the_last_stage_may_write_its_next_output_into_the_same_memory() -> None:
    """All rows of the result were those of the last microbatch."""
    get_pool(2).run(results_are_used_again)


# -- checkpoints -----------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Checkpoints its layers for all microbatches but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.num_calls = 0
        self.num_forwards = 0
        self.inner.register_forward_pre_hook(self.count)

    def count(self, *_: object) -> None:
        self.num_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards % 4 == 1:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=False)


def looks_once(rank: int, world_size: int) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Sometimes())
    single = copy.deepcopy(model)
    pipeline = PipelineParallel(model, 4, mse, "zb-h1")
    x, target = draw_batch(0)
    pipeline.step(x, target=target)
    reference_step(single, mse, x, target, 4)
    assert_same_gradients(dict(pipeline.named_parameters()), dict(single.named_parameters()))
    return model[1].num_calls


def test_a_step_looks_for_checkpoints_until_it_has_cut_a_stage() -> None:
    """The look costs more than a cut, and microbatches hardly ever differ. Where they do, layers
    are computed once more for I and once for W, and the gradients are right."""
    assert get_pool(2).run(looks_once)[1] == 1 + 3 * 3


# -- threads ---------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout that lets other threads run between its seed and its draw."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        threading.Event().wait(0.002)
        return self.dropout(x)


def two_threads(rank: int, world_size: int) -> None:
    def make(num_first: int) -> PipelineParallel:
        layers: list[nn.Module] = [nn.Identity() for _ in range(num_first)]  # other seeds
        layers += [layer for _ in range(3) for layer in (nn.Linear(6, 6), Noisy())]
        return PipelineParallel(
            nn.Sequential(*layers), 4, mse, "interleaved-1f1b", stages_per_rank=2
        )

    def steps(pipeline: PipelineParallel) -> list[Tensor]:
        x, target = draw_batch(0)
        return [pipeline.step(x, target=target) for _ in range(4)]

    torch.manual_seed(1)
    pipelines = [make(index % 2) for index in range(4)]
    expected: dict[int, list[Tensor]] = {}
    found: dict[int, list[Tensor]] = {}
    for index in (0, 1):
        pipelines[index + 2].load_state_dict(pipelines[index].state_dict())
        expected[index] = steps(pipelines[index])
    state = torch.get_rng_state()
    threads = [
        threading.Thread(target=lambda i=i: found.setdefault(i, steps(pipelines[i + 2])))
        for i in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == expected.keys()
    for index, losses in expected.items():
        assert torch.equal(torch.stack(losses), torch.stack(found[index]))
    assert torch.equal(torch.get_rng_state(), state)


def test_two_threads_draw_as_one_does() -> None:
    """Layers draw from the process's generator, which a stage seeds and gives back: a second thread
    with a pipeline of its own drew from the first one's stream, and gave back its state."""
    get_pool(1).run(two_threads)
