"""Owns the tests of rounds around a pipeline stage's last backward, without a pipeline.

Each rank plays the executor: it runs several backwards of one or two stages, brackets each of them,
and finishes the rounds at the end of its list. What must come out is the mean over replicas of the
sums over microbatches.
"""

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from conftest import Transport
from models import WIDTHS, Scalars, mlp, wavy_loss
from pydist import DataParallel
from pydist._stage_reduction import Replicas
from ranks import fresh_ranks
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_reduced,
    assert_same_on_all_ranks,
    draw,
    expect_error,
    gradients,
)
from transport_differences import NAMES_DEAD_RANK

NUM_MICROBATCHES = 3
LARGE = WIDTHS["large"]

Sum = torch.futures.Future[Tensor]


def replicas_of(*stages: nn.Module, **options: Any) -> Replicas:
    """Replicas of these stages, over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return Replicas(dict(enumerate(stages)), group, options)


def microbatch_loss(module: nn.Module, rank: int, microbatch: int, width: int) -> Tensor:
    return wavy_loss(module(draw(rank, microbatch, 4, width)))


def run_backwards(replicas: Replicas, rank: int, width: int, first: int = 0) -> Any:
    """All backwards of stage 0 in one step, the round around the last; its reducer, unfinished."""
    replicas.begin_step()
    reducer = replicas.reducers()[0]
    last = first + NUM_MICROBATCHES - 1
    module = replicas.stages[0].module
    losses = [microbatch_loss(module, rank, i, width) for i in range(first, last + 1)]
    for i, loss in enumerate(losses, first):
        reducer.begin_backward(i == last and replicas.synchronizes)
        loss.backward()
        if i == last and replicas.synchronizes:
            assert reducer.published() == list(range(len(reducer.units())))
        reducer.end_backward()
    return reducer


def expect_step(expected: OneProcess, width: int, first: int = 0) -> None:
    for i in range(first, first + NUM_MICROBATCHES):
        expected.backward(microbatch_loss, i, width, synced=False)
    expected.average()


def sum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Sum:
    """A communication hook that torch has no name for: the mean, by an all-reduce."""
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    assert work is not None
    future: Sum = work.get_future().then(lambda done: done.value()[0])
    return future


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "bucket view": {"gradient_as_bucket_view": True},
    "bfloat16": {"wire_dtype": torch.bfloat16},
    "skip unused": {"skip_all_reduce_unused_params": True},
    "hook": {},
}


def equal_data_parallel(rank: int, world_size: int, width: int) -> None:
    """For every option the bits are those of DataParallel with all microbatches but the last under
    no_sync; each unit is reduced once a step, and every one before the last backward ends."""
    for name, options in OPTIONS.items():
        module = mlp(width, 2)
        model = DataParallel(copy.deepcopy(module), **options)
        expected = OneProcess(module, world_size)
        replicas = replicas_of(module, **options)
        if name == "hook":
            for hooked in (model, replicas.stages[0]):
                hooked.register_comm_hook(dist.group.WORLD, sum_hook)
        for step in range(3):
            for trained in (model, module, expected):
                trained.zero_grad(set_to_none=step != 1)
            reducer = run_backwards(replicas, rank, width, first=10 * step)
            assert reducer.is_open
            reducer.finish_round()
            assert not reducer.is_open
            with model.no_sync():
                for i in range(NUM_MICROBATCHES - 1):
                    microbatch_loss(model, rank, 10 * step + i, width).backward()
            microbatch_loss(model, rank, 10 * step + NUM_MICROBATCHES - 1, width).backward()
            for found, other in zip(gradients(module), gradients(model), strict=True):
                assert found is not None
                assert other is not None
                assert torch.equal(found, other), name
            expect_step(expected, width, 10 * step)
            if name != "bfloat16":
                assert_gradients_match(module, expected.module)
            assert_same_on_all_ranks(gradients(module))
            unit_nbytes = sum(nbytes for _, nbytes, _ in reducer.units())
            counters = reducer.counters()
            assert counters["num_rounds"] == step + 1
            assert counters["moved_nbytes"] == (step + 1) * unit_nbytes


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_c104_microbatches_are_averaged_once(
    transport: Transport, world_size: int, width: int
) -> None:
    """Three microbatches, and one reduction of each unit, within the last backward (torch's
    pipeline over DDP reduced after every microbatch)."""
    transport.pool(world_size).run(equal_data_parallel, width)


# Who uses what: by rank, then by microbatch. "e" is used by nobody.
USES = [
    [{"a": 1.0, "b": 2.0}, {"a": 3.0}, {"c": 4.0}],
    [{"b": 5.0}, {"d": 6.0}, {}],
]


def scalar_loss(module: nn.Module, rank: int, microbatch: int) -> Tensor | None:
    inputs = USES[rank][microbatch]
    return module(inputs) if inputs else None


def use_some(rank: int, world_size: int) -> None:
    module = Scalars("abcde")
    expected = OneProcess(module, world_size)
    replicas = replicas_of(module, unused_parameters="ignore", bucket_cap_mb=1e-6)
    for step in range(2):  # the second adds to what the first left
        replicas.begin_step()
        reducer = replicas.reducers()[0]
        for i in range(NUM_MICROBATCHES):
            reducer.begin_backward(i == NUM_MICROBATCHES - 1)
            loss = scalar_loss(module, rank, i)
            if loss is not None:
                loss.backward()
            reducer.end_backward()
            expected.backward(scalar_loss, i, synced=False)
        reducer.finish_round()
        expected.average()
        assert_reduced(module, expected)
        assert module.get_submodule("e").weight.grad is None
        assert [module_unused for module_unused, _ in reducer.unused_by_rank()] == [0, 2, 3, 4]
        assert replicas.stages[0].report().num_rounds == step + 1


def test_parameters_that_the_last_backward_does_not_use(transport: Transport) -> None:
    """Gradients of earlier microbatches are averaged too, also of a rank whose last microbatch is
    absent altogether; a parameter that nobody uses keeps None."""
    transport.pool(2).run(use_some)


class TwoBranches(nn.Module):
    """Two large layers, of which a microbatch may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(LARGE, LARGE, bias=False)
        self.right = nn.Linear(LARGE, LARGE, bias=False)


def branch_loss(module: nn.Module, rank: int, microbatch: int) -> Tensor:
    branch = module.left if microbatch == 0 else module.right
    return wavy_loss(branch(draw(rank, microbatch, 4, LARGE)))  # type: ignore[operator]


def stay_in_place(rank: int, world_size: int) -> dict[str, Any]:
    module = TwoBranches()
    expected = OneProcess(module, world_size)
    replicas = replicas_of(module)
    replicas.begin_step()
    reducer = replicas.reducers()[0]
    for i in range(2):
        reducer.begin_backward(i == 1)
        branch_loss(module, rank, i).backward()
        reducer.end_backward()
        expected.backward(branch_loss, i, synced=False)
    expected.average()
    before = module.left.weight.grad
    assert before is not None
    # Nobody waits for anybody, and the means are there nevertheless.
    dist.barrier()
    reducer.progress()
    dist.barrier()
    if replicas.stages[0].report().transport == "shared_memory":
        assert_gradients_match(module, expected.module)
    reducer.finish_round()
    assert module.left.weight.grad is before
    assert_reduced(module, expected)
    return dict(reducer.counters())


def test_reduction_goes_on_under_other_actions(transport: Transport) -> None:
    """Large gradients are reduced where autograd wrote them, also one that only an earlier
    microbatch used (a leaf below a custom Function gets its gradient before the last action), and
    before anybody waits for the round's end."""
    for counters in transport.pool(2).run(stay_in_place):
        if transport.name == "shared_memory":
            assert counters["born_nbytes"] == 2 * 4 * LARGE * LARGE
            assert counters["packed_nbytes"] == {}


def backward_in_two_parts(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    parameters = list(module.parameters())
    expected = OneProcess(module, world_size)
    replicas = replicas_of(module)
    for step in range(2):
        module.zero_grad()
        expected.zero_grad()
        replicas.begin_step()
        reducer = replicas.reducers()[0]
        losses = []
        for i in range(NUM_MICROBATCHES):
            x = draw(rank, i, 4, width).requires_grad_()
            losses.append(wavy_loss(module(x)))
            reducer.begin_backward(False)  # I, in which leaves might get a gradient as well
            torch.autograd.backward(losses[i], inputs=[x], retain_graph=True)
            reducer.end_backward()
            assert all(parameter.grad is None for parameter in parameters)
        for i, loss in enumerate(losses):  # W, all of them after the last I
            reducer.begin_backward(i == NUM_MICROBATCHES - 1)
            torch.autograd.backward(loss, inputs=parameters)
            reducer.end_backward()
        reducer.finish_round()
        expect_step(expected, width)
        assert_reduced(module, expected)
        assert reducer.num_rounds == step + 1


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_a_split_backward(transport: Transport, width: int) -> None:
    """Input gradients first, weight gradients later: the round is around the last of the latter."""
    transport.pool(2).run(backward_in_two_parts, width)


def through_both(modules: list[nn.Module], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Input and output of the hand-over, each with a graph of its own; and the loss."""
    sent = modules[0](x)
    received = sent.detach().requires_grad_()
    return sent, received, wavy_loss(modules[1](received))


def two_at_once(rank: int, world_size: int, width: int) -> None:
    modules = [mlp(width, 2), mlp(width, 3)]
    expected = OneProcess(nn.Sequential(*modules), world_size)
    replicas = replicas_of(*modules)
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        for trained in (*modules, expected):
            trained.zero_grad()
        replicas.begin_step()
        reducers = replicas.reducers()
        key = f"two stages/{width}/{step}"
        graphs = [through_both(modules, draw(rank, i, 4, width)) for i in range(NUM_MICROBATCHES)]
        last = NUM_MICROBATCHES - 1
        for i, (_, _, loss) in enumerate(graphs):
            if i == last and rank == 0:  # the others are through with their whole list by now
                store.wait([f"{key}/{other}" for other in range(1, world_size)])
            reducers[1].begin_backward(i == last)
            loss.backward()
            reducers[1].end_backward()
        for i, (sent, received, _) in enumerate(graphs):
            reducers[0].begin_backward(i == last)
            sent.backward(received.grad)
            reducers[0].end_backward()
            reducers[1].progress()
        assert all(reducer.is_open for reducer in reducers.values())
        store.set(f"{key}/{rank}", "")
        for stage in (1, 0):
            reducers[stage].finish_round()
        expect_step(expected, width)
        for stage, module in enumerate(modules):
            assert_gradients_match(module, expected.module.get_submodule(str(stage)))
            assert_same_on_all_ranks(gradients(module))
        store.delete_key(f"{key}/{rank}")


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_two_stages_of_one_rank(transport: Transport, width: int) -> None:
    """Rounds of two stages are open at once, and a rank comes to the end of its list although its
    replica has not begun its first round: no action waits for a replica."""
    transport.pool(2).run(two_at_once, width)


def accumulate(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    replicas = replicas_of(module)
    hook_calls = []
    module[0].weight.register_post_accumulate_grad_hook(
        lambda weight: hook_calls.append(weight.grad.clone())
    )
    for first in (0, 3):
        with replicas.no_sync():
            reducer = run_backwards(replicas, rank, 8, first)
        assert not reducer.is_open
        for i in range(first, first + NUM_MICROBATCHES):
            expected.backward(microbatch_loss, i, 8, synced=False)
        assert_gradients_match(module, expected.replicas[rank])
    run_backwards(replicas, rank, 8, 6).finish_round()
    expect_step(expected, 8, 6)
    assert_reduced(module, expected)
    assert reducer.num_rounds == 1
    # Users' hooks wait for the mean, as with DataParallel.
    assert len(hook_calls) == 1
    assert torch.equal(hook_calls[0], module[0].weight.grad)


def test_steps_accumulate_under_no_sync(transport: Transport) -> None:
    """Two steps stay local and are averaged with the third; a post-accumulate hook runs once, on
    the mean."""
    transport.pool(2).run(accumulate)


class Accident(ArithmeticError):
    """What a rank raises in its backward."""


def run_into_accident(replicas: Replicas, rank: int, microbatch: int) -> None:
    """A step in which this rank's backward of that microbatch raises, as the executor sees it."""
    replicas.begin_step()
    reducer = replicas.reducers()[0]
    for i in range(NUM_MICROBATCHES):
        x = draw(rank, i, 4, LARGE).requires_grad_()
        loss = microbatch_loss_of(replicas.stages[0].module, x, raises=i == microbatch)
        reducer.begin_backward(i == NUM_MICROBATCHES - 1)
        try:
            loss.backward()
        except Accident as error:
            replicas.fail(f"rank {rank} raised in 0B{i}: {error}")
            raise
        reducer.end_backward()
    reducer.finish_round()


def microbatch_loss_of(module: nn.Module, x: Tensor, raises: bool) -> Tensor:
    hidden = module[0](x)  # type: ignore[index]
    if raises:
        hidden.register_hook(have_accident)
    return wavy_loss(module[1:](hidden))  # type: ignore[index]


def have_accident(_: Tensor) -> None:
    raise Accident("a loss scale of minus one")


def recover(rank: int, world_size: int) -> None:
    """An accident in the first microbatch and one in the last; each step after one is sound."""
    module = mlp(LARGE, 3)
    expected = OneProcess(module, world_size)
    replicas = replicas_of(module)
    for microbatch in (0, NUM_MICROBATCHES - 1):
        if rank == 1:
            expect_error(Accident, lambda m=microbatch: run_into_accident(replicas, rank, m))
        else:
            error = expect_error(
                pydist.PeerError, lambda: run_backwards(replicas, rank, LARGE).finish_round()
            )
            assert f"rank 1 raised in 0B{microbatch}: a loss scale of minus one" in str(error)
        module.zero_grad()
        expected.zero_grad()
        run_backwards(replicas, rank, LARGE).finish_round()
        expect_step(expected, LARGE)
        assert_reduced(module, expected)
        module.zero_grad()
        expected.zero_grad()


def test_an_exception_reaches_the_replicas(transport: Transport) -> None:
    """Whoever waits for the round of a rank that raised is told its cause; the next step works."""
    transport.pool(2).run(recover)


def drift_apart(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    replicas = replicas_of(module)
    run_backwards(replicas, rank, 8).finish_round()
    dist.barrier()
    if rank == 1:
        replicas.fail("rank 1 raised after its last action")
    else:
        replicas.end_step()
        with torch.no_grad():
            module[0].weight.add_(module[0].weight.grad)  # an optimizer's step
    for _ in range(2):
        error = expect_error(pydist.MismatchError, replicas.begin_step)
        assert "parameter 0.weight" in str(error)
        assert "a step that failed" in str(error)
        assert "stage 0" in str(error)
    with torch.no_grad():
        dist.broadcast(module[0].weight, 0)
    module.zero_grad()
    run_backwards(replicas, rank, 8).finish_round()
    assert_same_on_all_ranks(gradients(module))


def hear_late(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    replicas = replicas_of(module)
    run_backwards(replicas, rank, 8).finish_round()
    dist.barrier()
    if rank == 1:
        replicas.fail("rank 1 raised after its last action")
        error = expect_error(
            pydist.PeerError, lambda: run_backwards(replicas, rank, 8).finish_round()
        )
        assert "rank 0 raised PeerError" in str(error)
    else:
        replicas.end_step()
        told = expect_error(pydist.PeerError, replicas.begin_step)
        assert "failed on another replica" in str(told)
        replicas.refuse(f"PeerError: {told}", met=True)
    module.zero_grad()
    run_backwards(replicas, rank, 8).finish_round()
    assert_same_on_all_ranks(gradients(module))


def test_a_failure_after_the_step_has_ended_elsewhere(transport: Transport) -> None:
    """A replica whose step was a success is told at its next one, which fails on both."""
    transport.pool(2).run(hear_late)


def test_replicas_that_a_failure_has_left_apart(transport: Transport) -> None:
    """A step that failed on one rank after it had ended on another leaves an optimizer step taken
    on some replicas only: the next steps raise until parameters are equal again."""
    transport.pool(2).run(drift_apart)


def lose_peer(rank: int, world_size: int) -> str:
    module = mlp(LARGE, 3)
    replicas = replicas_of(module)
    run_backwards(replicas, rank, LARGE).finish_round()
    dist.barrier()
    if rank == 1:
        module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    error = expect_error(
        pydist.PeerError, lambda: run_backwards(replicas, rank, LARGE).finish_round()
    )
    return str(error)


def test_a_replica_is_killed(transport: Transport) -> None:
    """SIGKILL in the middle of a replica's backward."""
    outcomes = fresh_ranks(2, lose_peer, env=transport.env)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].ok, outcomes[0].traceback
    if NAMES_DEAD_RANK[transport.name]:
        assert "rank 1" in outcomes[0].value


class Counting(nn.Module):
    """No parameter; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


def odd_stages(rank: int, world_size: int) -> None:
    bare, frozen, late = Counting(), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    bare.count.fill_(rank)
    frozen.weight.fill_(rank)
    late.requires_grad_(False)
    expected = OneProcess(late, world_size)
    replicas = replicas_of(bare, frozen, late, nn.ReLU())
    assert float(bare.count) == 0
    assert float(frozen.weight.sum()) == 0
    for step in range(2):
        if step == 1:
            for thawed in (late, *expected.replicas):
                thawed.requires_grad_(True)
        assert replicas.begin_step(weight=rank + 1.0) == world_size * (world_size + 1) / 2
        assert float(bare.count) == 0
        bare.count.add_(rank + 1)
        for reducer in replicas.reducers().values():
            for i in range(2):
                reducer.begin_backward(i == 1)
                if reducer is replicas.reducers()[2] and step == 1:
                    wavy_loss(late(draw(rank, i, 3, 4))).backward()
                    expected.backward(
                        lambda m, r, i=i: wavy_loss(m(draw(r, i, 3, 4))), synced=False
                    )
                reducer.end_backward()
        for reducer in replicas.reducers().values():
            reducer.finish_round()
        bare.count.sub_(1)  # 0 on the first rank again
        if step == 1:
            expected.average()
            assert_reduced(late, expected)


def test_stages_without_parameters_or_frozen(transport: Transport) -> None:
    """Stages with nothing to train, one of which thaws: state starts equal, buffers are the first
    replica's at the start of each step, and weights are summed over replicas."""
    transport.pool(2).run(odd_stages)


def build_wrongly(rank: int, world_size: int) -> None:
    error = expect_error(
        pydist.MismatchError, lambda: replicas_of(nn.ReLU(), nn.Linear(3, 3 + rank))
    )
    assert "stage 1 (Linear)" in str(error)
    for options, said in (
        ({"mixed_precision": None}, "torch.autocast"),
        ({"process_group": None}, "data_parallel_group"),
        ({"bucket_cap": 1}, "bucket_cap_mb"),
    ):
        with pytest.raises(pydist.UsageError, match=said):
            replicas_of(nn.Linear(3, 3), **options)


def test_errors_at_the_start(transport: Transport) -> None:
    """Stages that differ, and options that DataParallel has but stages have not."""
    transport.pool(2).run(build_wrongly)
