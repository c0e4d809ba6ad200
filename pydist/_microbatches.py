"""Owns how a batch becomes microbatches, what each of them weighs, and how outputs become one
again.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist._outputs import tensors_of
from pydist._trees import take_apart
from pydist.errors import UsageError

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclasses.dataclass
class Microbatches:
    """One step's arguments, cut."""

    # Rows of each microbatch that has any, in order; the others are absent. None: nothing that was
    # given here tells the number of rows, and any of them may be present.
    rows: list[int] | None
    args: list[tuple[Any, ...]]  # by microbatch, of those that are present
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    shared: list[tuple[str, Tensor, int]]  # given to several microbatches: name, version then
    # Pieces that several stages get.
    watched: list[tuple[str, Tensor, int]] = dataclasses.field(default_factory=list)

    @property
    def num_present(self) -> int:
        return len(self.targets)

    def watch(self, names: Collection[str]) -> None:
        """Several stages get these keyword arguments, which none of them may change."""
        self.watched = [
            (name, tensor, _version(tensor))
            for kwargs in self.kwargs
            for name in names
            for tensor in _leaves(kwargs[name])
        ]

    def check_unchanged(self) -> None:
        """Raises UsageError if a stage wrote to a tensor that others get too."""
        for name, tensor, version in self.shared:
            if _version(tensor) != version:
                raise UsageError(
                    f"a tensor of {name}, shape {tuple(tensor.shape)}, was changed in place during "
                    "the step. It is not cut, so every microbatch gets the same one, changed by "
                    "those before it; clone it in forward before changing it"
                )
        for name, tensor, version in self.watched:
            if _version(tensor) != version:
                raise UsageError(
                    f"a stage changed a tensor of {name}, shape {tuple(tensor.shape)}, in place. "
                    "Several stages get this argument, and those on other ranks do not see the "
                    "change; clone it in forward before changing it"
                )

    def row_weights(self) -> list[float]:
        """Each microbatch's share of the rows: its weight in a mean over the batch."""
        if self.rows is None:
            raise UsageError(
                "the weights of microbatches in the mean are their shares of the rows, but no "
                "tensor given on the last stage's rank has rows; pass the target, or the first "
                "stage's arguments there too, or use loss_weight"
            )
        total = sum(self.rows)
        return [rows / total for rows in self.rows]


class Slicer:
    """Cuts batches the way one pipeline wants it.

    Tensors, in any container that torch's pytree knows or a dataclass, are cut along `chunk_dim`
    as torch.tensor_split does it: into pieces whose numbers of rows differ by one at most, the
    larger first. With fewer rows than microbatches, each row is one, and the rest are absent.

    Not cut, but given to every microbatch: what `replicate` names, tensors of one row (a mask that
    is the same for the whole batch), tensors without dimensions, and whatever is no tensor. A
    batch whose tensors all have one row is one microbatch.

    chunk_dim: a dimension for all, or dimensions by argument name ("target" for the target), 0 for
        those not named. Negative ones count from the end.
    positional_names: what the first stage's forward calls its positional arguments; empty where
        this rank cannot know.
    has_first_stage, has_last_stage: of this rank; where it has not, positional arguments or the
        target are not cut, but count when rows are compared.
    """

    def __init__(
        self,
        num_microbatches: int,
        chunk_dim: int | Mapping[str, int] = 0,
        replicate: Collection[str] = (),
        positional_names: Sequence[str] = (),
        has_first_stage: bool = True,
        has_last_stage: bool = True,
    ) -> None:
        if isinstance(replicate, str):
            raise UsageError(f"replicate is {replicate!r}; expected a tuple of argument names")
        self._num_microbatches = num_microbatches
        self._dims = dict(chunk_dim) if isinstance(chunk_dim, Mapping) else {}
        self._default_dim = 0 if isinstance(chunk_dim, Mapping) else chunk_dim
        self._replicate = frozenset(replicate)
        self._positional_names = tuple(positional_names)
        self._has_first_stage = has_first_stage
        self._has_last_stage = has_last_stage

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Microbatches:
        """UsageError names the arguments whose numbers of rows differ.

        Pieces are views of the batch, with version counters of their own: what a stage does in
        place to one microbatch does not count as a change of another.
        """
        names = self._names(args)
        rows = self._num_rows(names, args, kwargs, target)
        present = self._num_microbatches if rows is None else min(self._num_microbatches, rows)
        cutting = _Cutting(self, present)
        nothing = [None] * present
        columns = [
            cutting.pieces(name, value) if self._has_first_stage else nothing
            for name, value in zip(names, args, strict=True)
        ]
        by_name = [cutting.pieces(name, value) for name, value in kwargs.items()]
        return Microbatches(
            rows=None if rows is None else row_counts(rows, self._num_microbatches),
            args=[tuple(column[i] for column in columns) for i in range(present)],
            kwargs=[
                dict(zip(kwargs, (column[i] for column in by_name), strict=True))
                for i in range(present)
            ],
            targets=list(cutting.pieces("target", target) if self._has_last_stage else nothing),
            shared=cutting.shared,
        )

    def dim(self, name: str) -> int:
        """That the argument is cut along."""
        return self._dims.get(name, self._default_dim)

    def is_replicated(self, name: str) -> bool:
        return name in self._replicate

    def _names(self, args: tuple[Any, ...]) -> list[str]:
        known = self._positional_names[: len(args)]
        return [*known, *(f"positional argument {i}" for i in range(len(known), len(args)))]

    def _num_rows(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> int | None:
        """None where no tensor tells it."""
        found: dict[int, list[str]] = {}
        if self._has_first_stage or self._positional_names or not self._dims:
            for name, value in zip(names, args, strict=True):
                self._note_sizes(name, value, found)
        self._note_sizes("target", target, found)
        # One row in a keyword argument may be a mask for all rows of what only another rank has.
        is_whole = bool(found) or self._has_first_stage
        for name, value in kwargs.items():
            self._note_sizes(name, value, found)
        more = {size: names for size, names in found.items() if size != 1}
        if len(more) > 1:
            listed = "; ".join(
                f"{size} in {', '.join(dict.fromkeys(names))}" for size, names in more.items()
            )
            raise UsageError(
                f"the arguments of a step have different numbers of rows to cut: {listed}. Name in "
                "replicate=(...) what is not to be cut, or give its dimension in chunk_dim={...}"
            )
        if 0 in more:
            raise UsageError(f"the batch has no rows: {', '.join(dict.fromkeys(more[0]))} is empty")
        if more:
            return next(iter(more))
        return 1 if found and is_whole else None

    def _note_sizes(self, name: str, value: Any, found: dict[int, list[str]]) -> None:
        if name not in self._replicate:
            for tensor in _tensors(name, value):
                if tensor.dim() > 0:
                    found.setdefault(self._size(name, tensor), []).append(name)

    def _size(self, name: str, tensor: Tensor) -> int:
        dim = self.dim(name)
        if not -tensor.dim() <= dim < tensor.dim():
            raise UsageError(
                f"{name} is to be cut along dimension {dim}, but has a tensor of shape "
                f"{tuple(tensor.shape)}; name it in replicate=(...), or give its dimension in "
                f"chunk_dim={{{name!r}: ...}}"
            )
        return tensor.size(dim)


class _Cutting:
    """One batch being cut into so many pieces."""

    def __init__(self, slicer: Slicer, num_pieces: int) -> None:
        self._slicer = slicer
        self._num_pieces = num_pieces
        self.shared: list[tuple[str, Tensor, int]] = []

    def pieces(self, name: str, value: Any) -> Sequence[Any]:
        """Of one argument, by microbatch."""
        if isinstance(value, Tensor):  # nearly always
            return self._tensor_pieces(name, value)
        if isinstance(value, _SCALARS):
            return [value] * self._num_pieces
        leaves, structure = take_apart(value)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return [value] * self._num_pieces
        columns = [
            self._tensor_pieces(name, leaf)
            if isinstance(leaf, Tensor)
            else [leaf] * self._num_pieces
            for leaf in leaves
        ]
        return [structure.build(row) for row in zip(*columns, strict=True)]

    def _tensor_pieces(self, name: str, tensor: Tensor) -> Sequence[Any]:
        dim = self._slicer.dim(name)
        whole = tensor.dim() == 0 or self._slicer.is_replicated(name) or tensor.size(dim) == 1
        if whole or self._num_pieces == 1:
            if self._num_pieces > 1:
                self.shared.append((name, tensor, _version(tensor)))
            return [tensor] * self._num_pieces
        pieces = tensor.tensor_split(self._num_pieces, dim)
        if tensor.requires_grad:  # which gets a gradient, as with the unsplit model
            return pieces
        return [piece.data for piece in pieces]


def _version(tensor: Tensor) -> int:
    """How often it was written to; of an inference tensor nobody knows."""
    return 0 if tensor.is_inference() else tensor._version


def row_counts(rows: int, num_microbatches: int) -> list[int]:
    """How many rows each microbatch has, without those that have none."""
    each, more = divmod(rows, num_microbatches)
    counts = [each + (i < more) for i in range(num_microbatches)]
    return [count for count in counts if count > 0]


def _tensors(name: str, value: Any) -> Iterator[Tensor]:
    """All tensors of an argument; UsageError where an object hides some."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _SCALARS):
        return
    for leaf in take_apart(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, _SCALARS) and any(True for _ in tensors_of(leaf)):
            raise UsageError(
                f"{name} has a {type(leaf).__name__}, which holds tensors but is no container that "
                "torch's pytree knows; pass its tensors in a dict, tuple or dataclass, register it "
                "with torch.utils._pytree.register_pytree_node, or name it in replicate=(...)"
            )


def _leaves(value: Any) -> list[Tensor]:
    """The tensors of what has been cut already."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, _SCALARS):
        return []
    return [leaf for leaf in take_apart(value)[0] if isinstance(leaf, Tensor)]


# -- weights ---------------------------------------------------------------------------------------


def target_weights(loss_weight: Callable[[Any], Any], targets: Sequence[Any]) -> list[float]:
    """loss_weight(target) of each microbatch, as numbers."""
    found: list[float] = []
    for index, target in enumerate(targets):
        weight = float(loss_weight(target))
        if not 0 <= weight < math.inf:
            raise UsageError(
                f"loss_weight returned {weight} for microbatch {index}; expected a number from 0 up"
            )
        found.append(weight)
    return found


def shares(weights: Sequence[float], total: float | None = None) -> list[float]:
    """Each weight's share of `total`, which is their own sum unless others count too (replicas).

    All zeros where the total is: then nothing has a loss.
    """
    whole = sum(weights) if total is None else total
    return [weight / whole if whole > 0 else 0.0 for weight in weights]


# -- outputs ---------------------------------------------------------------------------------------


def merge_outputs(outputs: Sequence[Any], chunk_dim: int = 0) -> Any:
    """One value from those of the microbatches that were present, in order.

    Tensors are concatenated along `chunk_dim`. What has no such dimension, and what is no tensor,
    becomes a list with one entry per microbatch; None stays None where all are.
    """
    if not outputs:
        return None
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_leaves(outputs, chunk_dim)
    taken = [take_apart(output) for output in outputs]
    structure = taken[0][1]
    for index, (_, other) in enumerate(taken):
        if other != structure:
            raise UsageError(
                f"outputs of microbatches 0 and {index} are built differently and cannot be "
                f"merged: {structure.spec} and {other.spec}"
            )
    columns = zip(*(leaves for leaves, _ in taken), strict=True)
    return structure.build([_merge_leaves(column, chunk_dim) for column in columns])


def _merge_leaves(leaves: Sequence[Any], chunk_dim: int) -> Any:
    if all(leaf is None for leaf in leaves):
        return None
    if not all(isinstance(leaf, Tensor) and _has_dim(leaf, chunk_dim) for leaf in leaves):
        return list(leaves)
    if len(leaves) == 1:
        return leaves[0]
    try:
        return torch.cat(list(leaves), chunk_dim)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise UsageError(
            f"outputs of microbatches cannot be concatenated along dimension {chunk_dim}: their "
            f"shapes are {shapes}"
        ) from error


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
