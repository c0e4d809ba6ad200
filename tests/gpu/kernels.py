"""Owns the checks of every kernel on the device against torch, in fp64 or bit by bit."""

import itertools
import math
from collections.abc import Iterator

import packs
import torch
from place import Place
from rows import Rows
from segments import FLOAT8, FLOAT8_BLOCK, TYPES, Segments, decoded, name_of
from torch import Tensor
from values import LARGE_LENGTH, LENGTHS, eps, tiny, values, with_specials

SUMMED = (1, 9, 129, 4097, 33_333, 2**20 + 1)
OFFSETS = (0, 1, 3)  # of a buffer's begin, in elements


def lengths(place: Place) -> Iterator[int]:
    yield from LENGTHS
    if not place.emulated:
        yield LARGE_LENGTH


def check_casts(place: Place, rows: Rows, source: torch.dtype, target: torch.dtype) -> None:
    """One segment and no scale: what torch's own conversion gives, bit by bit."""
    for seed, length in enumerate(lengths(place)):
        given = with_specials(place, length, source, seed)
        for offset, output_offset in ((0, 0), (1, 0), (0, 3), (3, 3)):
            segments = Segments.of([given], offset)
            found = segments.reduced(target, 1.0, output_offset)
            rows.expect_equal(found, given.to(target))


def check_sums(place: Place, rows: Rows, source: torch.dtype, target: torch.dtype) -> None:
    """Several segments, added and scaled, against the same in fp64."""
    for seed, (length, num_inputs) in enumerate(
        itertools.product((1, 129, 4097) if place.emulated else SUMMED, (1, 2, 5, 17))
    ):
        given = [
            values(place, length, source, 100 * seed + k).clamp(-1000, 1000)
            for k in range(num_inputs)
        ]
        offset = OFFSETS[seed % len(OFFSETS)]
        segments = Segments.of(given, offset, own=seed % num_inputs if seed % 2 else None)
        found = segments.reduced(target, 1 / num_inputs, offset)
        wide = torch.stack([g.double() for g in given])
        expected = (wide.sum(0) / num_inputs).to(target)
        # Sums are in float32, so what cancels leaves the rounding of what was large.
        summed = 0.0 if source is torch.float64 else num_inputs * 2.0**-24
        allowed = summed * wide.abs().sum(0) / num_inputs + eps(target) * expected.double().abs()
        if target is torch.float64 and source is torch.float64:
            allowed = num_inputs * 2.0**-52 * wide.abs().sum(0) + tiny(target)
        off = (found.double() - wide.sum(0) / num_inputs).abs() - allowed - tiny(target)
        rows.expect_close(off.clamp_min(0), torch.zeros_like(off), 0.0, 0.0)


def check_float8_encoding(place: Place, rows: Rows, source: torch.dtype) -> None:
    """Each block has the smallest scale that fits, and codes as torch rounds them."""
    for seed, length in enumerate(lengths(place)):
        given = values(place, length, source, seed)
        if length > 300:
            given[5] = math.nan
            given[130] = math.inf
            given[256:300] = 0
        encoded = Segments.of([given], 0).reduced_to_float8(1.0)
        codes, scales = encoded.codes, encoded.scales
        rows.expect_equal(codes, float8_codes(given, scales))
        check_scales(rows, given, scales)


def blocks_of(tensor: Tensor) -> Tensor:
    """Rows of one block, padded with zeros."""
    padding = -tensor.numel() % FLOAT8_BLOCK
    return torch.nn.functional.pad(tensor, (0, padding)).view(-1, FLOAT8_BLOCK)


def float8_codes(given: Tensor, scales: Tensor) -> Tensor:
    scaled = blocks_of(given.float()) / scales.float()[:, None]
    finite = scaled.isfinite()
    codes = torch.where(finite, scaled, 0).to(FLOAT8).float()
    return torch.where(finite, codes, math.nan).flatten()[: given.numel()]


def check_scales(rows: Rows, given: Tensor, scales: Tensor) -> None:
    blocks = blocks_of(given.float()).double()
    largest = torch.where(blocks.isfinite(), blocks.abs(), 0).amax(dim=1)
    fits = largest / scales <= 448
    # Half the scale would not do, or the scale is the smallest there is.
    smallest = (largest / (scales / 2) > 448) | (scales == 2.0**-126)
    found = (fits & smallest).double()
    rows.expect_equal(found, torch.ones_like(found))


def check_float8_sums(place: Place, rows: Rows, target: torch.dtype) -> None:
    """Encoded segments are widened exactly, added, scaled and rounded once."""
    for seed, (length, num_inputs) in enumerate(itertools.product((1, 129, 4097), (1, 2, 5))):
        encoded = [
            Segments.of([values(place, length, torch.float32, 10 * seed + k)], 0).reduced_to_float8(
                1.0
            )
            for k in range(num_inputs)
        ]
        found = Segments.of_float8(encoded).reduced(target, 1 / num_inputs, 0)
        wide = torch.stack([decoded(e) for e in encoded])
        mean = wide.sum(0) / num_inputs
        allowed = num_inputs * 2.0**-24 * wide.abs().sum(0) + eps(target) * mean.abs()
        off = (found.double() - mean).abs() - allowed - tiny(target)
        if target is torch.float16:
            off = off[mean.abs() < 65504]
        rows.expect_close(off.clamp_min(0), torch.zeros_like(off), 0.0, 0.0)


def run(place: Place, rows: Rows) -> None:
    packs.run(place, rows)
    for source, target in itertools.product(TYPES, TYPES):
        pair = f"{name_of(source)} to {name_of(target)}"
        with rows.check(f"reduce, {pair}: one segment is torch's cast"):
            check_casts(place, rows, source, target)
        with rows.check(f"reduce, {pair}: sums of up to 17 segments"):
            check_sums(place, rows, source, target)
    for dtype in TYPES:
        with rows.check(f"reduce, {name_of(dtype)} to float8: scales and codes"):
            check_float8_encoding(place, rows, dtype)
        with rows.check(f"reduce, float8 to {name_of(dtype)}: sums"):
            check_float8_sums(place, rows, dtype)
