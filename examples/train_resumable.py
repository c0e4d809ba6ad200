"""Owns the training that survives its ranks: checkpoints, and resuming bit by bit.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 2 examples/train_resumable.py

Trains a small GPT on the source of Python's standard library with pydist.DataParallel, and writes
a checkpoint every few steps. When a rank dies, torchrun ends the others and starts all of them
again; they resume from the checkpoint, and end with the same bits as a run in which nobody died.
docs/launch.md shows how to start it on several hosts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import pydist
from gpt_model import MODEL_SIZES, Gpt
from resumable_checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from stdlib_text import read_stdlib

_USAGE_ERROR = 2


@dataclass(frozen=True)
class Job:
    """What decides the bits of the result; a checkpoint of another job is refused."""

    model: str
    batch: int
    num_ranks: int
    learning_rate: float
    noise: float
    seed: int
    text_sha256: str


@dataclass(frozen=True)
class Crash:
    """A death on demand, to see what a restart does; in the first attempt only."""

    step: int | None
    rank: int
    in_save: bool

    def due(self, step: int, in_save: bool) -> bool:
        """Whether this process is to die now."""
        # What torchrun counts; a job that is submitted again starts at 0, as does plain Python.
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        here = (self.step, self.rank, self.in_save) == (step, dist.get_rank(), in_save)
        return first and here


def die() -> None:
    """As the kernel's out-of-memory killer would end this process: no clean-up, no last words."""
    os.kill(os.getpid(), signal.SIGKILL)


class Windows:
    """The text cut into windows, in another order in each epoch: a place in it is one number."""

    def __init__(self, codes: npt.NDArray[np.uint8], context: int, seed: int) -> None:
        self.codes = codes
        self.context = context
        self.seed = seed
        self.num_windows = (len(codes) - 1) // context
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(0)

    def draw(self, position: int, num_sequences: int) -> Tensor:
        """The windows from `position` on, each with the character after it."""
        places = [self._window(position + i) * self.context for i in range(num_sequences)]
        rows = self.codes[np.array(places)[:, None] + np.arange(self.context + 1)]
        return torch.from_numpy(rows.astype(np.int64))

    def _window(self, position: int) -> int:
        epoch, place = divmod(position, self.num_windows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)
        return int(self._order[place])


class Training:
    """One rank's part of the job, and all the state that it goes on from."""

    def __init__(self, job: Job, windows: Windows, num_symbols: int) -> None:
        self.job = job
        self.windows = windows
        self.num_symbols = num_symbols
        self.step = 0
        self.position = 0  # in `windows`, of all ranks together
        torch.manual_seed(job.seed)  # the same model on each rank
        self.gpt = Gpt(MODEL_SIZES[job.model], num_symbols)
        self.ddp = pydist.DataParallel(self.gpt)
        self.optimizer = torch.optim.AdamW(self.gpt.parameters(), lr=job.learning_rate)
        torch.manual_seed(job.seed + 1 + dist.get_rank())  # and noise of its own

    def train_step(self, crash: Crash) -> Tensor:
        """Forward, backward and update on this rank's share of the next batch."""
        share = self.job.batch // self.job.num_ranks
        rows = self.windows.draw(self.position + dist.get_rank() * share, share)
        loss: Tensor = self.ddp(self.with_noise(rows[:, :-1]), rows[:, 1:])
        if crash.due(self.step + 1, in_save=False):
            die()  # while the others wait for this rank's gradients
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.position += self.job.batch
        return loss.detach()

    def with_noise(self, symbols: Tensor) -> Tensor:
        """Some characters replaced by others, drawn from the global generator as dropout would."""
        replaced = torch.rand(symbols.shape) < self.job.noise
        return torch.where(replaced, torch.randint(self.num_symbols, symbols.shape), symbols)

    def checkpoint(self) -> Checkpoint | None:
        """All ranks call it; rank 0 gets what there is to save."""
        states = gather_bytes(torch.get_rng_state())
        if states is None:
            return None
        return Checkpoint(
            job=asdict(self.job),
            step=self.step,
            position=self.position,
            model=self.gpt.state_dict(),
            optimizer=self.optimizer.state_dict(),
            rng_states=states,
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes on from what `checkpoint` returned on rank 0."""
        self.gpt.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        torch.set_rng_state(checkpoint.rng_states[dist.get_rank()])
        self.step = checkpoint.step
        self.position = checkpoint.position


def gather_bytes(own: Tensor) -> list[Tensor] | None:
    """Tensors of one shape from all ranks, on rank 0."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    if dist.get_rank() != 0:
        dist.gather(own)
        return None
    dist.gather(own, gathered)
    return gathered


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; every rank gets the same one."""
    parser = argparse.ArgumentParser(
        prog="train_resumable", description="Trains a small GPT, resuming from its checkpoint."
    )
    parser.add_argument("--steps", type=int, default=200, help="in all, with those before a resume")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="of checkpoints")
    parser.add_argument("--model", choices=sorted(MODEL_SIZES), default="tiny")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--noise", type=float, default=0.05, help="share of characters replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-characters", type=int, help="train on the first ones alone")
    parser.add_argument("--backend", default="gloo", help="of the process group")
    parser.add_argument("--timeout", type=float, default=300, help="of the group, in seconds")
    parser.add_argument("--crash-at", type=int, metavar="STEP", help="end a rank in its first try")
    parser.add_argument("--crash-rank", type=int, default=1, metavar="RANK")
    parser.add_argument(
        "--crash-in-save",
        action="store_true",
        help="end rank 0 with half of the checkpoint of --crash-at written",
    )
    options = parser.parse_args(arguments)
    for name in ("steps", "save_every", "batch", "timeout"):
        if getattr(options, name) <= 0:
            parser.error(f"expected --{name.replace('_', '-')} to be positive")
    return options


def prepare(options: argparse.Namespace) -> Training:
    """The training at its first step; raises ValueError where the options do not fit."""
    text = read_stdlib()
    codes = text.train[: options.max_characters]
    num_ranks = dist.get_world_size()
    if options.batch % num_ranks != 0:
        raise ValueError(f"expected --batch to be a multiple of {num_ranks} ranks")
    job = Job(
        model=options.model,
        batch=options.batch,
        num_ranks=num_ranks,
        learning_rate=options.learning_rate,
        noise=options.noise,
        seed=options.seed,
        # Another version of Python has another library.
        text_sha256=hashlib.sha256(text.alphabet.encode() + codes.tobytes()).hexdigest(),
    )
    context = MODEL_SIZES[job.model].context
    if len(codes) <= context:
        raise ValueError(f"expected --max-characters of more than {context}")
    return Training(job, Windows(codes, context, job.seed), len(text.alphabet))


def train(training: Training, options: argparse.Namespace) -> None:
    """Resumes if there is something to resume from, and trains to the end."""
    crash = Crash(
        options.crash_at, 0 if options.crash_in_save else options.crash_rank, options.crash_in_save
    )
    if dist.get_rank() == 0:
        options.folder.mkdir(parents=True, exist_ok=True)
    found = load_checkpoint(options.folder, asdict(training.job))
    if found is not None:
        training.resume(found)
        say(f"resumed at step {training.step} from {options.folder}")
    while training.step < options.steps:
        loss = training.train_step(crash)
        if training.step % options.save_every == 0 or training.step == options.steps:
            save(training, options.folder, crash)
            say(f"saved step {training.step}, loss of rank 0 {loss.item():.3f}")
    say(f"finished step {training.step}, parameters {digest(training.gpt)}")


def save(training: Training, folder: Path, crash: Crash) -> None:
    """Called by all ranks; only rank 0 waits for the disk."""
    checkpoint = training.checkpoint()
    if checkpoint is not None:
        save_checkpoint(
            checkpoint,
            folder,
            half_written=lambda: die() if crash.due(training.step, in_save=True) else None,
        )


def digest(module: nn.Module) -> str:
    """Of all bits of the parameters."""
    sha256 = hashlib.sha256()
    for parameter in module.parameters():
        sha256.update(parameter.detach().numpy().tobytes())
    return sha256.hexdigest()


def say(message: str) -> None:
    """A line of rank 0."""
    if dist.get_rank() == 0:
        print(f"train_resumable: {message}", flush=True)


def advise(backend: str) -> None:
    """Says what a restart would fail of, while there is time to change it."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shared and restarts and backend != "pydist":
        say(
            "torchrun keeps one store for all attempts, where restarted ranks may find the "
            "addresses of dead ones; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, or "
            "use --backend pydist, which looks for the living"
        )


@record
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; torchrun's summary shows the error of the first that fails."""
    options = parse_options(arguments)
    dist.init_process_group(options.backend, timeout=timedelta(seconds=options.timeout))
    advise(options.backend)
    try:
        train(prepare(options), options)
    except (CheckpointError, ValueError) as error:
        print(f"train_resumable: rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        return _USAGE_ERROR
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
