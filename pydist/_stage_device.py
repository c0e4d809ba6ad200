"""Owns where the stages of a pipeline are: on the CPU everywhere, or on one device of each rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pydist import _device
from pydist._engine import Engine
from pydist._trees import take_apart
from pydist.errors import UsageError


def device_of(layers: Sequence[tuple[str, nn.Module]]) -> torch.device | None:
    """The one device of all parameters and buffers of these layers, by name; None without any.

    Raises:
        UsageError: they are on several, on the meta device, or where pydist cannot run.
    """
    found: tuple[str, torch.device] | None = None
    for layer_name, layer in layers:
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            full = f"{layer_name}.{name}"
            if tensor.device.type == "meta":
                raise UsageError(
                    f"{full} is on the meta device and has no data; give a list of zero-argument "
                    "callables that make the stages' modules: each rank calls those of its own "
                    "stages"
                )
            if tensor.device.type != "cpu":
                _device.require_device(tensor, full)
            if found is None:
                found = full, tensor.device
            elif found[1] != tensor.device:
                raise UsageError(
                    f"{found[0]} is on {found[1]}, but {full} on {tensor.device}: all that the "
                    "stages of one rank hold must be on one device; move it before"
                )
    return None if found is None else found[1]


def agree_on_device(engine: Engine, own: torch.device | None) -> torch.device:
    """This rank's device: `own`, or where that is None one of the others' kind. Collective.

    Raises:
        UsageError: some ranks are on the CPU and some are not; on every rank.
    """
    texts = engine.exchange_bytes(b"" if own is None else str(own).encode())
    places = {rank: text.decode() for rank, text in enumerate(texts) if text}
    kinds = {torch.device(place).type: rank for rank, place in reversed(places.items())}
    if len(kinds) > 1:
        parts = [f"on {places[rank]} on rank {rank}" for rank in sorted(kinds.values())]
        raise UsageError(
            f"the stages of a pipeline are {' and '.join(parts)}; move all of them to the CPU, or "
            "each rank's to a device of its own"
        )
    if own is not None:
        return own
    kind = next(iter(kinds), "cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())


def goes_over_device(device: torch.device) -> bool:
    """Whether tensors there travel from device to device."""
    return _device.on_device(torch.empty(0, device=device))


def check_place(value: Any, what: str, device: torch.device, stage: str) -> None:
    """Raises UsageError where the stage could not use the tensors in `value`.

    One beside others that are on its device may be on the CPU: lengths of sequences, say.
    """
    leaves, _ = take_apart(value)
    there = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    away = sorted(str(other) for other in there if other not in (device, torch.device("cpu")))
    if not there or (device in there and not away):
        return
    found = away[0] if away else "the CPU"
    raise UsageError(
        f"{what} is on {found}, but the {stage} stage on {device}; move it there before the step: "
        f".to({str(device)!r})"
    )
