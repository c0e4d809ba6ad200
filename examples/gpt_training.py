"""Owns the training of the demo: ranks that train a GPT by each engine in turn, and their clocks.

All engines train in the same processes on the same batches, a block of steps each in turn, so that
whatever else the machine does slows all of them alike:

    rank 0   single 0-9   DDP 0-9   pydist 0-9   1f1b 0-9   2 x 2 0-9   single 10-19   ...
    rank 1   (waits)      DDP 0-9   pydist 0-9   1f1b 0-9   2 x 2 0-9   (waits)        ...
    rank 2   (waits)      (waits)   (waits)      (waits)    2 x 2 0-9   (waits)        ...
    rank 3   (waits)      (waits)   (waits)      (waits)    2 x 2 0-9   (waits)        ...
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm  # type: ignore[import-untyped]

from gpt_model import MODEL_SIZES
from pipeline_trainee import SCHEDULE, PipelineTrainee
from stdlib_text import StdlibText, draw_batch
from trainees import (
    SEED,
    DataParallelTrainee,
    Plan,
    RankRecord,
    RecordedStep,
    Trainee,
    Wrapper,
    wrap_with_ddp,
)

BLOCK_NUM_STEPS = 10
NUM_STAGES = 2
HYBRID_NUM_REPLICAS = 2
# Names of engines: of the one whose model writes the sample, and of the one that is drawn.
WRITER = "pydist"
PIPELINE = f"pydist {SCHEDULE}"
_SAMPLE_PROMPT = "\n\ndef "
_SAMPLE_NUM_CHARACTERS = 400
_TIMEOUT = timedelta(minutes=5)


# (plan, number of symbols, mesh) -> what trains in this rank
TraineeMaker = Callable[[Plan, int, DeviceMesh], Trainee]


@dataclass(frozen=True)
class Engine:
    """One way to train, on the first ranks there are."""

    name: str
    num_replicas: int
    num_stages: int
    num_threads: int  # of each rank
    make_trainee: TraineeMaker

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * self.num_stages


def make_engines(num_ranks: int, pydist_wrapper: Wrapper) -> list[Engine]:
    """The runs of the demo; `num_ranks` is of those with data parallelism."""
    ddp = functools.partial(DataParallelTrainee, wrapper=wrap_with_ddp)
    pydist = functools.partial(DataParallelTrainee, wrapper=pydist_wrapper)
    replicas = HYBRID_NUM_REPLICAS
    return [
        # As many threads as each of the processes that it is compared with.
        Engine("single process", 1, 1, num_threads(num_ranks), Trainee),
        Engine("torch DDP", num_ranks, 1, num_threads(num_ranks), ddp),
        Engine(WRITER, num_ranks, 1, num_threads(num_ranks), pydist),
        Engine(PIPELINE, 1, NUM_STAGES, num_threads(NUM_STAGES), PipelineTrainee),
        Engine(
            f"pydist {replicas} x {NUM_STAGES}",
            replicas,
            NUM_STAGES,
            num_threads(replicas * NUM_STAGES),
            PipelineTrainee,
        ),
    ]


def num_threads(num_ranks: int) -> int:
    """Of each rank, where so many share the machine."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


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
    # Of a pipeline, by rank: the same steps in each.
    recorded: list[list[RecordedStep]]


@dataclass(frozen=True)
class TrainingResult:
    """Everything that the report needs."""

    engines: list[EngineResult]
    sample: str
    writer: str = WRITER

    @property
    def pipeline(self) -> EngineResult:
        """Without replicas."""
        return next(result for result in self.engines if result.name == PIPELINE)


class Progress:
    """A bar on a terminal; elsewhere a line for every tenth of the way."""

    def __init__(self, plan: Plan, num_engines: int, shown: bool) -> None:
        self.plan = plan
        self.total = plan.num_steps * num_engines
        self.done = 0
        self.shown = shown
        self.bar: tqdm | None = None
        # tqdm draws nothing on a terminal without lines, as some recorders have it.
        if shown and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 1:
            self.bar = tqdm(total=self.total, unit="step", dynamic_ncols=True)

    def advance(self, engine: Engine, record: RankRecord) -> None:
        """Counts one step of the engine that `record` belongs to."""
        tenth = 10 * self.done // self.total
        self.done += 1
        if not self.shown:
            return
        samples_per_s = self.plan.global_batch / np.median(record.step_s[-BLOCK_NUM_STEPS:])
        state = f"{engine.name}: loss {record.losses[-1]:.3f}, {samples_per_s:.0f} samples/s"
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


# What trains in this rank, by engine; None where the engine has no use for it.
Trainees = list[tuple[Engine, "Trainee | None"]]


def train_on_rank(
    rank: int,
    plan: Plan,
    engines: list[Engine],
    text: StdlibText,
    store_port: int,
    result_path: Path,
) -> None:
    """What each rank process runs; rank 0 leaves the result at `result_path`."""
    # Everything stays on this machine, whatever its host name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_ranks = max(engine.num_ranks for engine in engines)
    store = TCPStore("127.0.0.1", store_port, num_ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    trainees = [(engine, make_trainee(engine, plan, text)) for engine in engines]
    train_in_turns(trainees, plan, text)
    for _, trainee in trainees:
        if trainee is not None:
            trainee.finish(text)
    own = [None if trainee is None else trainee.record for _, trainee in trainees]
    records: list[list[RankRecord | None]] | None = [[]] * num_ranks if rank == 0 else None
    dist.gather_object(own, records)
    if records is not None:
        merged = [
            merge_ranks(engine, [record for record in of_engine if record is not None], plan)
            for engine, of_engine in zip(engines, zip(*records, strict=True), strict=True)
        ]
        result = TrainingResult(merged, sample_text(trainees, text))
        result_path.write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def make_trainee(engine: Engine, plan: Plan, text: StdlibText) -> Trainee | None:
    """Called by all ranks, since all have a part in making groups."""
    ranks = torch.arange(engine.num_ranks).view(engine.num_replicas, engine.num_stages)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "pp"))
    if mesh.get_coordinate() is None:
        return None
    torch.set_num_threads(engine.num_threads)
    return engine.make_trainee(plan, len(text.alphabet), mesh)


def train_in_turns(trainees: Trainees, plan: Plan, text: StdlibText) -> None:
    """Runs the schedule at the top of this file."""
    context = MODEL_SIZES[plan.model].context
    progress = Progress(plan, len(trainees), shown=dist.get_rank() == 0)
    for block in range(0, plan.num_steps, BLOCK_NUM_STEPS):
        for engine, trainee in trainees:
            if trainee is not None:
                torch.set_num_threads(engine.num_threads)
                for step in range(block, min(block + BLOCK_NUM_STEPS, plan.num_steps)):
                    batch = draw_batch(text.train, plan.global_batch, context, seed=step)
                    trainee.train_step(step, batch)
                    progress.advance(engine, trainee.record)
            # The engine's other ranks sleep here.
            dist.barrier()
    progress.close()


def merge_ranks(engine: Engine, records: list[RankRecord], plan: Plan) -> EngineResult:
    """The engine's curve is the ranks' mean; a step takes as long as in its slowest rank."""
    step_s = np.max([record.step_s for record in records], axis=0)[plan.warmup_num_steps :]
    communication_s = None
    if records[0].computed_s:
        synced_s = np.max([record.synced_s for record in records], axis=0)
        computed_s = np.max([record.computed_s for record in records], axis=0)
        communication_s = float(np.median(synced_s - computed_s))
    digests = {part for record in records for part in record.weights_digests.items()}
    return EngineResult(
        name=engine.name,
        losses=np.mean([record.losses for record in records], axis=0),
        norms=np.mean([record.norms for record in records], axis=0),
        held_out_loss=records[0].held_out_loss,
        ranks_agree=len(digests) == len({part for part, _ in digests}),
        step_s=float(np.median(step_s)),
        communication_s=communication_s,
        recorded=[record.recorded for record in records],
    )


def sample_text(trainees: Trainees, text: StdlibText) -> str:
    """A few lines that a model writes which was trained by pydist and is whole here."""
    gpt = next(trainee.gpt for engine, trainee in trainees if trainee and engine.name == WRITER)
    prompt = text.encode(_SAMPLE_PROMPT)
    return text.decode(gpt.generate(prompt, _SAMPLE_NUM_CHARACTERS, SEED)).strip("\n")
