"""Owns the comparison of the conversion kernels with torch's casts, on every instruction set."""

import pytest
import torch
from torch import Tensor

from pydist._C import testing

HALVES = [torch.float16, torch.bfloat16]
WIDE = [torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def convert(source: Tensor, dtype: torch.dtype, isa: int) -> Tensor:
    target = torch.empty(source.shape, dtype=dtype)
    names = [str(t.dtype).removeprefix("torch.") for t in (source, target)]
    testing.convert(names[0], source.data_ptr(), names[1], target.data_ptr(), source.numel(), isa)
    return target


def assert_as_torch(source: Tensor, dtype: torch.dtype) -> None:
    """The same bits as source.to(dtype); of a NaN's bits torch itself gives several."""
    expected = source.to(dtype)
    bits = BITS[dtype.itemsize]
    nan = expected.isnan()
    for isa in range(testing.best_isa() + 1):
        found = convert(source, dtype, isa)
        assert torch.equal(found.isnan(), nan)
        assert torch.equal(found.view(bits)[~nan], expected.view(bits)[~nan]), f"isa {isa}"


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("half", HALVES)
def test_every_half_is_widened_and_comes_back(half: torch.dtype, wide: torch.dtype) -> None:
    """All 65536 patterns: the wider value is torch's, and narrowing it gives the pattern again."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half)
    assert_as_torch(patterns, wide)
    widened = patterns.to(wide)
    assert_as_torch(widened, half)
    finite = ~patterns.isnan()
    for isa in range(testing.best_isa() + 1):
        narrowed = convert(widened, half, isa)
        assert torch.equal(narrowed.view(torch.int16)[finite], patterns.view(torch.int16)[finite])


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("half", HALVES)
def test_rounding_is_torchs(half: torch.dtype, wide: torch.dtype) -> None:
    """Random bits (every exponent, NaN, infinities, subnormals), values halfway between two
    neighbours of the half type, and what lies one bit beside them."""
    generator = torch.Generator().manual_seed(1)
    limit = 2**63 - 1
    bits = torch.randint(-limit, limit, (200_003,), generator=generator).to(BITS[wide.itemsize])
    assert_as_torch(bits.view(wide), half)
    patterns = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(half)
    values = patterns[~patterns.isnan()].to(torch.float64)
    halfway = ((values[1:] + values[:-1]) / 2).to(wide)
    for step in (-1, 0, 1):
        beside = (halfway.view(BITS[wide.itemsize]) + step).view(wide)
        assert_as_torch(beside, half)
        assert_as_torch(-beside, half)


def test_float16_overflows_to_infinity() -> None:
    """From 65520 on, halfway to what would come next; below, the largest finite value."""
    source = torch.tensor([65519.99, 65520.0, -1e38, 3e38])
    for isa in range(testing.best_isa() + 1):
        found = convert(source, torch.float16, isa).tolist()
        assert found == [65504.0, float("inf"), float("-inf"), float("inf")]


def test_the_callers_float_control_is_ignored_and_kept() -> None:
    """With torch.set_flush_denormal on, subnormal values still pass, and it is on afterwards."""
    tiny = torch.tensor([1e-39, 2.0**-24, 1e-7] * 11)
    expected = tiny.double().to(torch.float16)
    torch.set_flush_denormal(True)
    try:
        for isa in range(testing.best_isa() + 1):
            assert torch.equal(convert(tiny, torch.float16, isa), expected)
        assert float(torch.tensor(1e-39) * 1) == 0
    finally:
        torch.set_flush_denormal(False)
