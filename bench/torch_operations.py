"""Owns the operations of torch.distributed that the backends' benchmark times, with what they give.

The number of bytes of an operation is that of all ranks' parts together where ranks have parts
(a gather's output, a scatter's input), and else that of the tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench.ranks import Rank

Group = dist.ProcessGroup
DTYPE = torch.float32


@dataclass(frozen=True)
class Call:
    """One operation in buffers of its own, and the values that it should leave there."""

    run: Callable[[Group], object]
    source: Tensor | None = None  # filled before each sample
    initial: Tensor | None = None  # with this
    output: Tensor | None = None  # what is checked, if anything is on this rank
    expected: Tensor | None = None

    def reset(self) -> None:
        if self.output is not None:
            self.output.zero_()
        if self.source is not None and self.initial is not None:
            self.source.copy_(self.initial)

    def num_wrong(self) -> int:
        if self.output is None or self.expected is None:
            return 0
        return int((self.output != self.expected).sum())


@dataclass(frozen=True)
class Values:
    """Small integers that depend on rank and position: every sum of them is exact."""

    rank: Rank
    num_elements: int

    def of(self, rank: int) -> Tensor:
        return (torch.arange(self.num_elements) % 1021 + 1 + 3 * rank).to(DTYPE)

    @property
    def own(self) -> Tensor:
        return self.of(self.rank.index)

    @property
    def total(self) -> Tensor:
        size = self.rank.size
        return self.of(0).mul_(size).add_(3 * (size * (size - 1) // 2))

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's share of something."""
        return whole.chunk(self.rank.size)[self.rank.index]

    @property
    def of_all(self) -> Tensor:
        """Every rank's own part, one after the other."""
        size = self.rank.size
        return torch.cat([self.of(r).chunk(size)[r] for r in range(size)])

    def whole_buffer(self) -> Tensor:
        return torch.empty(self.num_elements, dtype=DTYPE)

    def part_buffer(self) -> Tensor:
        return torch.empty(self.num_elements // self.rank.size, dtype=DTYPE)


def _all_reduce(values: Values) -> Call:
    tensor = values.whole_buffer()
    return Call(
        lambda group: dist.all_reduce(tensor, group=group),
        tensor,
        values.own,
        tensor,
        values.total,
    )


def _broadcast(values: Values) -> Call:
    tensor = values.whole_buffer()
    return Call(
        lambda group: dist.broadcast(tensor, 0, group=group),
        tensor,
        values.own,
        tensor,
        values.of(0),
    )


def _reduce(values: Values) -> Call:
    tensor = values.whole_buffer()

    def run(group: Group) -> None:
        dist.reduce(tensor, 0, group=group)

    if values.rank.index > 0:  # what it leaves there is nobody's
        return Call(run, tensor, values.own)
    return Call(run, tensor, values.own, tensor, values.total)


def _all_gather(values: Values) -> Call:
    source, output = values.part_buffer(), values.whole_buffer()
    return Call(
        lambda group: dist.all_gather_into_tensor(output, source, group=group),
        source,
        values.part_of(values.own),
        output,
        values.of_all,
    )


def _reduce_scatter(values: Values) -> Call:
    source, output = values.whole_buffer(), values.part_buffer()
    return Call(
        lambda group: dist.reduce_scatter_tensor(output, source, group=group),
        source,
        values.own,
        output,
        values.part_of(values.total),
    )


def _gather(values: Values) -> Call:
    source, output = values.part_buffer(), values.whole_buffer()
    root = values.rank.index == 0
    parts = list(output.chunk(values.rank.size)) if root else None

    def run(group: Group) -> None:
        dist.gather(source, parts, 0, group=group)

    initial = values.part_of(values.own)
    return Call(run, source, initial, output, values.of_all) if root else Call(run, source, initial)


def _scatter(values: Values) -> Call:
    source, output = values.whole_buffer(), values.part_buffer()
    parts = list(source.chunk(values.rank.size)) if values.rank.index == 0 else None
    return Call(
        lambda group: dist.scatter(output, parts, 0, group=group),
        source,
        values.own,
        output,
        values.part_of(values.of(0)),
    )


def _all_to_all(values: Values) -> Call:
    source, output = values.whole_buffer(), values.whole_buffer()
    parts = [values.part_of(values.of(rank)) for rank in range(values.rank.size)]
    return Call(
        lambda group: dist.all_to_all_single(output, source, group=group),
        source,
        values.own,
        output,
        torch.cat(parts),
    )


def _send(values: Values) -> Call:
    """From each even rank to the next."""
    tensor, index = values.whole_buffer(), values.rank.index
    if index % 2 == 0:
        return Call(lambda group: dist.send(tensor, index + 1, group=group), tensor, values.own)
    return Call(
        lambda group: dist.recv(tensor, index - 1, group=group),
        output=tensor,
        expected=values.of(index - 1),
    )


def _barrier(values: Values) -> Call:
    return Call(lambda group: dist.barrier(group=group))


OPERATIONS: dict[str, Callable[[Values], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all,
    "send, recv": _send,
    "barrier": _barrier,
}
