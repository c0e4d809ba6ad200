"""Owns the public collectives in which one rank has all that the others have parts of."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pydist._collective_calls import (
    SUM,
    Group,
    InMemoryOrder,
    check_dtypes,
    check_length,
    check_numel,
    flat,
    group_rank_of,
    not_a_member,
    op_index,
)
from pydist._engine import Engine, group_engine


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """In place at `dst`, a global rank, or at the group's `group_dst`; others' tensors stay.

    Its tensor becomes the reduction of everybody's, bit for bit that of all_reduce.
    """
    if not tensor.is_cpu:
        return dist.reduce(tensor, dst, op, group, async_op, group_dst)
    if not_a_member(group, "reduce"):
        return None
    root = group_rank_of(group, dst, group_dst, "dst")
    engine = group_engine(group)
    index = op_index(engine, op)
    order = InMemoryOrder()
    memory = order.write(tensor) if engine.rank == root else order.read(tensor)
    return order.end(engine.operations.reduce(memory, root, index, async_op))


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """At `dst` (global rank 0 if nothing is given), gather_list[r] becomes rank r's tensor.

    All tensors have as many elements; the other ranks give no list.
    """
    if not tensor.is_cpu:
        return dist.gather(tensor, gather_list, dst, group, async_op, group_dst)
    if not_a_member(group, "gather"):
        return None
    root = group_rank_of(group, *_default_root(dst, group_dst), "dst")
    engine = group_engine(group)
    targets = _list_of_root(engine, gather_list, tensor, root, "gather_list")
    order = InMemoryOrder()
    together = None
    if targets is not None:
        together = torch.empty(engine.size * tensor.numel(), dtype=tensor.dtype)
        parts = together.view(engine.size, tensor.numel()).unbind()
        for target, part in zip(targets, parts, strict=True):
            order.later(target, part)
    return order.end(engine.operations.gather(together, order.read(tensor), root, async_op))


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Rank r's tensor becomes scatter_list[r] of `src` (global rank 0 if nothing is given).

    All tensors have as many elements; the other ranks give no list.
    """
    if not tensor.is_cpu:
        return dist.scatter(tensor, scatter_list, src, group, async_op, group_src)
    if not_a_member(group, "scatter"):
        return None
    root = group_rank_of(group, *_default_root(src, group_src), "src")
    engine = group_engine(group)
    sources = _list_of_root(engine, scatter_list, tensor, root, "scatter_list")
    order = InMemoryOrder()
    together = None if sources is None else flat(sources)
    return order.end(engine.operations.scatter(order.write(tensor), together, root, async_op))


def _default_root(rank: int | None, group_rank: int | None) -> tuple[int | None, int | None]:
    return (0 if rank is None and group_rank is None else rank), group_rank


def _list_of_root(
    engine: Engine, tensors: list[Tensor] | None, mine: Tensor, root: int, what: str
) -> list[Tensor] | None:
    """None on the other ranks. Refuses what the root's peers could only wait for."""
    if engine.rank != root:
        if tensors:
            engine.operations.refuse(f"{what} is given on a rank that is not the root")
        return None
    tensors = tensors if tensors is not None else []
    check_length(engine, tensors, what)
    check_dtypes(engine, tensors, mine.dtype, what)
    for tensor in tensors:
        check_numel(engine, tensor, mine.numel(), f"a tensor of {what}")
    return tensors
