"""Owns the training of the demo: one rank that trains a GPT by each engine in turn, with clocks.

All engines train in the same processes on the same batches, a block of steps each in turn, so that
whatever else the machine does slows all of them alike:

    rank 0   single 0-9   DDP 0-9   pydist 0-9   single 10-19   DDP 10-19   pydist 10-19  ...
    rank 1   (waits)      DDP 0-9   pydist 0-9   (waits)        DDP 10-19   pydist 10-19  ...
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm  # type: ignore[import-untyped]

from gpt_model import MODEL_SIZES, Gpt
from stdlib_text import StdlibText, draw_batch

Wrapper = Callable[[nn.Module], DistributedDataParallel]

BLOCK_NUM_STEPS = 10
# In every so many steps of a parallel engine the computation alone is timed as well.
_PROBE_EVERY = 5
_SEED = 1
_LEARNING_RATE = 3e-3
_RISE_NUM_STEPS = 60
_HELD_OUT_NUM_BATCHES = 16
_SAMPLE_PROMPT = "\n\ndef "
_SAMPLE_NUM_CHARACTERS = 400
_TIMEOUT = timedelta(minutes=5)


def wrap_with_ddp(model: nn.Module) -> DistributedDataParallel:
    """torch's own wrapper, with its faster setting."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def wrap_with_pydist(model: nn.Module) -> DistributedDataParallel:
    """The same line with pydist."""
    import pydist

    return pydist.DataParallel(model, gradient_as_bucket_view=True)


@dataclass(frozen=True)
class Plan:
    """What is trained, and how; the same in every rank."""

    model: str
    num_ranks: int
    num_steps: int
    global_batch: int
    num_threads: int
    # Engines by name; the engine None is one process on the whole global batch.
    engines: dict[str, Wrapper | None]

    @property
    def warmup_num_steps(self) -> int:
        """Steps at the start whose times do not count: buckets and caches are settling."""
        return min(10, self.num_steps // 3)


@dataclass
class RankRecord:
    """What one rank saw of one engine's training."""

    name: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    # Forward and backward of the probed steps: with and without communication.
    synced_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    weights_digest: str = ""
    held_out_loss: float = math.nan


@dataclass(frozen=True)
class EngineResult:
    """One engine's training, over all ranks."""

    name: str
    losses: npt.NDArray[np.float64]
    # Of the gradient, before clipping.
    norms: npt.NDArray[np.float64]
    held_out_loss: float
    ranks_agree: bool
    step_s: float
    communication_s: float | None


@dataclass(frozen=True)
class TrainingResult:
    """Everything that the report needs."""

    engines: list[EngineResult]
    sample: str


class Trainee:
    """A model, its optimizer and its engine in this rank."""

    def __init__(self, name: str, wrapper: Wrapper | None, plan: Plan, num_symbols: int) -> None:
        # Every rank and engine starts from the same weights.
        torch.manual_seed(_SEED)
        self.gpt = Gpt(MODEL_SIZES[plan.model], num_symbols)
        self.wrapped = None if wrapper is None else wrapper(self.gpt)
        self.model: nn.Module = self.gpt if self.wrapped is None else self.wrapped
        # A slow rise and a large epsilon keep the training calm. At 4e-3 with a rise of 20 steps
        # and torch's epsilon, it amplified rounding from 1e-7 to 1e-3 of the loss within 10 steps,
        # and then no check could tell an engine's small mistake from rounding.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=_LEARNING_RATE,
            betas=(0.9, 0.99),
            eps=1e-5,
            weight_decay=0.1,
        )
        self.record = RankRecord(name)
        self.plan = plan

    def train_step(self, step: int, batch: tuple[Tensor, Tensor]) -> None:
        """One timed step of training, and now and then a timed look at its computation alone."""
        probed = step % _PROBE_EVERY == _PROBE_EVERY - 1 and step >= self.plan.warmup_num_steps
        if self.wrapped is not None:
            if probed:
                self.record.computed_s.append(self.time_computation(self.wrapped, batch))
            # Outside the clock: a rank that comes late from elsewhere is not communication.
            dist.barrier()
        start = time.perf_counter()
        loss: Tensor = self.model(*batch)
        # torch's own annotation of backward() is missing.
        loss.backward()
        synced = time.perf_counter()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = _LEARNING_RATE * learning_rate_factor(step, self.plan.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        self.record.losses.append(loss.item())
        self.record.norms.append(norm.item())
        self.record.step_s.append(end - start)
        if probed:
            self.record.synced_s.append(synced - start)

    def time_computation(
        self, wrapped: DistributedDataParallel, batch: tuple[Tensor, Tensor]
    ) -> float:
        """Seconds of forward and backward without communication, leaving no trace."""
        dist.barrier()
        start = time.perf_counter()
        with wrapped.no_sync():
            loss: Tensor = wrapped(*batch)
            loss.backward()
        elapsed_s = time.perf_counter() - start
        self.optimizer.zero_grad()
        return elapsed_s

    def finish(self, text: StdlibText) -> None:
        """Records what can be said of the trained weights."""
        weights = b"".join(p.detach().numpy().tobytes() for p in self.gpt.parameters())
        self.record.weights_digest = hashlib.sha256(weights).hexdigest()
        self.record.held_out_loss = self.evaluate(text)

    @torch.no_grad()
    def evaluate(self, text: StdlibText) -> float:
        """The mean loss on text that was held out, the same places for every engine."""
        losses: list[float] = [
            self.gpt(*draw_batch(text.held_out, 16, self.gpt.size.context, seed=i)).item()
            for i in range(_HELD_OUT_NUM_BATCHES)
        ]
        return sum(losses) / len(losses)


class Progress:
    """A bar on a terminal; elsewhere a line for every tenth of the way."""

    def __init__(self, plan: Plan, shown: bool) -> None:
        self.plan = plan
        self.total = plan.num_steps * len(plan.engines)
        self.done = 0
        self.shown = shown
        self.bar: tqdm | None = None
        # tqdm draws nothing on a terminal without lines, as some recorders have it.
        if shown and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 1:
            self.bar = tqdm(total=self.total, unit="step", dynamic_ncols=True)

    def advance(self, record: RankRecord) -> None:
        """Counts one step of the engine that `record` belongs to."""
        tenth = 10 * self.done // self.total
        self.done += 1
        if not self.shown:
            return
        samples_per_s = self.plan.global_batch / np.median(record.step_s[-BLOCK_NUM_STEPS:])
        state = f"{record.name}: loss {record.losses[-1]:.3f}, {samples_per_s:.0f} samples/s"
        if self.bar is not None:
            self.bar.set_postfix_str(state, refresh=False)
            self.bar.update()
        elif 10 * self.done // self.total > tenth:
            percent = 100 * self.done // self.total
            print(f"{percent:3d} %  step {len(record.losses)}  {state}", flush=True)

    def close(self) -> None:
        """Leaves the finished bar on its line."""
        if self.bar is not None:
            self.bar.close()


def learning_rate_factor(step: int, num_steps: int) -> float:
    """A rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / _RISE_NUM_STEPS)
    return rise * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / num_steps)))


def train_on_rank(
    rank: int, plan: Plan, text: StdlibText, store_port: int, result_path: Path
) -> None:
    """What each rank process runs; rank 0 leaves the result at `result_path`."""
    torch.set_num_threads(plan.num_threads)
    # Everything stays on this machine, whatever its host name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", store_port, plan.num_ranks, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=plan.num_ranks, timeout=_TIMEOUT
    )
    trainees = [
        Trainee(name, wrapper, plan, len(text.alphabet)) for name, wrapper in plan.engines.items()
    ]
    train_in_turns(rank, trainees, plan, text)
    for trainee in trainees:
        if trainee.record.losses:
            trainee.finish(text)
    records: list[list[RankRecord]] | None = [[]] * plan.num_ranks if rank == 0 else None
    dist.gather_object([trainee.record for trainee in trainees], records)
    if records is not None:
        engines = [merge_ranks(of_engine, plan) for of_engine in zip(*records, strict=True)]
        result = TrainingResult(engines, sample_text(trainees[-1].gpt, text))
        result_path.write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def train_in_turns(rank: int, trainees: list[Trainee], plan: Plan, text: StdlibText) -> None:
    """Runs the schedule at the top of this file."""
    context = MODEL_SIZES[plan.model].context
    share = plan.global_batch // plan.num_ranks
    own = slice(rank * share, (rank + 1) * share)
    progress = Progress(plan, shown=rank == 0)
    for block in range(0, plan.num_steps, BLOCK_NUM_STEPS):
        for trainee in trainees:
            for step in range(block, min(block + BLOCK_NUM_STEPS, plan.num_steps)):
                symbols, targets = draw_batch(text.train, plan.global_batch, context, seed=step)
                if trainee.wrapped is not None:
                    trainee.train_step(step, (symbols[own], targets[own]))
                elif rank == 0:
                    trainee.train_step(step, (symbols, targets))
                if rank == 0:
                    progress.advance(trainee.record)
            # The other ranks sleep here while rank 0 trains on its own.
            dist.barrier()
    progress.close()


def merge_ranks(records: tuple[RankRecord, ...], plan: Plan) -> EngineResult:
    """The engine's curve is the ranks' mean; a step takes as long as in its slowest rank."""
    active = [record for record in records if record.losses]
    step_s = np.max([record.step_s for record in active], axis=0)[plan.warmup_num_steps :]
    communication_s = None
    if active[0].computed_s:
        synced_s = np.max([record.synced_s for record in active], axis=0)
        computed_s = np.max([record.computed_s for record in active], axis=0)
        communication_s = float(np.median(synced_s - computed_s))
    return EngineResult(
        name=active[0].name,
        losses=np.mean([record.losses for record in active], axis=0),
        norms=np.mean([record.norms for record in active], axis=0),
        held_out_loss=active[0].held_out_loss,
        ranks_agree=len({record.weights_digest for record in active}) == 1,
        step_s=float(np.median(step_s)),
        communication_s=communication_s,
    )


def sample_text(gpt: Gpt, text: StdlibText) -> str:
    """A few lines that the trained model writes."""
    prompt = text.encode(_SAMPLE_PROMPT)
    return text.decode(gpt.generate(prompt, _SAMPLE_NUM_CHARACTERS, _SEED)).strip("\n")
