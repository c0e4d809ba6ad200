"""Holds PipelineParallel's promise: every schedule, on any number of ranks, gives the bits of one
process that goes through the same microbatches in order.
"""

import copy

import pytest
from torch import nn

from pipeline_reference import make_mlp, train_both
from pydist import PipelineParallel, schedule
from ranks import get_pool

MICROBATCHES = {1: (1, 4), 2: (1, 2, 3, 5, 8), 3: (2, 5, 8), 4: (4, 7, 8)}


def kinds_for(num_microbatches: int, num_ranks: int) -> list[str]:
    return [
        kind
        for kind in schedule.kinds()
        if kind != "forward-only" and (kind != "dualpipe-v" or num_microbatches >= 2 * num_ranks)
    ]


def every_schedule_is_exact(rank: int, world_size: int) -> int:
    model = make_mlp(16)
    loss_fn = nn.functional.mse_loss
    count = 0
    for num_microbatches in MICROBATCHES[world_size]:
        for kind in kinds_for(num_microbatches, world_size):
            try:
                pipeline = PipelineParallel(
                    copy.deepcopy(model),
                    num_microbatches,
                    loss_fn,
                    schedule=kind,
                    balance="uniform",
                )
                train_both(model, pipeline, loss_fn, num_microbatches)
            except Exception as error:
                error.add_note(f"{kind}, {num_microbatches} microbatches")
                raise
            count += 1
    return count


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_schedule_gives_the_bits_of_one_process(num_ranks: int) -> None:
    counts = get_pool(num_ranks).run(every_schedule_is_exact)
    assert min(counts) >= 8


def three_stages_per_rank(rank: int, world_size: int) -> None:
    model = make_mlp(16)
    for kind in ("interleaved-1f1b", "looped-bfs", "interleaved-zb"):
        pipeline = PipelineParallel(
            copy.deepcopy(model), 5, nn.functional.mse_loss, kind, stages_per_rank=3
        )
        assert len(pipeline.local_stages) == 3
        train_both(model, pipeline, nn.functional.mse_loss, 5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_three_stages_on_each_rank(num_ranks: int) -> None:
    get_pool(num_ranks).run(three_stages_per_rank)


def interleaved_with_any_number(rank: int, world_size: int) -> None:
    model = make_mlp(16)
    for num_microbatches in (1, 2, 3, 5, 7):
        for kind in ("interleaved-1f1b", "interleaved-zb"):
            pipeline = PipelineParallel(
                copy.deepcopy(model), num_microbatches, nn.functional.mse_loss, kind
            )
            assert len(pipeline.local_stages) == 2
            train_both(model, pipeline, nn.functional.mse_loss, num_microbatches)


def test_c83_interleaved_takes_any_number_of_microbatches() -> None:
    """C83 (PiPPy 1048, pytorch#129597, #137783): numbers that the ranks do not divide were refused,
    or waited for ever.
    """
    get_pool(2).run(interleaved_with_any_number)
