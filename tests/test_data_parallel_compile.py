"""Owns the tests of torch.compile around DataParallel and inside it."""

import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

import pydist
from pydist import DataParallel
from ranks import RankPool
from reference import OneProcess, assert_reduced, draw

# Of the layers, and the bucket_cap_mb that puts them into several buckets. Dynamo cuts the wide
# model's graph where buckets end; it does not where buckets are below 1 MiB.
SIZES = {"narrow": (24, 0.002), "wide": (520, 1.5)}


class Corners(nn.Module):
    """What torch.compile has had trouble with in wrapped modules: a layer that is used twice,
    weight normalisation, a checkpoint, a scalar output by torch.where, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.shared = nn.Linear(width, width)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.leave = nn.Linear(width, 1)
        self.register_buffer("threshold", torch.tensor(0.1))
        self.compiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.compiled = torch.compiler.is_compiling()
        hidden = self.shared(torch.tanh(self.shared(self.enter(x))))
        hidden = torch.utils.checkpoint.checkpoint(self.normed, hidden, use_reentrant=False)
        scores = self.leave(hidden).squeeze(1)
        return torch.where(scores > self.threshold, scores * scores, scores).mean()


def loss_of(module: nn.Module, rank: int, step: int, width: int) -> torch.Tensor:
    return module(draw(rank, step, 6, width))  # type: ignore[no-any-return]


def functions_of(modules: Iterable[ModuleType]) -> Iterator[FunctionType]:
    for module in modules:
        for holder in (module, *filter(inspect.isclass, vars(module).values())):
            for value in vars(holder).values():
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    yield value


def compiled_of_ours() -> list[str]:
    """Functions of pydist for which Dynamo keeps compiled code."""
    ours = [module for name, module in sys.modules.items() if name.startswith("pydist.")]
    return [
        function.__qualname__
        for function in functions_of(ours)
        if torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    ]


def run_compiled(rank: int, world_size: int, where: str, backend: str, size: str) -> list[str]:
    """Four steps, one of them under no_sync and one that accumulates."""
    torch._dynamo.reset()
    width, bucket_cap_mb = SIZES[size]
    torch.manual_seed(1)
    module = Corners(width)
    expected = OneProcess(module, world_size)
    if where == "inside":
        module.compile(backend=backend)
    wrapper = DataParallel(module, bucket_cap_mb=bucket_cap_mb)
    model = torch.compile(wrapper, backend=backend) if where == "around" else wrapper
    for step in range(4):
        wrapper.require_backward_grad_sync = step != 1
        if step != 2:
            wrapper.zero_grad()
            expected.zero_grad()
        loss_of(model, rank, step, width).backward()
        expected.backward(loss_of, step, width, synced=step != 1)
        if step != 1:
            assert_reduced(wrapper, expected)
        assert module.compiled
    return compiled_of_ours()


CONFIGURATIONS = [("aot_eager", "narrow"), ("aot_eager", "wide"), ("inductor", "narrow")]


@pytest.mark.parametrize(("backend", "size"), CONFIGURATIONS)
@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled(pool2: RankPool, where: str, backend: str, size: str) -> None:
    """Gradients are the mean over ranks whether the module is compiled or the wrapper, of which
    Dynamo compiles nothing but the module."""
    assert pool2.run(run_compiled, where, backend, size, timeout_s=300) == [[], []]


def run_compiled_autograd(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    expected = OneProcess(module, world_size)
    model = DataParallel(module)

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        return module(draw(rank, step, 4, 24)).square().sum()  # type: ignore[no-any-return]

    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    with pytest.raises(pydist.UsageError, match=f"on rank {rank}.*compiled autograd"), enabled:
        loss(model, rank, 0).backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    loss(model, rank, 1).backward()
    expected.backward(loss, 1)
    assert_reduced(model, expected)


def test_compiled_autograd(pool2: RankPool) -> None:
    """Compiled autograd runs no hooks of C++, so that nothing would be averaged: it is refused in
    one sentence, and a backward without it works afterwards."""
    pool2.run(run_compiled_autograd, timeout_s=300)
