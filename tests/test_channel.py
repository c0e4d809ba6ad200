"""Owns what crosses from stage to stage: every value arrives whole, private and in any order."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from channels import activation, gradient, make_channel, receive_tensor, send_tensor, step
from conftest import Transport
from pydist.errors import UsageError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]


def of_type(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.arange(torch.Size(sizes).numel()).add(1).reshape(sizes).to(dtype)


def values() -> dict[str, Tensor]:
    base = torch.randn(4, 6, 8, 10)
    tensors = {str(dtype): of_type(dtype, 3, 5) for dtype in DTYPES}
    tensors |= {
        "no dimension": torch.tensor(3.5),
        "bool without dimension": torch.tensor(True),
        "no elements": torch.empty(0),
        "no rows": torch.empty(0, 7, dtype=torch.int32),
        "one element": torch.ones(1, 1, 1),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(5, 7).t(),
        "permuted": base.permute(3, 0, 2, 1),
        "every second": base[:, ::2, :, ::3],
        "columns": torch.randn(9, 9)[:, 3:5],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "expanded scalar": torch.tensor(2.0).expand(2, 3),
        "view with an offset": torch.randn(100)[17:83],
        "conj": torch.randn(4, 3, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "zero": torch._efficientzerotensor(3, 2),
        "with a graph": torch.randn(3, requires_grad=True) * 2,
        "leaf": torch.randn(2, 2, requires_grad=True),
        "large": torch.randn(700, 1000),
        "large, every second column": torch.randn(700, 1000)[:, ::2],
        "many dimensions": torch.randn(1, 2, 1, 3, 1, 2, 1, 2, 1),
    }
    return tensors


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (left, right))
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def exchange_every_value(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    sent = values()
    channel = make_channel()
    for _ in range(2):
        with step(channel):
            if rank == 0:
                for microbatch, tensor in enumerate(sent.values()):
                    send_tensor(channel, 1, activation(microbatch), tensor)
                channel.send(1, activation(1000), [(t, t.requires_grad) for t in sent.values()])
            else:
                received = [
                    receive_tensor(channel, 0, activation(microbatch))
                    for microbatch in range(len(sent))
                ]
                slots, structure, absent = channel.receive(0, activation(1000))
                assert (structure, absent) == (b"", False)
                flags = [flag for _, flag in slots]
                assert flags == [tensor.requires_grad for tensor in sent.values()]
                together = [tensor for tensor, _ in slots]
                for name, expected, *found in zip(
                    sent, sent.values(), received, together, strict=True
                ):
                    for tensor in found:
                        assert same_bits(tensor, expected), name
                        assert not tensor.requires_grad
                        assert tensor.is_leaf
                        assert not tensor.is_conj() and not tensor.is_neg()
                        assert tensor.storage_offset() == 0
                        dense = torch.empty_like(expected, memory_format=torch.preserve_format)
                        assert tensor.stride() == dense.stride(), name


def test_every_value_arrives_with_its_bits_type_and_strides(transport: Transport) -> None:
    transport.pool(2).run(exchange_every_value)
