"""Owns the tests of what users reported: several losses, nesting, derivatives, batches, buffers."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pydist
from conftest import Transport
from models import WIDTHS, Scalar, TwoHeads, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_gradients_match,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_step_reduced,
    difference,
    digest,
    draw,
    expect_error,
    gradients,
)


def loss_of(module: nn.Module, rank: int, step: int, width: int = 8) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, width)))


def head_losses(module: nn.Module, rank: int, step: int) -> tuple[Tensor, Tensor]:
    a, b = module(draw(rank, step, 4, 10))
    return wavy_loss(a), wavy_loss(b)


def sum_of_losses(module: nn.Module, rank: int, step: int) -> Tensor:
    return torch.stack(head_losses(module, rank, step)).sum()


def backward_twice(rank: int, world_size: int) -> None:
    module = TwoHeads()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, static_graph=True)

    def both(step: int) -> None:
        first, second = head_losses(model, rank, step)
        first.backward(retain_graph=True)
        second.backward()

    for step in (0, 2):
        with model.no_sync():
            both(step)
        expected.backward(sum_of_losses, step, synced=False)
        assert_gradients_match(model, expected.replicas[rank])
        both(step + 1)
        expected.backward(sum_of_losses, step + 1)
        assert_reduced(model, expected)


def test_c19_two_losses_of_one_forward(transport: Transport) -> None:
    """static_graph=True, the first use inside no_sync, and a backward for each of two losses of
    one forward: an internal assertion. Under no_sync both stay local; else each is a round."""
    transport.pool(2).run(backward_twice)


class Nested(nn.Module):
    """A wrapped layer, under a checkpoint or not, in front of a plain one."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner: nn.Module = nn.Linear(192, 192)
        self.last = nn.Linear(192, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.inner(x))  # type: ignore[no-any-return]
        x = x.requires_grad_()
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def nest(rank: int, world_size: int, reentrant: bool | None) -> None:
    module = Nested(reentrant)
    expected = OneProcess(module, world_size)
    inner = DataParallel(module.inner)
    module.inner = inner
    model = DataParallel(module)

    def found_gradients() -> list[Tensor | None]:
        return [parameter.grad for parameter in model.parameters()]

    def assert_like(replica: nn.Module) -> None:
        for found, parameter in zip(found_gradients(), replica.parameters(), strict=True):
            problem = difference(found, parameter.grad)
            assert problem is None, problem

    for step in range(2):
        model.zero_grad()
        expected.zero_grad()
        with model.no_sync():
            loss_of(model, rank, step, 192).backward()
        expected.backward(loss_of, step, 192, synced=False)
        assert_like(expected.replicas[rank])
        assert model.report().num_rounds == step
        loss_of(model, rank, step + 5, 192).backward()
        expected.backward(loss_of, step + 5, 192)
        assert_like(expected.module)
        assert_same_on_all_ranks(found_gradients())
    assert inner.report().num_rounds == 0
    model.zero_grad()
    expected.zero_grad()
    loss_of(inner, rank, 9, 192).backward()  # by itself it is a wrapper like any other
    expected.backward(lambda replica, rank: loss_of(replica.inner, rank, 9, 192))  # type: ignore[arg-type]
    assert_like(expected.module)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_c22_a_wrapper_inside_a_wrapper(transport: Transport, reentrant: bool | None) -> None:
    """The inner wrapper went on averaging inside the outer one's no_sync, and both wrote to the
    same gradients. Inside another one a wrapper stands aside, also where a checkpoint runs it again
    in backward; called by itself it averages."""
    transport.pool(2).run(nest, reentrant)


def nest_ignored(rank: int, world_size: int) -> None:
    module = Nested(None)
    expected = OneProcess(module, world_size)
    inner = DataParallel(module.inner)
    module.inner = inner
    names = [f"inner.{name}" for name, _ in inner.named_parameters()]
    mark = DataParallel._set_params_and_buffers_to_ignore_for_model
    mark(module, names[:1])
    text = str(expect_error(pydist.UsageError, lambda: DataParallel(module)))
    assert names[0] in text
    assert names[1] in text
    mark(module, names)
    model = DataParallel(module)
    loss_of(model, rank, 0, 192).backward()
    expected.backward(loss_of, 0, 192)
    for found, right in zip(model.parameters(), expected.module.parameters(), strict=True):
        problem = difference(found.grad, right.grad)
        assert problem is None, problem
    assert inner.report().num_rounds == 1


def test_an_inner_wrapper_that_is_ignored_averages(transport: Transport) -> None:
    """Recommender systems let an outer wrapper ignore the parameters of wrappers inside: those go
    on averaging them. To ignore a part of them makes no sense."""
    transport.pool(2).run(nest_ignored)


def nest_torchs(rank: int, world_size: int) -> str:
    inner = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    wrap = nn.Sequential(nn.Linear(4, 4), inner)
    return str(expect_error(pydist.UsageError, lambda: DataParallel(wrap)))


def test_torchs_wrapper_inside_ours_is_refused(transport: Transport) -> None:
    """torch's class does not know to stand aside."""
    for message in transport.pool(2).run(nest_torchs):
        assert "module 1 " in message


class Cube(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), 2.0))

    def forward(self, x: float) -> Tensor:
        return (self.weight**3 * x).sum()


def differentiate_twice(rank: int, world_size: int, as_view: bool, numel: int) -> list[str]:
    module = Cube(numel)
    model = DataParallel(module, gradient_as_bucket_view=as_view)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(1.0 + rank).backward(create_graph=True)
        gradient = module.weight.grad
        assert gradient is not None
        assert torch.equal(gradient.detach(), torch.full((numel,), 3 * 4 * 1.5))
        assert gradient.requires_grad
        found.append(str(expect_error(pydist.UsageError, gradient.square().sum().backward)))
    return found


def penalize(rank: int, world_size: int, order: str) -> None:
    """The penalty is the square of the inner gradient 3 w^2 x, its own gradient 36 w^3 x^2."""
    module = Cube(5)
    model = DataParallel(module)
    of_output, of_penalty = 12 * 1.5, 36 * 8 * (1 + 4) / 2
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        output = model(1.0 + rank)
        (inner,) = torch.autograd.grad(output, module.weight, create_graph=True)
        penalty = inner.square().sum()
        if order == "sum":
            (output + penalty).backward()
        elif order == "penalty":
            penalty.backward()
        elif order == "penalty first":
            penalty.backward(retain_graph=True)
            output.backward()
        else:
            del output
            model(1.0 + rank).backward()
            penalty.backward()
        mean = of_penalty + (0 if order == "penalty" else of_output)
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [mean] * 5


@pytest.mark.parametrize("order", ["sum", "penalty", "penalty first", "penalty last"])
def test_gradient_penalties(transport: Transport, order: str) -> None:
    """A penalty on torch.autograd.grad(create_graph=True) reaches parameters past the wrapper's
    outputs: its backward is a round, together with that of the output, before or after it."""
    transport.pool(2).run(penalize, order)


@pytest.mark.parametrize("numel", [1, 50_000])
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_c40_gradients_of_gradients(transport: Transport, as_view: bool, numel: int) -> None:
    """backward(create_graph=True) raised, or left a gradient whose own graph was local while its
    value was the mean: a backward through it was wrong silently, and is an error here."""
    for messages in transport.pool(2).run(differentiate_twice, as_view, numel):
        for message in messages:
            assert "parameter weight" in message
            assert "torch.autograd.grad" in message


def unequal_batches(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    batches = [draw(0, 0, 1, 5), draw(1, 0, 3, 5)]
    whole = copy.deepcopy(module)
    whole(torch.cat(batches)).square().mean().backward()
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def local_mean(module: nn.Module, rank: int) -> Tensor:
        return module(batches[rank]).square().mean()  # type: ignore[no-any-return]

    local_mean(model, rank).backward()
    expected.backward(local_mean)
    assert_reduced(model, expected)
    assert not torch.allclose(module[0].weight.grad, whole[0].weight.grad)  # type: ignore[arg-type]
    model.zero_grad()
    (local_mean(model, rank) * len(batches[rank]) * world_size / 4).backward()
    assert_gradients_match(model, whole)


def test_c42_batches_of_unequal_size(transport: Transport) -> None:
    """The mean of the ranks' means is not the mean of all samples. It is what a drop-in gives;
    weighted by local_batch * world_size / global_batch a loss gives the other."""
    transport.pool(2).run(unequal_batches)


def evaluate_together(rank: int, world_size: int, no_grad: bool) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, digest(module.buffers()))
    assert len(set(digests)) == world_size  # each has seen other data last
    model.eval()
    with torch.set_grad_enabled(not no_grad):
        output = model(draw(0, 9, 4, 8))
    assert_same_on_all_ranks([output.detach(), *model.state_dict().values()])


@pytest.mark.parametrize("no_grad", [True, False])
def test_c50_running_statistics_at_evaluation(transport: Transport, no_grad: bool) -> None:
    """After the last training forward running statistics differ between ranks, so evaluation and
    checkpoints did. The first forward of the evaluation gives all ranks rank 0's."""
    transport.pool(2).run(evaluate_together, no_grad)


class Marked(nn.Parameter):
    """A subclass of parameters, as quantisation and metadata libraries have."""


class WithSubclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Marked(torch.ones(3))

    def forward(self, x: float) -> Tensor:
        return self.weight * x


def wrap_subclass_and_lazy(rank: int, world_size: int) -> None:
    model = DataParallel(WithSubclass())
    model(1.0 + rank).sum().backward()
    assert model.module.weight.grad.tolist() == [1.5] * 3
    lazy = nn.LazyLinear(3)
    lazy(draw(rank, 0, 2, 4))
    lazy_model = DataParallel(lazy)
    expected = OneProcess(lazy, world_size)
    for step in range(2):
        lazy_model.zero_grad()
        expected.zero_grad()
        loss_of(lazy_model, rank, step, 4).backward()
        expected.backward(loss_of, step, 4)
        assert_reduced(lazy_model, expected)


def test_c67_subclasses_and_materialized_parameters(transport: Transport) -> None:
    """A subclass of Parameter was taken for an uninitialised one; a lazy module can be wrapped
    once a forward has given it its shapes."""
    transport.pool(2).run(wrap_subclass_and_lazy)


def wrap_meta(rank: int, world_size: int) -> str:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    error = expect_error(pydist.UsageError, lambda: DataParallel(module))
    DataParallel(Scalar())(1.0).backward()
    return str(error)


def test_c72_meta_device(transport: Transport) -> None:
    """A module without data is refused in Python, not by a crash in C++."""
    for message in transport.pool(2).run(wrap_meta):
        assert "parameter weight" in message
        assert "meta" in message


def toggle_many(rank: int, world_size: int, width: int) -> None:
    module = mlp(width, 2)
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        return loss_of(module, rank, step, width)

    for step in range(3):
        torch.autograd.grad(loss(model, rank, 30 + step), list(module.parameters()))
        x = draw(rank, step, 4, width).requires_grad_()
        (inner,) = torch.autograd.grad(model(x).sum(), x)
        assert all(g is None for g in gradients(model)) or step > 0
        assert inner.shape == x.shape
        assert_step_reduced(model, expected, loss, rank, step)


@pytest.mark.parametrize("width", list(WIDTHS.values()))
def test_autograd_grad_reduces_nothing(transport: Transport, width: int) -> None:
    """torch.autograd.grad gives local gradients, of parameters and of inputs, between steps."""
    transport.pool(2).run(toggle_many, width)
