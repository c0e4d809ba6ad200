"""Owns who trains a pipeline in the benchmark: torch's schedules, ours, ours without a peer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import pydist
from bench.ranks import Rank
from pydist import _C, _pipeline_build, schedule
from pydist.schedule import ActionRecord

NUM_RANKS = 2
NUM_LAYERS = 8
TORCH_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Workload:
    """Equal layers, as many on each rank, and a batch; the same for all schedules."""

    name: str
    width: int
    rows: int  # of a microbatch
    num_microbatches: int
    steps: int  # timed in a row

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """The same on every rank and every time."""
        generator = torch.Generator().manual_seed(1)
        size = (self.num_microbatches * self.rows, self.width)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)

    def make_stages(self, num_stages: int) -> list[nn.Sequential]:
        """All stages, with the same parameters every time."""
        torch.manual_seed(0)
        layers = [
            layer
            for _ in range(NUM_LAYERS)
            for layer in (nn.Linear(self.width, self.width), nn.Tanh())
        ]
        size = len(layers) // num_stages
        return [nn.Sequential(*layers[i * size : (i + 1) * size]) for i in range(num_stages)]


class Trainee(ABC):
    """One contender in one rank: takes steps, and leaves a gradient when asked to."""

    def __init__(self, rank: Rank, kind: str, workload: Workload) -> None:
        self.plan = schedule.build(kind, NUM_RANKS, workload.num_microbatches)
        self.stages = workload.make_stages(self.plan.num_stages)
        # Stages that this rank holds, and their parameters.
        self.local = [i for i, place in enumerate(self.plan.placement) if place == rank.index]
        self.parameters = [p for index in self.local for p in self.stages[index].parameters()]
        self.workload = workload
        inputs, target = workload.batch
        self.inputs = inputs if 0 in self.local else None
        self.target = target if self.plan.num_stages - 1 in self.local else None

    def step(self) -> None:
        self.forward_and_backward()
        self.forget()

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @abstractmethod
    def forward_and_backward(self) -> None: ...


class TorchTrainee(Trainee):
    """torch.distributed.pipelining over Gloo."""

    def __init__(self, rank: Rank, kind: str, workload: Workload) -> None:
        super().__init__(rank, kind, workload)
        device = torch.device("cpu")
        stages = [
            PipelineStage(self.stages[index], index, self.plan.num_stages, device)
            for index in self.local
        ]
        given = stages[0] if kind in ("gpipe", "1f1b") else stages
        make = TORCH_SCHEDULES[kind]
        self._schedule = make(given, workload.num_microbatches, nn.functional.mse_loss)

    def forward_and_backward(self) -> None:
        inputs = () if self.inputs is None else (self.inputs,)
        self._schedule.step(*inputs, target=self.target, return_outputs=False)


class Alone:
    """The whole model in one process, microbatch after microbatch: what gradients should be."""

    def __init__(self, num_stages: int, workload: Workload) -> None:
        self.stages = workload.make_stages(num_stages)
        model = nn.Sequential(*self.stages)
        count = workload.num_microbatches
        pairs = zip(*(tensor.chunk(count) for tensor in workload.batch), strict=True)
        for inputs, target in pairs:
            loss: Tensor = nn.functional.mse_loss(model(inputs), target)
            (loss / count).backward()

    def gradients_of(self, stages: list[int]) -> list[Tensor]:
        parameters = [p for index in stages for p in self.stages[index].parameters()]
        return [p.grad for p in parameters if p.grad is not None]


class PydistTrainee(Trainee):
    """pydist.PipelineParallel on the same stages."""

    def __init__(self, rank: Rank, kind: str, workload: Workload) -> None:
        super().__init__(rank, kind, workload)
        self._pipeline = pydist.PipelineParallel(
            self.stages,
            num_microbatches=workload.num_microbatches,
            loss_fn=nn.functional.mse_loss,
            schedule=self.plan,
        )

    def forward_and_backward(self) -> None:
        self._pipeline.step(self.inputs, target=self.target)

    def recorded_step(self) -> list[ActionRecord]:
        """One more step, each action of it."""
        self._pipeline.record()
        self.step()
        records = self._pipeline.records()
        self._pipeline.record(False)
        return records


class ReplayTrainee(PydistTrainee):
    """The same actions by the same executor without a peer: its messages are there at once."""

    def __init__(self, rank: Rank, kind: str, workload: Workload) -> None:
        channels: list[_C.ReplayChannel] = []
        make_channel = _pipeline_build._make_channel

        def replaying(*arguments: Any) -> _C.ReplayChannel:
            real = make_channel(*arguments)
            assert real is not None
            channels.append(_C.ReplayChannel(real))
            return channels[-1]

        with mock.patch.object(_pipeline_build, "_make_channel", replaying):
            super().__init__(rank, kind, workload)
        self.step()
        channels[0].replay()
