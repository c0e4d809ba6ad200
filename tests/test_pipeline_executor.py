"""Holds the executor to its word: no Python between actions, memory given back as soon as it may
be, records on demand, and a fault at any action that all ranks hear of and the next step survives.
"""

import collections
import copy
import gc
import os
import signal
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline_reference import (
    assert_same_gradients,
    draw_batch,
    make_mlp,
    reference_step,
    train_both,
)
from pydist import PeerError, PipelineParallel, TimeoutError
from ranks import fresh_ranks, get_pool

mse = nn.functional.mse_loss


def both_transports(rank: int, world_size: int) -> None:
    for kind in ("1f1b", "interleaved-1f1b", "zb-v"):
        model = make_mlp(8)
        pipeline = PipelineParallel(copy.deepcopy(model), 3, mse, kind)
        train_both(model, pipeline, mse, 3, rows=7)


def test_both_transports_give_the_same_bits(transport: Any) -> None:
    transport.pool(2).run(both_transports)


# -- no Python between actions ---------------------------------------------------------------------


def frames_in_a_step(pipeline: PipelineParallel, rows: int) -> collections.Counter[str]:
    """Python frames that the executor itself starts, by name."""
    found: collections.Counter[str] = collections.Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        caller = frame.f_back
        if event == "call" and caller is not None and caller.f_code.co_name == "_run":
            found[frame.f_code.co_name] += 1

    x, target = draw_batch(0, rows)
    sys.setprofile(profile)
    try:
        pipeline.step(x, target=target)
    finally:
        sys.setprofile(None)
    return found


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def frames_per_action(rank: int, world_size: int) -> None:
    for kind in ("1f1b", "zb-h1", "interleaved-zb"):
        frames = {}
        for num_microbatches in (4, 8):
            pipeline = PipelineParallel(make_mlp(8), num_microbatches, plain_loss, kind)
            x, target = draw_batch(0)
            pipeline.step(x, target=target)
            frames[num_microbatches] = frames_in_a_step(pipeline, 8)
        forwards = {"_wrapped_call_impl": 4 * len(pipeline.local_stages)}
        more = forwards | ({"plain_loss": 4} if pipeline.has_last_stage else {})
        assert frames[8] - frames[4] == collections.Counter(more), frames


def test_no_python_frame_per_action() -> None:
    """The executor calls a stage's forward and the loss; B, I, W, sending and receiving are C++."""
    get_pool(2).run(frames_per_action)


# -- memory ----------------------------------------------------------------------------------------


class Watching(nn.Module):
    """Knows whether the memory of its earlier outputs is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.outputs: list[StorageWeakRef] = []
        self.objects: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(not reference.expired() for reference in self.outputs))
        output = self.layer(x)
        self.outputs.append(StorageWeakRef(output.untyped_storage()))
        self.objects.append(weakref.ref(output))
        return output


class Adding(nn.Module):
    """Saves nothing of its input for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def outputs_die(rank: int, world_size: int) -> None:
    gc.collect()
    gc.disable()
    try:
        watching = Watching()
        kind = "gpipe" if world_size == 2 else "interleaved-1f1b"
        pipeline = PipelineParallel(
            [watching, Adding()], 4, mse, kind, stages_per_rank=2 // world_size
        )
        for step in range(2):
            x, target = draw_batch(step)
            pipeline.step(x, target=target)
        if rank == 0:
            assert len(watching.outputs) == 8
            # With gpipe, all forwards come first: what was sent is gone all the same.
            assert watching.alive == [0] * 8
            assert all(reference() is None for reference in watching.objects)
    finally:
        gc.enable()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_outputs_die_as_soon_as_they_are_sent(num_ranks: int) -> None:
    """Between F and backward only the edges of an output are kept. With the collector off."""
    get_pool(num_ranks).run(outputs_die)


def steps_leave_no_garbage(rank: int, world_size: int) -> None:
    pipeline = PipelineParallel(make_mlp(8), 4, mse, "zb-v")
    x, target = draw_batch(0)
    pipeline.step(x, target=target)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            pipeline.step(x, target=target, return_outputs=True)
        gc.collect()
        tensors = [each for each in gc.garbage if isinstance(each, (Tensor, nn.Module))]
        assert tensors == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_steps_leave_no_reference_cycles() -> None:
    """In processes of their own: what torch.compile keeps for a while is garbage of others."""
    for outcome in fresh_ranks(2, steps_leave_no_garbage):
        assert outcome.ok, outcome.traceback


class Scribbling(nn.Module):
    """Changes what it received in place, which one process allows."""

    def __init__(self) -> None:
        super().__init__()
        self.inplace = True
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(nn.functional.relu(x, inplace=self.inplace))


class Squaring(nn.Module):
    """Its backward needs its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).exp()


def in_place_changes(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Scribbling())
    spoilt = nn.Sequential(Squaring(), Scribbling())
    single = copy.deepcopy(spoilt)
    single[1].inplace = False
    stages_per_rank = 2 // world_size
    x, target = draw_batch(0)
    for kind in ("1f1b", "zb-h1") if world_size == 2 else ("interleaved-1f1b", "interleaved-zb"):
        pipeline = PipelineParallel(copy.deepcopy(model), 3, mse, kind, stages_per_rank)
        train_both(model, pipeline, mse, 3)
        pipeline = PipelineParallel(copy.deepcopy(spoilt), 3, mse, kind, stages_per_rank)
        single.zero_grad()
        loss = pipeline.step(x, target=target)
        assert torch.equal(loss, reference_step(single, mse, x, target, 3))
        own, theirs = dict(pipeline.named_parameters()), dict(single.named_parameters())
        assert_same_gradients(own, theirs)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stage_may_change_its_input_in_place(num_ranks: int) -> None:
    """A received tensor is no leaf. Where the sender's backward needs what it sent, which raises in
    one process, the receiver has memory of its own, on another rank as on the same."""
    get_pool(num_ranks).run(in_place_changes)


# -- records ---------------------------------------------------------------------------------------


def recorded(rank: int, world_size: int) -> list[str]:
    pipeline = PipelineParallel(make_mlp(8), 3, mse, "zb-h1")
    x, target = draw_batch(0)
    pipeline.step(x, target=target)
    assert pipeline.records() == []
    pipeline.record()
    pipeline.step(x, target=target)
    records = pipeline.records()
    assert [record.action for record in records] == pipeline.schedule.actions[rank]
    last = 0
    for record in records:
        assert last <= record.start_ns <= record.end_ns
        assert 0 <= record.wait_ns <= record.end_ns - record.start_ns
        last = record.end_ns
    pipeline.record(False)
    pipeline.step(x, target=target)
    assert pipeline.records() == []
    return [record.action for record in records]


def test_actions_are_recorded_on_demand() -> None:
    first, second = get_pool(2).run(recorded)
    assert len(first) == len(second) == 9


def automatic(rank: int, world_size: int) -> str:
    model = make_mlp(8)
    pipeline = PipelineParallel(copy.deepcopy(model), 4, mse, "auto")
    assert pipeline.schedule.name == "1f1b"
    train_both(model, pipeline, mse, 4, num_steps=6)
    assert pipeline.schedule.name == "auto"
    return pipeline.schedule.to_csv()


def test_auto_measures_and_then_changes_the_schedule() -> None:
    """Bits are those of one process before, while and after."""
    first, second = get_pool(2).run(automatic)
    assert first == second


def recorded_while_automatic(rank: int, world_size: int) -> None:
    pipeline = PipelineParallel(make_mlp(8), 4, mse, "auto")
    x, target = draw_batch(0)
    for on in (True, False, True):
        for _ in range(6 if on else 2):
            pipeline.record(on)
            expected = pipeline.schedule.actions[rank] if on else []
            pipeline.step(x, target=target)
            assert [record.action for record in pipeline.records()] == expected
    assert pipeline.schedule.name == "auto"
    silent = PipelineParallel(make_mlp(8), 4, mse, "auto")
    for _ in range(4):
        silent.step(x, target=target)
        assert silent.records() == []  # what "auto" measures is its own affair


def test_auto_leaves_the_users_records_alone() -> None:
    """Once it had measured, "auto" switched the recorder off that the user had switched on, and
    with each new schedule what had been recorded was gone."""
    get_pool(2).run(recorded_while_automatic)


# -- failures --------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Fused(nn.Module):
    """Raises once, in the action that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.armed: tuple[str, int] | None = None
        self.num_forwards = 0
        self.num_gradients = 0
        self.layer.weight.register_hook(self.on_weight)

    def arm(self, kind: str, microbatch: int) -> None:
        self.armed = (kind, microbatch)
        self.num_forwards = self.num_gradients = 0

    def fire(self, kind: str, microbatch: int) -> None:
        if self.armed == (kind, microbatch):
            self.armed = None
            raise Boom(f"in {kind}{microbatch}")

    def on_weight(self, gradient: Tensor) -> None:
        self.fire("weight", self.num_gradients)
        self.num_gradients += 1

    def forward(self, x: Tensor) -> Tensor:
        microbatch = self.num_forwards
        self.num_forwards += 1
        self.fire("forward", microbatch)
        output = self.layer(x)
        if output.requires_grad:
            output.register_hook(lambda _: self.fire("input", microbatch))
        return output


POINT_OF = {"F": "forward", "I": "input", "W": "weight", "B": "input"}


def faults_at_every_action(rank: int, world_size: int) -> int:
    torch.manual_seed(0)
    count = 0
    for kind in ("1f1b", "zb-h1"):
        stages = [Fused() for _ in range(world_size)]
        pipeline = PipelineParallel(stages, 3, mse, kind)
        for stage in range(world_size):
            for action in pipeline.schedule.actions[stage]:
                letter, microbatch = action[1], int(action[2:])
                point = POINT_OF[letter]
                if kind == "zb-h1" and stage == 0:
                    if letter == "W":
                        continue  # the first stage's B runs in the place of I
                    point = point if letter == "F" else "weight"
                stages[stage].arm(point, microbatch)
                pipeline.zero_grad()
                x, target = draw_batch(0)
                expected = Boom if rank == stage else PeerError
                with pytest.raises(expected) as error:
                    pipeline.step(x, target=target)
                notes = getattr(error.value, "__notes__", [])
                text = f"{error.value} {' '.join(notes)}"
                assert action in text, (action, text)
                assert f"in {point}{microbatch}" in text
                assert f"rank {stage} " in text
                for each in stages:
                    each.armed = None
                pipeline.zero_grad()
                loss = pipeline.step(x, target=target)
                assert loss.isfinite()
                dist.barrier()
                count += 1
    return count


def test_a_fault_at_any_action(transport: Any) -> None:
    """Raises on all ranks with the action and the cause; the next step works."""
    counts = transport.pool(2).run(faults_at_every_action)
    assert counts == [6 + 6 + 6 + 9] * 2


class Killing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def killed(rank: int, world_size: int) -> None:
    pipeline = PipelineParallel([nn.Linear(6, 6), Killing()], 4, mse)
    x, target = draw_batch(0)
    pipeline.step(x, target=target)


def test_a_rank_that_is_killed_in_an_action() -> None:
    first, second = fresh_ranks(2, killed)
    assert second.exit_code == -signal.SIGKILL
    assert first.error == "pydist.PeerError"
    assert "rank 1" in first.message
    assert "to run" in first.message


def alone(rank: int, world_size: int) -> str:
    model = make_mlp(4)
    pipeline = PipelineParallel(copy.deepcopy(model), 2, mse)
    text = ""
    if rank == 1:
        with pytest.raises(TimeoutError) as error:
            pipeline.evaluate(target=draw_batch(0)[1])
        text = str(error.value)
    dist.barrier()
    return text


def test_a_rank_alone_times_out() -> None:
    """C90 (Megatron-Bridge PR 6025): only the last rank called the evaluation."""
    _, text = get_pool(2, PYDIST_TIMEOUT_S="1").run(alone)
    assert "1F0" in text
    assert "rank 0" in text
