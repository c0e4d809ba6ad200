"""Owns the tests of join(): ranks that run out of inputs while others have some left."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import pydist
from conftest import Transport
from models import OneUnused, TwoHeads, wavy_loss
from pydist import DataParallel, MismatchError, UsageError
from ranks import RankPool, fresh_ranks
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_parameters_match,
    assert_same_on_all_ranks,
    difference,
    digest,
    draw,
    expect_error,
    gradients,
)

WIDTH = 10


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


class Epochs:
    """A model that is trained with uneven inputs, beside the replicas of one process."""

    def __init__(self, rank: int, world_size: int, module: nn.Module, **arguments: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self.expected = OneProcess(module, world_size, sgd)
        self.model = DataParallel(module, **arguments)
        self.optimizer = sgd(self.model.parameters())
        self.num_steps = 0

    def run(self, counts: list[int], loss: Callable[..., Tensor], initial: bool = True) -> None:
        """One epoch of which rank r has counts[r] steps; every gradient is compared."""
        begin = self.num_steps
        self.num_steps += max(counts)
        with self.model.join(divide_by_initial_world_size=initial):
            for step in range(counts[self.rank]):
                self.optimizer.zero_grad()
                loss(self.model, self.rank, begin + step).backward()
                self.expect(counts, loss, begin, step, initial)
                assert_gradients_match(self.model, self.expected.module)
                self.step()
            before = digest(gradients(self.model))
        for step in range(counts[self.rank], max(counts)):
            self.expect(counts, loss, begin, step, initial)
            for optimizer in self.expected.optimizers:
                optimizer.step()
        assert digest(gradients(self.model)) == before, "a rank without inputs got gradients"
        assert_parameters_match(self.model, self.expected.module)
        assert_same_on_all_ranks(self.model.module.state_dict().values())

    def step(self) -> None:
        self.optimizer.step()
        for optimizer in self.expected.optimizers:
            optimizer.step()

    def expect(
        self, counts: list[int], loss: Callable[..., Tensor], begin: int, step: int, initial: bool
    ) -> None:
        self.expected.zero_grad()
        self.expected.backward(
            lambda replica, r: loss(replica, r, begin + step) if step < counts[r] else None
        )
        num_active = sum(count > step for count in counts)
        if not initial:
            for replica in self.expected.replicas:
                for gradient in gradients(replica):
                    if gradient is not None:
                        gradient.mul_(self.world_size / num_active)


def two_heads_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    width = next(module.parameters()).shape[1]
    a, b = module(draw(rank, step, 4, width, dtype=torch.float64))
    return wavy_loss(a) if (rank + step) % 3 else wavy_loss(a) + wavy_loss(b)


def uneven_epochs(rank: int, world_size: int, width: int, bucket_view: bool) -> None:
    model = TwoHeads(width).double()  # rounding would add up over the steps
    epochs = Epochs(
        rank, world_size, model, gradient_as_bucket_view=bucket_view, find_unused_parameters=True
    )
    last = world_size - 1
    epochs.run([5] + [3] * last, two_heads_loss)
    epochs.run([1] * last + [4], two_heads_loss, initial=False)
    epochs.run([0] * last + [2], two_heads_loss)
    epochs.run([2] * world_size, two_heads_loss)
    epochs.run([2, 4, 1, 3][:world_size], two_heads_loss, initial=False)
    # Outside of it a step is as ever.
    epochs.optimizer.zero_grad()
    two_heads_loss(epochs.model, rank, 99).backward()
    epochs.expect([1] * world_size, two_heads_loss, 99, 0, True)
    assert_gradients_match(epochs.model, epochs.expected.module)


@pytest.mark.parametrize("bucket_view", [False, True], ids=["own", "views"])
@pytest.mark.parametrize("width", [WIDTH, 192], ids=["tiny", "large"])
def test_c30_ranks_may_have_different_numbers_of_inputs(
    transport: Transport, width: int, bucket_view: bool
) -> None:
    """The rank with more batches hung. Those without count as zeros, or do not count at all; their
    gradients stay; a rank may have no input from the start; epochs follow each other."""
    transport.pool(2).run(uneven_epochs, width, bucket_view)


def test_c30_three_ranks_join_one_after_the_other(transport: Transport) -> None:
    transport.pool(3).run(uneven_epochs, WIDTH, False)


class Normalised(nn.Module):
    """BatchNorm between two layers, of which the first may be frozen."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = kind(WIDTH)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def normalised_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 6, WIDTH)))


def buffers_follow(rank: int, world_size: int, counts: list[int]) -> None:
    """Buffers come from the lowest rank that has inputs, and in the end from the last to join."""
    module = Normalised(nn.BatchNorm1d)
    replicas = [copy.deepcopy(module) for _ in counts]
    model = DataParallel(module)
    with model.join():
        for step in range(counts[rank]):
            normalised_loss(model, rank, step).backward()
    for step in range(max(counts)):
        active = [r for r, count in enumerate(counts) if count > step]
        state = copy.deepcopy(dict(replicas[active[0]].named_buffers()))
        for r in active:
            replicas[r].load_state_dict(state, strict=False)
            normalised_loss(replicas[r], r, step)
    last = max(r for r, count in enumerate(counts) if count == max(counts))
    for name, buffer in model.module.named_buffers():
        expected = replicas[last].get_buffer(name)
        assert torch.allclose(buffer.double(), expected.double(), rtol=1e-5), name
    assert_same_on_all_ranks(model.module.buffers())


def test_buffers_come_from_a_rank_that_has_inputs(transport: Transport) -> None:
    for counts in ([4, 2], [1, 3], [0, 2]):
        transport.pool(2).run(buffers_follow, counts)


def buffers_stay(rank: int, world_size: int) -> None:
    module = Normalised(nn.BatchNorm1d)
    model = DataParallel(module, forward_sync_buffers=False)
    with model.join():
        for step in range(rank + 1):
            normalised_loss(model, rank, step).backward()
        mine = digest(module.buffers())
    assert digest(module.buffers()) == mine
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, mine)
    assert len(set(found)) == world_size


def test_buffers_that_are_not_shared_stay_apart(pool2: RankPool) -> None:
    pool2.run(buffers_stay)


def synchronised(rank: int, world_size: int, counts: list[int], frozen: bool) -> None:
    """Every step is one process's step on the batch of the ranks that have inputs."""
    reference = Normalised(nn.BatchNorm1d)
    reference.first.requires_grad_(not frozen)
    module = copy.deepcopy(reference)
    model = DataParallel(pydist.convert_sync_batchnorm(module))
    optimizer, expected = sgd(module.parameters()), sgd(reference.parameters())

    def step_reference(step: int) -> None:
        active = [r for r, count in enumerate(counts) if count > step]
        expected.zero_grad()
        outputs = reference(torch.cat([draw(r, step, 6, WIDTH) for r in active]))
        torch.stack([wavy_loss(output) for output in outputs.split(6)]).sum().backward()
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(world_size)
        expected.step()

    with model.join():
        for step in range(counts[rank]):
            optimizer.zero_grad()
            normalised_loss(model, rank, step).backward()
            step_reference(step)
            for name, parameter in module.named_parameters():
                problem = difference(parameter.grad, reference.get_parameter(name).grad, 50)
                assert problem is None, f"{name} in step {step}: {problem}"
            optimizer.step()
    for step in range(counts[rank], max(counts)):
        step_reference(step)
    for name, value in reference.state_dict().items():
        found = module.state_dict()[name]
        assert torch.allclose(found.double(), value.double(), rtol=1e-4, atol=1e-6), name
    assert_same_on_all_ranks(module.state_dict().values())


def test_sync_batch_norm_is_shadowed_too(transport: Transport) -> None:
    """torch's join cannot shadow these layers: the rank with more batches hung in their forward."""
    transport.pool(2).run(synchronised, [4, 2], False)
    transport.pool(2).run(synchronised, [0, 3], True)
    transport.pool(3).run(synchronised, [1, 3, 2], False)


def shapes_of_iterations(rank: int, world_size: int) -> None:
    """no_sync, several forwards for a backward, several backwards of a forward, forwards alone."""
    reference = Normalised(nn.BatchNorm1d)
    model = DataParallel(pydist.convert_sync_batchnorm(copy.deepcopy(reference)))
    with model.join():
        for step in range(2 - rank * 2 if rank < 1 else 0):
            with model.no_sync():
                normalised_loss(model, rank, 10 * step).backward()
            with torch.no_grad():
                normalised_loss(model, rank, 10 * step + 1)
            losses = [normalised_loss(model, rank, 10 * step + k) for k in (2, 3)]
            sum(losses, torch.zeros(())).backward()
            loss = normalised_loss(model, rank, 10 * step + 4)
            loss.backward(retain_graph=True)
            loss.backward()
            normalised_loss(model, rank, 10 * step + 5)
        found = [g if g is None else g.clone() for g in gradients(model)]
    if rank == 0:
        for step in range(2):
            normalised_loss(reference, 0, 10 * step).backward()
            for k in (2, 3, 4, 4):
                normalised_loss(reference, 0, 10 * step + k).backward()
                if k == 3 or k == 4:
                    halve(reference, world_size)
        for mine, parameter in zip(found, reference.parameters(), strict=True):
            assert difference(mine, parameter.grad, 50) is None
    else:
        assert found == [None] * len(found)
    assert_same_on_all_ranks(model.module.state_dict().values())


def halve(module: nn.Module, world_size: int) -> None:
    """What a mean with zeros makes of all that has been accumulated."""
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(world_size)


def test_an_iteration_may_have_any_shape(transport: Transport) -> None:
    """torch's join expects one forward and one backward, else it hangs."""
    transport.pool(2).run(shapes_of_iterations)


def unused_and_frozen(rank: int, world_size: int) -> None:
    """What no rank uses has no gradient; a rank may go on alone with a part of the model."""
    module = OneUnused(WIDTH)
    module.net2.bias.requires_grad_(False)
    epochs = Epochs(rank, world_size, module, find_unused_parameters=True)
    epochs.run([1, 3], lambda module, rank, step: wavy_loss(module(draw(rank, step, 4, WIDTH))))
    assert module.net1.weight.grad is None
    assert module.net2.bias.grad is None


def test_unused_and_frozen_parameters(transport: Transport) -> None:
    transport.pool(2).run(unused_and_frozen)


def accumulated(rank: int, world_size: int, bucket_view: bool) -> None:
    """A rank that joins with gradients of its own keeps them, and gives zeros."""
    module = nn.Linear(WIDTH, 1, bias=False)
    model = DataParallel(module, gradient_as_bucket_view=bucket_view)
    with model.join():
        model(draw(rank, 0, 4, WIDTH)).sum().backward()
        with model.no_sync():
            model(draw(rank, 1, 4, WIDTH)).sum().backward()
        assert module.weight.grad is not None
        mine = module.weight.grad.clone()
        if rank == 0:
            for step in (2, 3):
                model(draw(0, step, 4, WIDTH)).sum().backward()
                mine = (mine + draw(0, step, 4, WIDTH).sum(0)) / world_size
                assert difference(module.weight.grad, mine, 10) is None
    assert difference(module.weight.grad, mine, 10) is None


@pytest.mark.parametrize("bucket_view", [False, True], ids=["own", "views"])
def test_local_gradients_survive_joining(transport: Transport, bucket_view: bool) -> None:
    transport.pool(2).run(accumulated, bucket_view)


def alone_with_half(rank: int, world_size: int, dtype: torch.dtype) -> None:
    module = nn.Linear(WIDTH, 3).to(dtype)
    model = DataParallel(module)
    plain = copy.deepcopy(module)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 - rank):
            model.zero_grad()
            model(draw(rank, step, 4, WIDTH, dtype=dtype)).float().square().mean().backward()
    if rank == 0:
        plain(draw(0, 1, 4, WIDTH, dtype=dtype)).float().square().mean().backward()
        for found, expected in zip(gradients(model), gradients(plain), strict=True):
            assert found is not None
            assert expected is not None
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_of_the_last_rank_alone_gradients_are_its_own(
    transport: Transport, dtype: torch.dtype
) -> None:
    """Divided by one, the sum with zeros is the gradient itself, in every bit."""
    transport.pool(2).run(alone_with_half, dtype)


def freeze_meanwhile(rank: int, world_size: int) -> None:
    module = Normalised(nn.BatchNorm1d)
    model = DataParallel(module)
    with model.join():
        for step in range(4 - 3 * rank):
            module.first.requires_grad_(step % 2 == 0)
            model.zero_grad()
            normalised_loss(model, rank, step).backward()
            assert (module.first.weight.grad is None) == (step % 2 == 1)
    assert_same_on_all_ranks(module.parameters())


def test_parameters_may_freeze_while_others_have_joined(transport: Transport) -> None:
    """A rank that has joined does not run what freezes them, and must not count as different."""
    transport.pool(2).run(freeze_meanwhile)


def sparse_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    rows = torch.tensor([rank, step % 4, 5])
    return (module(rows) * draw(rank, step, 3, 4, dtype=torch.float64)).sum()


def sparse_and_uneven(rank: int, world_size: int) -> None:
    module = nn.Embedding(6, 4, sparse=True, dtype=torch.float64)
    dense = nn.Embedding(6, 4, dtype=torch.float64)
    dense.load_state_dict(module.state_dict())
    model, expected = DataParallel(module), OneProcess(dense, world_size)
    counts = [3, 1]
    with model.join():
        for step in range(counts[rank]):
            model.zero_grad()
            sparse_loss(model, rank, step).backward()
            expected.zero_grad()
            expected.backward(
                lambda m, r, step=step: sparse_loss(m, r, step) if step < counts[r] else None
            )
            found = module.weight.grad
            assert found is not None
            assert difference(found.to_dense(), gradients(expected.module)[0]) is None
        mine = digest([module.weight.grad.to_dense()])
    assert digest([module.weight.grad.to_dense()]) == mine


def test_sparse_gradients_too(transport: Transport) -> None:
    transport.pool(2).run(sparse_and_uneven)


def halving_hook(state: Any, bucket: dist.GradBucket) -> Any:
    """A communication hook of two calls."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hook_and_uneven(rank: int, world_size: int) -> None:
    epochs = Epochs(rank, world_size, TwoHeads(WIDTH).double(), find_unused_parameters=True)
    epochs.model.register_comm_hook(None, halving_hook)
    epochs.run([3, 1], two_heads_loss)
    epochs.run([0, 2], two_heads_loss)


def test_communication_hooks_get_zeros(transport: Transport) -> None:
    transport.pool(2).run(hook_and_uneven)


def one_after_the_other(rank: int, world_size: int) -> None:
    """A context that was made and not used, or was disabled, is no part of the next one."""
    models = [DataParallel(nn.Linear(WIDTH, 1, bias=False)) for _ in range(3)]
    Join([models[0]])
    with models[1].join(enable=False):
        pass
    for model in (models[2], models[0]):
        with model.join(divide_by_initial_world_size=False):
            for step in range(3 * rank):
                model.zero_grad()
                x = draw(rank, step, 4, WIDTH)
                model(x).sum().backward()
                assert difference(gradients(model)[0], x.sum(0, keepdim=True), 10) is None


def test_sessions_are_kept_apart(pool2: RankPool) -> None:
    pool2.run(one_after_the_other)


def evaluate_alone(rank: int, world_size: int) -> None:
    model = DataParallel(nn.Linear(WIDTH, 1))
    with model.join():
        for step in range(2 + rank):
            model(draw(rank, step, 4, WIDTH)).sum().backward()
            if rank == 0:
                model.eval()
                with torch.no_grad():
                    model(draw(rank, step, 4, WIDTH))
                model.train()
    assert_same_on_all_ranks(model.module.parameters())


def test_one_rank_may_evaluate_meanwhile(pool2: RankPool) -> None:
    """In torch every forward within join() waits for the other ranks."""
    pool2.run(evaluate_alone)


def terminate(rank: int, world_size: int) -> None:
    model = DataParallel(Normalised(nn.SyncBatchNorm))
    num_steps = 0

    def run() -> None:
        nonlocal num_steps
        with model.join(throw_on_early_termination=True):
            for step in range(5 if rank == 0 else 2):
                normalised_loss(model, rank, step).backward()
                num_steps += 1

    message = str(expect_error(RuntimeError, run))
    assert num_steps == 2
    assert ("at least one rank that exhausted" if rank == 0 else "Rank 1 exhausted") in message
    normalised_loss(model, rank, 9).backward()
    assert_same_on_all_ranks(gradients(model))


def test_all_stop_when_the_first_runs_out(transport: Transport) -> None:
    transport.pool(2).run(terminate)


def disabled(rank: int, world_size: int) -> None:
    module = nn.Linear(WIDTH, 1)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int) -> Tensor:
        return wavy_loss(module(draw(rank, 0, 4, WIDTH)))

    with model.join(enable=False):
        loss(model, rank).backward()
    expected.backward(loss)
    assert_gradients_match(model, expected.module)
    if rank == 0:  # after join() no forward counts the ranks any more
        with model.join():
            pass
        model.eval()
        model(draw(0, 0, 4, WIDTH))
    else:
        with model.join():
            pass
    dist.barrier()


def test_outside_and_disabled_nothing_is_counted(pool2: RankPool) -> None:
    """After torch's join ended, a forward on one rank alone still hung."""
    pool2.run(disabled)


def sharded(model: nn.Module, kind: type[torch.optim.Optimizer]) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to import

    return ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.01)


def with_zero(rank: int, world_size: int, counts: list[int]) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    expected = OneProcess(module, world_size, lambda p: torch.optim.Adam(p, lr=0.01))
    model = DataParallel(module)
    optimizer = sharded(model, torch.optim.Adam)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor | None:
        if step >= counts[rank]:
            return None
        return wavy_loss(module(draw(rank, step, 4, WIDTH)))

    with Join([model, optimizer]):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            local = loss(model, rank, step)
            assert local is not None
            local.backward()
            optimizer.step()
    for step in range(max(counts)):
        expected.step(loss, step)
    assert_parameters_match(model, expected.module, factor=100)
    assert_same_on_all_ranks(model.module.parameters())


def test_an_optimizer_in_shards_goes_on(transport: Transport) -> None:
    """A rank that has joined steps its shard with its last gradient over and over in torch; here
    with the mean of the others."""
    transport.pool(2).run(with_zero, [4, 2])
    transport.pool(2).run(with_zero, [1, 3])


def two_models(rank: int, world_size: int, interleaved: bool) -> None:
    modules = [nn.Linear(WIDTH, 3), Normalised(nn.SyncBatchNorm)]
    models = [DataParallel(module) for module in modules]
    optimizers = [sgd(model.parameters()) for model in models]
    with Join(models):
        for step in range(3 - 2 * rank):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x = draw(rank, step, 6, WIDTH)
            if interleaved:
                losses = [wavy_loss(model(x)) for model in models]
                for loss in losses:
                    loss.backward()
            else:
                for model in models:
                    wavy_loss(model(x)).backward()
            for optimizer in optimizers:
                optimizer.step()
    for module in modules:
        assert_same_on_all_ranks(module.state_dict().values())


def test_two_models_may_take_turns(transport: Transport) -> None:
    """The two networks of a GAN, say: one after the other, or forwards first."""
    for interleaved in (False, True):
        transport.pool(2).run(two_models, interleaved)


def twice_in_an_iteration(rank: int, world_size: int) -> None:
    model = DataParallel(nn.Linear(WIDTH, 1))

    def run() -> None:
        with Join([model]):
            for _ in range(2 - 2 * rank):
                loss = model(draw(rank, 0, 4, WIDTH)).sum()
                loss.backward(retain_graph=True)
                loss.backward()

    error = expect_error(RuntimeError if rank else UsageError, run)
    if rank == 0:
        assert "use model.join()" in str(error), error


def test_torchs_join_has_one_backward_per_iteration() -> None:
    """A second one, which joined ranks could not know of, hung."""
    outcomes = fresh_ranks(2, twice_in_an_iteration, group_timeout_s=10)
    assert [outcome.ok for outcome in outcomes] == [True, True], outcomes


def wrong_order(rank: int, world_size: int) -> None:
    model = DataParallel(nn.Linear(WIDTH, 1))
    optimizer = sharded(model, torch.optim.SGD)

    def run() -> None:
        with Join([optimizer, model]):
            model(draw(rank, 0, 4, WIDTH)).sum().backward()

    assert "not the first in Join" in str(expect_error(UsageError, run))


def other_group(rank: int, world_size: int) -> None:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    module = pydist.convert_sync_batchnorm(Normalised(nn.BatchNorm1d), alone)
    model = DataParallel(module)
    error = expect_error(UsageError, model.join)
    assert "layer norm" in str(error), error


def test_what_cannot_be_shadowed_is_refused(pool2: RankPool) -> None:
    pool2.run(wrong_order)
    pool2.run(other_group)


def different_things(rank: int, world_size: int) -> None:
    model = DataParallel(nn.Linear(WIDTH, 1))

    def run() -> None:
        with model.join():
            for _ in range([0, 2, 2][rank]):
                output = model(draw(rank, 0, 4, WIDTH))
                if rank == 1:
                    output.sum().backward()

    message = str(expect_error(MismatchError, run))
    assert "rank 1 goes on with a backward of DataParallel(Linear)" in message, message
    assert "rank 2 goes on with the end of an iteration" in message, message


def test_active_ranks_must_agree() -> None:
    """One rank with inputs left the backward out: the third, without any, waited for ever."""
    for outcome in fresh_ranks(3, different_things):
        assert outcome.ok, outcome


def copied(rank: int, world_size: int) -> None:
    model = DataParallel(nn.Linear(WIDTH, 1))
    with model.join(), contextlib.suppress(StopIteration):
        model(draw(rank, 0, 4, WIDTH)).sum().backward()
        other = copy.deepcopy(model)
    with other.join():
        for step in range(rank + 1):
            other(draw(rank, step, 4, WIDTH)).sum().backward()
    assert_same_on_all_ranks(other.module.parameters())


def test_a_copy_joins_for_itself(pool2: RankPool) -> None:
    pool2.run(copied)
