"""Owns the messages between two ranks of a process group, waited for or not."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pydist._group_calls import (
    CALL_NBYTES,
    amount,
    bytes_of,
    copy_bytes,
    dtype_name,
    tensor_to_text,
    text_to_tensor,
    translated,
)
from pydist._message_queues import MessageQueues, MessageRequest
from pydist.errors import MismatchError, UsageError

# A message is a header, the receiver's answer and the data, each with a tag of its own: what one
# thread sends must not reach another that waits for something else.
_NUM_TAGS = 1 << 29
_ANSWER_TAG, _DATA_TAG = _NUM_TAGS, 2 * _NUM_TAGS


class ProcessGroupMessages:
    """Does not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group_reference = weakref.ref(group)
        self._rank, self._size = group.rank(), group.size()
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
        return f"send of {amount(tensor)} with tag {tag} to rank {destination}"

    def _receive_call(self, tensor: Tensor, source: int | None, tag: int) -> str:
        if source == self._rank or (source is not None and not 0 <= source < self._size):
            raise UsageError(
                f"recv on rank {self._rank} from rank {source} of {self._size}; the source must "
                "be another rank of the group"
            )
        _check_tag(tag)
        whose = "any rank" if source is None else f"rank {source}"
        return f"recv of {amount(tensor)} with tag {tag} from {whose}"

    def _send_message(self, tensor: Tensor, destination: int, tag: int, call: str) -> int:
        with translated(call), self._turn("send", destination, tag):
            # The header goes first, so that a receiver with another buffer can raise.
            header = text_to_tensor(f"{tensor.numel()} {dtype_name(tensor.dtype)}")
            self._send(header, destination, tag)
            answer = torch.zeros(1, dtype=torch.uint8)
            self._receive(answer, destination, tag + _ANSWER_TAG)
            if answer.item() == 0:
                raise MismatchError(f"rank {destination} refused the {call}: its buffer differs")
            if tensor.numel() > 0:
                self._send(bytes_of(tensor), destination, tag + _DATA_TAG)
        return -1

    def _receive_message(self, tensor: Tensor, source: int | None, tag: int, call: str) -> int:
        with translated(call):
            header = torch.zeros(CALL_NBYTES, dtype=torch.uint8)
            source = self._receive(header, source, tag)
            # The sender begins its next message after this one's answer, so turns are in order.
            with self._turn("recv", source, tag):
                self._receive_data(tensor, source, tag, tensor_to_text(header))
        return source

    def _receive_data(self, tensor: Tensor, source: int, tag: int, found: str) -> None:
        """`found` is the sender's header."""
        expected = f"{tensor.numel()} {dtype_name(tensor.dtype)}"
        answer = torch.tensor([found == expected], dtype=torch.uint8)
        self._send(answer, source, tag + _ANSWER_TAG)
        if found != expected:
            raise MismatchError(
                f"recv expected {expected} with tag {tag}, but rank {source} sent {found}"
            )
        if tensor.numel() > 0:
            received = torch.empty(tensor.nbytes, dtype=torch.uint8)
            self._receive(received, source, tag + _DATA_TAG)
            copy_bytes(tensor, received)

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


def _check_tag(tag: int) -> None:
    if not 0 <= tag < _NUM_TAGS:
        raise UsageError(f"tag is {tag}; expected one from 0 to {_NUM_TAGS - 1}")
