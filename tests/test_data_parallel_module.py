"""Owns the tests of what the wrapper is to its user: a module like torch's, freed when dropped."""

import collections
import copy
import gc
import pickle
import threading
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from conftest import Transport
from models import Scalar, Scalars, TwoHeads, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    draw,
    gradients,
)


def loss_of(module: nn.Module, rank: int, step: int, width: int = 8) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


def behave_as_a_module(rank: int, world_size: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    model = DataParallel(module)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert model.module is module
    assert [name for name, _ in model.named_parameters()] == [
        f"module.{name}" for name, _ in module.named_parameters()
    ]
    model.eval()
    assert not module.training
    assert not module[1].training
    model.train()  # type: ignore[no-untyped-call]
    assert module[1].training
    assert model.process_group is torch.distributed.group.WORLD
    assert model.require_backward_grad_sync is True
    assert type(model).__name__ in repr(model)
    assert model.to(torch.float32) is model


def test_the_wrapper_is_a_module(transport: Transport) -> None:
    """isinstance of torch's class, parameters under "module.", train and eval passed on."""
    transport.pool(2).run(behave_as_a_module)


def use_state_dict(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    model = DataParallel(module)
    state = model.state_dict()
    assert list(state) == [f"module.{name}" for name in module.state_dict()]
    changed = {name: value + 1 for name, value in state.items()}
    assert str(model.load_state_dict(changed)) == "<All keys matched successfully>"
    assert torch.equal(module.get_parameter("0.bias"), changed["module.0.bias"])
    nn.modules.utils.consume_prefix_in_state_dict_if_present(changed, "module.")
    module.load_state_dict(changed)
    expected = OneProcess(module, world_size)
    for step in range(2):
        assert_step_reduced(model, expected, loss_of, rank, step)


def test_c66_state_dict(transport: Transport) -> None:
    """Names have the "module." prefix, a strict load takes them, torch's function strips them,
    and a step after a load is right."""
    transport.pool(2).run(use_state_dict)


class Passing(nn.Module):
    """Returns what it was given, beside a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        return self.weight * scale, args, kwargs


class Opaque:
    """An argument of a type that nobody knows."""


Pair = collections.namedtuple("Pair", ["left", "right"])


def pass_anything(rank: int, world_size: int) -> None:
    model = DataParallel(Passing())
    opaque, table, pair = Opaque(), {"a": torch.ones(1)}, Pair(torch.zeros(1), None)
    product, args, kwargs = model(opaque, None, table, pair, scale=2.0, more=[opaque])
    assert args[0] is opaque
    assert args[1] is None
    assert args[2] is table
    assert args[3] is pair
    assert kwargs["more"][0] is opaque
    (product.sum() * (rank + 1)).backward()
    assert model.module.weight.grad.tolist() == [3.0, 3.0, 3.0]
    model.zero_grad()
    model()[0].sum().backward()
    assert model.module.weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_c62_arguments_pass_unchanged(transport: Transport) -> None:
    """Any object, dicts, named tuples, keyword arguments and none at all reach forward as they
    are, so that what forward does to them is seen outside."""
    transport.pool(2).run(pass_anything)


def run_without_gradients(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(3):
        with torch.no_grad():
            assert not model(draw(rank, step, 4, 8)).requires_grad
        with torch.inference_mode():
            model(draw(rank, step, 4, 8))
        model.eval()
        if rank == 0:  # evaluating on one rank alone involves nobody else
            with torch.no_grad():
                model(draw(rank, step, 4, 8))
            loss_of(module, rank, step).detach()
        model.train()  # type: ignore[no-untyped-call]
        model(draw(rank, step, 4, 8))  # a forward without a backward
        torch.autograd.grad(loss_of(model, rank, 100), list(module.parameters()))
        assert_step_reduced(model, expected, loss_of, rank, step)


def test_forwards_without_backward(transport: Transport) -> None:
    """no_grad, inference_mode, evaluation on one rank alone, a dropped output, and
    torch.autograd.grad, which reduces nothing, leave the next step right."""
    transport.pool(2).run(run_without_gradients)


class NoGradientOutput(nn.Module):
    """Its output has no graph, or only for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: float) -> Tensor:
        return self.weight * x if x > 0 else torch.tensor(x)


def output_without_graph(rank: int, world_size: int) -> None:
    model = DataParallel(NoGradientOutput())
    for _ in range(3):
        model.zero_grad()
        assert not model(-1.0).requires_grad
        model(1.0 + rank).backward()
        assert float(model.module.weight.grad) == 1.5


def test_outputs_without_a_graph(transport: Transport) -> None:
    """A forward whose output needs no gradient opens nothing that a later step would stumble on."""
    transport.pool(2).run(output_without_graph)


class WithIndices(nn.Module):
    """Holds a parameter of integers, which cannot have a gradient, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.indices = nn.Parameter(torch.arange(4), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: float) -> Tensor:
        return (self.weight[self.indices] * self.frozen * x).sum()


def train_with_indices(rank: int, world_size: int) -> None:
    module = WithIndices()
    with torch.no_grad():
        module.indices.add_(rank)
        module.frozen.add_(rank)
        module.mask.fill_(bool(rank))
    model = DataParallel(module)
    assert module.indices.tolist() == [0, 1, 2, 3]
    assert module.frozen.tolist() == [1.0] * 4
    assert module.mask.tolist() == [False, False]
    for _ in range(2):
        model.zero_grad()
        model(1.0 + rank).backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [1.5] * 4
        assert module.frozen.grad is None


def test_parameters_that_are_not_trained(transport: Transport) -> None:
    """Integer, bool and frozen parameters come from rank 0 at the start and get no gradient."""
    transport.pool(2).run(train_with_indices)


def call_the_module(rank: int, world_size: int) -> None:
    module = Scalars("ab")
    model = DataParallel(module)
    for _ in range(2):
        model.zero_grad()
        if rank == 0:
            module({"a": 5.0}).backward()  # past the wrapper, on one rank alone
            model.zero_grad()
        model({"a": 1.0 + rank, "b": 1.0}).backward()
        assert float(module.get_parameter("a.weight").grad or 0) == 1.5


def test_c23_calling_the_module_itself(transport: Transport) -> None:
    """A backward through model.module is that rank's own affair: nobody waits, and the next step
    through the wrapper is right."""
    transport.pool(2).run(call_the_module)


def share_one_backward(rank: int, world_size: int) -> None:
    module = TwoHeads()
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def losses(module: nn.Module, rank: int, step: int) -> tuple[Tensor, Tensor]:
        a, b = module(draw(rank, step, 4, 10))
        return wavy_loss(a), wavy_loss(b)

    def sum_of_losses(module: nn.Module, rank: int, step: int) -> Tensor:
        return torch.stack(losses(module, rank, step)).sum()

    for step in range(3):
        model.zero_grad()
        expected.zero_grad()
        torch.autograd.backward(list(losses(model, rank, step)))
        expected.backward(sum_of_losses, step)
        assert_reduced(model, expected)


def test_two_roots_of_one_backward(transport: Transport) -> None:
    """torch.autograd.backward of two outputs at once is one round."""
    transport.pool(2).run(share_one_backward)


def retain_graph(rank: int, world_size: int) -> None:
    module = mlp(8, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(2):
        loss = loss_of(model, rank, step)
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            expected.backward(loss_of, step)
        assert_gradients_match(model, expected.module)
        assert_same_on_all_ranks(gradients(model))


def test_one_graph_twice(transport: Transport) -> None:
    """backward(retain_graph=True) and backward again: both are rounds, and the sum of both means
    is left."""
    transport.pool(2).run(retain_graph)


def copy_and_pickle(rank: int, world_size: int) -> None:
    model = DataParallel(mlp(8, 2))
    loss_of(model, rank, 0).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        expected = OneProcess(other.module, world_size)
        expected.zero_grad()
        other.zero_grad()
        loss_of(other, rank, 1).backward()
        expected.backward(loss_of, 1)
        assert_reduced(other, expected)
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    assert_reduced(model, expected)


def test_c65_deepcopy_and_pickle(transport: Transport) -> None:
    """A copy of the wrapper on every rank trains by itself, and the original goes on."""
    transport.pool(2).run(copy_and_pickle)


def drop_and_look(rank: int, world_size: int) -> list[bool]:
    module = mlp(192, 2)
    model = DataParallel(module)
    dead = []
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, rank, 0, 192).backward()
    optimizer.step()
    watched: list[weakref.ref[Any]] = [
        weakref.ref(module),
        weakref.ref(model),
        weakref.ref(module[0].weight),
    ]
    del model, module, optimizer
    gc.collect()
    dead += [each() is None for each in watched]

    # The module lives on, trains alone, and can be wrapped again.
    module = mlp(8, 2)
    model = DataParallel(module)
    loss_of(model, rank, 0).backward()
    watched = [weakref.ref(model)]
    del model
    gc.collect()
    dead += [each() is None for each in watched]
    module.zero_grad()
    expected = OneProcess(module, world_size)
    loss_of(module, rank, 1).backward()
    expected.backward(loss_of, 1, synced=False)
    assert_gradients_match(module, expected.replicas[rank])
    model = DataParallel(module)
    model.zero_grad()
    expected.zero_grad()
    loss_of(model, rank, 2).backward()
    expected.backward(loss_of, 2)
    assert_reduced(model, expected)
    return dead


def test_c69_the_wrapper_is_freed(transport: Transport) -> None:
    """After del nothing keeps wrapper, module or parameters alive; a module that outlives its
    wrapper trains alone again, and can be wrapped anew."""
    for dead in transport.pool(2).run(drop_and_look):
        assert all(dead)


def gradients_outlive(rank: int, world_size: int, as_view: bool) -> None:
    module = mlp(192, 2)
    model = DataParallel(module, gradient_as_bucket_view=as_view)
    loss_of(model, rank, 0, 192).backward()
    found = [(gradient, gradient.clone()) for gradient in gradients(model) if gradient is not None]
    del model, module
    gc.collect()
    other = DataParallel(Scalar())
    other(1.0).backward()
    for gradient, copied in found:
        assert torch.equal(gradient, copied)
        gradient.mul_(2)


def test_gradients_outlive_the_wrapper(transport: Transport) -> None:
    """Gradients that the user kept are readable and writable after the wrapper is gone, parts of
    buckets too."""
    for as_view in (False, True):
        transport.pool(2).run(gradients_outlive, as_view)


def train_in_threads(rank: int, world_size: int) -> None:
    module = mlp(192, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)
    for step in range(4):
        model.zero_grad()
        expected.zero_grad()
        loss = loss_of(model, rank, step, 192)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        expected.backward(loss_of, step, 192)
        assert_reduced(model, expected)


def test_backward_in_another_thread(transport: Transport) -> None:
    """Forward in one thread and backward in a new one each time."""
    transport.pool(2).run(train_in_threads)


def train_quietly(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        for step in range(3):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        with model.no_sync():
            loss_of(model, rank, 3).backward()
        model.report()


def test_ordinary_use_warns_of_nothing(transport: Transport) -> None:
    """Neither wrapping nor training says anything that the user can do nothing about."""
    transport.pool(2).run(train_quietly)


class ReturnsParameter(nn.Module):
    """Its output is a parameter itself, which no operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight


def return_a_parameter(rank: int, world_size: int) -> None:
    model = DataParallel(ReturnsParameter())
    for _ in range(3):
        model.zero_grad()
        (model() * (rank + 1)).sum().backward()
        assert model.module.weight.grad.tolist() == [1.5] * 3


def test_the_output_is_a_parameter(transport: Transport) -> None:
    """An output without a node in the graph, on which no hook can sit, still means a round."""
    transport.pool(2).run(return_a_parameter)
