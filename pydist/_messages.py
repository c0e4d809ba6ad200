"""Owns the public messages between two ranks, and the barrier that finds out who is missing."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pydist._collective_calls import Group, InMemoryOrder, Work, group_rank_of, not_a_member
from pydist._engine import group_engine
from pydist.errors import UsageError


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Sends to `dst`, a global rank, or to the group's `group_dst`.

    Messages of one peer and tag arrive in the order of their calls, whatever mixture of send and
    isend they are. Raises MismatchError if the receiver has refused one (once for each refusal).
    """
    if not tensor.is_cpu:
        dist.send(tensor, dst, group, tag, group_dst)
        return
    if not_a_member(group, "send"):
        return
    target = group_rank_of(group, dst, group_dst, "dst")
    group_engine(group).operations.send(InMemoryOrder().read(tensor), target, _checked(tag))


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Any:
    """Like send, without waiting; the tensor must not change before the Work has ended."""
    if not tensor.is_cpu:
        return dist.isend(tensor, dst, group, tag, group_dst)
    if not_a_member(group, "isend"):
        return None
    target = group_rank_of(group, dst, group_dst, "dst")
    operations = group_engine(group).operations
    return Work(operations.start_send(InMemoryOrder().read(tensor), target, _checked(tag)))


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives from `src` (global), from `group_src`, or from any; returns the global rank.

    Raises MismatchError if the message has another dtype or another number of elements; it is lost
    then. Shapes are not compared.
    """
    if not tensor.is_cpu:
        return int(dist.recv(tensor, src, group, tag, group_src))
    if not_a_member(group, "recv"):
        return -1
    engine = group_engine(group)
    source = _source(group, src, group_src)
    order = InMemoryOrder()
    found = engine.operations.receive(order.write(tensor), source, _checked(tag))
    order.copy_back()
    return engine.global_ranks[found]


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """Like recv, without waiting: once the Work's wait() has returned, the tensor has the message.

    Work.source() is the global rank that sent it. Receives of one peer and tag get their messages
    in the order of their calls, whatever mixture of recv and irecv they are.
    """
    if not tensor.is_cpu:
        return dist.irecv(tensor, src, group, tag, group_src)
    if not_a_member(group, "irecv"):
        return None
    engine = group_engine(group)
    source = _source(group, src, group_src)
    order = InMemoryOrder()
    request = engine.operations.start_receive(order.write(tensor), source, _checked(tag))
    return Work(request, order.copy_back, engine.global_ranks)


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Returns when all ranks have called it; names those that do not come, on all that came.

    Raises TimeoutError where ranks do not come within `timeout` (None: the group's time limit); it
    names all of them with wait_all_ranks, else the first. The group stays usable.
    """
    if not_a_member(group, "monitored_barrier"):
        return
    timeout_s = None if timeout is None else timeout.total_seconds()
    if timeout_s is not None and timeout_s <= 0:
        raise UsageError(f"monitored_barrier(timeout={timeout}): expected more than 0 seconds")
    group_engine(group).operations.monitored_barrier(timeout_s, wait_all_ranks)


def _source(group: Group, src: int | None, group_src: int | None) -> int | None:
    """A rank of the group; None for any."""
    anybody = src is None and group_src is None
    return None if anybody else group_rank_of(group, src, group_src, "src")


def _checked(tag: int) -> int:
    if tag < 0:
        raise UsageError(f"tag is {tag}; expected 0 or more")
    return tag
