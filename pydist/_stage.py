"""Owns what one stage of a pipeline computes: its layers, their random numbers and keywords."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from pydist import _C
from pydist._running_statistics import RunningStatistics, watch_running_statistics


@dataclass(frozen=True)
class Layer:
    """A module of the unsplit model."""

    index: int  # in the unsplit model; its random numbers depend on it
    name: str  # in the unsplit model's state_dict
    module: nn.Module


@dataclass(frozen=True)
class Keywords:
    """The keyword arguments that a forward takes."""

    names: frozenset[str]
    any: bool = False  # it has **kwargs

    def of(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of the given ones that it takes."""
        if self.any:
            return given
        return {name: value for name, value in given.items() if name in self.names}

    def takes(self, name: str) -> bool:
        return self.any or name in self.names


def keywords_of(module: nn.Module, num_positional: int = 0) -> Keywords:
    """What a module's forward can be given by keyword, besides its first positional arguments."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in by_position]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Keywords(
        frozenset(
            parameter.name
            for parameter in parameters
            if parameter.kind in by_keyword and parameter not in positional[:num_positional]
        ),
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    )


class Stage(nn.Module):
    """One stage; called once per microbatch, with what the stage before it returned.

    Its state_dict has the names of the unsplit model. In a `StageContext` each layer draws its
    random numbers from a seed of its own (see csrc/pipeline/seeded_generator.h), so that dropout
    masks depend neither on how layers are split, nor on the schedule.
    """

    # Of a layer's arguments, those that the stage before it gives.
    num_positional: ClassVar[int] = 0

    def __init__(
        self, index: int, layers: Sequence[Layer], deferred_batch_norm: bool = False
    ) -> None:
        super().__init__()
        self.stage_index = index
        self._layer_indices = tuple(layer.index for layer in layers)
        self._keywords = tuple(keywords_of(layer.module, self.num_positional) for layer in layers)
        self._statistics: list[RunningStatistics] = []
        # Not by add_module, which refuses the names that this class uses.
        self._modules.update({layer.name: layer.module for layer in layers})
        self._statistics.extend(watch_running_statistics(self, deferred_batch_norm))

    @property
    def keywords(self) -> Keywords:
        """The keyword arguments of a step that this stage wants."""
        names = frozenset[str]().union(*(keywords.names for keywords in self._keywords))
        return Keywords(names, any(keywords.any for keywords in self._keywords))

    def begin_step(self) -> None:
        """Called before the first forward of a step; forgets what a failed step has left."""
        for statistics in self._statistics:
            statistics.begin_step()

    def end_step(self) -> None:
        """Called after the last forward of a step that succeeded."""
        for statistics in self._statistics:
            statistics.end_step()


class SequentialStage(Stage):
    """Layers of an nn.Sequential: one value goes from layer to layer."""

    num_positional = 1

    def forward(self, value: Any, /, **kwargs: Any) -> Any:
        if kwargs:
            return self._forward_with(value, kwargs)
        # What stands in _modules now: converting a stage's layers replaces them there.
        for index, layer in zip(self._layer_indices, self._modules.values()):  # noqa: B905
            _C.seed_layer(index)
            value = layer(value)  # type: ignore[misc]
        return value

    def _forward_with(self, value: Any, kwargs: dict[str, Any]) -> Any:
        layers = zip(self._layer_indices, self._keywords, self._modules.values(), strict=True)
        for index, keywords, layer in layers:
            _C.seed_layer(index)
            value = layer(value, **keywords.of(kwargs))  # type: ignore[misc]
        return value


class ModuleStage(Stage):
    """A user's module that is a stage: takes all that the stage before it returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        [module] = self._modules.values()
        _C.seed_layer(self._layer_indices[0])
        return module(*args, **kwargs)  # type: ignore[misc]
