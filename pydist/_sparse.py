"""Owns the mean of sparse gradients: which parameters have them, and how ranks add theirs up."""

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist._process_group import MEAN, SUM

if TYPE_CHECKING:
    from pydist._engine import Engine

# What ranks say of a gradient beside the number of its sparse dimensions.
_NONE, _DENSE = 0, -1


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """The ids of parameters whose module says that their gradients are sparse, as torch asks it."""
    return {
        id(parameter)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
        for parameter in part.parameters(recurse=False)
    }


@dataclasses.dataclass
class _Contribution:
    """One rank's gradient of one parameter; rows are numbered over all its sparse dimensions."""

    kind: int
    rows: Tensor
    values: Tensor | None


class SparseMean:
    """The reducer's callback (AverageSparse in reducer.h). Does not keep the wrapper alive.

    Ranks tell each other the rows that they have. Each then writes its own into a dense block of
    all these rows, zeros for those it lacks, and the blocks are reduced like any dense gradient:
    in rank order, half types in float32, with the same bits on all ranks.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def __call__(
        self, parameters: list[Tensor], divisor: int, contributes: bool, receives: bool
    ) -> None:
        """Collective: leaves the means in `.grad` of a rank that receives them."""
        with torch.no_grad():
            mine = [_contribution(p.grad if contributes else None, p) for p in parameters]
            table = self._gather(mine)
            kinds = [_common_kind(table[:, index, 0].tolist()) for index in range(len(parameters))]
            rows = self._gather_rows(mine, table)
            for index, parameter in enumerate(parameters):
                if kinds[index] == _DENSE:
                    mean = self._dense_mean(parameter, contributes, divisor)
                else:
                    mean = self._sparse_mean(
                        parameter, kinds[index], mine[index], rows[index], divisor
                    )
                if receives:
                    _store(parameter, mean)

    def _gather(self, mine: list[_Contribution]) -> Tensor:
        """Kind and number of rows, by rank and parameter."""
        sent = torch.tensor([[c.kind, c.rows.numel()] for c in mine], dtype=torch.int64)
        table = torch.empty(self._engine.size, len(mine), 2, dtype=torch.int64)
        self._engine.operations.all_gather(table, sent, False)
        return table

    def _gather_rows(self, mine: list[_Contribution], table: Tensor) -> list[Tensor]:
        """For each parameter the rows that any rank has, in increasing order."""
        counts = table[:, :, 1]
        longest = int(counts.sum(1).max())
        if longest == 0:
            return [contribution.rows for contribution in mine]
        sent = torch.zeros(longest, dtype=torch.int64)
        together = torch.cat([contribution.rows for contribution in mine])
        sent[: together.numel()] = together
        gathered = torch.empty(self._engine.size, longest, dtype=torch.int64)
        self._engine.operations.all_gather(gathered, sent, False)
        split = [
            torch.split(gathered[rank, : int(counts[rank].sum())], counts[rank].tolist())
            for rank in range(self._engine.size)
        ]
        return [torch.unique(torch.cat(parts)) for parts in zip(*split, strict=True)]

    def _sparse_mean(
        self,
        parameter: Tensor,
        num_sparse: int,
        mine: _Contribution,
        rows: Tensor,
        divisor: int,
    ) -> Tensor:
        block = parameter.new_zeros((rows.numel(), *parameter.shape[num_sparse:]))
        if mine.values is not None and mine.rows.numel() > 0:
            block.index_copy_(0, torch.searchsorted(rows, mine.rows), mine.values)
        self._average(block, divisor)
        return torch.sparse_coo_tensor(
            _unravel(rows, parameter.shape[:num_sparse]),
            block,
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def _dense_mean(self, parameter: Tensor, contributes: bool, divisor: int) -> Tensor:
        gradient = parameter.grad if contributes else None
        mean = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if gradient is not None:
            mean.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self._average(mean, divisor)
        return mean

    def _average(self, tensor: Tensor, divisor: int) -> None:
        if tensor.numel() == 0:
            return
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if divisor == self._engine.size:
            self._engine.operations.all_reduce(real, MEAN, False)
            return
        wide = real.float() if real.element_size() < 4 else real  # rounded once
        self._engine.operations.all_reduce(wide, SUM, False)
        real.copy_(wide.mul_(1.0 / divisor))


def _contribution(gradient: Tensor | None, parameter: Tensor) -> _Contribution:
    no_rows = torch.empty(0, dtype=torch.int64)
    if gradient is None:
        return _Contribution(_NONE, no_rows, None)
    if not gradient.is_sparse:  # torch accepts no third layout
        return _Contribution(_DENSE, no_rows, None)
    summed = gradient.detach().coalesce()
    rows = _ravel(summed.indices(), parameter.shape)
    return _Contribution(summed.sparse_dim(), rows, summed.values())


def _common_kind(kinds: list[int]) -> int:
    """Sparse where all ranks that have a gradient have it so, in the same dimensions."""
    present = set(kinds) - {_NONE}
    if not present:  # used, but taken away since
        return 1
    return present.pop() if len(present) == 1 else _DENSE


def _ravel(indices: Tensor, shape: torch.Size) -> Tensor:
    rows = indices[0]
    for dim in range(1, indices.shape[0]):
        rows = rows * shape[dim] + indices[dim]
    return rows.contiguous()


def _unravel(rows: Tensor, shape: torch.Size) -> Tensor:
    indices = []
    for dim in range(len(shape)):
        below = math.prod(shape[dim + 1 :])
        indices.append(rows // below % shape[dim])
    return torch.stack(indices)


def _store(parameter: Tensor, mean: Tensor) -> None:
    """Into the gradient that there is, which somebody may hold, if it is of the same kind."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse != mean.is_sparse:
        parameter.grad = mean
    elif mean.is_sparse:
        gradient.data = mean
        torch.autograd.graph.increment_version(gradient)
    else:
        gradient.detach().copy_(mean)
