"""Owns the tests of docs/errors.md: a scenario for each of its rows; rank 1 is at fault."""

import dataclasses
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Transport
from models import mlp, wavy_loss
from pydist import DataParallel
from ranks import Outcome, start_ranks
from reference import draw

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
AT_FAULT = 1
WIDTH = 192  # weights are large enough to be averaged where autograd wrote them, biases are not


@dataclasses.dataclass(frozen=True)
class Row:
    """What rank 1 does, and words that every rank's message holds."""

    run: Callable[[int, int], None]
    words: tuple[str, ...]


def wrapped() -> DataParallel:
    return DataParallel(mlp(WIDTH, 3))


def step(model: nn.Module, rank: int) -> None:
    wavy_loss(model(draw(rank, 0, 4, WIDTH))).backward()


def after_accumulation(parameter: nn.Parameter, action: Callable[[], None]) -> None:
    """Runs `action` as a hook of autograd's that comes after ours."""
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: action())


def wraps_another_shape(rank: int, world_size: int) -> None:
    DataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8 + rank)))


def wraps_another_dtype(rank: int, world_size: int) -> None:
    dtype = torch.float64 if rank == AT_FAULT else torch.float32
    DataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=dtype)))


def wraps_another_name(rank: int, world_size: int) -> None:
    layers = {"first": nn.Linear(8, 8), f"second{rank or ''}": nn.Linear(8, 8)}
    DataParallel(nn.ModuleDict(layers))


def wraps_frozen(rank: int, world_size: int) -> None:
    module = mlp(WIDTH, 2)
    list(module.parameters())[-1].requires_grad_(rank != AT_FAULT)
    DataParallel(module)


def wraps_with_other_settings(rank: int, world_size: int) -> None:
    DataParallel(mlp(WIDTH, 2), bucket_cap_mb=1 + rank)


def wraps_what_it_cannot(rank: int, world_size: int) -> None:
    module = mlp(WIDTH, 2)
    if rank == AT_FAULT:
        module.to("meta")
    DataParallel(module)


def converts(rank: int, world_size: int) -> None:
    model = wrapped()
    step(model, rank)
    if rank == AT_FAULT:
        model.half()
        model(draw(rank, 1, 4, WIDTH))
    step(model, rank)


def reshapes(rank: int, world_size: int) -> None:
    model = wrapped()
    if rank == AT_FAULT:
        weight = next(model.parameters())
        weight.data = weight.data.t().contiguous().t()
    step(model, rank)


def freezes(rank: int, world_size: int) -> None:
    model = wrapped()
    step(model, rank)
    next(model.parameters()).requires_grad_(rank != AT_FAULT)
    step(model, rank)


class Explosive(torch.autograd.Function):
    """Raises in backward, on the ranks that are told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.raises:
            raise ArithmeticError("a fuse blew")
        return gradient, None


class Exploding(nn.Module):
    """Two layers with an Explosive between them."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.first, self.last, self.raises = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), raises

    def forward(self, x: Tensor) -> Tensor:
        between: Tensor = Explosive.apply(self.first(x), self.raises)
        return self.last(between)  # type: ignore[no-any-return]


def raises(rank: int, world_size: int) -> None:
    model = DataParallel(Exploding(rank == AT_FAULT))
    step(model, rank)


def dies(rank: int, world_size: int) -> None:
    model = wrapped()
    step(model, rank)
    if rank == AT_FAULT:
        os._exit(86)
    step(model, rank)


def stays_away(rank: int, world_size: int) -> None:
    model = wrapped()
    step(model, rank)
    if rank == AT_FAULT:
        time.sleep(6)
    else:
        step(model, rank)


def _meddle(rank: int, action: Callable[[nn.Parameter], None]) -> None:
    """Rank 1 does something to the first gradient that backward finished, at its end."""
    model = wrapped()
    first, *_, last, _bias = model.parameters()
    step(model, rank)
    model.zero_grad()
    if rank == AT_FAULT:
        after_accumulation(first, lambda: action(last))
    step(model, rank)


def _drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


def _replace(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


def _change(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)  # type: ignore[union-attr]


def _free(parameter: nn.Parameter) -> None:
    parameter.grad.untyped_storage().resize_(0)  # type: ignore[union-attr]


def drops_gradient(rank: int, world_size: int) -> None:
    _meddle(rank, _drop)


def replaces_gradient(rank: int, world_size: int) -> None:
    _meddle(rank, _replace)


def changes_gradient(rank: int, world_size: int) -> None:
    _meddle(rank, _change)


def frees_gradient(rank: int, world_size: int) -> None:
    _meddle(rank, _free)


class Rows(nn.Module):
    """Looks rows up in a plain parameter, on rank 1 with sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.sparse_rows = sparse
        self.table = nn.Parameter(torch.ones(10, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, self.table, sparse=self.sparse_rows)


def makes_sparse(rank: int, world_size: int) -> None:
    model = DataParallel(Rows(rank == AT_FAULT))
    wavy_loss(model(torch.tensor([1, 2]))).backward()


def removes(rank: int, world_size: int) -> None:
    model = wrapped()
    step(model, rank)
    torch.distributed.barrier()
    if rank == AT_FAULT:
        model.module[2] = nn.Tanh()
    step(model, rank)


def replaces_parameter(rank: int, world_size: int) -> None:
    module = mlp(WIDTH, 2)
    model = DataParallel(module)
    step(model, rank)
    if rank == AT_FAULT:
        module[0].weight = nn.Parameter(torch.zeros(WIDTH + 1, WIDTH))
    step(model, rank)


class Skipping(nn.Module):
    """Leaves its second layer out, on the ranks that are told to."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.first, self.second, self.skips = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), skips

    def forward(self, x: Tensor) -> Tensor:
        between: Tensor = self.first(x)
        return between if self.skips else self.second(between)  # type: ignore[no-any-return]


def leaves_unused(rank: int, world_size: int) -> None:
    step(DataParallel(Skipping(rank == AT_FAULT), unused_parameters="error"), rank)


def drifts(rank: int, world_size: int) -> None:
    model = DataParallel(mlp(WIDTH, 2), audit_every=1)
    step(model, rank)
    if rank == AT_FAULT:
        with torch.no_grad():
            next(model.parameters())[3, 5] += 1
    step(model, rank)


def raises_in_hook(rank: int, world_size: int) -> None:
    def hook(state: None, bucket: torch.distributed.GradBucket) -> Any:
        if rank == AT_FAULT:
            raise ArithmeticError("a fuse blew")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = wrapped()
    model.register_comm_hook(None, hook)
    step(model, rank)


ROWS = {
    "wraps_another_shape": Row(wraps_another_shape, ("1.weight", "shape", "rank 1")),
    "wraps_another_dtype": Row(wraps_another_dtype, ("1.weight", "float64", "rank 1")),
    "wraps_another_name": Row(wraps_another_name, ("second1.", "rank 1")),
    "wraps_frozen": Row(wraps_frozen, ("requires_grad", "rank 1")),
    "wraps_with_other_settings": Row(wraps_with_other_settings, ("bucket_cap_mb", "rank 1")),
    "wraps_what_it_cannot": Row(wraps_what_it_cannot, ("0.weight", "meta")),
    "converts": Row(converts, ("0.weight", "Half", "Float", "rank 1")),
    "reshapes": Row(reshapes, ("0.weight", "strides", "rank 1")),
    "removes": Row(removes, ("2.weight", "removed", "rank 1")),
    "freezes": Row(freezes, ("0.weight", "requires_grad", "rank 1")),
    "raises": Row(raises, ()),
    "dies": Row(dies, ("rank 1",)),
    "stays_away": Row(stays_away, ("rank 1", "2")),
    "drops_gradient": Row(drops_gradient, ("4.weight", "None", "rank 1")),
    "replaces_gradient": Row(replaces_gradient, ("4.weight", "replaced", "rank 1")),
    "changes_gradient": Row(changes_gradient, ("4.weight", "modified", "rank 1")),
    "frees_gradient": Row(frees_gradient, ("4.weight", "rank 1")),
    "replaces_parameter": Row(replaces_parameter, ("0.weight", "shape", "rank 1")),
    "leaves_unused": Row(leaves_unused, ("second.weight", "rank 1")),
    "drifts": Row(drifts, ("0.weight", "rank 1")),
    "raises_in_hook": Row(raises_in_hook, ("fuse",)),
    "makes_sparse": Row(makes_sparse, ("table", "sparse", "rank 1")),
}


def documented() -> dict[str, list[str]]:
    """The error of the rank at fault and that of its peers, by row."""
    found = re.findall(r"^\| (\w+): [^|]*\|([^|]*)\|([^|]*)\|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: [own.strip(), peers.strip()] for name, own, peers in found}


def test_every_row_has_a_scenario() -> None:
    """The table and the scenarios are the same list."""
    assert documented().keys() == ROWS.keys()


def say(outcomes: list[Outcome]) -> str:
    return "\n".join(f"rank {o.rank}: {o.error}: {o.message}" for o in outcomes)


@pytest.mark.parametrize("name", ROWS)
def test_row(transport: Transport, name: str) -> None:
    """Every rank raises what the table says, within seconds, in words that name the fault."""
    own, peers = documented()[name]
    env = {**transport.env, "PYDIST_TIMEOUT_S": "2" if name == "stays_away" else "30"}
    outcomes = start_ranks(2, ROWS[name].run, env=env).join()
    if own not in ("", "its own"):
        assert outcomes[AT_FAULT].error == f"pydist.{own}", say(outcomes)
    assert outcomes[0].error == f"pydist.{peers}", say(outcomes)
    told = [outcome for outcome, error in zip(outcomes, (peers, own), strict=True) if error]
    for outcome in told:
        for word in ROWS[name].words:
            assert word in str(outcome.message), f"{word!r} is missing\n{say(outcomes)}"
