"""Holds that a pipeline that is saved, made anew and loaded goes on as if nothing had happened:
with the masks of dropout and the moments of Adam that it would have had.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from pipeline_reference import draw_batch, make_mlp
from pydist import PipelineParallel, UsageError
from ranks import get_pool
from reference import expect_error

NUM_STEPS = 3


class Trained:
    """A pipeline with dropout, made alike each time."""

    def __init__(self) -> None:
        layers = make_mlp(4)
        torch.manual_seed(5)
        model = nn.Sequential(*layers[:2], nn.Dropout(0.5), *layers[2:], nn.Dropout(0.5))
        self.pipeline = PipelineParallel(model, 2, nn.functional.mse_loss)
        self.optimizer = torch.optim.Adam(self.pipeline.parameters(), lr=0.1)

    def train(self, steps: range) -> list[float]:
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        self.optimizer.zero_grad()
        x, target = draw_batch(step)
        loss = self.pipeline.step(x, target=target)
        self.optimizer.step()
        return float(loss)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.pipeline.state_dict(),
            "optim": self.pipeline.optim_state_dict(self.optimizer),
            "num_steps": self.pipeline.num_steps,
        }


def interrupt(rank: int, world_size: int, folder: str) -> None:
    whole = Trained()
    expected = whole.train(range(2 * NUM_STEPS))
    first = Trained()
    first.train(range(NUM_STEPS))
    assert first.pipeline.num_steps == NUM_STEPS
    dcp.save(first.state(), checkpoint_id=folder)

    second = Trained()
    state = second.state()
    dcp.load(state, checkpoint_id=folder)
    second.pipeline.load_state_dict(state["model"])
    second.pipeline.load_optim_state_dict(second.optimizer, state["optim"])
    second.pipeline.num_steps = state["num_steps"]
    assert second.train(range(NUM_STEPS, 2 * NUM_STEPS)) == expected[NUM_STEPS:]
    for p, q in zip(whole.pipeline.parameters(), second.pipeline.parameters(), strict=True):
        assert torch.equal(p, q)

    for wrong in (-1, 1.0, True, "3"):
        expect_error(UsageError, lambda wrong=wrong: setattr(second.pipeline, "num_steps", wrong))
    assert second.pipeline.num_steps == 2 * NUM_STEPS


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """Moments were lost without a word, as a new optimizer's state, which is what a checkpoint is
    loaded into, was empty; and masks were those of the first steps again."""
    get_pool(2).run(interrupt, str(tmp_path))


def save_at_the_start(rank: int, world_size: int) -> None:
    plain, saved = Trained(), Trained()
    grads = [p.grad for p in saved.pipeline.parameters()]
    state = copy.deepcopy(saved.pipeline.optim_state_dict(saved.optimizer))
    assert {"exp_avg", "exp_avg_sq", "step"} == set(next(iter(state["state"].values())))
    assert [p.grad for p in saved.pipeline.parameters()] == grads
    assert plain.train(range(NUM_STEPS)) == saved.train(range(NUM_STEPS))


def test_asking_for_the_state_changes_nothing() -> None:
    """A new optimizer whose state was asked for had counted one step, and corrected the bias of
    its moments less in the next."""
    get_pool(2).run(save_at_the_start)
