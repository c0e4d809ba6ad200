"""Owns segments of memory as the reduction's kernels take them, made of torch's tensors."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pydist import _C

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = torch.float8_e4m3fn
FLOAT8_BLOCK = 128
# More than a vector's alignment between segments, and what is left of it must stay as it was.
PADDING = 16


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Float8:
    """An encoded segment as the engine lays it out: codes, padded, then a scale a block."""

    memory: Tensor  # uint8
    num_elements: int

    @property
    def codes(self) -> Tensor:
        return self.memory[: self.num_elements].view(FLOAT8).float()

    @property
    def scales(self) -> Tensor:
        """In fp64, one for each block."""
        num_blocks = -(-self.num_elements // FLOAT8_BLOCK)
        exponents = self.memory[num_blocks * FLOAT8_BLOCK :][:num_blocks].double() - 127
        return torch.exp2(exponents)


def decoded(segment: Float8) -> Tensor:
    """In fp64."""
    scales = segment.scales.repeat_interleave(FLOAT8_BLOCK)[: segment.num_elements]
    return segment.codes.double() * scales


def float8_nbytes(num_elements: int) -> int:
    """As csrc/collective/device_kernels/float8_wire.h has it."""
    num_blocks = -(-num_elements // FLOAT8_BLOCK)
    return num_blocks * FLOAT8_BLOCK + -(-num_blocks // 16) * 16


@dataclasses.dataclass(frozen=True)
class Segments:
    """Inputs of one launch: at equal distances, but one of them elsewhere if `own` is not -1."""

    type_name: str
    memory: Tensor  # keeps it alive
    inputs: int  # address of the first
    stride_nbytes: int
    num_inputs: int
    num_elements: int
    own_input: Tensor
    own: int

    @staticmethod
    def of(given: Sequence[Tensor], offset: int, own: int | None = None) -> "Segments":
        """Copies of the tensors; they begin `offset` elements after an aligned address."""
        dtype, length = given[0].dtype, given[0].numel()
        stride = length + PADDING + offset
        memory = torch.zeros(stride * len(given), dtype=dtype, device=given[0].device)
        elsewhere = torch.zeros(length + offset, dtype=dtype, device=given[0].device)[offset:]
        for k, tensor in enumerate(given):
            into = memory[k * stride + offset :][:length]
            (elsewhere if k == own else into).copy_(tensor)
            if k == own and length > 0:
                into.fill_(float("nan"))  # must not be read
        size = dtype.itemsize
        address = memory.data_ptr() + offset * size
        index = -1 if own is None else own
        return Segments(
            name_of(dtype), memory, address, stride * size, len(given), length, elsewhere, index
        )

    @staticmethod
    def of_float8(given: Sequence[Float8]) -> "Segments":
        memory = torch.stack([segment.memory for segment in given])
        return Segments(
            "float8",
            memory,
            memory.data_ptr(),
            memory.stride(0),
            len(given),
            given[0].num_elements,
            memory[:0],
            -1,
        )

    def reduced(self, target: torch.dtype, scale: float, offset: int) -> Tensor:
        """The sum; what lies around the output must not change."""
        around = torch.full(
            (offset + self.num_elements + PADDING,), -7, dtype=target, device=self.memory.device
        )
        output = around[offset:][: self.num_elements]
        self._launch(name_of(target), output, scale)
        if bool((around[:offset] != -7).any()) or bool(
            (around[offset + self.num_elements :] != -7).any()
        ):
            raise AssertionError(f"{self.num_elements} elements: wrote outside of the output")
        return output

    def reduced_to_float8(self, scale: float) -> Float8:
        nbytes = float8_nbytes(self.num_elements)
        around = torch.full((nbytes + PADDING,), 77, dtype=torch.uint8, device=self.memory.device)
        self._launch("float8", around, scale)
        if bool((around[nbytes:] != 77).any()):
            raise AssertionError(f"{self.num_elements} elements: wrote behind the scales")
        return Float8(around[:nbytes], self.num_elements)

    def _launch(self, target: str, output: Tensor, scale: float) -> None:
        _C.testing.launch_reduce_segments(
            from_type=self.type_name,
            to_type=target,
            inputs=self.inputs,
            stride_nbytes=self.stride_nbytes,
            num_inputs=self.num_inputs,
            own_input=self.own_input.data_ptr(),
            own=self.own,
            output=output.data_ptr(),
            num_elements=self.num_elements,
            scale=scale,
        )
