"""Owns how a stage of a pipeline runs its layers: their random numbers and keyword arguments.

The executor calls a stage once for each microbatch, within a `StageContext`, in which each layer
draws its random numbers from a seed of its own (csrc/pipeline/seeded_generator.h).
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pydist import _C

# The keyword arguments that a forward takes; None: any.
Names = frozenset[str] | None


def keyword_names(module: nn.Module, num_positional: int = 0) -> Names:
    """Which keyword arguments the forward takes, when so many arguments go to it by position."""
    parameters = _parameters_of(module)
    if parameters is None:
        return None
    names: set[str] = set()
    for index, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return None
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or (
            parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and index >= num_positional
        ):
            names.add(parameter.name)
    return frozenset(names)


def _parameters_of(module: nn.Module) -> list[inspect.Parameter] | None:
    """Of the module's forward; None where they cannot be known."""
    while True:  # what torch.compile and data parallelism put around a module takes anything
        inner = module._modules.get("_orig_mod")
        if inner is None and isinstance(module, DistributedDataParallel):
            inner = module.module
        if inner is None:
            break
        module = inner
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # of a forward that is no Python function
        return None


class SequentialStage(nn.Sequential):
    """Layers of an nn.Sequential, with the names that they have there.

    Called as an nn.Sequential, and with keyword arguments: each goes to the layers that name it.
    Random numbers depend on a layer's index in the unsplit model, not on which stage it is in.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], indices: Sequence[int] | None = None
    ) -> None:
        """`indices`: of the layers in the unsplit model; None, as for a slice: from 0 on."""
        super().__init__()
        self._layer_indices = tuple(range(len(layers)) if indices is None else indices)
        self._layer_keywords = tuple(keyword_names(layer, 1) for layer in layers.values())
        # Not by add_module, which refuses names that this class has, but nn.Sequential has not.
        self._modules.update(layers)

    def forward(self, value: Any, /, **kwargs: Any) -> Any:  # type: ignore[override]
        if kwargs:
            return self._forward_with(value, kwargs)
        # What stands in _modules now: converting a stage's layers replaces them there.
        for index, layer in zip(self._layer_indices, self._modules.values(), strict=True):
            _C.seed_layer(index)
            value = layer(value)
        return value

    def _forward_with(self, value: Any, kwargs: dict[str, Any]) -> Any:
        layers = zip(self._layer_indices, self._layer_keywords, self._modules.values(), strict=True)
        for index, names, layer in layers:
            _C.seed_layer(index)
            own = {k: v for k, v in kwargs.items() if names is None or k in names}
            value = layer(value, **own)
        return value


class ModuleStage:
    """A user's module that is a stage: it draws random numbers as one layer."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module = module
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _C.seed_layer(self._index)
        return self.module(*args, **kwargs)
