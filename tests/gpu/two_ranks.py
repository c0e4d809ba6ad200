"""Owns the checks with two ranks, both on one GPU where NCCL allows that."""

import copy
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import communicator
import torch
import torch.distributed as dist
from place import Place
from rows import Rows, Skip
from torch import nn
from training import NUM_STEPS, Training, batch, expect_same_gradients, make_plain
from world import join_group, make_store

import pipeline
import pydist

SIZE = 2
OLDEST_NCCL = (2, 30)  # that takes several ranks of one GPU, as an experiment
ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",  # both ranks' kernels have to be on the card together
}
LIMIT_S = 45.0
GRACE_S = 10.0  # after the first rank that ended badly

TRAININGS = (
    Training("float32"),
    Training("bfloat16", dtype=torch.bfloat16, tolerance=2**-6),
    Training("bfloat16 wire", arguments={"wire_dtype": torch.bfloat16}, tolerance=2**-6),
    Training("by the ring", arguments={"algorithm": "ring"}),
    Training("by slices", arguments={"algorithm": "slices"}),
    Training("float8 wire", arguments={"wire_dtype": torch.float8_e4m3fn}, tolerance=2**-2),
    Training("bucket views", arguments={"gradient_as_bucket_view": True}),
    Training("unused parameters", arguments={"find_unused_parameters": True}, alternates=True),
)


def train(place: Place, rows: Rows, training: Training, rank: int) -> None:
    """The mean of both ranks' gradients, each of a batch of its own."""
    plain = make_plain(place, training)
    model = pydist.DataParallel(copy.deepcopy(plain), **training.arguments)
    for step in range(NUM_STEPS):
        inputs = [batch(place, SIZE * step + r, training.dtype) for r in range(SIZE)]
        if training.alternates:
            plain.uses_other = model.module.uses_other = step % 2 == 1
        model.zero_grad()
        plain.zero_grad()
        model(inputs[rank]).square().sum().backward()
        for each in inputs:
            (plain(each).square().sum() / SIZE).backward()
        expect_same_gradients(rows, model, plain, max(training.tolerance, 1e-5))


def train_pipeline(place: Place, rows: Rows, kind: str, stages_per_rank: int, rank: int) -> None:
    """Half of the stages on each rank: gradients are the plain model's."""
    plain = pipeline.make_model(place)
    model = pydist.PipelineParallel(
        copy.deepcopy(plain), pipeline.NUM_MICROBATCHES, pipeline.loss_fn, kind, stages_per_rank
    )
    for step in range(pipeline.NUM_STEPS):
        inputs, target = pipeline.batch(place, step)
        model.zero_grad()
        loss = model.step(inputs, target=target)
        expected = pipeline.plain_step(plain, inputs, target)
        local = without_parameters_of_others(plain, model)
        pipeline.expect_same(rows, model, local, (torch.as_tensor(loss).cpu(), expected.cpu()))


def without_parameters_of_others(plain: nn.Module, model: nn.Module) -> nn.Module:
    """A module with the plain model's parameters of those names that this rank holds."""
    held = nn.Module()
    for name, parameter in plain.named_parameters():
        if name in dict(model.named_parameters()):
            parent = held
            *path, last = name.split(".")
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.register_parameter(last, parameter)
    return held


def run_rank(place: Place, rows: Rows, port: int, rank: int) -> None:
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(ENVIRONMENT)
    place.enter()
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    # Only the store of torch's group is used for what is on the device.
    join_group(place, dist.PrefixStore("torch", store), rank, SIZE, backend="gloo")
    communicator.check_everything(place, rows, dist.PrefixStore("checks", store), rank, SIZE)
    for training in TRAININGS:
        with rows.check(f"gradients: {training.name}"):
            train(place, rows, training, rank)
    for kind, stages_per_rank in (("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("zb-v", 2)):
        with rows.check(f"pipeline: {kind}"):
            train_pipeline(place, rows, kind, stages_per_rank, rank)
    dist.destroy_process_group()


def why_not(place: Place) -> str | None:
    if place.emulated:
        return None
    version = torch.cuda.nccl.version()
    if version >= OLDEST_NCCL:
        return None
    found, oldest = (".".join(map(str, v)) for v in (version, OLDEST_NCCL))
    return f"NCCL {found} refuses several ranks on one GPU; {oldest} and newer need not"


def run(place: Place, rows: Rows) -> None:
    with rows.check("both ranks come to their end"):
        reason = why_not(place)
        if reason is not None:
            raise Skip(reason)
        run_ranks(place, rows)


def run_ranks(place: Place, rows: Rows) -> None:
    """Both write into the same rows, the second one only what is not as it should be."""
    from sections import fork

    store = make_store()

    def in_rank(rank: int) -> Callable[[], None]:
        own = rows.of_rank(rank, place.settle)
        return lambda: run_rank(place, own, store.port, rank)

    log = Path(os.readlink("/proc/self/fd/1"))  # that of the section
    processes = [fork(in_rank(rank), log, leads_group=False) for rank in range(SIZE)]
    deadline = time.monotonic() + LIMIT_S
    statuses: dict[int, int] = {}
    while len(statuses) < SIZE:
        for rank, process in enumerate(processes):
            if rank in statuses:
                continue
            status = process.ended_within(0)
            if status is not None:
                statuses[rank] = status
                if status != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    late = [process for rank, process in enumerate(processes) if rank not in statuses]
    for process in late:
        os.kill(process.pid, signal.SIGUSR1)  # the stacks of its threads, for the log
    time.sleep(0.5 if late else 0.0)
    for process in late:
        process.kill()
    if statuses != dict.fromkeys(range(SIZE), 0):
        raise AssertionError(f"exit status by rank: {statuses}, of {SIZE} ranks within {LIMIT_S} s")
