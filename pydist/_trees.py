"""Owns how a value made of containers is taken apart into leaves, and put together again."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is left of a value without its leaves. Equal if two values are built alike."""

    spec: pytree.TreeSpec
    objects: tuple["_Object", ...]  # dataclasses that torch's pytree takes for leaves, in order

    def build(self, leaves: Sequence[Any]) -> Any:
        """The value with these leaves."""
        if not self.objects:
            return pytree.tree_unflatten(leaves, self.spec)
        parts: list[Any] = []
        taken = 0
        for part in self.objects:
            parts += leaves[taken : taken + part.num_leaves_before]
            taken += part.num_leaves_before
            parts.append(part.build(leaves[taken : taken + part.num_leaves]))
            taken += part.num_leaves
        return pytree.tree_unflatten([*parts, *leaves[taken:]], self.spec)


@dataclasses.dataclass(frozen=True)
class _Object:
    kind: type
    template: Any = dataclasses.field(compare=False)  # for what is not a field
    names: tuple[str, ...]
    structure: Structure  # of the fields' values as a list
    num_leaves_before: int  # since the object before it
    num_leaves: int

    def build(self, leaves: Sequence[Any]) -> Any:
        built = copy.copy(self.template)
        for name, value in zip(self.names, self.structure.build(leaves), strict=True):
            # Past a frozen dataclass; one that also is a mapping (Hugging Face's) minds its keys.
            setter = setattr if isinstance(built, dict) else object.__setattr__
            setter(built, name, value)
        return built


def take_apart(value: Any) -> tuple[list[Any], Structure]:
    """Leaves in order, through tuples, lists, dicts, namedtuples, dataclasses and whatever else is
    registered with torch.utils._pytree. Any other object is a leaf, None too.
    """
    parts, spec = pytree.tree_flatten(value)
    leaves: list[Any] = []
    objects: list[_Object] = []
    last_end = 0
    for part in parts:
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            leaves.append(part)
            continue
        names = tuple(field.name for field in dataclasses.fields(part) if hasattr(part, field.name))
        inner, structure = take_apart([getattr(part, name) for name in names])
        before = len(leaves) - last_end
        objects.append(_Object(type(part), part, names, structure, before, len(inner)))
        leaves += inner
        last_end = len(leaves)
    return leaves, Structure(spec, tuple(objects))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with function(tensor) in the place of each of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    leaves, structure = take_apart(value)
    return structure.build([function(x) if isinstance(x, Tensor) else x for x in leaves])
