"""Owns what the public collectives and messages share: the tensors of a call, and its Work."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pydist._engine import Engine, Request, check_group
from pydist.errors import UsageError

Group = dist.ProcessGroup | None

SUM = dist.ReduceOp.SUM
OPS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.AVG: 1,
    dist.ReduceOp.MIN: 2,
    dist.ReduceOp.MAX: 3,
    dist.ReduceOp.PRODUCT: 4,
    dist.ReduceOp.BAND: 5,
    dist.ReduceOp.BOR: 6,
    dist.ReduceOp.BXOR: 7,
}


class Work:
    """An operation started with async_op=True, or by isend or irecv."""

    def __init__(
        self,
        request: Request,
        finish: Callable[[], None] | None = None,
        global_ranks: list[int] | None = None,  # for a message that is received: of the group
    ) -> None:
        self._request = request
        self._finish = finish
        self._global_ranks = global_ranks

    def is_completed(self) -> bool:
        """True once the operation has ended, well or not."""
        return self._request.test()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns once the result is there; raises what the operation raised.

        The time limit is the group's: `timeout` is accepted for compatibility and must be None.
        """
        if timeout is not None:
            raise UsageError("wait(timeout=...): the time limit is the group's; set it there")
        self._request.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def source(self) -> int:
        """Of an irecv that wait() has ended: the global rank whose message it was."""
        if self._global_ranks is None or not self._request.test() or self._request.source < 0:
            raise UsageError("source() is known of an irecv, once its wait() has returned")
        return self._global_ranks[self._request.source]


class InMemoryOrder:
    """Stand-ins for tensors whose memory is not their values in order, and the way back.

    Such are tensors that are not contiguous, and views that only note a conjugate or a sign.
    """

    def __init__(self) -> None:
        self._written: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def write(self, tensor: Tensor) -> Tensor:
        """The stand-in starts with the tensor's values."""
        if in_order(tensor):
            return tensor
        stand_in = self.read(tensor)
        self.later(tensor, stand_in)
        return stand_in

    def later(self, tensor: Tensor, source: Tensor) -> None:
        """`tensor` gets the values of `source` when the operation has ended."""
        self._written.append((tensor.detach(), source))

    def copy_back(self) -> None:
        for tensor, stand_in in self._written:
            tensor.copy_(stand_in.view(tensor.shape))

    def end(self, request: Request | None) -> Work | None:
        """Of an operation that has ended (None), or runs."""
        if request is not None:
            return Work(request, self.copy_back if self._written else None)
        if self._written:
            self.copy_back()
        return None


def in_order(tensor: Tensor) -> bool:
    """True if the memory of a tensor is its values, one after the other."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def not_a_member(group: object, name: str) -> bool:
    """Like torch: a call on a group that this process is not in does nothing but warn."""
    if group is None:
        return False
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        dist.distributed_c10d._warn_not_in_group(name)
        return True
    check_group(group)
    return False


def op_index(engine: Engine, op: Any) -> int:
    index = OPS.get(getattr(op, "op", op))
    if index is None:
        engine.operations.refuse(
            f"{op} is not one of ReduceOp.SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR, BXOR"
        )
    return index if index is not None else -1


def group_rank_of(group: Group, global_rank: int | None, group_rank: int | None, what: str) -> int:
    """Of the two ways to name a rank, exactly one is used."""
    if (global_rank is None) == (group_rank is None):
        raise UsageError(
            f"give either {what} (a global rank) or group_{what} (a rank of the group)"
        )
    if group_rank is not None:
        return group_rank
    assert global_rank is not None
    if group is None:
        return global_rank
    return dist.get_group_rank(group, global_rank)


def flat(tensors: list[Tensor]) -> Tensor:
    order = InMemoryOrder()
    return torch.cat([order.read(tensor).view(-1) for tensor in tensors])


def check_length(engine: Engine, tensors: list[Tensor], what: str) -> None:
    if len(tensors) != engine.size:
        engine.operations.refuse(f"{what} has {len(tensors)} tensors for {engine.size} ranks")


def check_numel(engine: Engine, tensor: Tensor, expected: int, what: str) -> None:
    if tensor.numel() != expected:
        engine.operations.refuse(f"{what} has {tensor.numel()} elements instead of {expected}")


def check_dtypes(engine: Engine, tensors: list[Tensor], dtype: torch.dtype, what: str) -> None:
    """The detour through one tensor would convert silently."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            found, expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
            # Short, as peers are told only how it begins.
            engine.operations.refuse(f"{what}[{index}] is {found} instead of {expected}")
