"""Owns the collectives of groups that cannot share memory: torch.distributed's own, made equal.

The same verbs as _C.Communicator, with the same results and errors, on any process group. What
the group's backend lacks is composed of what every backend has: reductions run in a dtype that it
can add, and every collective begins with an exchange of what each rank calls.
"""

import hashlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pydist._message_queues import MessageQueues, MessageRequest
from pydist.errors import MismatchError, PeerError, TimeoutError, UsageError

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
_CALL_NBYTES = 256
# A message is a header, the receiver's answer and the data, each with a tag of its own: what one
# thread sends must not reach another that waits for something else.
_NUM_TAGS = 1 << 29
_ANSWER_TAG, _DATA_TAG = _NUM_TAGS, 2 * _NUM_TAGS


class Finished:
    """The request of an operation that has ended."""

    source = -1

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class ProcessGroupOperations:
    """See _C.Communicator for the verbs. Collectives end before they return, async ones too."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group_reference = weakref.ref(group)
        self._rank, self._size = group.rank(), group.size()
        self._num_calls = 0
        self._queues = MessageQueues()
        self._turns_lock = threading.Lock()
        self._turns: weakref.WeakValueDictionary[tuple[str, int, int], threading.Lock] = (
            weakref.WeakValueDictionary()
        )

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_reference()
        if group is None:
            raise UsageError("the process group of this operation has been destroyed")
        return group

    # -- the verbs ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: int, async_op: bool) -> Finished | None:
        call = f"all_reduce({OP_NAMES[op]}) of {_amount(tensor)}"
        self._agree(call, _why_not_reducible(tensor, op))
        with _translated(call):
            self._reduce(tensor, op)
        return Finished() if async_op else None

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: int, async_op: bool
    ) -> Finished | None:
        call = f"reduce_scatter({OP_NAMES[op]}) of {_amount(output)} per rank"
        why = _why_not_reducible(output, op) or self._why_unequal(output, input, "input")
        self._agree(call, why)
        with _translated(call):
            total = input.clone()
            self._reduce(total, op)
            output.copy_(total.view(self._size, -1)[self._rank].view_as(output))
        return Finished() if async_op else None

    def reduce(self, tensor: Tensor, root: int, op: int, async_op: bool) -> Finished | None:
        call = f"reduce({OP_NAMES[op]}, to rank {root}) of {_amount(tensor)}"
        self._agree(call, _why_not_reducible(tensor, op) or self._why_no_rank(root))
        with _translated(call):
            self._reduce(tensor if self._rank == root else tensor.clone(), op)
        return Finished() if async_op else None

    def gather(
        self, output: Tensor | None, input: Tensor, root: int, async_op: bool
    ) -> Finished | None:
        call = f"gather(to rank {root}) of {_amount(input)} per rank"
        why = self._why_no_rank(root)
        if not why and self._rank == root:
            why = self._why_unequal(input, _given(output), "output")
        self._agree(call, why)
        with _translated(call):
            if input.numel() > 0:
                gathered = self._gather_bytes(_bytes_of(input))
                if self._rank == root:
                    _copy_bytes(_given(output), gathered)
        return Finished() if async_op else None

    def scatter(
        self, output: Tensor, input: Tensor | None, root: int, async_op: bool
    ) -> Finished | None:
        call = f"scatter(from rank {root}) of {_amount(output)} per rank"
        why = self._why_no_rank(root)
        if not why and self._rank == root:
            why = self._why_unequal(output, _given(input), "input")
        self._agree(call, why)
        with _translated(call):
            together = torch.empty(self._size * output.nbytes, dtype=torch.uint8)
            if self._rank == root:
                together.copy_(_bytes_of(_given(input)))
            self._broadcast_bytes(together, root)
            _copy_bytes(output, together.view(self._size, -1)[self._rank])
        return Finished() if async_op else None

    def all_gather(self, output: Tensor, input: Tensor, async_op: bool) -> Finished | None:
        call = f"all_gather of {_amount(input)} per rank"
        self._agree(call, self._why_unequal(input, output, "output"))
        with _translated(call):
            if input.numel() > 0:
                _copy_bytes(output, self._gather_bytes(_bytes_of(input)))
        return Finished() if async_op else None

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Finished | None:
        call = f"broadcast(from rank {root}) of {_amount(tensor)}"
        self._agree(call, self._why_no_rank(root))
        with _translated(call):
            self._broadcast_bytes(_bytes_of(tensor), root)
        return Finished() if async_op else None

    def broadcast_many(self, tensors: list[Tensor], root: int) -> None:
        total = sum(tensor.nbytes for tensor in tensors)
        orders = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        call = f"broadcast(from rank {root}) of {len(tensors)} tensors with {total} bytes"
        self._agree(f"{call}, layout {_fingerprint(orders)}", self._why_no_rank(root))
        with _translated(call):
            runs = [_bytes_of(_in_memory_order(tensor)) for tensor in tensors]
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
        call = f"all_to_all of {_name(input.dtype)}"
        why = self._why_bad_splits(input, input_splits, output, output_splits)
        self._agree(call, why)
        self._check_splits(input_splits, output_splits)
        size = input.element_size()
        with _translated(call):
            received = torch.empty(output.nbytes, dtype=torch.uint8)
            dist.all_to_all_single(
                received,
                _bytes_of(input),
                [split * size for split in output_splits],
                [split * size for split in input_splits],
                group=self._group,
            )
            _copy_bytes(output, received)
        return Finished() if async_op else None

    def refuse(self, why: str) -> None:
        """Raises UsageError here and MismatchError on the peers, for a call that cannot be made."""
        self._agree("an invalid call", why)

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        call = self._send_call(tensor, destination, tag)
        run = partial(self._send_message, tensor, destination, tag, call)
        self._queues.run("send", destination, tag, call, run)

    def start_send(self, tensor: Tensor, destination: int, tag: int) -> MessageRequest:
        call = self._send_call(tensor, destination, tag)
        run = partial(self._send_message, tensor, destination, tag, call)
        return self._queues.start("send", destination, tag, call, run)

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> int:
        call = self._receive_call(tensor, source, tag)
        run = partial(self._receive_message, tensor, source, tag, call)
        return self._queues.run("recv", source, tag, call, run)

    def start_receive(self, tensor: Tensor, source: int | None, tag: int) -> MessageRequest:
        call = self._receive_call(tensor, source, tag)
        run = partial(self._receive_message, tensor, source, tag, call)
        return self._queues.start("recv", source, tag, call, run)

    def _send_call(self, tensor: Tensor, destination: int, tag: int) -> str:
        if destination == self._rank or not 0 <= destination < self._size:
            raise UsageError(
                f"send from rank {self._rank} to rank {destination} of {self._size}; the "
                "destination must be another rank of the group"
            )
        _check_tag(tag)
        return f"send of {_amount(tensor)} with tag {tag} to rank {destination}"

    def _receive_call(self, tensor: Tensor, source: int | None, tag: int) -> str:
        if source == self._rank or (source is not None and not 0 <= source < self._size):
            raise UsageError(
                f"recv on rank {self._rank} from rank {source} of {self._size}; the source must "
                "be another rank of the group"
            )
        _check_tag(tag)
        whose = "any rank" if source is None else f"rank {source}"
        return f"recv of {_amount(tensor)} with tag {tag} from {whose}"

    def _send_message(self, tensor: Tensor, destination: int, tag: int, call: str) -> int:
        with _translated(call), self._turn("send", destination, tag):
            # The header goes first, so that a receiver with another buffer can raise.
            header = _text_to_tensor(f"{tensor.numel()} {_name(tensor.dtype)}")
            self._send(header, destination, tag)
            answer = torch.zeros(1, dtype=torch.uint8)
            self._receive(answer, destination, tag + _ANSWER_TAG)
            if answer.item() == 0:
                raise MismatchError(f"rank {destination} refused the {call}: its buffer differs")
            if tensor.numel() > 0:
                self._send(_bytes_of(tensor), destination, tag + _DATA_TAG)
        return -1

    def _receive_message(self, tensor: Tensor, source: int | None, tag: int, call: str) -> int:
        with _translated(call):
            header = torch.zeros(_CALL_NBYTES, dtype=torch.uint8)
            source = self._receive(header, source, tag)
            # The sender begins its next message after this one's answer, so turns are in order.
            with self._turn("recv", source, tag):
                self._receive_data(tensor, source, tag, _tensor_to_text(header))
        return source

    def _receive_data(self, tensor: Tensor, source: int, tag: int, found: str) -> None:
        """`found` is the sender's header."""
        expected = f"{tensor.numel()} {_name(tensor.dtype)}"
        answer = torch.tensor([found == expected], dtype=torch.uint8)
        self._send(answer, source, tag + _ANSWER_TAG)
        if found != expected:
            raise MismatchError(
                f"recv expected {expected} with tag {tag}, but rank {source} sent {found}"
            )
        if tensor.numel() > 0:
            received = torch.empty(tensor.nbytes, dtype=torch.uint8)
            self._receive(received, source, tag + _DATA_TAG)
            _copy_bytes(tensor, received)

    def _send(self, run: Tensor, destination: int, tag: int) -> None:
        dist.send(run, group=self._group, tag=tag, group_dst=destination)

    def _receive(self, run: Tensor, source: int | None, tag: int) -> int:
        if source is not None:
            dist.recv(run, group=self._group, tag=tag, group_src=source)
            return source
        return dist.get_group_rank(self._group, dist.recv(run, group=self._group, tag=tag))

    @contextmanager
    def _turn(self, direction: str, peer: int, tag: int) -> Iterator[None]:
        """Threads that exchange messages with one peer and tag do so one after the other."""
        with self._turns_lock:
            turn = self._turns.setdefault((direction, peer, tag), threading.Lock())
        with turn:
            yield

    # -- agreement ------------------------------------------------------------------------------

    def _agree(self, text: str, why: str) -> None:
        """Compares what ranks call; on a difference all of them raise."""
        self._num_calls += 1
        with _translated(text):
            shown = f"an invalid call ({why})" if why else text
            rows = self._gather_bytes(_text_to_tensor(shown)).view(self._size, -1)
        calls = [_tensor_to_text(row) for row in rows]
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
        with _translated("all_to_all"):
            gathered = self._gather_bytes(_bytes_of(mine)).view(torch.int64)
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
            return f"input and output are {_name(share.dtype)} and {_name(whole.dtype)}"
        expected = share.numel() * self._size
        if whole.numel() != expected:
            return f"{what} size is {whole.numel()} instead of {expected}"
        return ""

    def monitored_barrier(self, timeout_s: float | None, wait_all_ranks: bool) -> None:
        limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        with _translated("monitored_barrier"):
            dist.monitored_barrier(self._group, limit, wait_all_ranks)

    def _why_no_rank(self, root: int) -> str:
        return "" if 0 <= root < self._size else f"root {root} of {self._size} ranks"

    def _why_bad_splits(
        self, input: Tensor, input_splits: list[int], output: Tensor, output_splits: list[int]
    ) -> str:
        if input.dtype != output.dtype:
            return f"{_name(input.dtype)} input, {_name(output.dtype)} output"
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
        rows = self._gather_bytes(_bytes_of(tensor)).view(tensor.dtype).view(self._size, -1)
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _amount(tensor: Tensor) -> str:
    return f"{tensor.numel()} {_name(tensor.dtype)}"


def _check_tag(tag: int) -> None:
    if not 0 <= tag < _NUM_TAGS:
        raise UsageError(f"tag is {tag}; expected one from 0 to {_NUM_TAGS - 1}")


def _why_not_reducible(tensor: Tensor, op: int) -> str:
    if tensor.dtype not in _REDUCIBLE:
        return f"cannot reduce tensors of {_name(tensor.dtype)}"
    real = tensor.is_floating_point() or tensor.is_complex()
    if op == MEAN and not real:
        return "the mean of integers or bool is not defined"
    if op >= BIT_AND and real:
        return f"{OP_NAMES[op]} of {_name(tensor.dtype)} is not defined"
    if op in (MIN, MAX) and tensor.is_complex():
        return "min or max of complex numbers is not defined"
    return ""


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's own memory, which is contiguous, as bytes."""
    # A contiguous tensor of one element or none may have any stride, which a view as bytes forbids.
    return _in_memory_order(tensor).view(torch.uint8)


def _copy_bytes(tensor: Tensor, run: Tensor) -> None:
    _bytes_of(tensor).copy_(run)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous view of a tensor that fills its memory without gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _fingerprint(orders: list[tuple[Any, ...]]) -> str:
    """The same in every process, unlike hash()."""
    return hashlib.sha1(repr(orders).encode()).hexdigest()[:16]


def _text_to_tensor(text: str) -> Tensor:
    return torch.frombuffer(
        bytearray(text.encode()[:_CALL_NBYTES].ljust(_CALL_NBYTES, b"\0")), dtype=torch.uint8
    )


def _tensor_to_text(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace")


@contextmanager
def _translated(call: str) -> Iterator[None]:
    """What a backend raises, in pydist's classes."""
    try:
        yield
    except (UsageError, MismatchError):
        raise
    except RuntimeError as error:
        timed_out = re.search(r"time[d]? ?out", str(error), re.IGNORECASE)
        kind = TimeoutError if timed_out else PeerError
        raise kind(f"{call} failed in the process group: {error}") from error
