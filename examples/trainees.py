"""Owns what takes the demo's training steps in one rank: alone, or with data parallelism."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gpt_model import MODEL_SIZES, Gpt
from stdlib_text import StdlibText, draw_batch

if TYPE_CHECKING:
    from pydist.schedule import ActionRecord

# Symbols, and those that follow them: (sequences, positions) each.
Batch = tuple[Tensor, Tensor]
Wrapper = Callable[[nn.Module, dist.ProcessGroup], DistributedDataParallel]

# The actions of one rank in one step, in order.
RecordedStep = Sequence["ActionRecord"]

# In every so many steps, and the last, something more is measured than the time.
_PROBE_EVERY = 5
SEED = 1
_LEARNING_RATE = 3e-3
_RISE_NUM_STEPS = 60
_HELD_OUT_NUM_BATCHES = 16
_HELD_OUT_NUM_SEQUENCES = 16


@dataclass(frozen=True)
class Plan:
    """What is trained; the same for every engine and in every rank."""

    model: str
    num_steps: int
    global_batch: int

    @property
    def warmup_num_steps(self) -> int:
        """Steps at the start whose times do not count: buckets and caches are settling."""
        return min(10, self.num_steps // 3)

    def is_probed(self, step: int) -> bool:
        """Whether something more is measured in this step than its time."""
        due = step % _PROBE_EVERY == _PROBE_EVERY - 1 and step >= self.warmup_num_steps
        return due or step == self.num_steps - 1


@dataclass
class RankRecord:
    """What one rank saw of one engine's training."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    # Forward and backward of the probed steps: with and without communication.
    synced_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    # By the part of the model that was held here.
    weights_digests: dict[str, str] = field(default_factory=dict)
    # Of a pipeline: its probed steps.
    recorded: list[RecordedStep] = field(default_factory=list)
    held_out_loss: float = math.nan


class Trainee:
    """A model and its optimizer in this rank; of itself, one process on the whole batch.

    The mesh of its engine's ranks has the dimensions "dp", replicas, and "pp", stages.
    """

    def __init__(self, plan: Plan, num_symbols: int, mesh: DeviceMesh) -> None:
        # Every rank and engine starts from the same weights.
        torch.manual_seed(SEED)
        self.gpt = Gpt(MODEL_SIZES[plan.model], num_symbols)
        self.plan = plan
        self.mesh = mesh
        self.record = RankRecord()
        self.parameters = list(self.wrap())
        # A slow rise and a large epsilon keep the training calm. At 4e-3 with a rise of 20 steps
        # and torch's epsilon, it amplified rounding from 1e-7 to 1e-3 of the loss within 10 steps,
        # and then no check could tell an engine's small mistake from rounding.
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=_LEARNING_RATE, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.1
        )

    def wrap(self) -> Iterable[nn.Parameter]:
        """Called once: hands the model to the engine; the parameters that this rank trains."""
        return self.gpt.parameters()

    def train_step(self, step: int, batch: Batch) -> None:
        """One timed step of training on this rank's share of `batch`."""
        share = self.share_of(batch)
        self.prepare(step, share)
        # A rank that comes late from elsewhere is not communication.
        self.barrier()
        start = time.perf_counter()
        loss = self.backward(share)
        synced = time.perf_counter()
        norm = self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * learning_rate_factor(step, self.plan.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        self.record.losses.append(loss.item())
        self.record.norms.append(norm.item())
        self.record.step_s.append(end - start)
        self.conclude(step, synced - start)

    def share_of(self, batch: Batch) -> Batch:
        """What this rank's replica trains on."""
        symbols, targets = batch
        num_own = len(symbols) // self.mesh["dp"].size()
        first = self.mesh.get_local_rank("dp") * num_own
        return symbols[first : first + num_own], targets[first : first + num_own]

    def barrier(self) -> None:
        """Of all ranks of the engine."""
        for group in self.mesh.get_all_groups():
            dist.barrier(group)

    def prepare(self, step: int, share: Batch) -> None:
        """What comes before a step and does not count."""

    def conclude(self, step: int, synced_s: float) -> None:
        """What comes after a step; forward and backward took `synced_s`."""

    def backward(self, share: Batch) -> Tensor:
        """Forward and backward; the loss."""
        loss: Tensor = self.gpt(*share)
        # torch's own annotation of backward() is missing.
        loss.backward()
        return loss

    def clip(self) -> Tensor:
        """Clips the gradient; its norm before."""
        return nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def loss_of(self, batch: Batch) -> Tensor:
        """Without training."""
        loss: Tensor = self.gpt(*batch)
        return loss

    def parts(self) -> dict[str, nn.Module]:
        """What this rank holds of the trained model, by name."""
        return {"model": self.gpt}

    @torch.no_grad()
    def finish(self, text: StdlibText) -> None:
        """Records what can be said of the trained weights."""
        for name, part in self.parts().items():
            weights = b"".join(p.detach().numpy().tobytes() for p in part.parameters())
            self.record.weights_digests[name] = hashlib.sha256(weights).hexdigest()
        # The same places of the text that was held out for every engine.
        context = self.gpt.size.context
        losses = [
            self.loss_of(draw_batch(text.held_out, _HELD_OUT_NUM_SEQUENCES, context, seed)).item()
            for seed in range(_HELD_OUT_NUM_BATCHES)
        ]
        self.record.held_out_loss = sum(losses) / len(losses)


class DataParallelTrainee(Trainee):
    """A replica in each rank, wrapped by an engine."""

    def __init__(self, *arguments: Any, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        super().__init__(*arguments)

    def wrap(self) -> Iterable[nn.Parameter]:
        self.wrapped = self.wrapper(self.gpt, self.mesh.get_group("dp"))
        return self.gpt.parameters()

    def backward(self, share: Batch) -> Tensor:
        loss: Tensor = self.wrapped(*share)
        loss.backward()
        return loss

    def prepare(self, step: int, share: Batch) -> None:
        if self.plan.is_probed(step):
            self.record.computed_s.append(self.time_computation(share))

    def conclude(self, step: int, synced_s: float) -> None:
        if self.plan.is_probed(step):
            self.record.synced_s.append(synced_s)

    def time_computation(self, share: Batch) -> float:
        """Seconds of forward and backward without communication, leaving no trace."""
        self.barrier()
        start = time.perf_counter()
        with self.wrapped.no_sync():
            self.backward(share)
        elapsed_s = time.perf_counter() - start
        self.optimizer.zero_grad()
        return elapsed_s


def learning_rate_factor(step: int, num_steps: int) -> float:
    """A rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / _RISE_NUM_STEPS)
    return rise * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / num_steps)))


def wrap_with_ddp(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    """torch's own wrapper, with its faster setting."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def wrap_with_pydist(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    """The same line with pydist."""
    import pydist

    return pydist.DataParallel(model, process_group=group, gradient_as_bucket_view=True)
