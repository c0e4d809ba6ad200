"""Owns the numbers that kernels are given: of all sizes, with those that rounding is about."""

import math

import torch
from place import Place
from torch import Tensor

# Lengths that end before, at and after a vector, a warp's work, a block of float8, a tile.
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 31, 127, 128, 129, 1000, 4095, 4097, 33_333)
LARGE_LENGTH = 2**24 + 5  # on a GPU also this


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def tiny(dtype: torch.dtype) -> float:
    """Half a step between denormal numbers: what rounding may do near zero."""
    return float(torch.finfo(dtype).smallest_normal) * eps(dtype)


def values(place: Place, length: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Over many orders of magnitude, of which some leave the range of half types."""
    generator = torch.Generator(place.device).manual_seed(seed)
    options = {"generator": generator, "device": place.device, "dtype": torch.float64}
    mantissas = torch.randn(length, **options)
    exponents = torch.rand(length, **options) * 30 - 15
    return (mantissas * torch.exp2(exponents)).to(dtype)


SPECIALS = (
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 65504.0, 65520.0, 3.4e38),
    *(2.0**-24, 2.0**-25, 3 * 2.0**-26, 2.0**-133, 2.0**-134, 2.0**-149, 1 + 2.0**-8, 1 + 2.0**-11),
)


def with_specials(place: Place, length: int, dtype: torch.dtype, seed: int) -> Tensor:
    tensor = values(place, length, dtype, seed)
    specials = torch.tensor(SPECIALS, dtype=torch.float64, device=place.device).to(dtype)
    step = 3  # so that they fall on all places of a vector
    places = tensor[::step]
    count = min(len(specials), len(places))
    places[:count] = specials[:count]
    return tensor
