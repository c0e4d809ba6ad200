"""Owns the tests of what travels out of training: copies, pickles, queues, threads, outputs."""

import collections
import contextlib
import copy
import dataclasses
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from conftest import Transport
from models import WIDTHS, mlp, wavy_loss
from pydist import DataParallel
from ranks import fresh_ranks
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    draw,
    gradients,
)


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    width = next(iter(module.parameters())).shape[-1]
    return wavy_loss(module(draw(rank, step, 4, width)))


def keep_everything(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    model = DataParallel(module)
    average = copy.deepcopy(model.module)  # a moving average of weights
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), module.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "whole": model}, file
    )
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    resumed = DataParallel(mlp(width, 2))
    resumed.load_state_dict(loaded["model"])
    other = torch.optim.Adam(resumed.parameters(), lr=0.01)
    other.load_state_dict(loaded["optimizer"])
    whole = loaded["whole"]
    for each, its_optimizer in ((model, optimizer), (resumed, other)):
        its_optimizer.zero_grad()
        loss_of(each, rank, 2).backward()
        its_optimizer.step()
    whole.zero_grad()
    loss_of(whole, rank, 2).backward()
    assert_gradients_match(whole, module)
    for found, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert_same_on_all_ranks([*model.parameters(), *average.parameters(), *gradients(whole)])


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_c65_copies_averages_and_checkpoints(transport: Transport, width: int) -> None:
    """deepcopy for an average of weights, torch.save of states and of the whole wrapper, and a
    resumed training that goes on with the very bits of the first."""
    transport.pool(2).run(keep_everything, width)


def double_received(received: Any, answers: Any) -> None:
    """In the child: the sum of each gradient, which it then doubles in the shared memory."""
    for _ in range(4):
        gradient = received.get(timeout=30)
        answers.put(float(gradient.sum()))
        gradient.mul_(2)
        answers.put(None)


def send_gradients(rank: int, world_size: int, strategy: str, width: int) -> None:
    before = mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
    mp.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    context = mp.get_context("fork")
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=double_received, args=(queue, answers))
    module = mlp(width, 1)
    model = DataParallel(module)
    expected = OneProcess(module, world_size)
    child.start()
    try:
        for step in range(2):
            assert_step_reduced(model, expected, loss_of, rank, step)
            for gradient in gradients(model):
                assert gradient is not None
                before_sending = gradient.clone()
                queue.put(gradient)
                assert abs(answers.get(timeout=30) - float(before_sending.sum())) < 1e-3
                answers.get(timeout=30)
                assert torch.equal(gradient, 2 * before_sending)
            assert_same_on_all_ranks(gradients(model))
        # On top of gradients whose memory is shared with the child.
        with torch.no_grad():
            for replica in expected.replicas:
                for parameter in replica.parameters():
                    parameter.grad *= 2  # type: ignore[operator]
        loss_of(model, rank, 2).backward()
        expected.backward(loss_of, 2)
        assert_reduced(model, expected)
    finally:
        child.join(30)
        mp.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
    assert child.exitcode == 0


def manager_is_running() -> bool:
    """True while torch's manager of shared files is a child of this process, as orphans become."""
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            with contextlib.suppress(FileNotFoundError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("torch_shm") and os.waitpid(pid, os.WNOHANG)[0] == 0:
                    return True
    return False


@pytest.mark.parametrize(
    ("strategy", "width"), [("file_descriptor", 8), ("file_descriptor", 192), ("file_system", 192)]
)
def test_gradients_through_queues(transport: Transport, strategy: str, width: int) -> None:
    """A gradient sent to another process by torch.multiprocessing moves to shared memory: both
    processes see the same values then, and training goes on."""
    if strategy == "file_descriptor":
        transport.pool(2).run(send_gradients, strategy, width)
        return
    outcomes = fresh_ranks(2, send_gradients, strategy, width, env=transport.env)
    assert [outcome.traceback for outcome in outcomes] == ["", ""]
    # torch's manager of such files ends two seconds after its last client.
    deadline = time.monotonic() + 30
    while manager_is_running():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def train_two_threads(rank: int, world_size: int) -> None:
    """Each thread has a model and a group of its own, and its own number of steps."""
    groups = [dist.new_group(), dist.new_group()]
    modules = [mlp(192, 2), mlp(8, 3)]
    expected = [OneProcess(module, world_size) for module in modules]
    models = [
        DataParallel(module, process_group=group)
        for module, group in zip(modules, groups, strict=True)
    ]
    problems: list[BaseException] = []

    def train(index: int) -> None:
        try:
            for step in range(6 + 3 * index):
                models[index].zero_grad()
                expected[index].zero_grad()
                loss_of(models[index], rank, step).backward()
                expected[index].backward(loss_of, step)
                assert_gradients_match(models[index], expected[index].module)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    for model in models:
        assert_same_on_all_ranks(gradients(model))


def test_two_wrappers_in_two_threads(transport: Transport) -> None:
    """Two models train at the same time in two threads, over a group each."""
    transport.pool(2).run(train_two_threads)


class ModelOutput(collections.OrderedDict[str, Any]):
    """As transformers has it: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclasses.dataclass
class Sample:
    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()


Pair = collections.namedtuple("Pair", ["loss", "cache"])


class Handle:
    """An object that is no container, and has a cycle."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss
        self.owner = self


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        hidden = self.used(x)
        loss = wavy_loss(hidden)
        outputs: dict[str, Any] = {
            "model_output": ModelOutput(loss=loss, logits=hidden, past=None),
            "dict": {"loss": loss, "extra": [None, "text", hidden]},
            "dataclass": Sample(loss, (hidden, hidden)),
            "namedtuple": Pair(loss, None),
            "handle": Handle(loss),
        }
        return outputs[self.kind]


def train_returning(rank: int, world_size: int) -> None:
    for kind in ("model_output", "dict", "dataclass", "namedtuple", "handle"):
        module = Returning(kind)
        expected = OneProcess(module, world_size)
        model = DataParallel(module, find_unused_parameters=True)

        def loss(module: nn.Module, rank: int, step: int) -> Tensor:
            output = module(draw(rank, step, 4, 8))
            found = output["loss"] if isinstance(output, dict) else output.loss
            assert isinstance(found, Tensor)
            return found

        for step in range(2):
            assert_step_reduced(model, expected, loss, rank, step)
        assert module.unused.weight.grad is None
        assert type(model(draw(rank, 0, 4, 8))) is type(module(draw(rank, 0, 4, 8)))


def test_c09_outputs_of_model_libraries(transport: Transport) -> None:
    """Outputs as model libraries return them come back as they are, their type included, and their
    gradients are averaged."""
    transport.pool(2).run(train_returning)


def evaluate_alone(rank: int, world_size: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    expected_module = copy.deepcopy(module)
    model = DataParallel(module, forward_sync_buffers=False)
    expected = OneProcess(expected_module, world_size)
    for step in range(4):
        assert_step_reduced(model, expected, loss_of, rank, step)
        if rank == 0:
            for evaluated in (model.module, model):
                evaluated.eval()
                with torch.no_grad():
                    evaluated(draw(0, step, 4, 8))
                evaluated.train()
            with torch.enable_grad():  # attribution, say: past the wrapper
                x = draw(0, step, 4, 8).requires_grad_()
                module.eval()(x).sum().backward()
                module.train()
                assert x.grad is not None


def test_evaluation_on_rank_0_alone(transport: Transport) -> None:
    """Rank 0 evaluates in the middle of training, through the wrapper or its module, while others
    go on: nobody waits, and later steps are right. (With buffers to synchronise the wrapper's
    forward is collective, as in torch.)"""
    transport.pool(2).run(evaluate_alone)
