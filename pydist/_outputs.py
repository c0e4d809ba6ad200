"""Owns the search for tensors in what a forward returns."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 16  # of nested containers; deeper ones are not searched


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, dicts, dataclasses and other objects' attributes, once each."""
    if isinstance(output, torch.Tensor):  # nearly always
        yield output
        return
    yield from _search(output, set(), _MAX_DEPTH)


def _search(value: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    if value is None or isinstance(value, (str, bytes, int, float, complex)) or depth == 0:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for child in _children(value):
        yield from _search(child, seen, depth - 1)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    elif not isinstance(value, (type, torch.nn.Module)):
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                yield getattr(value, slot, None)
