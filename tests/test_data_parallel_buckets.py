"""Owns the tests of what bucket_cap_mb_list and batched_grad_copy mean."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conftest import Transport
from models import Scalar, mlp, wavy_loss
from pydist import DataParallel, MismatchError, UsageError
from reference import OneProcess, assert_step_reduced, digest, draw, expect_error, gradients

KIB = 1 / 1024  # in MiB


class TwoTypes(nn.Module):
    """Small layers of two types in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Linear(20 + i % 3, 20 + (i + 1) % 3, dtype=torch.float64 if i % 2 else torch.float32)
            for i in range(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, 20)))


def bucket(rank: int, world_size: int, sizes: list[float]) -> None:
    module = TwoTypes()
    expected = OneProcess(module, world_size)
    model = DataParallel(module, bucket_cap_mb=7, bucket_cap_mb_list=sizes)
    nbytes = [int(size * 2**20) for size in sizes]
    assert model.bucket_bytes_cap_list == nbytes
    assert model.bucket_bytes_cap == max(nbytes)
    assert not model.bucket_bytes_cap_default
    backwards = list(module.parameters())[::-1]
    wanted, _ = dist._compute_bucket_assignment_by_size(backwards, nbytes, [False] * len(backwards))
    last = len(backwards) - 1
    found = [members for _, _, members in model._reducer.units()]
    assert sorted(found) == sorted([last - i for i in indices] for indices in wanted)
    assert len({len(members) for members in found}) > 1
    for step in range(2):
        assert_step_reduced(model, expected, loss_of, rank, step)


@pytest.mark.parametrize("sizes", [[KIB, 9 * KIB], [9 * KIB, 4 * KIB, KIB], [5 * KIB]])
def test_bucket_cap_mb_list(transport: Transport, sizes: list[float]) -> None:
    """The first bucket of a type closes at the first size, the second at the second, all further
    ones at the last: torch's own assignment of the parameters in the order of backward."""
    transport.pool(2).run(bucket, sizes)


def read_caps(rank: int, world_size: int) -> None:
    cases: list[tuple[dict[str, Any], int, list[int], bool]] = [
        ({}, 25 * 2**20, [], True),
        ({"bucket_cap_mb": 3}, 3 * 2**20, [], False),
        ({"bucket_cap_mb_list": []}, 25 * 2**20, [], True),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [2, 3, 1]}, 3 * 2**20, [2, 3, 1], False),
    ]
    for options, cap, sizes, is_default in cases:
        model = DataParallel(Scalar(), **options)
        assert model.bucket_bytes_cap == cap
        assert model.bucket_bytes_cap_list == [size * 2**20 for size in sizes]
        assert model.bucket_bytes_cap_default == is_default
    for name, value in (("bucket_cap_mb", "5"), ("bucket_cap_mb_list", [1, float("inf")])):
        error = expect_error(UsageError, functools.partial(DataParallel, Scalar(), **{name: value}))
        assert name in str(error)
    error = expect_error(
        MismatchError, lambda: DataParallel(Scalar(), bucket_cap_mb_list=[1, 2 + rank])
    )
    assert "bucket_cap_mb" in str(error)


def test_attributes_of_bucket_sizes(transport: Transport) -> None:
    """torch's attributes in bytes; a list wins over one size; nonsense and ranks that disagree are
    refused."""
    transport.pool(2).run(read_caps)


def copy_in_batches(rank: int, world_size: int) -> None:
    found = []
    for batched in (False, True):
        model = DataParallel(mlp(30, 4), batched_grad_copy=batched)
        assert model.batched_grad_copy == batched
        loss = wavy_loss(model(draw(rank, 0, 4, 30)))
        loss.backward()
        report = model.report()
        found.append((digest(gradients(model)), report.packed_nbytes, report.moved_nbytes))
    assert found[0] == found[1]


def test_batched_grad_copy(transport: Transport) -> None:
    """A bucket is always packed in one pass once all of it is ready, which is what the flag asks
    torch for: with it nothing is different."""
    transport.pool(2).run(copy_in_batches)
