"""Owns the tests of sparse gradients: of embeddings that say sparse=True."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pydist
from conftest import Transport
from pydist import DataParallel
from reference import TOLERANCES, assert_same_on_all_ranks, difference, expect_error

Loss = Callable[[nn.Module, int], Tensor]  # of module and rank


def dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def parts_of(gradient: Tensor | None) -> list[Tensor | None]:
    if gradient is None or not gradient.is_sparse:
        return [gradient]
    assert gradient.is_coalesced()
    return [gradient.indices(), gradient.values()]


def mean_backward(module: nn.Module, world_size: int, loss: Loss) -> None:
    """What the ranks' backwards should leave: that of the mean of their losses, in one process."""
    total = torch.stack([loss(module, rank) for rank in range(world_size)]).sum()
    (total / world_size).backward()


def assert_same_gradients(model: DataParallel, expected: nn.Module) -> None:
    found = dict(model.module.named_parameters())
    for name, parameter in expected.named_parameters():
        problem = difference(dense(found[name].grad), dense(parameter.grad), 4)
        assert problem is None, f"{name}: {problem}"
        assert_same_on_all_ranks(parts_of(found[name].grad))


def assert_one_backward(
    model: DataParallel, expected: nn.Module, rank: int, world_size: int, loss: Loss
) -> None:
    loss(model, rank).backward()
    mean_backward(expected, world_size, loss)
    assert_same_gradients(model, expected)


class Words(nn.Module):
    """The sum of an embedding's rows, of which row 0 is padding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(6, 2, padding_idx=0, sparse=True, dtype=dtype)

    def forward(self, rows: list[int]) -> Tensor:
        return self.embedding(torch.tensor(rows, dtype=torch.int64))  # type: ignore[no-any-return]


def pad_on_one_rank(rank: int, world_size: int) -> None:
    module = Words()
    model = DataParallel(module)
    for _ in range(2):
        model.zero_grad()
        model([0, 0] if rank == 0 else [1, 1]).sum().backward()
        gradient = module.embedding.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        assert gradient.to_dense().tolist() == [[0, 0], [1, 1], [0, 0], [0, 0], [0, 0], [0, 0]]


def test_c37_only_padding_on_one_rank(transport: Transport) -> None:
    """One rank's batch was padding alone, so that its sparse gradient was empty, which the sparse
    all-reduce could not take: ranks failed over unequal lengths."""
    transport.pool(2).run(pad_on_one_rank)


class TwoWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Embedding(5, 3, sparse=True)
        self.b = nn.EmbeddingBag(7, 3, sparse=True, mode="sum")
        self.last = nn.Linear(3, 2)

    def forward(self, use: str, rows: Tensor) -> Tensor:
        hidden = self.a(rows).sum(1) if use == "a" else self.b(rows)
        return self.last(hidden)  # type: ignore[no-any-return]


def leave_one_unused(rank: int, world_size: int) -> None:
    module = TwoWords()
    expected = copy.deepcopy(module)
    model = DataParallel(module, find_unused_parameters=True)
    rows = torch.tensor([[1, 2], [2, 2]])
    assert_one_backward(
        model, expected, rank, world_size, lambda m, r: m("a", rows + r).square().sum()
    )
    assert module.b.weight.grad is None
    kept = module.a.weight.grad
    for _ in range(2):
        model.zero_grad()
        expected.zero_grad()
        assert_one_backward(
            model, expected, rank, world_size, lambda m, r: m("ab"[r], rows + r).square().sum()
        )
    assert kept is not None
    assert kept is not module.a.weight.grad


def warn_of_unused(rank: int, world_size: int) -> str:
    model = DataParallel(TwoWords())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model("a", torch.tensor([[1, 2]])).sum().backward()
    assert len(caught) == 1
    return str(caught[0].message)


def test_c38_an_unused_sparse_embedding(transport: Transport) -> None:
    """find_unused_parameters=True and a sparse embedding that nobody used: "sparse gradient to be
    defined". It keeps no gradient; where each rank uses another one, both are averaged."""
    transport.pool(2).run(leave_one_unused)
    for message in transport.pool(2).run(warn_of_unused):
        assert "b.weight" in message
        assert "a.weight" not in message


class Tower(nn.Module):
    """Sparse embeddings of two kinds in front of dense layers, small and large."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(40, width, sparse=True)
        self.bags = nn.EmbeddingBag(30, width, sparse=True, mode="mean")
        self.rest = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.rest(self.words(rows).sum(1) + self.bags(rows % 30))  # type: ignore[no-any-return]


def tower_loss(step: int) -> Loss:
    """Batches of another size on each rank, rows that ranks share and rows of one alone."""

    def loss(module: nn.Module, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        rows = torch.randint(0, 40, (2 + 3 * rank, 4), generator=generator)
        return module(rows).square().mean()  # type: ignore[no-any-return]

    return loss


def optimizers_of(module: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "sgd":
        return [torch.optim.SGD(module.parameters(), lr=0.1)]
    named = list(module.named_parameters())
    sparse = [p for name, p in named if not name.startswith("rest")]
    rest = [p for name, p in named if name.startswith("rest")]
    return [torch.optim.SparseAdam(sparse, lr=0.01), torch.optim.Adam(rest, lr=0.01)]


def train_tower(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> None:
    module = Tower()
    expected = copy.deepcopy(module)
    model = DataParallel(module, **options)
    mine, theirs = optimizers_of(module, kind), optimizers_of(expected, kind)
    for step in range(4):
        for optimizer in mine + theirs:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert_one_backward(model, expected, rank, world_size, tower_loss(step))
        for optimizer in mine + theirs:
            optimizer.step()
        for found, other in zip(module.parameters(), expected.parameters(), strict=True):
            assert difference(found, other, 50) is None
        assert_same_on_all_ranks(module.parameters())
    assert module.words.weight.grad is not None
    assert module.words.weight.grad.is_sparse


@pytest.mark.parametrize("kind", ["sgd", "sparse_adam"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_one_process(transport: Transport, world_size: int, kind: str) -> None:
    """Steps of optimizers that know sparse gradients, over batches of unequal size."""
    transport.pool(world_size).run(train_tower, kind, {})


def test_with_bucket_views(transport: Transport) -> None:
    transport.pool(2).run(train_tower, "sgd", {"gradient_as_bucket_view": True})


def accumulate(rank: int, world_size: int, set_to_none: bool) -> None:
    module = Tower()
    expected = copy.deepcopy(module)
    model = DataParallel(module)
    for round_number in range(3):
        for step, synced in enumerate([False, False, True, True]):  # the last on top of a mean
            loss = tower_loss(10 * round_number + step)
            with contextlib.nullcontext() if synced else model.no_sync():
                loss(model, rank).backward()
            mean_backward(expected, world_size, loss)
            if synced:
                assert_same_gradients(model, expected)
        model.zero_grad(set_to_none=set_to_none)
        expected.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(transport: Transport, set_to_none: bool) -> None:
    """Two backwards under no_sync, one that is synchronised, and one more on top of its mean."""
    transport.pool(2).run(accumulate, set_to_none)


class Repeated(nn.Module):
    """An embedding under two checkpoints: its gradient is there twice in one backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(9, 4, sparse=True)
        self.last = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, rows: Tensor) -> Tensor:
        def segment(x: Tensor) -> Tensor:
            return self.last(x + self.words(rows))  # type: ignore[no-any-return]

        x = torch.ones(len(rows), 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(segment, x, use_reentrant=self.reentrant)
        return x


def repeat(rank: int, world_size: int, reentrant: bool) -> None:
    module = Repeated(reentrant)
    expected = copy.deepcopy(module)
    model = DataParallel(module)
    for step in range(3):
        model.zero_grad()
        expected.zero_grad()

        def loss(module: nn.Module, rank: int, step: int = step) -> Tensor:
            return module(torch.arange(rank + 1, 4) + step).square().sum()  # type: ignore[no-any-return]

        assert_one_backward(model, expected, rank, world_size, loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_embedding_used_twice(transport: Transport, reentrant: bool) -> None:
    """Its gradient is ready twice, the second time long after the first: the sum is averaged."""
    transport.pool(2).run(repeat, reentrant)


class Tied(nn.Module):
    """A sparse embedding that is also used as a matrix, in all forwards or in some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(5, 3, sparse=True)

    def forward(self, rows: Tensor, as_matrix: bool) -> Tensor:
        hidden = self.words(rows)
        return F.linear(hidden, self.words.weight) if as_matrix else hidden


def use_as_matrix(rank: int, world_size: int, ranks: list[int]) -> None:
    module = Tied()
    expected = copy.deepcopy(module)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int) -> Tensor:
        return module(torch.tensor([rank, 2, 2]), rank in ranks).square().sum()  # type: ignore[no-any-return]

    for _ in range(3):  # the second on top of the dense mean of the first
        assert_one_backward(model, expected, rank, world_size, loss)
    assert module.words.weight.grad is not None
    assert not module.words.weight.grad.is_sparse


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_dense_on_some_ranks(transport: Transport, ranks: list[int]) -> None:
    """Tied weights get a dense gradient in spite of sparse=True, on all ranks or on one."""
    transport.pool(2).run(use_as_matrix, ranks)


def average_dtype(rank: int, world_size: int, dtype: torch.dtype) -> None:
    module = Words(dtype)
    model = DataParallel(module)
    factors = torch.tensor([1.0, 40000.0, 2.0**-24, 1 / 3], dtype=torch.float64)
    if dtype == torch.bfloat16:
        factors[2] = 2.0**-9 + 1
    rows = [1, 2, 3, 4]
    (model(rows).sum(1) * factors.to(dtype)).sum().backward()
    gradient = module.embedding.weight.grad
    assert gradient is not None
    expected = factors.to(dtype).double()
    found = gradient.to_dense()[1:5, 0].double()
    assert torch.allclose(found, expected, rtol=TOLERANCES[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(transport: Transport, dtype: torch.dtype) -> None:
    """Half types neither overflow in the sum nor vanish in the division."""
    transport.pool(3).run(average_dtype, dtype)


def hold_the_gradient(rank: int, world_size: int) -> None:
    module = Words()
    model = DataParallel(module)
    model([1, 2]).sum().backward()
    held = module.embedding.weight.grad
    assert held is not None
    version = held._version
    values = held.values()
    before = values.clone()
    model([1 + rank]).sum().backward()
    assert module.embedding.weight.grad is held
    assert held._version > version
    assert held.to_dense()[:3, 0].tolist() == [0, 1.5, 1.5]
    assert torch.equal(values, before)


def test_the_gradient_stays_the_same_object(transport: Transport) -> None:
    """As with dense ones: who holds the gradient sees the mean, and autograd a modification."""
    transport.pool(2).run(hold_the_gradient)


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight, sparse=True)


def use_undeclared(rank: int, world_size: int) -> str:
    model = DataParallel(Undeclared())
    kinds = (pydist.UsageError, pydist.PeerError)  # the latter where the peer was faster
    return str(expect_error(kinds, lambda: model(torch.tensor([1])).sum().backward()))


def test_an_undeclared_sparse_gradient(transport: Transport) -> None:
    """No module says sparse=True, so its place in a bucket expects a dense one."""
    pool = transport.pool(2)
    messages = pool.run(use_undeclared)
    pool.discard()  # a round that failed leaves a process group out of step
    for message in messages:
        assert "parameter weight is sparse" in message
        assert "sparse=True" in message


def declare_differently(rank: int, world_size: int) -> str:
    def wrap() -> DataParallel:
        return DataParallel(nn.Embedding(4, 2, sparse=rank == 0))

    return str(expect_error(pydist.MismatchError, wrap))


def test_ranks_that_declare_differently(transport: Transport) -> None:
    for message in transport.pool(2).run(declare_differently):
        assert "sparse" in message
        assert "weight" in message
