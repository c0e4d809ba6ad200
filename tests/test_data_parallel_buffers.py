"""Owns the tests of buffers that are synchronised while graphs of earlier forwards hold them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pydist
from conftest import Transport
from pydist import DataParallel
from reference import OneProcess, assert_reduced, draw, expect_error


def normed(width: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))


def share_buffers(expected: OneProcess) -> None:
    """What the wrapper does before a forward."""
    first, *others = expected.replicas
    for replica in others:
        for name, buffer in first.named_buffers():
            replica.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2], buffer.clone()
            )


def tell_apart(module: nn.Module, rank: int, step: int) -> Tensor:
    real, fake = draw(rank, step, 6, 4), draw(rank, 50 + step, 6, 4)
    return (module(real) - module(fake)).square().sum()  # type: ignore[no-any-return]


def compare_real_and_fake(rank: int, world_size: int) -> None:
    module = normed()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, forward_sync_buffers=True)
    for step in range(3):
        model.zero_grad()
        expected.zero_grad()
        tell_apart(model, rank, step).backward()
        expected.backward(tell_apart, step)
        assert_reduced(model, expected)
    model(draw(rank, 0, 6, 4))  # buffers are rank 0's at its start
    assert int(module[1].num_batches_tracked) == 7  # type: ignore[arg-type]


def test_c18_two_forwards_through_batch_norm(transport: Transport) -> None:
    """D(real) - D(fake) through BatchNorm: the second forward's broadcast of buffers invalidated
    what the first one's graph had saved."""
    transport.pool(2).run(compare_real_and_fake)


def penalty(module: nn.Module, rank: int, step: int) -> Tensor:
    """Two inner gradients in evaluation mode, whose graph is part of the loss."""
    total = torch.zeros(())
    for x in (draw(rank, step, 6, 4), draw(rank, 60 + step, 6, 4)):
        x.requires_grad_()
        (inner,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        total = total + inner.square().sum()
    return total


def penalize_in_eval(rank: int, world_size: int) -> None:
    module = normed()
    with torch.no_grad():
        module(draw(0, 9, 32, 4))  # running statistics of some data
    module.eval()
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(3):
        with torch.no_grad():  # rank 0's statistics move, which all ranks follow
            for each in (module, *expected.replicas) if rank == 0 else expected.replicas:
                each[1].running_var *= 1.5  # type: ignore[index]
        model.zero_grad()
        expected.zero_grad()
        penalty(model, rank, step).backward()
        expected.backward(penalty, step)
        assert_reduced(model, expected)


def test_c18_gradient_penalty_in_evaluation_mode(transport: Transport) -> None:
    """torch.autograd.grad twice through a BatchNorm in eval(), and backward through both."""
    transport.pool(2).run(penalize_in_eval)


class Scaled(nn.Module):
    """A plain buffer multiplied into the output, or added to it."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.added = added
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        return hidden + self.scale if self.added else hidden * self.scale


def out_of_place(module: Scaled) -> None:
    module.scale = module.scale * 2 + 1


def in_place(module: Scaled) -> None:
    module.scale.mul_(2).add_(1)


Change = Callable[[Scaled], None]


def change_between(
    rank: int, world_size: int, change: Change, added: bool, changing: list[int]
) -> None:
    module = Scaled(added)
    plain = copy.deepcopy(module)
    model = DataParallel(module)

    def loss(module: nn.Module, owner: Scaled, rank: int, changes: bool) -> Tensor:
        first = module(draw(rank, 0, 3, 4))
        if changes:
            change(owner)
        return (first * module(draw(rank, 1, 3, 4))).sum()  # type: ignore[no-any-return]

    for _ in range(3):
        model.zero_grad()
        loss(model, module, rank, rank in changing).backward()
        means = []
        for each in range(world_size):
            replica = copy.deepcopy(plain)
            replica.zero_grad()
            loss(replica, replica, each, True).backward()
            means.append([p.grad for p in replica.parameters()])
        plain.scale = replica.scale
        for found, parts in zip(module.parameters(), zip(*means, strict=True), strict=True):
            assert found.grad is not None
            assert torch.allclose(found.grad, torch.stack(parts).mean(0), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("changing", [[0], [0, 1]])
def test_c18_a_buffer_exchanged_between_forwards(transport: Transport, changing: list[int]) -> None:
    """Rank 0 puts another tensor in the buffer's place. Where another rank did not, what arrives
    there must not overwrite what its first forward's graph has saved."""
    transport.pool(2).run(change_between, out_of_place, False, changing)


@pytest.mark.parametrize("changing", [[0], [0, 1]])
def test_c18_a_buffer_written_between_forwards(transport: Transport, changing: list[int]) -> None:
    """Written in place, and in no graph's way."""
    transport.pool(2).run(change_between, in_place, True, changing)


def write_what_is_saved(rank: int, world_size: int) -> str:
    module = Scaled(added=False)
    model = DataParallel(module)
    first = model(draw(rank, 0, 3, 4))
    in_place(module)
    loss = (first * model(draw(rank, 1, 3, 4))).sum()
    return str(expect_error((RuntimeError, pydist.PeerError), loss.backward))


def test_c18_a_saved_buffer_written_in_place(transport: Transport) -> None:
    """The user writes to what a graph has saved, which autograd refuses, wrapped or not."""
    pool = transport.pool(2)
    messages = pool.run(write_what_is_saved)
    pool.discard()  # a round that failed leaves a process group out of step
    assert any("inplace operation" in message for message in messages)


def keep_identity(rank: int, world_size: int) -> None:
    module = normed()
    model = DataParallel(module)
    buffers = list(module.buffers())
    for step in range(3):
        loss = model(draw(rank, step, 6, 4)).square().sum()
        loss.backward()  # the graph is alive in the next forward, but has let go of what it saved
    with torch.no_grad():
        model(draw(rank, 9, 6, 4))
    assert all(a is b for a, b in zip(buffers, module.buffers(), strict=True))


def test_buffers_stay_the_same_tensors(transport: Transport) -> None:
    """In the usual loop nothing is exchanged: whoever holds a buffer sees what it becomes."""
    transport.pool(2).run(keep_identity)


class Shared(nn.Module):
    """One buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Scaled(False), Scaled(False)
        self.last.scale = self.first.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def exchange_shared(rank: int, world_size: int) -> None:
    module = Shared()
    model = DataParallel(module)
    old = module.first.scale
    first = model(draw(rank, 0, 3, 4))
    if rank == 0:
        module.first.scale = module.last.scale = module.first.scale * 2
    second = model(draw(rank, 1, 3, 4))
    assert old.tolist() == [1, 2, 3, 4]
    assert module.first.scale is module.last.scale
    assert module.first.scale.tolist() == [2, 4, 6, 8]
    (first * second).sum().backward()


def test_a_shared_buffer_stays_shared(transport: Transport) -> None:
    """A buffer of two layers that gets new memory gets it in both."""
    transport.pool(2).run(exchange_shared)
