"""Owns the comparison of models across ranks before training."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from pydist.errors import MismatchError

if TYPE_CHECKING:
    from pydist._engine import Engine

# One tensor of a model: what must agree, by the word that messages use for it.
Description = dict[str, Any]


def describe_tensors(state: Iterable[tuple[str, str, torch.Tensor]]) -> list[Description]:
    """Everything that ranks must agree on about tensors given as kind, name and tensor."""
    return [
        {
            "kind": kind,
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "stride": list(tensor.stride()),
            "requires_grad": tensor.requires_grad,
        }
        for kind, name, tensor in state
    ]


def verify_models(engine: "Engine", model_name: str, mine: list[Description]) -> None:
    """Raises MismatchError on every rank, with the same words, unless all models agree.

    Collective. The message names the first tensor that differs on each rank that differs from the
    group's rank 0.
    """
    described = [json.loads(text) for text in engine.exchange_bytes(json.dumps(mine).encode())]
    differences = [
        f"rank {rank}: {difference}"
        for rank, theirs in enumerate(described)
        if (difference := _first_difference(described[0], theirs)) is not None
    ]
    if differences:
        raise MismatchError(
            f"the module of {model_name} differs between ranks, compared with rank 0. "
            + "; ".join(differences)
            + ". Build the same module, in the same order, on every rank."
        )


def verify_settings(engine: "Engine", model_name: str, mine: dict[str, Any]) -> None:
    """Raises MismatchError on every rank, naming rank and setting, unless all are equal.

    Collective. Cheap enough to be done always: units that differ would mix up gradients.
    """
    everybody = [json.loads(text) for text in engine.exchange_bytes(json.dumps(mine).encode())]
    for rank, theirs in enumerate(everybody):
        for name, value in everybody[0].items():
            if theirs[name] != value:
                raise MismatchError(
                    f"{model_name} was made differently on different ranks: {name} is "
                    f"{_shortened(theirs[name])} on rank {rank}, and {_shortened(value)} on "
                    "rank 0. Give all ranks the same module and arguments."
                )


def verify_layers(
    engine: "Engine", model_name: str, layers: Iterable[tuple[str, torch.nn.Module]]
) -> None:
    """Raises MismatchError on every rank, naming rank and tensor, unless layers that several ranks
    were given have tensors of the same names, shapes and dtypes.

    Collective. Ranks compare digests: the tensors of large models are many.
    """
    mine = {name: _outline(layer) for name, layer in layers}
    digests = {name: hashlib.sha256(json.dumps(o).encode()).hexdigest() for name, o in mine.items()}
    everybody = [json.loads(text) for text in engine.exchange_bytes(json.dumps(digests).encode())]
    for rank, theirs in enumerate(everybody):
        for root in range(rank):
            for name, digest in everybody[root].items():
                if theirs.get(name, digest) == digest:
                    continue
                texts = engine.exchange_bytes(json.dumps(mine.get(name)).encode())
                difference = _first_difference_of_layers(
                    json.loads(texts[root]), json.loads(texts[rank])
                )
                raise MismatchError(
                    f"{model_name} was given different models: layer {name} of rank {rank} "
                    f"{difference[1]}, that of rank {root} {difference[0]}. Give all ranks the "
                    "same model."
                )


def _outline(layer: torch.nn.Module) -> list[str]:
    found = []
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    for name, tensor in tensors:
        lazy = torch.nn.parameter.is_lazy(tensor)
        shape = "not initialized" if lazy else f"shape {tuple(tensor.shape)}"
        found.append(f"{name} of {shape} and {tensor.dtype}")
    return found


def _first_difference_of_layers(expected: list[str], found: list[str]) -> tuple[str, str]:
    for one, other in itertools.zip_longest(expected, found, fillvalue="no further tensor"):
        if one != other:
            return f"has {one}", f"has {other}"
    raise AssertionError("digests differ, but the layers do not")


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _first_difference(expected: list[Description], found: list[Description]) -> str | None:
    for one, other in zip(expected, found, strict=False):
        for field, value in one.items():
            if other[field] != value:
                return _word(one, other, field)
    if len(expected) == len(found):
        return None
    longer = max(expected, found, key=len)
    extra = longer[min(len(expected), len(found))]
    verb = "lacks" if longer is expected else "has in addition"
    return (
        f"{verb} {extra['kind']} {extra['name']} ({len(found)} tensors, {len(expected)} on rank 0)"
    )


def _word(expected: Description, found: Description, field: str) -> str:
    if field in ("kind", "name"):
        return (
            f"has {found['kind']} {found['name']} where rank 0 has "
            f"{expected['kind']} {expected['name']}"
        )
    return (
        f"{found['kind']} {found['name']} has {field} {found[field]}, on rank 0 {expected[field]}"
    )
