"""Owns the public collectives: torch.distributed's names and signatures, on pydist's engine.

They work for any torch group, whose Store sets the engine up at its first use. CPU tensors travel
through the engine; tensors of other devices go to torch.distributed's own functions.
"""

import operator
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pydist import _C
from pydist._collective_calls import (
    SUM,
    Group,
    InMemoryOrder,
    Work,
    check_dtypes,
    check_length,
    check_numel,
    flat,
    group_rank_of,
    in_order,
    not_a_member,
    op_index,
)
from pydist._engine import Engine, check_group, group_engine
from pydist._messages import irecv, isend, monitored_barrier, recv, send
from pydist._rooted import gather, reduce, scatter
from pydist.errors import UsageError

__all__ = [
    "Engine",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "group_engine",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "symmetric_empty",
]


def all_reduce(tensor: Tensor, op: Any = SUM, group: Group = None, async_op: bool = False) -> Any:
    """In place: every rank's tensor becomes the reduction of all of them."""
    if not tensor.is_cpu:
        return dist.all_reduce(tensor, op, group, async_op)
    if not_a_member(group, "all_reduce"):
        return None
    engine = group_engine(group)
    index = op_index(engine, op)
    if not async_op and in_order(tensor):  # nothing to undo: the short way
        return engine.operations.all_reduce(tensor, index, False)
    order = InMemoryOrder()
    return order.end(engine.operations.all_reduce(order.write(tensor), index, async_op))


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Rank r's output is the reduction of the r-th part of everybody's input."""
    if not input.is_cpu:
        return dist.reduce_scatter_tensor(output, input, op, group, async_op)
    if not_a_member(group, "reduce_scatter_tensor"):
        return None
    engine = group_engine(group)
    order = InMemoryOrder()
    index = op_index(engine, op)
    source = order.read(input)
    target = order.write(output)
    return order.end(engine.operations.reduce_scatter(target, source, index, async_op))


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Rank r's output is the reduction of everybody's input_list[r]; sizes may differ by r."""
    if not output.is_cpu:
        return dist.reduce_scatter(output, input_list, op, group, async_op)
    if not_a_member(group, "reduce_scatter"):
        return None
    engine = group_engine(group)
    check_length(engine, input_list, "input_list")
    check_dtypes(engine, input_list, output.dtype, "input_list")
    index = op_index(engine, op)
    order = InMemoryOrder()
    together = flat(input_list)
    if len({tensor.numel() for tensor in input_list}) == 1:
        target = order.write(output)
        return order.end(engine.operations.reduce_scatter(target, together, index, async_op))
    mine = torch.split(together, [tensor.numel() for tensor in input_list])[engine.rank]
    check_numel(engine, output, mine.numel(), "output")
    order.later(output, mine)
    return order.end(engine.operations.all_reduce(together, index, async_op))


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """The output is everybody's input, one after the other in rank order."""
    if not input_tensor.is_cpu:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    if not_a_member(group, "all_gather_into_tensor"):
        return None
    engine = group_engine(group)
    order = InMemoryOrder()
    source = order.read(input_tensor)
    target = order.write(output_tensor)
    return order.end(engine.operations.all_gather(target, source, async_op))


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """tensor_list[r] becomes rank r's tensor; sizes may differ by r."""
    if not tensor.is_cpu:
        return dist.all_gather(tensor_list, tensor, group, async_op)
    if not_a_member(group, "all_gather"):
        return None
    engine = group_engine(group)
    check_length(engine, tensor_list, "tensor_list")
    check_dtypes(engine, tensor_list, tensor.dtype, "tensor_list")
    order = InMemoryOrder()
    source = order.read(tensor).view(-1)
    sizes = [target.numel() for target in tensor_list]
    together = torch.empty(sum(sizes), dtype=tensor.dtype)
    for target, part in zip(tensor_list, torch.split(together, sizes), strict=True):
        order.later(target, part)
    if len(set(sizes)) == 1:
        return order.end(engine.operations.all_gather(together, source, async_op))
    copies = source.repeat(engine.size)
    splits = [source.numel()] * engine.size
    return order.end(engine.operations.all_to_all(together, copies, sizes, splits, async_op))


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Every rank's tensor becomes that of `src`, a global rank, or of the group's `group_src`."""
    if not tensor.is_cpu:
        return dist.broadcast(tensor, src, group, async_op, group_src)
    if not_a_member(group, "broadcast"):
        return None
    root = group_rank_of(group, src, group_src, "src")
    order = InMemoryOrder()
    target = order.write(tensor)
    return order.end(group_engine(group).operations.broadcast(target, root, async_op))


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Returns when all ranks have called it."""
    if device_ids is not None or timeout is not None:
        return dist.barrier(group, async_op, device_ids, timeout)
    if not_a_member(group, "barrier"):
        return None
    return InMemoryOrder().end(group_engine(group).operations.barrier(async_op))


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends the r-th part of input (along its first dimension) to rank r, for all r."""
    if not input.is_cpu:
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    if not_a_member(group, "all_to_all_single"):
        return None
    engine = group_engine(group)
    order = InMemoryOrder()
    return order.end(
        engine.operations.all_to_all(
            order.write(output),
            order.read(input),
            _splits(output, output_split_sizes, engine.size),
            _splits(input, input_split_sizes, engine.size),
            async_op,
        )
    )


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends input_tensor_list[r] to rank r, for all r."""
    if input_tensor_list and not input_tensor_list[0].is_cpu:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    if not_a_member(group, "all_to_all"):
        return None
    engine = group_engine(group)
    check_length(engine, output_tensor_list, "output_tensor_list")
    check_length(engine, input_tensor_list, "input_tensor_list")
    dtype = input_tensor_list[0].dtype
    check_dtypes(engine, input_tensor_list, dtype, "input_tensor_list")
    check_dtypes(engine, output_tensor_list, dtype, "output_tensor_list")
    order = InMemoryOrder()
    sizes = [target.numel() for target in output_tensor_list]
    source = flat(input_tensor_list)
    together = torch.empty(sum(sizes), dtype=source.dtype)
    for target, part in zip(output_tensor_list, torch.split(together, sizes), strict=True):
        order.later(target, part)
    splits = [tensor.numel() for tensor in input_tensor_list]
    return order.end(engine.operations.all_to_all(together, source, sizes, splits, async_op))


def symmetric_empty(*size: Any, dtype: torch.dtype | None = None, group: Group = None) -> Tensor:
    """A tensor, not initialised, in memory that peers can reach: collectives need no copies.

    Ordinary memory where ranks that share a host do not share memory. Its first use is collective.
    """
    check_group(group)
    shape = _shape(size)
    dtype = dtype if dtype is not None else torch.get_default_dtype()
    if group_engine(group).transport == "process_group":
        return torch.empty(shape, dtype=dtype)
    return _C.arena_empty(shape, dtype)


def _shape(size: tuple[Any, ...]) -> list[int]:
    """Of integers of any type, or of one sequence of them."""
    single = len(size) == 1 and isinstance(size[0], Iterable) and not _is_scalar(size[0])
    try:
        return [operator.index(length) for length in (size[0] if single else size)]
    except TypeError as error:
        raise UsageError(f"a size is integers or one sequence of them, not {size}") from error


def _is_scalar(value: Any) -> bool:
    """Tensors and arrays of no dimension say that they can be iterated."""
    return getattr(value, "ndim", None) == 0


def _splits(tensor: Tensor, sizes: list[int] | None, size: int) -> list[int]:
    """Rows per rank as elements per rank; what does not divide is left to the engine's check."""
    num_rows = tensor.shape[0] if tensor.dim() > 0 else 1
    row = tensor.numel() // num_rows if num_rows > 0 else 0
    if not sizes:
        sizes = [num_rows // size] * size
    return [rows * row for rows in sizes]
