"""Owns the tests of communication hooks: what a hook is given, and what becomes of its result.

A hook gets contiguous buckets of undivided gradients, in order, one after another, and its result
becomes the gradient on every rank. When it raises, nobody hangs and nobody trains on.
"""

import functools
import gc
import random
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import pydist
from conftest import Transport
from models import mlp, wavy_loss
from pydist import DataParallel
from ranks import fresh_ranks
from reference import (
    OneProcess,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    difference,
    draw,
    expect_error,
    gradients,
)

SMALL_MB = 400 / 2**20  # several buckets for the models here


class Mixed(nn.Module):
    """Parameters of several dtypes and strides, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(20, 3, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(x)).flatten(1)
        turned = self.wide(hidden.double()) * torch.view_as_real(self.turn).sum(1)
        return turned + (self.turn * self.turn).imag


def mixed_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, 3, 3, 3)))


class Watching:
    """A hook that averages, and notes the buckets that it gets."""

    def __init__(self) -> None:
        self.buckets: list[dist.GradBucket] = []
        self.raw: list[tuple[Tensor, Tensor]] = []

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Any:
        assert state == "state"
        self.buckets.append(bucket)
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        self.raw += [(parameter, gradient.clone()) for parameter, gradient in pairs]
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def watch_buckets(rank: int, world_size: int, views: bool) -> None:
    module = Mixed()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, gradient_as_bucket_view=views, bucket_cap_mb=SMALL_MB)
    hook = Watching()
    model.register_comm_hook("state", hook)
    module.unused.grad = torch.full((7,), float(rank))
    for step in range(3):
        hook.buckets.clear()
        hook.raw.clear()
        kept = module.unused.grad
        for parameter in module.parameters():
            parameter.grad = None if parameter is not module.unused else kept
        expected.zero_grad()
        mixed_loss(model, rank, step).backward()
        expected.backward(mixed_loss, step, synced=False)
        local = dict(zip(module.parameters(), expected.replicas[rank].parameters(), strict=True))
        assert [bucket.index() for bucket in hook.buckets] == list(range(len(hook.buckets)))
        assert [bucket.is_last() for bucket in hook.buckets].count(True) == 1
        assert hook.buckets[-1].is_last()
        assert len(hook.buckets) > 2
        assert {id(parameter) for parameter, _ in hook.raw} == {id(p) for p in local}
        for parameter, gradient in hook.raw:  # undivided, and shaped like the parameter
            if parameter is not module.unused:
                assert difference(gradient, local[parameter].grad) is None
        expected.average()
        expected.module.unused.grad = torch.full((7,), float(rank))
        assert module.unused.grad is not None
        assert bool((module.unused.grad == rank).all())
        for name, parameter in module.named_parameters():
            assert difference(parameter.grad, expected.module.get_parameter(name).grad) is None, (
                name
            )
            if views and parameter is not module.unused:
                assert parameter.grad is not None
                memory = {bucket.buffer().untyped_storage().data_ptr() for bucket in hook.buckets}
                assert parameter.grad.untyped_storage().data_ptr() in memory
        expected.zero_grad()
    assert_same_on_all_ranks([p.grad for p in module.parameters() if p is not module.unused])


@pytest.mark.parametrize("views", [False, True])
def test_c47_a_hook_gets_undivided_gradients_in_buckets(transport: Transport, views: bool) -> None:
    """Every backward the hook gets each bucket once and in order, is_last() on the last alone; a
    bucket's gradients are the local ones, also where strides are not row-major or numbers complex;
    and the gradients that training sees are its results, bucket views where asked for. A parameter
    that no rank used keeps its gradient, which is a rank's own, although it travelled along."""
    transport.pool(2).run(watch_buckets, views)


def train_with_hook(rank: int, world_size: int) -> None:
    module = mlp(40, 4)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, bucket_cap_mb=0.01)
    model.register_comm_hook(None, default_hooks.allreduce_hook)

    def loss_of(replica: nn.Module, r: int, step: int) -> Tensor:
        return wavy_loss(replica(draw(r, step, 4, 40)))

    for step in range(3):
        assert_step_reduced(model, expected, loss_of, rank, step)
    with model.no_sync():
        loss_of(model, rank, 3).backward()
    expected.backward(loss_of, 3, synced=False)
    loss_of(model, rank, 4).backward()
    expected.backward(loss_of, 4)
    assert_reduced(model, expected)

    def partial_loss(replica: nn.Module, r: int, step: int) -> Tensor:
        start = 0 if r == 0 else 4  # the other ranks leave two layers out
        inner = replica.module if isinstance(replica, DataParallel) else replica
        if isinstance(replica, DataParallel):
            inner.first_layer = start
            return wavy_loss(replica(draw(r, step, 4, 40)))
        return wavy_loss(inner[start:](draw(r, step, 4, 40)))

    module.forward = lambda x: nn.Sequential(*list(module)[module.first_layer :])(x)
    assert_step_reduced(model, expected, partial_loss, rank, 5)


def test_gradients_are_the_same_with_an_all_reduce_hook(transport: Transport) -> None:
    """Mean gradients over several buckets with torch's plain hook: step after step, accumulated
    under no_sync, and with layers that only one rank uses."""
    transport.pool(3).run(train_with_hook)


def call_chains(rank: int, world_size: int) -> None:
    module = mlp(40, 6)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, bucket_cap_mb=0.001)
    delays = random.Random(rank)

    def two_calls(state: Any, bucket: dist.GradBucket) -> Any:
        time.sleep(delays.uniform(0, 2e-3))

        def second(future: Any) -> Tensor:
            time.sleep(delays.uniform(0, 2e-3))
            total = future.value()[0]
            dist.all_reduce(total)
            return total / world_size**2

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(second)

    model.register_comm_hook(None, two_calls)
    for step in range(6):
        assert_step_reduced(
            model, expected, lambda m, r, s: wavy_loss(m(draw(r, s, 4, 40))), rank, step
        )


def test_callbacks_that_communicate_keep_their_order(transport: Transport) -> None:
    """A hook whose callback makes a second collective call, with ranks at different speeds: calls
    of two buckets would mix in an order of its own on every rank, and gradients with them, were
    buckets not handed over one after another."""
    transport.pool(2).run(call_chains)


def raise_everywhere(rank: int, world_size: int, where: str) -> None:
    module = mlp(40, 3)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, bucket_cap_mb=0.001)
    raising = False

    def hook(state: Any, bucket: dist.GradBucket) -> Any:
        if raising and where == "call" and bucket.index() == 1:
            raise ArithmeticError(f"no such luck on rank {rank}")
        future = default_hooks.allreduce_hook(dist.group.WORLD, bucket)

        def check(result: Any) -> Tensor:
            if raising and where == "callback" and bucket.is_last():
                raise ArithmeticError(f"no such luck on rank {rank}")
            return result.value()  # type: ignore[no-any-return]

        return future.then(check)

    model.register_comm_hook(None, hook)
    step = functools.partial(
        assert_step_reduced, model, expected, lambda m, r, s: wavy_loss(m(draw(r, s, 4, 40))), rank
    )
    step(0)
    for attempt in range(2):
        raising = True
        error = expect_error(Exception, lambda: wavy_loss(model(draw(rank, 1, 4, 40))).backward())
        assert f"no such luck on rank {rank}" in str(error), error
        if where == "call":
            assert isinstance(error, ArithmeticError)
        raising = False
        step(2 + attempt)


@pytest.mark.parametrize("where", ["call", "callback"])
def test_c47_training_goes_on_after_a_hook_raised_everywhere(
    transport: Transport, where: str
) -> None:
    """A hook that raises on all ranks, in the call or in its future's callback: each rank's
    backward raises that rank's own error, and the next step is right; twice."""
    transport.pool(2).run(raise_everywhere, where)


def raise_on_one(rank: int, world_size: int, case: str) -> None:
    model = DataParallel(mlp(40, 3), bucket_cap_mb=0.001)

    def hook(state: Any, bucket: dist.GradBucket) -> Any:
        if rank == 1 and bucket.index() == 1:
            raise ArithmeticError("a loss scale of minus one")
        if case == "local":
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, hook)
    kind = ArithmeticError if rank == 1 else pydist.PeerError
    start_s = time.monotonic()
    error = expect_error(kind, lambda: wavy_loss(model(draw(rank, 1, 4, 40))).backward())
    assert time.monotonic() - start_s < 10
    assert "minus one" in str(error)
    if rank == 0:
        for part in ("rank 1", "communication hook", "bucket 1", "parameter", "ArithmeticError"):
            assert part in str(error), error
    expect_error(pydist.PeerError, lambda: model(draw(rank, 1, 4, 40)).sum().backward())


@pytest.mark.parametrize("case", ["waiting", "local"])
def test_a_hook_that_raises_on_one_rank_is_named_on_all(transport: Transport, case: str) -> None:
    """Rank 1's hook raises for the second bucket: its backward raises that error; rank 0, which
    waits for the same bucket or has no reason to wait at all, learns who raised and what. After
    that the group is unusable, and says so."""
    for outcome in fresh_ranks(2, raise_on_one, case, env=transport.env):
        assert outcome.ok, outcome.traceback


def return_nonsense(rank: int, world_size: int) -> list[str]:
    texts = []
    for result in (lambda b: b.buffer()[1:].clone(), lambda b: "nothing", None):
        model = DataParallel(mlp(8, 1))

        def hook(state: Any, bucket: dist.GradBucket, result: Any = result) -> Any:
            if result is None:
                return bucket.buffer()
            future: Any = torch.futures.Future()
            future.set_result(result(bucket))
            return future

        model.register_comm_hook(None, hook)
        error = expect_error(Exception, lambda m=model: m(draw(rank, 0, 2, 8)).sum().backward())
        texts.append(str(error))
    return texts


def test_a_result_that_is_no_gradient_raises(transport: Transport) -> None:
    """A future of too few elements names the bucket and both numbers; a future of a string, and
    something that is no future, raise too."""
    for short, string, no_future in transport.pool(2).run(return_nonsense):
        assert "bucket 0 (a bucket of 2 parameters (0.bias to 0.weight))" in short
        assert "71 elements" in short
        assert "the 72 in the bucket" in short
        assert string
        assert "Future" in no_future


def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]


def refuse(rank: int, world_size: int) -> None:
    def no_bucket(state: Any, gradients: Any) -> Any: ...
    def other_bucket(state: Any, bucket: int) -> Any: ...
    def other_result(state: Any, bucket: dist.GradBucket) -> int:
        return 1

    model = DataParallel(mlp(8, 1))
    refused: list[tuple[Any, type[Exception], str]] = [
        ({}, TypeError, "Communication hook must be callable."),
        (no_bucket, ValueError, "parameter named bucket"),
        (other_bucket, ValueError, "bucket annotation should be dist.GradBucket."),
        (other_result, ValueError, "return annotation should be torch.futures.Future"),
    ]
    for candidate, kind, text in refused:
        error = expect_error(kind, lambda c=candidate: model.register_comm_hook(None, c))
        assert text in str(error)
    expect_error(ValueError, lambda: model._register_builtin_comm_hook("allreduce"))
    with model.no_sync():
        model(draw(rank, 0, 2, 8)).sum().backward()
    error = expect_error(ValueError, lambda: model.register_comm_hook(None, hook))
    assert "before the first backward" in str(error)
    model(draw(rank, 0, 2, 8)).sum().backward()
    error = expect_error(
        pydist.MismatchError,
        lambda: model.register_comm_hook(None, hook if rank == 0 else default_hooks.allreduce_hook),
    )
    assert "communication hook" in str(error)
    assert "rank 1" in str(error)
    model.register_comm_hook(None, functools.partial(hook))  # which has no name
    for again in (
        lambda: model.register_comm_hook(None, hook),
        lambda: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        error = expect_error(RuntimeError, again)
        assert "can only be called once" in str(error)
    assert len(model._comm_hooks) == 1


def test_what_is_no_hook_is_refused(transport: Transport) -> None:
    """Things that are no hooks are refused in torch's words; so are hooks that differ between
    ranks, a second hook, and one that comes while gradients wait to be averaged. None of it makes
    the model unusable."""
    transport.pool(2).run(refuse)


class Twice(nn.Module):
    """Its first layer is ready twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(12, 12)
        self.last = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.last(x)  # type: ignore[no-any-return]


def become_ready_twice(rank: int, world_size: int, views: bool) -> None:
    module = Twice()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=views)
    hook = Watching()
    model.register_comm_hook("state", hook)

    def loss_of(replica: nn.Module, r: int, step: int) -> Tensor:
        return wavy_loss(replica(draw(r, step, 3, 12).requires_grad_()))

    for step in range(3):
        hook.buckets.clear()
        assert_step_reduced(model, expected, loss_of, rank, step)
        assert [bucket.is_last() for bucket in hook.buckets].count(True) == 1
        if step > 0:
            indices = [bucket.index() for bucket in hook.buckets]
            assert indices == list(range(len(indices)))


@pytest.mark.parametrize("views", [False, True])
def test_parameters_that_are_ready_twice(transport: Transport, views: bool) -> None:
    """A layer used twice under reentrant checkpointing: its second gradient goes to the hook in a
    second call in the first backward; from then on the hook gets every bucket once, with the sum.
    The last bucket comes once in each backward."""
    transport.pool(2).run(become_ready_twice, views)


def train_alone(rank: int, world_size: int) -> None:
    model = DataParallel(mlp(8, 2))
    watching = Watching()
    model.register_comm_hook("state", watching)
    assert_step_reduced(
        model,
        OneProcess(model.module, 1),
        lambda m, r, s: wavy_loss(m(draw(r, s, 2, 8))),
        rank,
        0,
    )
    assert len(watching.buckets) == 1
    # A hook that knows its model keeps neither alive.
    reference = weakref.ref(model)
    watching.model = model  # type: ignore[attr-defined]
    del model, watching
    gc.collect()
    assert reference() is None


def test_a_single_rank_has_hooks_too(transport: Transport) -> None:
    """A hook is called also where there is nobody to communicate with, as in torch; and a hook that
    refers to its model can be freed together with it."""
    transport.pool(1).run(train_alone)


def copy_and_name(rank: int, world_size: int) -> None:
    import copy

    model = DataParallel(mlp(8, 2))
    assert "comm_hook" not in model.__dict__
    model.register_comm_hook(None, hook)
    twin = copy.deepcopy(model)
    assert twin._comm_hooks == []
    twin.register_comm_hook("state", Watching())
    for each in (model, twin):
        each(draw(rank, 0, 2, 8)).sum().backward()
    assert difference(gradients(model)[0], gradients(twin)[0]) is None


def test_a_copy_starts_without_hooks(transport: Transport) -> None:
    """As in torch, a copy of a model has no hook and may get another one."""
    transport.pool(2).run(copy_and_name)
