"""Owns the tests of what user code does to gradients after, and in the middle of, a backward."""

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from conftest import Transport
from models import WIDTHS, TwoLayers, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_parameters_match,
    assert_reduced,
    assert_same_on_all_ranks,
    digest,
    draw,
    expect_error,
    gradients,
)


def two_layers(width: int) -> TwoLayers:
    torch.manual_seed(1)
    return TwoLayers(width)


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    width = next(iter(module.parameters())).shape[-1]
    return wavy_loss(module(draw(rank, step, 4, width)))


def backward_both(model: nn.Module, expected: OneProcess, rank: int, step: int) -> None:
    """One backward of the wrapper and of the emulation."""
    loss_of(model, rank, step).backward()
    expected.backward(loss_of, step)


def set_data(gradient: Tensor) -> None:
    gradient.data = gradient.clone()


ACTIONS: dict[str, Callable[[Tensor], Any]] = {
    "share_memory": lambda gradient: gradient.share_memory_(),
    "shrink": lambda gradient: gradient.untyped_storage().resize_(0),
    "data": set_data,
    "set": lambda gradient: gradient.set_(gradient.clone()),  # type: ignore[call-overload]
}


def act_during_round(rank: int, world_size: int, action: str, width: int) -> str:
    module = two_layers(width)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(2):
        model.zero_grad()
        expected.zero_grad()
        backward_both(model, expected, rank, step)

    def act() -> None:
        if action == "drop":
            module.last.weight.grad = None
        else:
            assert module.last.weight.grad is not None
            ACTIONS[action](module.last.weight.grad)

    model.zero_grad()
    expected.zero_grad()
    module.between = act
    dist.barrier()  # a peer that is still in the round before would fail with it
    try:
        backward_both(model, expected, rank, 2)
    except pydist.UsageError as error:
        return str(error)
    except pydist.PeerError:
        return "peer refused"  # it was the faster one
    assert_reduced(model, expected)
    return "right"


@pytest.mark.parametrize("width", list(WIDTHS.values()))
@pytest.mark.parametrize("action", [*ACTIONS, "drop"])
def test_gradient_memory_exchanged_during_the_round(
    transport: Transport, action: str, width: int
) -> None:
    """A hook moves, frees or replaces the memory of a gradient that peers may be reading: the
    result is right, or UsageError names the parameter; never a crash or another value."""
    outcomes = transport.pool(2).run(act_during_round, action, width)
    if set(outcomes) == {"right"}:
        assert action != "shrink"
    else:
        assert any("last.weight" in outcome for outcome in outcomes)
        assert "right" not in outcomes


def drop_in_hook(rank: int, world_size: int, width: int) -> str:
    module = two_layers(width)
    weight = module.last.weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def drop(*_: Any) -> None:
        weight.grad = None

    node.register_hook(drop)
    model = DataParallel(module)
    errors = (pydist.UsageError, pydist.PeerError)  # whoever is faster lets the peer know
    return str(expect_error(errors, lambda: loss_of(model, rank, 0).backward()))


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_a_gradient_that_is_gone_at_once(transport: Transport, width: int) -> None:
    """A hook on autograd's own node steps an optimizer, say, and sets .grad to None before the
    reduction: replicas would drift apart silently, so the error names the parameter."""
    messages = transport.pool(2).run(drop_in_hook, width)
    assert any("last.weight" in message for message in messages)


def keep_many(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    model = DataParallel(module)
    kept = []
    for step in range(25):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        for gradient in gradients(model):
            assert gradient is not None
            kept.append((gradient, gradient.clone(), gradient.numpy()))
    for gradient, copied, view in kept:
        assert torch.equal(gradient, copied)
        assert (view == copied.numpy()).all()
    assert_same_on_all_ranks(gradient for gradient, _, _ in kept)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_gradients_kept_for_many_steps(transport: Transport, width: int) -> None:
    """A user collects the gradients of 25 steps, as tensors and as numpy views: their memory is
    never taken back for a later round."""
    transport.pool(2).run(keep_many, width)


def copy_everywhere(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    model = DataParallel(module)
    loss_of(model, rank, 0).backward()
    before = digest(gradients(model))
    buffer = io.BytesIO()
    torch.save(gradients(model), buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(gradients(model)),
        pickle.loads(pickle.dumps(gradients(model))),
        torch.load(buffer),
        [None if g is None else torch.from_numpy(g.numpy().copy()) for g in gradients(model)],
    ]
    for gradient in gradients(model):  # outside a round this is the user's own business
        assert gradient is not None
        gradient.share_memory_()
    copies.append(gradients(model))
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    assert [digest(each) for each in copies[:-1]] == [before] * 4
    for gradient in gradients(model):
        assert gradient is not None
        gradient.untyped_storage().resize_(0)
    model.zero_grad()
    loss_of(model, rank, 2).backward()
    assert_same_on_all_ranks(gradients(model))


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_gradients_are_ordinary_tensors(transport: Transport, width: int) -> None:
    """deepcopy, pickle, torch.save, numpy, share_memory_ and resize_ after backward see ordinary
    memory, and later steps do not disturb the copies."""
    transport.pool(2).run(copy_everywhere, width)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.001, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.001, foreach=True),
}


def clip_and_step(rank: int, world_size: int, optimizer: str, width: int) -> None:
    module = mlp(width, 2, torch.float64)
    expected = OneProcess(module, world_size, OPTIMIZERS[optimizer])
    model = DataParallel(module)
    mine = OPTIMIZERS[optimizer](model.parameters())

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return wavy_loss(module(draw(rank, step, 4, width, dtype=torch.float64)))

    for step in range(3):
        mine.zero_grad()
        expected.zero_grad()
        loss(model, rank, step).backward()
        expected.backward(loss, step)
        found = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in expected.replicas]
        torch.testing.assert_close(found, norms[0], rtol=1e-12, atol=0)
        assert_reduced(model, expected)
        for each in (mine, *expected.optimizers):
            each.step()
        assert_parameters_match(model, expected.module)
        assert_same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_clipping_and_fused_optimizers(transport: Transport, optimizer: str) -> None:
    """Clipping writes to the gradients in place and fused optimizers read them by pointer: both
    see the mean and do not disturb the next round."""
    pool = transport.pool(2)
    for width in WIDTHS.values():
        pool.run(clip_and_step, optimizer, width)


def scale_and_step(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size, lambda p: torch.optim.SGD(p, lr=0.01))
    model = DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        overflow = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale(loss_of(model, rank, step) * overflow).backward()
        scaler.unscale_(optimizer)
        if step != 1:
            expected.zero_grad()
            expected.backward(loss_of, step)
            assert_reduced(model, expected)
            for each in expected.optimizers:
                each.step()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        assert_parameters_match(model, expected.module)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_grad_scaler(transport: Transport, width: int) -> None:
    """One rank's loss overflows: the infinity reaches the gradients of all ranks, so that all
    skip the step and halve the scale together."""
    transport.pool(2).run(scale_and_step, width)


def flatten_gradients(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size)
    flat = torch.zeros(sum(parameter.numel() for parameter in module.parameters()))
    offset = 0
    for parameter in module.parameters():
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    model = DataParallel(module)
    for step in range(3):
        flat.zero_()
        expected.zero_grad()
        backward_both(model, expected, rank, step)
        assert_reduced(model, expected)
        assert torch.equal(
            flat, torch.cat([g.flatten() for g in gradients(model) if g is not None])
        )


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_gradients_in_one_flat_buffer(transport: Transport, width: int) -> None:
    """Somebody made every .grad a view of one flat tensor: the means arrive in that tensor."""
    transport.pool(2).run(flatten_gradients, width)


def save_for_autograd(rank: int, world_size: int, width: int) -> int:
    """The largest version of a gradient after one backward."""
    module = two_layers(width)
    model = DataParallel(module)
    loss_of(model, rank, 0).backward()
    versions = [gradient._version for gradient in gradients(model) if gradient is not None]
    model.zero_grad()
    products: list[Tensor] = []
    factor = torch.ones((), requires_grad=True)

    weight = module.last.weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def multiply(*_: Any) -> None:
        with torch.enable_grad():
            assert weight.grad is not None
            products.append((weight.grad * factor).sum())

    hook = node.register_hook(multiply)
    loss_of(model, rank, 1).backward()
    hook.remove()
    error = expect_error(RuntimeError, products[0].backward)
    assert "modified by an inplace operation" in str(error)
    return max(versions)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_reduction_counts_as_a_modification(transport: Transport, width: int) -> None:
    """A graph that saved the local gradient must not go on with the mean unnoticed: autograd sees
    the reduction as an in-place operation, one and no more."""
    for version in transport.pool(2).run(save_for_autograd, width):
        assert version <= 2


def read_in_child(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(3):
        model.zero_grad()
        expected.zero_grad()
        backward_both(model, expected, rank, step)
        before = digest(gradients(model))
        child = os.fork()
        if child == 0:
            try:
                assert digest(gradients(model)) == before
                for gradient in gradients(model):
                    assert gradient is not None
                    gradient.fill_(7)
                    assert float(gradient.sum()) == 7 * gradient.numel()
                model.zero_grad()  # frees them, in the child alone
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, "the child did not read the right gradients"
        assert digest(gradients(model)) == before
        assert_reduced(model, expected)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_gradients_in_a_forked_child(transport: Transport, width: int) -> None:
    """A forked child reads the gradients of its parent; what it writes and frees stays private."""
    transport.pool(2).run(read_in_child, width)
