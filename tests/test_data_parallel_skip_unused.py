"""Owns the tests of skip_all_reduce_unused_params: fewer bytes, and right whatever is used."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Transport
from models import Scalars
from pydist import DataParallel
from reference import OneProcess, assert_reduced
from transport_differences import MOVES_ONLY_WHAT_IS_USED

NAMES = "abcdef"
SCALAR_NBYTES = 4


def wrap(module: nn.Module, **options: Any) -> DataParallel:
    """Every scalar is a unit."""
    return DataParallel(module, find_unused_parameters=True, bucket_cap_mb=1e-9, **options)


def count_bytes(rank: int, world_size: int, skip: bool, steps: list[str]) -> list[int]:
    """Bytes that each step moved."""
    model = wrap(Scalars(NAMES), skip_all_reduce_unused_params=skip)
    assert model.skip_all_reduce_unused_params == skip
    moved = [0]
    for names in steps:
        model(dict.fromkeys(names, 1.0)).backward()
        moved.append(model.report().moved_nbytes)
    return [after - before for before, after in itertools.pairwise(moved)]


def test_what_nobody_uses_does_not_travel(transport: Transport) -> None:
    """From the second step on, only what the last step used and what this one turns out to use is
    reduced; without the flag a process group reduces everything always, and shared memory never
    more than is used."""
    steps = ["ab", "ab", "ab", "bc", "bc", "f", "abcdef"]
    used = [SCALAR_NBYTES * len(names) for names in steps]
    everything = [SCALAR_NBYTES * len(NAMES)] * len(steps)
    skipping, plain = (transport.pool(2).run(count_bytes, skip, steps)[0] for skip in (True, False))
    if MOVES_ONLY_WHAT_IS_USED[transport.name]:
        assert skipping == plain == used
    else:
        assert plain == everything
        assert skipping == [SCALAR_NBYTES * n for n in (6, 2, 2, 3, 2, 3, 6)]


def use_at_random(rank: int, world_size: int, seed: int, options: dict[str, Any]) -> None:
    """Each rank uses a subset of its own in each step; some steps are not synchronised."""
    module = Scalars(NAMES)
    expected = OneProcess(module, world_size)
    model = wrap(module, skip_all_reduce_unused_params=True, **options)
    random = torch.Generator().manual_seed(seed)
    for step in range(40):
        share = float(torch.rand((), generator=random))
        drawn = torch.rand(world_size, len(NAMES), generator=random) < share
        drawn[:, step % len(NAMES)] |= ~drawn.any(1)
        synced = bool(torch.rand((), generator=random) < 0.8)
        if step % 3 == 0:
            model.zero_grad()
            expected.zero_grad()

        def loss(module: nn.Module, rank: int, drawn: torch.Tensor = drawn) -> torch.Tensor:
            values = {n: 1.0 + rank for n, use in zip(NAMES, drawn[rank], strict=True) if use}
            return module(values)  # type: ignore[no-any-return]

        model.require_backward_grad_sync = synced
        loss(model, rank).backward()
        expected.backward(loss, synced=synced)
        if synced:
            assert_reduced(model, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_pattern_of_use_is_right(transport: Transport, world_size: int) -> None:
    """Torch promises nothing unless all ranks leave out the same parameters for ever. Here every
    rank uses what it likes in every step, also inside no_sync, and gets the mean."""
    for seed, options in enumerate([{}, {"gradient_as_bucket_view": True}]):
        transport.pool(world_size).run(use_at_random, seed, options)


def freeze_and_thaw(rank: int, world_size: int) -> None:
    module = Scalars("abc")
    model = wrap(module, skip_all_reduce_unused_params=True)
    for step in range(6):
        module.b.weight.requires_grad_(step % 3 != 1)
        model.zero_grad()
        model(dict.fromkeys("abc", 1.0 + rank)).backward()
        found = [None if p.grad is None else float(p.grad) for p in module.parameters()]
        assert found == [1.5, None if step % 3 == 1 else 1.5, 1.5]


def test_frozen_and_thawed(transport: Transport) -> None:
    """A parameter that thaws was unused in the step before, and is averaged at once."""
    transport.pool(2).run(freeze_and_thaw)
