"""Owns the collectives of groups that cannot share memory: torch.distributed's own, made equal.

The same verbs as _C.Communicator, with the same results and errors, on any process group. What
the group's backend lacks is composed of what every backend has: reductions run in a dtype that it
can add, and every collective begins with an exchange of what each rank calls.
"""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pydist._group_calls import (
    amount,
    bytes_of,
    copy_bytes,
    dtype_name,
    in_memory_order,
    tensor_to_text,
    text_to_tensor,
    translated,
)
from pydist._process_group_messages import ProcessGroupMessages
from pydist.errors import MismatchError, UsageError

SUM, MEAN, MIN, MAX, PRODUCT, BIT_AND, BIT_OR, BIT_XOR = range(8)
OP_NAMES = ("sum", "mean", "min", "max", "product", "bitwise and", "bitwise or", "bitwise xor")
_TORCH_OPS = {
    SUM: dist.ReduceOp.SUM,
    MEAN: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
    BIT_AND: dist.ReduceOp.BAND,
    BIT_OR: dist.ReduceOp.BOR,
    BIT_XOR: dist.ReduceOp.BXOR,
}
# Dtypes that backends cannot add, or only with an error in every step, and what carries them.
_CARRIERS = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
_REDUCIBLE = {
    *_CARRIERS,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


class Finished:
    """The request of an operation that has ended."""

    source = -1

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class ProcessGroupOperations(ProcessGroupMessages):
    """See _C.Communicator for the verbs. Collectives end before they return, async ones too."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._num_calls = 0

    # -- the verbs ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: int, async_op: bool) -> Finished | None:
        call = f"all_reduce({OP_NAMES[op]}) of {amount(tensor)}"
        self._agree(call, _why_not_reducible(tensor, op))
        with translated(call):
            self._reduce(tensor, op)
        return Finished() if async_op else None

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: int, async_op: bool
    ) -> Finished | None:
        call = f"reduce_scatter({OP_NAMES[op]}) of {amount(output)} per rank"
        why = _why_not_reducible(output, op) or self._why_unequal(output, input, "input")
        self._agree(call, why)
        with translated(call):
            total = input.clone()
            self._reduce(total, op)
            output.copy_(total.view(self._size, -1)[self._rank].view_as(output))
        return Finished() if async_op else None

    def reduce(self, tensor: Tensor, root: int, op: int, async_op: bool) -> Finished | None:
        call = f"reduce({OP_NAMES[op]}, to rank {root}) of {amount(tensor)}"
        self._agree(call, _why_not_reducible(tensor, op) or self._why_no_rank(root))
        with translated(call):
            self._reduce(tensor if self._rank == root else tensor.clone(), op)
        return Finished() if async_op else None

    def gather(
        self, output: Tensor | None, input: Tensor, root: int, async_op: bool
    ) -> Finished | None:
        call = f"gather(to rank {root}) of {amount(input)} per rank"
        why = self._why_no_rank(root)
        if not why and self._rank == root:
            why = self._why_unequal(input, _given(output), "output")
        self._agree(call, why)
        with translated(call):
            if input.numel() > 0:
                gathered = self._gather_bytes(bytes_of(input))
                if self._rank == root:
                    copy_bytes(_given(output), gathered)
        return Finished() if async_op else None

    def scatter(
        self, output: Tensor, input: Tensor | None, root: int, async_op: bool
    ) -> Finished | None:
        call = f"scatter(from rank {root}) of {amount(output)} per rank"
        why = self._why_no_rank(root)
        if not why and self._rank == root:
            why = self._why_unequal(output, _given(input), "input")
        self._agree(call, why)
        with translated(call):
            together = torch.empty(self._size * output.nbytes, dtype=torch.uint8)
            if self._rank == root:
                together.copy_(bytes_of(_given(input)))
            self._broadcast_bytes(together, root)
            copy_bytes(output, together.view(self._size, -1)[self._rank])
        return Finished() if async_op else None

    def all_gather(self, output: Tensor, input: Tensor, async_op: bool) -> Finished | None:
        call = f"all_gather of {amount(input)} per rank"
        self._agree(call, self._why_unequal(input, output, "output"))
        with translated(call):
            if input.numel() > 0:
                copy_bytes(output, self._gather_bytes(bytes_of(input)))
        return Finished() if async_op else None

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Finished | None:
        call = f"broadcast(from rank {root}) of {amount(tensor)}"
        self._agree(call, self._why_no_rank(root))
        with translated(call):
            self._broadcast_bytes(bytes_of(tensor), root)
        return Finished() if async_op else None

    def broadcast_many(self, tensors: list[Tensor], root: int) -> None:
        total = sum(tensor.nbytes for tensor in tensors)
        orders = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        call = f"broadcast(from rank {root}) of {len(tensors)} tensors with {total} bytes"
        self._agree(f"{call}, layout {_fingerprint(orders)}", self._why_no_rank(root))
        with translated(call):
            runs = [bytes_of(in_memory_order(tensor)) for tensor in tensors]
            together = torch.cat(runs) if runs else torch.empty(0, dtype=torch.uint8)
            self._broadcast_bytes(together, root)
            if self._rank != root and runs:
                torch._foreach_copy_(runs, torch.split(together, [run.numel() for run in runs]))

    def barrier(self, async_op: bool) -> Finished | None:
        self._agree("barrier", "")
        return Finished() if async_op else None

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        async_op: bool,
    ) -> Finished | None:
        call = f"all_to_all of {dtype_name(input.dtype)}"
        why = self._why_bad_splits(input, input_splits, output, output_splits)
        self._agree(call, why)
        self._check_splits(input_splits, output_splits)
        size = input.element_size()
        with translated(call):
            received = torch.empty(output.nbytes, dtype=torch.uint8)
            dist.all_to_all_single(
                received,
                bytes_of(input),
                [split * size for split in output_splits],
                [split * size for split in input_splits],
                group=self._group,
            )
            copy_bytes(output, received)
        return Finished() if async_op else None

    def refuse(self, why: str) -> None:
        """Raises UsageError here and MismatchError on the peers, for a call that cannot be made."""
        self._agree("an invalid call", why)

    # -- agreement ------------------------------------------------------------------------------

    def _agree(self, text: str, why: str) -> None:
        """Compares what ranks call; on a difference all of them raise."""
        self._num_calls += 1
        with translated(text):
            shown = f"an invalid call ({why})" if why else text
            rows = self._gather_bytes(text_to_tensor(shown)).view(self._size, -1)
        calls = [tensor_to_text(row) for row in rows]
        if why:
            raise UsageError(why if text == "an invalid call" else f"{text}: {why}")
        if any(call != calls[0] for call in calls):
            listed = "; ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls))
            raise MismatchError(
                f"ranks disagree about collective number {self._num_calls} of the process group: "
                f"{listed}. This is rank {self._rank}. Make every rank call the same operations in "
                "the same order, with the same sizes and dtypes"
            )

    def _check_splits(self, input_splits: list[int], output_splits: list[int]) -> None:
        mine = torch.tensor([input_splits, output_splits], dtype=torch.int64)
        with translated("all_to_all"):
            gathered = self._gather_bytes(bytes_of(mine)).view(torch.int64)
        table = gathered.view(self._size, 2, self._size).tolist()
        for source in range(self._size):
            for target in range(self._size):
                sent, expected = table[source][0][target], table[target][1][source]
                if sent != expected:
                    raise MismatchError(
                        f"all_to_all: rank {source} sends {sent} elements to rank {target}, which "
                        f"expects {expected}; make input_split_sizes and output_split_sizes of the "
                        "two agree"
                    )

    def _why_unequal(self, share: Tensor, whole: Tensor, what: str) -> str:
        if share.dtype != whole.dtype:
            return f"input and output are {dtype_name(share.dtype)} and {dtype_name(whole.dtype)}"
        expected = share.numel() * self._size
        if whole.numel() != expected:
            return f"{what} size is {whole.numel()} instead of {expected}"
        return ""

    def monitored_barrier(self, timeout_s: float | None, wait_all_ranks: bool) -> None:
        limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        with translated("monitored_barrier"):
            dist.monitored_barrier(self._group, limit, wait_all_ranks)

    def _why_no_rank(self, root: int) -> str:
        return "" if 0 <= root < self._size else f"root {root} of {self._size} ranks"

    def _why_bad_splits(
        self, input: Tensor, input_splits: list[int], output: Tensor, output_splits: list[int]
    ) -> str:
        if input.dtype != output.dtype:
            return f"{dtype_name(input.dtype)} input, {dtype_name(output.dtype)} output"
        for tensor, splits in ((input, input_splits), (output, output_splits)):
            if len(splits) != self._size:
                return f"number of splits is {len(splits)} instead of {self._size}"
            if min(splits) < 0:
                return "a split is negative"
            if sum(splits) != tensor.numel():
                return f"sum of splits is {sum(splits)} instead of {tensor.numel()}"
        return ""

    # -- what every backend can do --------------------------------------------------------------

    def _reduce(self, tensor: Tensor, op: int) -> None:
        if tensor.numel() == 0:
            return None
        if tensor.is_complex():
            return self._reduce_complex(tensor, op)
        carrier = tensor.to(_CARRIERS.get(tensor.dtype, tensor.dtype))
        torch_op = _TORCH_OPS[op]
        if tensor.dtype == torch.bool and op in (SUM, PRODUCT):
            torch_op = dist.ReduceOp.MAX if op == SUM else dist.ReduceOp.MIN
        if op in (MIN, MAX) and carrier.is_floating_point():
            return self._reduce_gathered(tensor, op)  # backends lose NaN
        dist.all_reduce(carrier, torch_op, group=self._group)
        if op == MEAN:
            carrier.mul_(1.0 / self._size)
        if carrier is not tensor:
            tensor.copy_(carrier)
        return None

    def _reduce_complex(self, tensor: Tensor, op: int) -> None:
        if op == PRODUCT:
            return self._reduce_gathered(tensor, op)
        return self._reduce(torch.view_as_real(tensor), op)

    def _reduce_gathered(self, tensor: Tensor, op: int) -> None:
        combine: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
            MIN: torch.minimum,
            MAX: torch.maximum,
            PRODUCT: torch.mul,
        }
        rows = self._gather_bytes(bytes_of(tensor)).view(tensor.dtype).view(self._size, -1)
        total = rows[0]
        for row in rows[1:]:
            total = combine[op](total, row)
        tensor.copy_(total.view_as(tensor))

    def _gather_bytes(self, mine: Tensor) -> Tensor:
        # Into rows: the call that takes one tensor has changed its name between torch versions.
        rows = torch.empty(self._size, mine.numel(), dtype=torch.uint8)
        dist.all_gather(list(rows.unbind()), mine, group=self._group)
        return rows.view(-1)

    def _broadcast_bytes(self, run: Tensor, root: int) -> None:
        if run.numel() > 0:
            dist.broadcast(run, group=self._group, group_src=root)


def _given(tensor: Tensor | None) -> Tensor:
    """What the root of a call has; nothing where it was forgotten, which does not fit then."""
    return tensor if tensor is not None else torch.empty(0)


def _why_not_reducible(tensor: Tensor, op: int) -> str:
    if tensor.dtype not in _REDUCIBLE:
        return f"cannot reduce tensors of {dtype_name(tensor.dtype)}"
    real = tensor.is_floating_point() or tensor.is_complex()
    if op == MEAN and not real:
        return "the mean of integers or bool is not defined"
    if op >= BIT_AND and real:
        return "a bitwise operation on numbers with fractions is not defined"
    if op in (MIN, MAX) and tensor.is_complex():
        return "min or max of complex numbers is not defined"
    return ""


def _fingerprint(orders: list[tuple[Any, ...]]) -> str:
    """The same in every process, unlike hash()."""
    return hashlib.sha1(repr(orders).encode()).hexdigest()[:16]
