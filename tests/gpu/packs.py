"""Owns packs and unpacks of torch's tensors by one launch, and their checks against torch."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from place import Place
from rows import Rows
from segments import TYPES, name_of
from torch import Tensor
from values import LENGTHS, eps, tiny, values, with_specials

from pydist import _C

# Copied byte by byte, whatever they mean.
OTHER_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.bool)
# So many pieces that their table has more than one page of tiles for any grid.
NUM_MANY = 20_000
NUM_MANY_EMULATED = 2_000


def launched(sources: Sequence[Tensor | None], targets: Sequence[Tensor]) -> Any:
    """Copies of the sources, zeros where there is none, into the targets; all contiguous."""
    return _C.testing.LaunchedPack(
        [
            (
                0 if source is None else source.data_ptr(),
                name_of(target.dtype if source is None else source.dtype),
                target.data_ptr(),
                name_of(target.dtype),
                target.numel(),
            )
            for source, target in zip(sources, targets, strict=True)
        ]
    )


def scattered(given: Sequence[Tensor]) -> list[Tensor]:
    """Copies that begin at all alignments of their own elements."""
    copies = []
    for index, tensor in enumerate(given):
        offset = index % 5
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)
        copies.append(memory[offset:].copy_(tensor))
    return copies


def slots(bucket: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """One behind the other."""
    return list(bucket.split([tensor.numel() for tensor in given]))


def expected_bucket(given: Sequence[Tensor], dtype: torch.dtype, scale: float) -> Tensor:
    """In fp64, rounded at the end only where nothing is scaled: then bit by bit."""
    if scale == 1.0:
        return torch.cat([tensor.to(dtype) for tensor in given])
    return torch.cat([tensor.double() * scale for tensor in given])


def check_pair(place: Place, rows: Rows, source: torch.dtype, target: torch.dtype) -> None:
    """Into a bucket, and out of it again."""
    given = [with_specials(place, n, source, seed) for seed, n in enumerate(LENGTHS)]
    copies = scattered(given)
    bucket = torch.full((sum(LENGTHS) + 9,), -7, dtype=target, device=place.device)
    pack = launched(copies, slots(bucket[3:-6], given))
    pack.run()
    rows.expect_equal(bucket[3:-6], expected_bucket(given, target, 1.0))
    scale = 1 / 3
    pack.run(scale=scale)
    expected = expected_bucket(given, target, scale)
    # Scale and product are rounded to float32 on the way, unless both types are float64.
    once = eps(target) + (0 if source is target is torch.float64 else 2.0**-23)
    usual = expected.abs() < torch.finfo(target).max / 2
    rows.expect_close(
        torch.where(usual, bucket[3:-6].double(), 0),
        torch.where(usual, expected, 0),
        once,
        tiny(target) + 2.0**-149,
    )
    edges = torch.cat((bucket[:3], bucket[-6:])).double()
    rows.expect_equal(edges, torch.full_like(edges, -7))
    back = [torch.full_like(copy, 5) for copy in copies]
    launched(slots(bucket[3:-6], given), back).run()
    rows.expect_equal(torch.cat(back), bucket[3:-6].to(source))


def check_bytes(place: Place, rows: Rows) -> None:
    for dtype in OTHER_TYPES:
        numbers = [(torch.arange(n, device=place.device) % 120).to(dtype) for n in LENGTHS]
        bucket = torch.zeros(sum(LENGTHS) + 3, dtype=dtype, device=place.device)
        copies = scattered(numbers)
        launched(copies, slots(bucket[1:-2], numbers)).run()
        found, expected = torch.view_as_real, torch.view_as_real
        if not dtype.is_complex:
            found = expected = Tensor.double
        rows.expect_equal(found(bucket[1:-2]), expected(torch.cat(numbers)))


def check_many(place: Place, rows: Rows) -> None:
    """Of all types in one launch, some absent, several times with what has changed meanwhile."""
    count = NUM_MANY_EMULATED if place.emulated else NUM_MANY
    given = [
        values(place, 1 + index * 7 % 90, TYPES[index % len(TYPES)], index % 10)
        for index in range(count)
    ]
    copies: list[Tensor | None] = list(scattered(given))
    copies[::50] = [None] * len(copies[::50])
    bucket = torch.full((sum(map(Tensor.numel, given)),), -7.0, device=place.device)
    pack = launched(copies, slots(bucket, given))
    for turn in range(3):
        for copy in copies[1::4]:
            if copy is not None:
                copy.mul_(2)
        pack.run()
        present = [
            torch.zeros_like(g) if c is None else c for g, c in zip(given, copies, strict=True)
        ]
        rows.expect_equal(bucket, expected_bucket(present, torch.float32, 1.0))
        if pack.num_refreshes != 1:
            raise AssertionError(f"the table was written {pack.num_refreshes} times by run {turn}")


def check_inspection(place: Place, rows: Rows, target: torch.dtype) -> None:
    """The flag, and the sum of squares in the same launch."""
    lengths = (*LENGTHS, 100_003)
    given = [
        values(place, n, torch.float32, seed).clamp(-100, 100) for seed, n in enumerate(lengths)
    ]
    bucket = torch.zeros(sum(lengths), dtype=target, device=place.device)
    pack = launched(given, slots(bucket, given))
    options = {"dtype": torch.float32, "device": place.device}
    partials = torch.full((_C.testing.num_copy_partials(),), math.nan, **options)
    found, squares = torch.zeros(1, **options), torch.zeros(1, **options)
    for scale, broken in itertools.product((1.0, 0.25), (None, math.inf, math.nan)):
        found.zero_()
        if broken is not None:
            given[-1][77_777] = broken
        pack.run(
            scale=scale,
            found_nonfinite=found.data_ptr(),
            partials=partials.data_ptr(),
            sum_of_squares=squares.data_ptr(),
        )
        rows.expect_equal(found, torch.full_like(found, float(broken is not None)))
        if broken is None:
            expected = torch.cat(given).double().mul(scale).square().sum().reshape(1)
            rows.expect_close(squares, expected, 1e-5, 0.0)
        given[-1][77_777] = 1.0


def check_graph(place: Place, rows: Rows) -> None:
    """A captured pack copies what is there when the graph is launched."""
    given = [values(place, n, torch.float32, seed) for seed, n in enumerate(LENGTHS)]
    bucket = torch.zeros(sum(LENGTHS), device=place.device)
    pack = launched(given, slots(bucket, given))
    replay = place.captured(lambda: pack.run, of_torch=False)
    for _ in range(3):
        for tensor in given:
            tensor.add_(1)
        bucket.zero_()
        replay()
        place.settle()
        rows.expect_equal(bucket, torch.cat(given))


def run(place: Place, rows: Rows) -> None:
    for source, target in itertools.product(TYPES, TYPES):
        with rows.check(f"pack and unpack, {name_of(source)} to {name_of(target)}"):
            check_pair(place, rows, source, target)
    with rows.check("pack, other types byte by byte"):
        check_bytes(place, rows)
    with rows.check("pack, thousands of tensors of all types"):
        check_many(place, rows)
    for target in TYPES:
        with rows.check(f"pack to {name_of(target)}: flag and norm"):
            check_inspection(place, rows, target)
    with rows.check("pack captured in a graph"):
        check_graph(place, rows)
