"""Owns the tests of model.report(): its counters, and how much is born where peers can read it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from conftest import Transport
from models import KINDS, Transformer, mlp, wavy_loss
from pydist import DataParallel
from reference import draw
from transport_differences import HAS_ARENA


def gradient_nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def change(before: Any, after: Any) -> dict[str, Any]:
    """What the counters counted between two reports."""
    reasons = set(before.packed_nbytes) | set(after.packed_nbytes)
    return {
        "born": after.born_nbytes - before.born_nbytes,
        "moved": after.moved_nbytes - before.moved_nbytes,
        "rounds": after.num_rounds - before.num_rounds,
        "packed": {
            reason: after.packed_nbytes.get(reason, 0) - before.packed_nbytes.get(reason, 0)
            for reason in reasons
        },
    }


def count_steps(model: DataParallel, loss: Any, num_steps: int) -> dict[str, Any]:
    """Counters over some steps after two that may be different."""
    for step in range(2):
        model.zero_grad()
        loss(step).backward()
    before = model.report()
    for step in range(num_steps):
        model.zero_grad()
        loss(step).backward()
    return change(before, model.report())


def report_mlp(rank: int, world_size: int) -> tuple[dict[str, Any], int]:
    model = DataParallel(mlp(1024, 8))
    counted = count_steps(model, lambda step: wavy_loss(model(draw(rank, step, 16, 1024))), 3)
    return counted, 3 * gradient_nbytes(model)


def report_transformer(rank: int, world_size: int) -> tuple[dict[str, Any], int]:
    torch.manual_seed(1)
    model = DataParallel(Transformer(256, 6))

    def loss(step: int) -> Tensor:
        tokens = draw(rank, step, 4, 32).abs().mul(100).long() % 512
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())

    return count_steps(model, loss, 3), 3 * gradient_nbytes(model)


def check_shares(counted: dict[str, Any], total_nbytes: int, has_arena: bool) -> None:
    assert counted["rounds"] == 3
    assert counted["moved"] >= total_nbytes
    counted_nbytes = counted["born"] + sum(counted["packed"].values())
    assert total_nbytes <= counted_nbytes <= 1.02 * total_nbytes  # buckets may have gaps
    if has_arena:
        assert counted["born"] >= 0.95 * total_nbytes, counted["packed"]
    else:
        assert counted["born"] == 0


def test_gradients_of_an_mlp_are_born_in_the_arena(transport: Transport) -> None:
    """At least 95 % of the gradient bytes of 8 layers of width 1024 are reduced where autograd
    wrote them."""
    for counted, total_nbytes in transport.pool(2).run(report_mlp):
        check_shares(counted, total_nbytes, HAS_ARENA[transport.name])


def test_gradients_of_a_transformer_are_born_in_the_arena(transport: Transport) -> None:
    """The same for a transformer of 6 layers and width 256."""
    for counted, total_nbytes in transport.pool(2).run(report_transformer):
        check_shares(counted, total_nbytes, HAS_ARENA[transport.name])


def report_reasons(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Counters of models whose gradients cannot be reduced where they are."""
    found = {}
    width = 192

    def loss(model: nn.Module, step: int) -> Tensor:
        return wavy_loss(model(draw(rank, step, 4, width)))

    small = DataParallel(mlp(16, 2))
    found["small"] = count_steps(small, lambda step: wavy_loss(small(draw(rank, step, 4, 16))), 2)

    shared = DataParallel(KINDS["cat"].module("large"))
    found["shared"] = count_steps(shared, lambda step: loss(shared, step), 2)

    views = DataParallel(mlp(width, 1), gradient_as_bucket_view=True)
    found["views"] = count_steps(views, lambda step: loss(views, step), 2)
    return found


def test_reasons_for_packing(transport: Transport) -> None:
    """The report tells small gradients, those that share memory, and bucket views apart."""
    for found in transport.pool(2).run(report_reasons):
        reasons = [
            {
                reason
                for reason, nbytes in found[name]["packed"].items()
                if nbytes > 10_000 or (name == "small" and nbytes > 0)
            }
            for name in ("small", "shared", "views")
        ]
        assert all(len(each) == 1 for each in reasons)
        if HAS_ARENA[transport.name]:
            assert len(set.union(*reasons)) == 3
        assert found["views"]["born"] == found["shared"]["born"] == found["small"]["born"] == 0


def read_report(rank: int, world_size: int) -> str:
    model = DataParallel(mlp(192, 2))
    empty = model.report()
    assert empty.num_rounds == 0
    assert empty.born_nbytes == 0
    assert sum(empty.packed_nbytes.values()) == 0
    for step in range(2):
        wavy_loss(model(draw(rank, step, 4, 192))).backward()
    report = model.report()
    assert report.num_rounds == 2
    assert report.num_buckets >= 1
    assert report.wait_s >= 0
    assert report.moved_nbytes > 0
    assert dataclasses.is_dataclass(report)
    return str(report)


def test_report_is_readable(transport: Transport) -> None:
    """The counters start at zero, and as text they are a few lines that name the model and the
    transport."""
    for text in transport.pool(2).run(read_report):
        assert "Sequential" in text
        assert transport.name in text
        assert 3 <= len(text.splitlines()) <= 20
