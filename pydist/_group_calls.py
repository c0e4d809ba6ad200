"""Owns how calls look to a process group: tensors and texts as bytes, errors as pydist's."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pydist.errors import MismatchError, PeerError, TimeoutError, UsageError

CALL_NBYTES = 256


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def amount(tensor: Tensor) -> str:
    return f"{tensor.numel()} {dtype_name(tensor.dtype)}"


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's own memory, which is contiguous, as bytes."""
    # A contiguous tensor of one element or none may have any stride, which a view as bytes forbids.
    return in_memory_order(tensor).view(torch.uint8)


def copy_bytes(tensor: Tensor, run: Tensor) -> None:
    bytes_of(tensor).copy_(run)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous view of a tensor that fills its memory without gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def text_to_tensor(text: str) -> Tensor:
    return torch.frombuffer(
        bytearray(text.encode()[:CALL_NBYTES].ljust(CALL_NBYTES, b"\0")), dtype=torch.uint8
    )


def tensor_to_text(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace")


@contextmanager
def translated(call: str) -> Iterator[None]:
    """What a backend raises, in pydist's classes."""
    try:
        yield
    except (UsageError, MismatchError):
        raise
    except RuntimeError as error:
        timed_out = re.search(r"time[d]? ?out", str(error), re.IGNORECASE)
        kind = TimeoutError if timed_out else PeerError
        raise kind(f"{call} failed in the process group: {error}") from error
