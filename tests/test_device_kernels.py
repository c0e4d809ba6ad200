"""Owns the comparison of the device's kernels, run on the host, with plain operations of torch."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import kernel_reference as reference
from pydist._C import testing
from pydist.errors import UsageError

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.uint8, torch.bool, torch.int16, torch.int64, torch.complex64, torch.complex128]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD = 0xA5


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Place:
    """Memory for a tensor at a chosen distance from a multiple of 64 bytes, between guards."""

    def __init__(self, num_elements: int, dtype: torch.dtype, offset_nbytes: int = 0) -> None:
        self.nbytes = num_elements * dtype.itemsize
        self.memory = torch.full((self.nbytes + 256,), GUARD, dtype=torch.uint8)
        self.begin = 64 + -self.memory.data_ptr() % 64 + offset_nbytes
        self.bytes = self.memory[self.begin : self.begin + self.nbytes]
        self.dtype = dtype
        self.num_elements = num_elements

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def put(self, values: Tensor) -> "Place":
        self.bytes.copy_(values.contiguous().view(-1).view(torch.uint8))
        return self

    def get(self) -> Tensor:
        return self.bytes.clone().view(self.dtype)

    def guards_are_whole(self) -> bool:
        around = [self.memory[: self.begin], self.memory[self.begin + self.nbytes :]]
        return all(bool((part == GUARD).all()) for part in around)


def placed(values: Tensor, offset_nbytes: int = 0) -> Place:
    return Place(values.numel(), values.dtype, offset_nbytes).put(values)


def item(source: Place | None, target: Place) -> tuple[int, str, int, str, int]:
    if source is None:
        return (0, name(target.dtype), target.address, name(target.dtype), target.num_elements)
    return (
        source.address,
        name(source.dtype),
        target.address,
        name(target.dtype),
        target.num_elements,
    )


def copy_many(
    pairs: list[tuple[Place | None, Place]], scale: float = 1.0, inspects: bool = False, **rest: int
) -> int:
    """The kernel, from places to places; the number of tiles."""
    items = [item(source, target) for source, target in pairs]
    return testing.copy_many(items, scale=scale, inspects=inspects, **rest)


def difficult(num_elements: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits: every exponent, infinities, NaN, subnormals; and ordinary numbers between."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        nbytes = num_elements * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, high, (nbytes,), generator=generator).to(torch.uint8)
        return raw.view(dtype)
    bits = torch.randint(-(2**63), 2**63 - 1, (num_elements,), generator=generator)
    values = bits.to(BITS[dtype.itemsize]).view(dtype).clone()
    ordinary = torch.randn(num_elements, generator=generator, dtype=torch.float64).to(dtype)
    return values.where(bits % 2 == 0, ordinary)


def assert_same(found: Tensor, expected: Tensor, what: str = "") -> None:
    """The same bits, but for those of a NaN."""
    assert found.dtype == expected.dtype
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if expected.is_floating_point():
        nan = expected.isnan()
        assert torch.equal(found.isnan(), nan), what
        bits = BITS[expected.dtype.itemsize]
        found, expected = found.view(bits)[~nan], expected.view(bits)[~nan]
    assert torch.equal(found, expected), what


# ---- Copies


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 2.0**-20])
@pytest.mark.parametrize("inspects", [False, True])
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source_dtype", FLOATS)
def test_every_pair_of_floats(
    source_dtype: torch.dtype, to: torch.dtype, inspects: bool, scale: float
) -> None:
    values = difficult(10_007, source_dtype)
    target = Place(values.numel(), to)
    copy_many([(placed(values), target)], scale=scale, inspects=inspects)
    assert_same(target.get(), reference.copied(values, to, scale))
    assert target.guards_are_whole()


@pytest.mark.parametrize("half", FLOATS[:2])
def test_halfway_values_are_rounded_to_even(half: torch.dtype) -> None:
    patterns = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(half)
    values = patterns[~patterns.isnan()].to(torch.float64)
    halfway = ((values[1:] + values[:-1]) / 2).to(torch.float32)
    for step, sign in itertools.product((-1, 0, 1), (-1, 1)):
        beside = (halfway.view(torch.int32) + step).view(torch.float32) * sign
        target = Place(beside.numel(), half)
        copy_many([(placed(beside), target)])
        assert_same(target.get(), beside.to(half))


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_other_types_keep_their_bits_but_for_complex_scale(
    dtype: torch.dtype, scale: float
) -> None:
    values = difficult(1003, dtype)
    target = Place(values.numel(), dtype)
    copy_many([(placed(values), target)], scale=scale, inspects=True)
    assert_same(target.get(), reference.copied(values, dtype, scale))


def test_nans_keep_their_payload_where_nothing_is_computed() -> None:
    values = torch.tensor([0x7FA00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    target = Place(3, torch.float32)
    copy_many([(placed(values), target)])
    assert torch.equal(target.get().view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("num_elements", [*range(1, 40), 255, 256, 257, 4095, 4096, 4097])
def test_bytes_at_every_alignment_and_length(num_elements: int) -> None:
    values = difficult(num_elements, torch.uint8)
    for source_offset, target_offset in itertools.product(range(16), range(16)):
        source = placed(values, source_offset)
        target = Place(num_elements, torch.uint8, target_offset)
        copy_many([(source, target)])
        assert torch.equal(target.get(), values), (source_offset, target_offset)
        assert target.guards_are_whole(), (source_offset, target_offset)


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source_dtype", FLOATS)
def test_floats_at_every_alignment(source_dtype: torch.dtype, to: torch.dtype) -> None:
    source_offsets = range(0, 16, source_dtype.itemsize)
    target_offsets = range(0, 16, to.itemsize)
    for num_elements in (1, 7, 16, 33, 1021):
        values = difficult(num_elements, source_dtype)
        expected = reference.copied(values, to, 0.5)
        for source_offset, target_offset in itertools.product(source_offsets, target_offsets):
            target = Place(num_elements, to, target_offset)
            copy_many([(placed(values, source_offset), target)], scale=0.5)
            assert_same(target.get(), expected, f"{num_elements} {source_offset} {target_offset}")
            assert target.guards_are_whole(), (num_elements, source_offset, target_offset)


def test_more_tensors_than_the_grid_has_warps() -> None:
    """Of mixed dtypes and lengths, empty ones, zeros; packed densely into one bucket a dtype."""
    sizes = [(k * 37) % 211 for k in range(5000)]
    sources = [difficult(n, FLOATS[k % 4], k) for k, n in enumerate(sizes)]
    places = [placed(values) for values in sources]
    bucket = Place(sum(sizes), torch.float32, offset_nbytes=4)
    items, expected, begin = [], [], 0
    for k, (values, place) in enumerate(zip(sources, places, strict=True)):
        address = 0 if k % 7 == 3 else place.address
        target = bucket.address + 4 * begin
        items.append((address, name(values.dtype), target, "float32", values.numel()))
        begin += values.numel()
        given = torch.zeros_like(values) if address == 0 else values
        expected.append(reference.copied(given, torch.float32, 0.125))
    num_tiles = testing.copy_many(items, scale=0.125, num_blocks=3)
    assert num_tiles == sum(n > 0 for n in sizes)
    assert_same(bucket.get(), torch.cat(expected))
    assert bucket.guards_are_whole()


def test_a_large_tensor_is_shared_by_many_warps() -> None:
    values = torch.randn(1_000_003)
    target = Place(values.numel(), torch.bfloat16)
    num_tiles = copy_many([(placed(values), target)], num_blocks=8)
    assert num_tiles >= 8 * 4
    assert_same(target.get(), values.bfloat16())


def test_nothing_to_copy() -> None:
    empty = Place(0, torch.float32)
    assert copy_many([]) == 0
    assert copy_many([(empty, empty)]) == 0


def test_what_no_kernel_can_do_is_refused() -> None:
    place = Place(4, torch.float32)
    with pytest.raises(UsageError, match="int32 to float32 is not a conversion"):
        testing.copy_many([(place.address, "int32", place.address, "float32", 4)])
    with pytest.raises(UsageError, match="multiples of their sizes"):
        testing.copy_many([(place.address + 1, "float32", place.address, "bfloat16", 1)])


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source_dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(
    source_dtype: torch.dtype, to: torch.dtype, bad: float
) -> None:
    values = torch.randn(3001).to(source_dtype)
    for position in (None, 0, 1234, 3000):
        given = values.clone()
        if position is not None:
            given[position] = bad
        found = torch.zeros(1)
        copy_many(
            [(placed(given, 8), Place(given.numel(), to))],
            inspects=True,
            found_nonfinite=found.data_ptr(),
        )
        assert found.item() == (position is not None)


def test_what_becomes_infinite_is_found() -> None:
    found = torch.zeros(1)
    source, target = placed(torch.tensor([1.0, 70000.0])), Place(2, torch.float16)
    address = found.data_ptr()
    copy_many([(source, target)], inspects=True, found_nonfinite=address)
    assert found.item() == 1
    found.zero_()
    copy_many([(source, target)], 0.5, inspects=True, found_nonfinite=address)
    assert found.item() == 0


def squared_norm(pairs: list[tuple[Place | None, Place]], scale: float, blocks: int) -> Tensor:
    partials = torch.full((7,), math.nan)
    copy_many(
        pairs,
        scale=scale,
        inspects=True,
        partials=partials.data_ptr(),
        num_partials=partials.numel(),
        num_blocks=blocks,
    )
    assert not partials.isnan().any()
    total = torch.full((1,), math.nan)
    testing.sum_partials(partials.data_ptr(), partials.numel(), total.data_ptr())
    return total


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source_dtype", FLOATS)
def test_squared_norm(source_dtype: torch.dtype, to: torch.dtype) -> None:
    """Of what is scaled, before it is rounded; integers and absent gradients do not count."""
    values = torch.randn(20_011).to(source_dtype)
    integers = torch.arange(100)
    pairs: list[tuple[Place | None, Place]] = [
        (placed(values, source_dtype.itemsize), Place(values.numel(), to)),
        (placed(integers), Place(100, torch.int64)),
        (None, Place(100, torch.float32)),
    ]
    for blocks in (1, 3, 7):
        total = squared_norm(pairs, 0.5, blocks)
        expected = (values.double() * 0.5).square().sum()
        torch.testing.assert_close(total[0].double(), expected, rtol=1e-5, atol=0)
        assert torch.equal(total, squared_norm(pairs, 0.5, blocks))


def test_squared_norm_of_nothing_is_zero() -> None:
    assert squared_norm([], 1.0, 2).item() == 0


# ---- Sums of segments


def reduce_on_host(
    inputs: list[Tensor],
    to: torch.dtype,
    scale: float = 1.0,
    own: int = -1,
    offset_nbytes: int = 0,
    blocks: int = 2,
) -> Tensor:
    """The segments lie one after the other, but for the own one."""
    num_elements, dtype = inputs[0].numel(), inputs[0].dtype
    stride = num_elements * dtype.itemsize
    # With an own one the stride is odd, and there is garbage where that one is not.
    padded = stride + 3 * dtype.itemsize if own >= 0 else (stride + 15) // 16 * 16
    segments = Place(padded * len(inputs), torch.uint8, offset_nbytes)
    for k, values in enumerate(inputs):
        if k != own:
            segments.bytes[k * padded : k * padded + stride] = values.view(torch.uint8)
    own_place = placed(inputs[own])
    output = Place(num_elements, to, offset_nbytes * to.itemsize // dtype.itemsize)
    testing.reduce_segments(
        name(dtype),
        name(to),
        segments.address,
        padded,
        len(inputs),
        own,
        own_place.address,
        output.address,
        num_elements,
        scale,
        blocks,
    )
    assert output.guards_are_whole()
    return output.get()


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source_dtype", FLOATS)
def test_every_pair_of_floats_is_added(source_dtype: torch.dtype, to: torch.dtype) -> None:
    for num_inputs, num_elements in itertools.product((1, 2, 3, 5, 8), (1, 4, 17, 2049)):
        inputs = [difficult(num_elements, source_dtype, seed) for seed in range(num_inputs)]
        expected = reference.reduced(inputs, to, 1 / num_inputs)
        for own in (-1, num_inputs // 2):
            found = reduce_on_host(inputs, to, 1 / num_inputs, own)
            assert_same(found, expected, f"{num_inputs} of {num_elements}, own {own}")


def test_segments_that_are_not_aligned() -> None:
    inputs = [difficult(1001, torch.bfloat16, seed) for seed in range(3)]
    for offset_nbytes in range(0, 16, 2):
        found = reduce_on_host(inputs, torch.bfloat16, offset_nbytes=offset_nbytes)
        assert_same(found, reference.reduced(inputs, torch.bfloat16))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_inputs", [2, 3, 7])
def test_the_mean_has_the_bits_of_the_hosts_ranks(dtype: torch.dtype, num_inputs: int) -> None:
    """Sums in rank order, times the rounded 1/n, where another order would show."""
    generator = torch.Generator().manual_seed(5)
    large, *others = (
        torch.randn(5000, generator=generator, dtype=torch.float64) for _ in range(num_inputs - 1)
    )
    large *= 1e4
    inputs = [values.to(dtype) for values in (large, *(1e-3 * o for o in others), -large)]
    expected = torch.empty_like(inputs[0])
    addresses = [values.data_ptr() for values in inputs]
    testing.reduce_mean(name(dtype), addresses, expected.data_ptr(), expected.numel())
    assert_same(reduce_on_host(inputs, dtype, 1 / num_inputs), expected)
    otherwise = reduce_on_host([inputs[0], inputs[-1], *inputs[1:-1]], dtype, 1 / num_inputs)
    assert num_inputs == 2 or not torch.equal(otherwise, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place(dtype: torch.dtype) -> None:
    """As a ring adds: what has arrived to what is there, where it is."""
    local, arrived = difficult(3003, dtype, 1), difficult(3003, dtype, 2)
    place, other = placed(local), placed(arrived)
    testing.reduce_segments(
        name(dtype), name(dtype), other.address, 0, 2, 1, place.address, place.address, 3003
    )
    assert_same(place.get(), reference.reduced([arrived, local], dtype))
    assert place.guards_are_whole()


# ---- float8


def float8_place(num_elements: int) -> Place:
    return Place(testing.float8_nbytes(num_elements), torch.uint8)


def encode(values: Tensor, scale: float = 1.0, blocks: int = 2) -> Place:
    """By the kernel, with one input."""
    buffer = float8_place(values.numel())
    source = placed(values)
    dtype = name(values.dtype)
    testing.reduce_segments(
        dtype, "float8", source.address, 0, 1, -1, 0, buffer.address, values.numel(), scale, blocks
    )
    assert buffer.guards_are_whole()
    return buffer


def decode(buffer: Place, num_elements: int, dtype: torch.dtype, offset_nbytes: int = 0) -> Tensor:
    target = Place(num_elements, dtype, offset_nbytes)
    testing.reduce_segments(
        "float8", name(dtype), buffer.address, 0, 1, -1, 0, target.address, num_elements
    )
    assert target.guards_are_whole()
    return target.get()


def split(buffer: Place, num_elements: int) -> tuple[Tensor, Tensor]:
    """(codes in blocks, scales) of a buffer."""
    begin = testing.float8_scales_offset(num_elements)
    num_blocks = -(-num_elements // reference.FLOAT8_BLOCK)
    codes = buffer.bytes[:begin].view(torch.float8_e4m3fn).view(-1, reference.FLOAT8_BLOCK)
    return codes, buffer.bytes[begin : begin + num_blocks].view(torch.float8_e8m0fnu)


def assert_encoded(values: Tensor) -> None:
    buffer = encode(values)
    codes, scales = split(buffer, values.numel())
    expected_codes, expected_scales = reference.float8_encoded(values)
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))
    assert_same(codes.float(), expected_codes.float())
    count = values.numel()
    expected = reference.float8_decoded(expected_codes, expected_scales).view(-1)[:count]
    for dtype in FLOATS:
        assert_same(decode(buffer, count, dtype), expected.to(dtype))
    shifted = decode(buffer, count, torch.float32, offset_nbytes=4)
    assert_same(shifted, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_elements", [1, 15, 16, 127, 128, 129, 2048, 2049, 33_333])
def test_float8_is_torchs(dtype: torch.dtype, num_elements: int) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(num_elements, generator=generator, dtype=torch.float64)
    # Every block of another magnitude.
    magnitudes = torch.arange(num_elements) // 128 % 30 - 20
    assert_encoded(torch.ldexp(values, magnitudes).to(dtype))


def test_float8_of_random_bits() -> None:
    for dtype in FLOATS:
        assert_encoded(difficult(20_001, dtype))


def test_float8_ties_and_neighbours() -> None:
    """Every code, what is halfway between two of them, and what is one bit beside that; the
    largest, 448, stands in each block, so that the scale is 1."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[1:] + codes[:-1]) / 2
    for step in (-1, 0, 1):
        beside = (halfway.view(torch.int32) + step).view(torch.float32)
        values = torch.cat([codes[-1:], beside])
        encoded, scales = split(encode(values), values.numel())
        assert scales.float().tolist() == [1.0]
        assert torch.equal(
            encoded.view(-1)[: values.numel()].float(), values.to(torch.float8_e4m3fn).float()
        )
        assert_encoded(-values)
    assert_encoded(codes)


def test_float8_scale_is_the_smallest_that_holds_the_largest() -> None:
    for largest, scale in [(448.0, 1.0), (448.0001, 2.0), (224.0, 0.5), (1.75, 2.0**-8)]:
        codes, scales = split(encode(torch.tensor([largest, 0.5])), 2)
        assert scales.float().tolist() == [scale]
        assert abs(codes.view(-1)[0].float() * scale / largest - 1) < 2.0**-4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_float8_never_makes_the_infinite_finite(dtype: torch.dtype, bad: float) -> None:
    """It arrives as NaN, and the rest of its block as if it were not there."""
    values = torch.randn(500).to(dtype)
    for position in (0, 127, 300, 499):
        given = values.clone()
        given[position] = bad
        found = decode(encode(given), 500, torch.float32)
        assert found.isnan().nonzero().view(-1).tolist() == [position]
        given[position] = 0
        without = decode(encode(given), 500, torch.float32)
        without[position] = math.nan
        assert_same(found, without)
    whole = torch.full((256,), bad, dtype=dtype)
    assert decode(encode(whole), 256, torch.float32).isnan().all()


def test_float8_of_zeros_and_of_the_smallest() -> None:
    zeros = torch.tensor([0.0, -0.0] * 100)
    assert_same(decode(encode(zeros), 200, torch.float32), zeros)
    tiny = torch.tensor([2.0**-126, -(2.0**-130), 2.0**-134, 2.0**-149])
    found = decode(encode(tiny), 4, torch.float32)
    assert found.tolist() == [2.0**-126, -(2.0**-130), 2.0**-134, 0.0]
    largest = torch.tensor([-(2.0**127) * 1.875, torch.finfo(torch.float32).max, 1.0])
    found = decode(encode(largest), 3, torch.float32)
    assert found.tolist() == [-(2.0**127) * 1.875, math.inf, 0.0]


@pytest.mark.parametrize("to", [*FLOATS, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_inputs", [2, 3, 5])
def test_float8_segments_are_added(to: torch.dtype, num_inputs: int) -> None:
    for num_elements in (1, 128, 1000, 4097):
        buffers = [reference.float8_buffer(torch.randn(num_elements)) for _ in range(num_inputs)]
        nbytes = testing.float8_nbytes(num_elements)
        assert all(buffer.numel() == nbytes for buffer in buffers)
        decoded = []
        for buffer in buffers:
            codes, scales = split(placed(buffer), num_elements)
            decoded.append(reference.float8_decoded(codes, scales).view(-1)[:num_elements])
        mean = reference.reduced(decoded, torch.float32, 1 / num_inputs)
        segments = placed(torch.cat(buffers))
        is_float8 = to == torch.float8_e4m3fn
        output = float8_place(num_elements) if is_float8 else Place(num_elements, to)
        testing.reduce_segments(
            "float8",
            "float8" if is_float8 else name(to),
            segments.address,
            nbytes,
            num_inputs,
            -1,
            0,
            output.address,
            num_elements,
            1 / num_inputs,
        )
        assert output.guards_are_whole()
        if is_float8:
            codes, scales = split(output, num_elements)
            expected_codes, expected_scales = reference.float8_encoded(mean)
            assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))
            assert_same(codes.float(), expected_codes.float())
        else:
            assert_same(output.get(), mean.to(to))


def test_float8_in_place() -> None:
    first, second = (reference.float8_buffer(torch.randn(1000)) for _ in range(2))
    place, other = placed(first), placed(second)
    decoded = [
        reference.float8_decoded(*split(placed(b), 1000)).view(-1)[:1000] for b in (second, first)
    ]
    testing.reduce_segments(
        "float8", "float8", other.address, 0, 2, 1, place.address, place.address, 1000
    )
    codes, scales = split(place, 1000)
    expected_codes, expected_scales = reference.float8_encoded(decoded[0] + decoded[1])
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))
    assert_same(codes.float(), expected_codes.float())


def test_the_callers_float_control_is_ignored() -> None:
    tiny = torch.tensor([1e-39, 2.0**-24, 1e-7] * 11)
    target = Place(tiny.numel(), torch.float16)
    source = placed(tiny)
    expected = tiny.half()
    torch.set_flush_denormal(True)
    try:
        copy_many([(source, target)], inspects=True)
    finally:
        torch.set_flush_denormal(False)
    assert_same(target.get(), expected)
