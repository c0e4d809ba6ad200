"""Owns the checks of PipelineParallel on one device: gradients and loss are the plain model's."""

import copy
from collections.abc import Callable

import torch
from place import Place
from rows import Rows
from torch import Tensor, nn
from world import lone_group

import pydist

NUM_MICROBATCHES = 4
BATCH_SIZE = 10  # which four do not divide
WIDTH = 65
NUM_STEPS = 3
TOLERANCE = 1e-5

# (kind, stages of this rank)
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("interleaved-1f1b", 2),
    ("looped-bfs", 3),
    ("interleaved-zb", 2),
    ("zb-v", 2),
)


def make_model(place: Place) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers).to(place.device)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def batch(place: Place, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(2, BATCH_SIZE, WIDTH, generator=generator).to(place.device)
    return both[0], both[1]


def plain_step(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    model.zero_grad()
    loss = loss_fn(model(inputs), target)
    loss.backward()
    return loss.detach()


def expect_same(
    rows: Rows,
    pipeline: pydist.PipelineParallel,
    plain: nn.Module,
    losses: tuple[Tensor, Tensor],
) -> None:
    rows.expect_close(losses[0].reshape(1), losses[1].reshape(1), TOLERANCE)
    own = dict(pipeline.named_parameters())
    if own.keys() != dict(plain.named_parameters()).keys():
        raise AssertionError(f"the pipeline has the parameters {sorted(own)}")
    found, expected = [], []
    for name, parameter in plain.named_parameters():
        gradient, wanted = own[name].grad, parameter.grad
        if gradient is None or wanted is None:
            raise AssertionError(f"{name}: found {gradient}, expected {wanted}")
        largest = wanted.double().abs().max().clamp_min(1e-30)
        found.append(gradient.double().flatten() / largest)
        expected.append(wanted.double().flatten() / largest)
    rows.expect_close(torch.cat(found), torch.cat(expected), TOLERANCE)


def train(place: Place, rows: Rows, kind: str, stages_per_rank: int) -> None:
    plain = make_model(place)
    pipeline = pydist.PipelineParallel(
        copy.deepcopy(plain), NUM_MICROBATCHES, loss_fn, kind, stages_per_rank
    )
    for step in range(NUM_STEPS):
        inputs, target = batch(place, step)
        pipeline.zero_grad()
        loss = pipeline.step(inputs, target=target)
        losses = (torch.as_tensor(loss), plain_step(plain, inputs, target).cpu())
        expect_same(rows, pipeline, plain, (losses[0].cpu(), losses[1]))
    inputs, target = batch(place, NUM_STEPS)
    with torch.no_grad():
        output = pipeline(inputs)
        rows.expect_close(output, plain(inputs), TOLERANCE)


def captured(place: Place, rows: Rows) -> None:
    """A step is captured once, and replayed on other inputs."""
    plain = make_model(place)
    inputs, target = batch(place, 0)
    made: list[pydist.PipelineParallel] = []
    losses: list[Tensor] = []

    def make_step() -> Callable[[], None]:
        model = copy.deepcopy(plain)
        made.append(pydist.PipelineParallel(model, NUM_MICROBATCHES, loss_fn, "1f1b"))

        def step() -> None:
            made[0].zero_grad()
            losses[:] = [made[0].step(inputs, target=target)]

        return step

    replay = place.captured(make_step)
    for step in range(1, 4):
        new_inputs, new_target = batch(place, step)
        inputs.copy_(new_inputs)
        target.copy_(new_target)
        replay()
        place.settle()
        expected = plain_step(plain, new_inputs, new_target)
        expect_same(rows, made[0], plain, (losses[0].cpu(), expected.cpu()))


def run(place: Place, rows: Rows) -> None:
    with lone_group(place):
        for kind, stages_per_rank in SCHEDULES:
            with rows.check(f"gradients and loss: {kind}, {stages_per_rank} stages"):
                train(place, rows, kind, stages_per_rank)
        with rows.check("gradients and loss: a step captured in a graph"):
            captured(place, rows)
