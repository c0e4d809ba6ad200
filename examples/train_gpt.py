"""Owns the command of the demo: trains a GPT on real text in five ways and compares them.

    python examples/train_gpt.py [--ranks N] [--steps N] [--model small|tiny]

A character-level GPT learns the source of Python's standard library five times, from the same
seed and on the same batches: in one process, on N processes with torch's DistributedDataParallel
over Gloo, on N processes with pydist.DataParallel, as a pipeline of two stages with
pydist.PipelineParallel, and as two replicas of such a pipeline. The exit status is 1 if a rank
failed, or if they did not train the same model.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from gpt_model import MODEL_SIZES
from gpt_training import (
    HYBRID_NUM_REPLICAS,
    Engine,
    TrainingResult,
    make_engines,
    train_on_rank,
)
from pipeline_trainee import NUM_MICROBATCHES, SCHEDULE
from report import disagreements, draw_losses, render_table
from schedule_picture import ScheduleReport
from stdlib_text import LICENSE_NOTE, NoTextError, StdlibText, read_stdlib
from trainees import Plan, Wrapper, wrap_with_pydist

_DEFAULT_NUM_STEPS = {"small": 500, "tiny": 200}
_DEFAULT_BATCH = 16
_INTERRUPTED = 130


class RankFailedError(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


def main(arguments: Sequence[str] | None = None, pydist_wrapper: Wrapper | None = None) -> int:
    """Runs the demo and returns its exit status; tests pass a wrapper in pydist's place."""
    started = time.monotonic()
    options = parse_options(arguments)
    try:
        if pydist_wrapper is None:
            # Here its error is one sentence; in the ranks it would be several tracebacks.
            importlib.import_module("pydist")
        text = read_stdlib()
    except ModuleNotFoundError as error:
        return fail(f"{error}; `make demo` installs what the demo needs")
    except (ImportError, NoTextError) as error:
        return fail(str(error))
    plan = Plan(options.model, options.steps, options.batch)
    engines = make_engines(options.ranks, pydist_wrapper or wrap_with_pydist)
    print_plan(plan, engines, text)
    try:
        result = train_on_all_ranks(plan, engines, text)
    except RankFailedError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted")
        return _INTERRUPTED
    print(f"\nWritten by the model that '{result.writer}' trained:\n")
    print("\n".join(f"    | {line[:92]}" for line in result.sample.splitlines()))
    print("\n" + render_table(result.engines, plan))
    print_footnotes(engines)
    schedule = ScheduleReport(result.pipeline.recorded)
    print(schedule.text())
    draw_losses(result.engines, options.output)
    schedule.draw(options.schedule_output)
    print(f"Loss curves: {options.output}. The schedule: {options.schedule_output}.")
    print(f"Took {time.monotonic() - started:.0f} s.")
    problems = disagreements(result.engines)
    for problem in problems:
        fail(problem)
    if not problems:
        print("The runs trained the same model: losses and gradients differ by rounding alone.")
    return 1 if problems else 0


def fail(message: str) -> int:
    """Says what went wrong; the exit status for it."""
    print(f"train_gpt: {message}", file=sys.stderr, flush=True)
    return 1


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked before minutes are spent on it."""
    parser = argparse.ArgumentParser(
        prog="train_gpt", description="Trains a small GPT in five ways and compares them."
    )
    parser.add_argument(
        "--ranks", type=positive, default=2, help="processes of data parallelism (default: 2)"
    )
    parser.add_argument("--steps", type=positive, help="steps of training (default: by model)")
    parser.add_argument("--model", choices=sorted(MODEL_SIZES), default="small")
    parser.add_argument(
        "--batch",
        type=positive,
        help=f"sequences in a step, over all ranks (default: {_DEFAULT_BATCH}, rounded up)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_loss.png"), help="picture of the loss curves"
    )
    parser.add_argument(
        "--schedule-output",
        type=Path,
        default=Path("demo_schedule.png"),
        help="picture of the pipeline's schedule",
    )
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = _DEFAULT_NUM_STEPS[options.model]
    divisor = math.lcm(options.ranks, HYBRID_NUM_REPLICAS)
    if options.batch is None:
        options.batch = -(-_DEFAULT_BATCH // divisor) * divisor
    if options.batch % divisor != 0:
        parser.error(
            f"expected --batch to be a multiple of {divisor}, for --ranks {options.ranks} and the "
            f"{HYBRID_NUM_REPLICAS} replicas of a pipeline, found {options.batch}"
        )
    for path in (options.output, options.schedule_output):
        if not path.absolute().parent.is_dir():
            parser.error(f"expected the folder of {path} to exist")
    return options


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {number}")
    return number


def print_plan(plan: Plan, engines: list[Engine], text: StdlibText) -> None:
    """What is going to happen."""
    megabytes = (len(text.train) + len(text.held_out)) / 1e6
    print(
        f"Text: source of Python's standard library, {megabytes:.1f} MB in {text.num_files} files "
        f"of {text.folder}\n"
        f"      ({LICENSE_NOTE}),\n"
        f"      {len(text.held_out) / 1e6:.1f} MB of it held out.\n"
        f"Model: {plan.model} GPT, {plan.num_steps} steps of {plan.global_batch} sequences of "
        f"{MODEL_SIZES[plan.model].context} characters.\n"
        f"Runs: {', '.join(engine.name for engine in engines)}.",
        flush=True,
    )


def print_footnotes(engines: list[Engine]) -> None:
    """How to read the table."""
    ranks = ", ".join(f"{e.name} {e.num_ranks} (threads: {e.num_threads})" for e in engines)
    hybrid = engines[-1]
    print(
        f"\nranks: {ranks}.\n"
        f"pipelines: {hybrid.num_stages} stages, {NUM_MICROBATCHES} microbatches, schedule "
        f"{SCHEDULE}; the last run: {hybrid.num_replicas} replicas of that.\n"
        "step: median, its slowest rank. communication: what a step takes longer than the same "
        "step under no_sync().\nThe runs took turns in the same processes, so that they met the "
        "same noise."
    )


def train_on_all_ranks(plan: Plan, engines: list[Engine], text: StdlibText) -> TrainingResult:
    """Starts the ranks, waits for them, and ends them all if one fails or the user interrupts."""
    num_ranks = max(engine.num_ranks for engine in engines)
    # The port is chosen by the system and the store outlives the ranks.
    store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.pickle"
        ranks = start_processes(
            train_on_rank,
            args=(plan, engines, text, store.port, result_path),
            nprocs=num_ranks,
            join=False,
            # So that an interrupt before they are all there ends those that are.
            daemon=True,
            start_method="spawn",
        )
        try:
            while not ranks.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankFailedError(f"rank {error.error_index} failed: {error}") from error
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        result: TrainingResult = pickle.loads(result_path.read_bytes())
    return result


if __name__ == "__main__":
    sys.exit(main())
