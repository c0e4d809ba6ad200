"""Owns the tests of what a pipeline says of its actions: when each ran, and how long it waited."""

import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from pipeline_reference import draw_batch
from pydist import PipelineParallel
from pydist.schedule import ActionRecord, Costs, TimedAction, build, plot_timelines
from ranks import get_pool

SLEEP_S = 0.05
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Sleeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x


def first_forwards(rank: int, world_size: int) -> ActionRecord:
    stages = [nn.Sequential(nn.Linear(6, 6), Sleeps()), nn.Linear(6, 6)]
    pipeline = PipelineParallel(stages, 1, nn.functional.mse_loss)
    pipeline.record()
    x, target = draw_batch(0)
    dist.barrier()
    pipeline.step(x, target=target)
    return pipeline.records()[0]


def test_waiting_is_told_from_work() -> None:
    """Rank 0 sleeps in its forward, which is work there; rank 1 waits for what it gives."""
    first, second = get_pool(2).run(first_forwards)
    assert first.work_s >= SLEEP_S
    assert second.began_ns >= first.began_ns + 1e9 * SLEEP_S


def test_recorded_actions_are_costs_for_the_simulator() -> None:
    """Means by stage and kind, without what was waited; what never ran costs nothing."""
    actions = [
        ActionRecord("0F0", 1_000_000_000, 3_000_000_000, 500_000_000),
        ActionRecord("0F10", 3_000_000_000, 4_500_000_000, 0),
        ActionRecord("1B0", 0, 8_000_000_000, 6_000_000_000),
        ActionRecord("0I3", 0, 250_000_000, 0),
    ]
    costs = Costs.measured(actions, num_stages=2)
    assert costs.forward == [1.5, 0.0]
    assert costs.backward == [0.0, 2.0]
    assert costs.backward_input == [0.25, 0.0]
    assert costs.backward_weight == [0.0, 0.0]
    plan = build("1f1b", num_ranks=2, num_microbatches=3)
    assert plan.simulate(**vars(costs)).makespan == 7.5  # rank 1 is never without work


def test_a_plan_and_what_ran_are_drawn_on_one_axis(tmp_path: Path) -> None:
    """Both begin at zero, so that their ends can be compared."""
    plan = build("1f1b", num_ranks=2, num_microbatches=3).simulate()
    ran = [[TimedAction(a, 2 * start, 2 * end) for a, start, end in row] for row in plan.timeline]
    figure = plot_timelines({"planned": plan.timeline, "ran": ran}, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(PNG_SIGNATURE)
    planned_axes, ran_axes = figure.axes
    assert planned_axes.get_title(loc="left") == "planned"
    assert ran_axes.get_title(loc="left") == "ran"
    assert planned_axes.get_xlim() == ran_axes.get_xlim() == (0.0, 2 * plan.makespan)
