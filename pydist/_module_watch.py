"""Owns the notice of parameters that are replaced, moved or added after a module was wrapped."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pydist import _C
from pydist.errors import UsageError

# Of a warning in forward: to the line that called the model.
_USER_STACKLEVEL = 7


class ModuleWatch:
    """Remembers which parameters and submodules each part of a module holds."""

    def __init__(self, module: torch.nn.Module) -> None:
        # ScriptModules keep theirs elsewhere, and cannot exchange them.
        self._dicts: list[dict[str, Any]] = [
            held
            for part in module.modules()
            for held in (part._parameters, part._modules)
            if isinstance(held, dict)
        ]
        self._values = [tuple(held.values()) for held in self._dicts]

    def changed(self) -> bool:
        """True if some parameter or submodule is another object than before. Cheap."""
        return not _C.dicts_hold(self._dicts, self._values)


def find_replacements(
    model_name: str,
    names: list[str],
    parameters: list[Tensor],
    now: Iterable[tuple[str, Tensor]],
) -> tuple[list[str], dict[int, Tensor]]:
    """What has become of the parameters that were wrapped, given those that the module has now.

    Returns their names now (parametrizations rename), and by index those that took another's place.

    Raises:
        UsageError: a parameter was added or removed.
    """
    found = dict(now)
    known = {id(parameter): index for index, parameter in enumerate(parameters)}
    new_names = list(names)
    missing = set(range(len(parameters)))
    strangers: dict[str, Tensor] = {}
    for name, parameter in found.items():
        index = known.get(id(parameter))
        if index is not None:
            new_names[index] = name
            missing.discard(index)
        elif parameter.is_floating_point() or parameter.is_complex():
            strangers[name] = parameter
    replaced: dict[int, Tensor] = {}
    for index in sorted(missing):
        stranger = strangers.pop(names[index], None)
        if stranger is None:
            raise UsageError(
                f"parameter {names[index]} of {model_name} was removed after the module was "
                "wrapped; wrap it again"
            )
        replaced[index] = stranger
    for name in strangers:
        raise UsageError(
            f"parameter {name} of {model_name} was added after the module was wrapped, so ranks "
            "would not average its gradient; wrap the module again"
        )
    return new_names, replaced


def lent_tensors(
    parameters: list[Tensor], now: Iterable[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """What stands in parameters' places for this one forward (torch.func.functional_call)."""
    known = {id(parameter) for parameter in parameters}
    return [
        (name, tensor)
        for name, tensor in now
        if not isinstance(tensor, torch.nn.Parameter) and id(tensor) not in known
    ]


def check_lent(model_name: str, lent: list[tuple[str, Tensor]]) -> None:
    """Warns that the gradients of lent tensors are this rank's own.

    Raises:
        UsageError: they belong to a function transform, and a backward is not what follows.
    """
    for name, tensor in lent:
        if not tensor.requires_grad:
            continue
        text = (
            f"another tensor stands in place of parameter {name} of {model_name} for this forward "
            "(torch.func.functional_call?), and ranks do not average its gradient; call "
            "model.module this way, and average the gradients with pydist.all_reduce"
        )
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise UsageError(text)
        warnings.warn(text, UserWarning, stacklevel=_USER_STACKLEVEL)
        return
