"""Owns what the kernels of the device must compute, as plain operations of torch."""

import torch
from torch import Tensor

FLOAT8_BLOCK = 128


def copied(source: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """`source` times `scale`, rounded once to `dtype`: in float32, but in float64 between those.

    Complex elements are pairs of real ones; integers and bools stay as they are.
    """
    if source.is_complex():
        return torch.view_as_complex(
            copied(torch.view_as_real(source), source.real.dtype, scale)
        ).clone()
    if not source.is_floating_point():
        return source.clone()
    wide = torch.float64 if source.dtype == dtype == torch.float64 else torch.float32
    return (source.to(wide) * torch.tensor(scale, dtype=wide, device=source.device)).to(dtype)


def reduced(inputs: list[Tensor], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """The sum in this order, in float32 (float64 of float64), times `scale`, rounded once."""
    wide = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    total = inputs[0].to(wide)
    for other in inputs[1:]:
        total = total + other.to(wide)
    scaled = total * torch.tensor(scale, dtype=wide, device=total.device)
    # A half type by way of float32, as everywhere.
    return scaled.to(torch.float32 if dtype.itemsize < 4 else dtype).to(dtype)


def in_blocks(values: Tensor) -> Tensor:
    """float32, (blocks, 128), with zeros behind the end."""
    padding = -values.numel() % FLOAT8_BLOCK
    flat = torch.nn.functional.pad(values.reshape(-1).to(torch.float32), (0, padding))
    return flat.view(-1, FLOAT8_BLOCK)


def float8_encoded(values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes in blocks, float8_e4m3fn; scales, float8_e8m0fnu); see float8_wire.h."""
    blocks = in_blocks(values)
    largest = blocks.where(blocks.isfinite(), 0).abs().amax(1)
    mantissa, exponent = torch.frexp(largest)  # 448 is 0.875 * 2^9
    bytes_ = (exponent - 9 + (mantissa > 0.875).int() + 127).where(largest > 0, 1).clamp(min=1)
    inverse = torch.ldexp(torch.ones_like(largest), 127 - bytes_)
    # Infinity, too, becomes NaN; torch has no such code, and some versions make it 448.
    codes = (blocks.where(blocks.isfinite(), torch.nan) * inverse[:, None]).to(torch.float8_e4m3fn)
    return codes, bytes_.to(torch.uint8).view(torch.float8_e8m0fnu)


def float8_decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """float32, (blocks, 128)."""
    return codes.to(torch.float32) * scales.to(torch.float32)[:, None]


def float8_buffer(values: Tensor) -> Tensor:
    """uint8: how `values` travel, codes and then scales, both padded."""
    codes, scales = float8_encoded(values)
    padding = -scales.numel() % 16
    return torch.cat(
        [
            codes.view(torch.uint8).view(-1),
            torch.nn.functional.pad(scales.view(torch.uint8), (0, padding)),
        ]
    )
