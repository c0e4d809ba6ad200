"""Owns what the parts of a split model have to say about the whole: its names, and their order."""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from pydist._engine import Engine


class SplitModel(Protocol):
    """A model whose layers are on several ranks."""

    @property
    def engine(self) -> Engine:
        """Of the ranks that hold the model together, each layer once."""

    @property
    def layer_names(self) -> Sequence[str]:
        """Of all layers, in the unsplit model's order (Partition.layer_names)."""

    @property
    def local_layers(self) -> Sequence[tuple[str, nn.Module]]:
        """This rank's, by these names, in this order."""

    @property
    def tied_names(self) -> Sequence[Sequence[str]]:
        """For each parameter that stages share, its names in the unsplit model, in order."""


class LocalPart(nn.Module):
    """This rank's layers as one module, whose names are the unsplit model's."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, layer in layers:
            # Not by add_module, which refuses names that nn.Sequential takes: "forward", "type".
            self._modules[name] = layer


class Order:
    """Sorts names as the unsplit model has them."""

    def __init__(self, layer_names: Sequence[str]) -> None:
        self._place = {name: index for index, name in enumerate(layer_names)}

    def layer(self, name: str) -> int:
        """The global index of the layer that has the parameter or buffer of this name; names of
        no layer come last."""
        return self._place.get(name.partition(".")[0], len(self._place))

    def sorted(self, names: Sequence[str]) -> list[str]:
        """By layers; within a layer as they were."""
        return sorted(names, key=self.layer)


def first_names(tied_names: Sequence[Sequence[str]]) -> dict[str, str]:
    """By each name of a tied parameter, the one that the unsplit model's parameters() have."""
    return {name: names[0] for names in tied_names for name in names}
