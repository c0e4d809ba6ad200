"""Owns the public collectives: torch.distributed's names and signatures, on pydist's engine.

They work for any torch group, whose Store sets the engine up at its first use. CPU tensors travel
through the engine; tensors of other devices go to torch.distributed's own functions.
"""

import operator
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pydist import _C
from pydist._engine import Engine, Request, check_group, group_engine
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
    "group_engine",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
    "symmetric_empty",
]

Group = dist.ProcessGroup | None
Function = TypeVar("Function", bound=Callable[..., Any])

_SUM = dist.ReduceOp.SUM
_OPS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.AVG: 1,
    dist.ReduceOp.MIN: 2,
    dist.ReduceOp.MAX: 3,
    dist.ReduceOp.PRODUCT: 4,
}


class Work:
    """An operation started with async_op=True."""

    def __init__(self, request: Request, finish: Callable[[], None] | None = None) -> None:
        self._request = request
        self._finish = finish

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


class _InMemoryOrder:
    """Stand-ins for tensors whose memory is not their values in order, and the way back.

    Such are tensors that are not contiguous, and views that only note a conjugate or a sign.
    """

    def __init__(self) -> None:
        self._written: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def write(self, tensor: Tensor) -> Tensor:
        """The stand-in starts with the tensor's values."""
        if _in_order(tensor):
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


def _in_order(tensor: Tensor) -> bool:
    """True if the memory of a tensor is its values, one after the other."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _not_a_member(group: object, name: str) -> bool:
    """Like torch: a call on a group that this process is not in does nothing but warn."""
    if group is None:
        return False
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        dist.distributed_c10d._warn_not_in_group(name)
        return True
    check_group(group)
    return False


def _op_index(engine: Engine, op: Any) -> int:
    index = _OPS.get(getattr(op, "op", op))
    if index is None:
        engine.operations.refuse(f"{op} is not one of ReduceOp.SUM, AVG, MIN, MAX, PRODUCT")
    return index if index is not None else -1


def _group_rank(group: Group, global_rank: int | None, group_rank: int | None, what: str) -> int:
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


def all_reduce(tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False) -> Any:
    """In place: every rank's tensor becomes the reduction of all of them."""
    if not tensor.is_cpu:
        return dist.all_reduce(tensor, op, group, async_op)
    if _not_a_member(group, "all_reduce"):
        return None
    engine = group_engine(group)
    index = _op_index(engine, op)
    if not async_op and _in_order(tensor):  # nothing to undo: the short way
        return engine.operations.all_reduce(tensor, index, False)
    order = _InMemoryOrder()
    return order.end(engine.operations.all_reduce(order.write(tensor), index, async_op))


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Rank r's output is the reduction of the r-th part of everybody's input."""
    if not input.is_cpu:
        return dist.reduce_scatter_tensor(output, input, op, group, async_op)
    if _not_a_member(group, "reduce_scatter_tensor"):
        return None
    engine = group_engine(group)
    order = _InMemoryOrder()
    index = _op_index(engine, op)
    source = order.read(input)
    target = order.write(output)
    return order.end(engine.operations.reduce_scatter(target, source, index, async_op))


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Rank r's output is the reduction of everybody's input_list[r]; sizes may differ by r."""
    if not output.is_cpu:
        return dist.reduce_scatter(output, input_list, op, group, async_op)
    if _not_a_member(group, "reduce_scatter"):
        return None
    engine = group_engine(group)
    _check_length(engine, input_list, "input_list")
    _check_dtypes(engine, input_list, output.dtype, "input_list")
    index = _op_index(engine, op)
    order = _InMemoryOrder()
    together = _flat(input_list)
    if len({tensor.numel() for tensor in input_list}) == 1:
        target = order.write(output)
        return order.end(engine.operations.reduce_scatter(target, together, index, async_op))
    mine = torch.split(together, [tensor.numel() for tensor in input_list])[engine.rank]
    _check_numel(engine, output, mine.numel(), "output")
    order.later(output, mine)
    return order.end(engine.operations.all_reduce(together, index, async_op))


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """The output is everybody's input, one after the other in rank order."""
    if not input_tensor.is_cpu:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    if _not_a_member(group, "all_gather_into_tensor"):
        return None
    engine = group_engine(group)
    order = _InMemoryOrder()
    source = order.read(input_tensor)
    target = order.write(output_tensor)
    return order.end(engine.operations.all_gather(target, source, async_op))


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """tensor_list[r] becomes rank r's tensor; sizes may differ by r."""
    if not tensor.is_cpu:
        return dist.all_gather(tensor_list, tensor, group, async_op)
    if _not_a_member(group, "all_gather"):
        return None
    engine = group_engine(group)
    _check_length(engine, tensor_list, "tensor_list")
    _check_dtypes(engine, tensor_list, tensor.dtype, "tensor_list")
    order = _InMemoryOrder()
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
    if _not_a_member(group, "broadcast"):
        return None
    root = _group_rank(group, src, group_src, "src")
    order = _InMemoryOrder()
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
    if _not_a_member(group, "barrier"):
        return None
    return _InMemoryOrder().end(group_engine(group).operations.barrier(async_op))


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
    if _not_a_member(group, "all_to_all_single"):
        return None
    engine = group_engine(group)
    order = _InMemoryOrder()
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
    if _not_a_member(group, "all_to_all"):
        return None
    engine = group_engine(group)
    _check_length(engine, output_tensor_list, "output_tensor_list")
    _check_length(engine, input_tensor_list, "input_tensor_list")
    dtype = input_tensor_list[0].dtype
    _check_dtypes(engine, input_tensor_list, dtype, "input_tensor_list")
    _check_dtypes(engine, output_tensor_list, dtype, "output_tensor_list")
    order = _InMemoryOrder()
    sizes = [target.numel() for target in output_tensor_list]
    source = _flat(input_tensor_list)
    together = torch.empty(sum(sizes), dtype=source.dtype)
    for target, part in zip(output_tensor_list, torch.split(together, sizes), strict=True):
        order.later(target, part)
    splits = [tensor.numel() for tensor in input_tensor_list]
    return order.end(engine.operations.all_to_all(together, source, sizes, splits, async_op))


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Sends to `dst`, a global rank, or to the group's `group_dst`."""
    if not tensor.is_cpu:
        dist.send(tensor, dst, group, tag, group_dst)
        return
    if _not_a_member(group, "send"):
        return
    target = _group_rank(group, dst, group_dst, "dst")
    group_engine(group).operations.send(_InMemoryOrder().read(tensor), target, tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives from `src` (global), from `group_src`, or from any; returns the global rank."""
    if not tensor.is_cpu:
        return int(dist.recv(tensor, src, group, tag, group_src))
    if _not_a_member(group, "recv"):
        return -1
    engine = group_engine(group)
    anybody = src is None and group_src is None
    source = None if anybody else _group_rank(group, src, group_src, "src")
    order = _InMemoryOrder()
    found = engine.operations.receive(order.write(tensor), source, tag)
    order.copy_back()
    return engine.global_ranks[found]


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


def _flat(tensors: list[Tensor]) -> Tensor:
    order = _InMemoryOrder()
    return torch.cat([order.read(tensor).view(-1) for tensor in tensors])


def _splits(tensor: Tensor, sizes: list[int] | None, size: int) -> list[int]:
    """Rows per rank as elements per rank; what does not divide is left to the engine's check."""
    num_rows = tensor.shape[0] if tensor.dim() > 0 else 1
    row = tensor.numel() // num_rows if num_rows > 0 else 0
    if not sizes:
        sizes = [num_rows // size] * size
    return [rows * row for rows in sizes]


def _check_length(engine: Engine, tensors: list[Tensor], what: str) -> None:
    if len(tensors) != engine.size:
        engine.operations.refuse(f"{what} has {len(tensors)} tensors for {engine.size} ranks")


def _check_numel(engine: Engine, tensor: Tensor, expected: int, what: str) -> None:
    if tensor.numel() != expected:
        engine.operations.refuse(f"{what} has {tensor.numel()} elements instead of {expected}")


def _check_dtypes(engine: Engine, tensors: list[Tensor], dtype: torch.dtype, what: str) -> None:
    """The detour through one tensor would convert silently."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            found, expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
            # Short, as peers are told only how it begins.
            engine.operations.refuse(f"{what}[{index}] is {found} instead of {expected}")
