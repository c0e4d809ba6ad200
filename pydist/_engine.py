"""Owns the engine of each torch group: how its ranks reach each other, made at its first use."""

import hashlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from pydist import _C
from pydist._connect import TRANSPORTS, connect
from pydist._device import on_device
from pydist._hosts import Group, connect_hosts, find_hosts
from pydist._process_group import ProcessGroupOperations
from pydist._torch_groups import cpu_backend, own_gloo_group, own_store, time_limit_s
from pydist.errors import MismatchError, PeerError, UsageError


class Request(Protocol):
    """An operation in flight."""

    def test(self) -> bool: ...
    def wait(self) -> None: ...
    @property
    def source(self) -> int: ...  # of a receive that has ended: a rank of the group


class Operations(Protocol):
    """What every transport can do, on contiguous CPU tensors; ops and roots as in _C."""

    def all_reduce(self, tensor: Tensor, op: int, async_op: bool) -> Request | None: ...
    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: int, async_op: bool
    ) -> Request | None: ...
    def reduce(self, tensor: Tensor, root: int, op: int, async_op: bool) -> Request | None: ...
    def gather(
        self, output: Tensor | None, input: Tensor, root: int, async_op: bool
    ) -> Request | None: ...
    def scatter(
        self, output: Tensor, input: Tensor | None, root: int, async_op: bool
    ) -> Request | None: ...
    def all_gather(self, output: Tensor, input: Tensor, async_op: bool) -> Request | None: ...
    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Request | None: ...
    def broadcast_many(self, tensors: list[Tensor], root: int) -> None: ...
    def barrier(self, async_op: bool) -> Request | None: ...
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        async_op: bool,
    ) -> Request | None: ...
    def refuse(self, why: str) -> None: ...
    def send(self, tensor: Tensor, destination: int, tag: int) -> None: ...
    def receive(self, tensor: Tensor, source: int | None, tag: int) -> int: ...
    def start_send(self, tensor: Tensor, destination: int, tag: int) -> Request: ...
    def start_receive(self, tensor: Tensor, source: int | None, tag: int) -> Request: ...
    def monitored_barrier(self, timeout_s: float | None, wait_all_ranks: bool) -> None: ...


class SideOperations(Protocol):
    """Those of Operations that layers use within a backward."""

    def all_reduce(self, tensor: Tensor, op: int, async_op: bool) -> Request | None: ...
    def all_gather(self, output: Tensor, input: Tensor, async_op: bool) -> Request | None: ...


class Engine:
    """One group's way to communicate. Making one is collective. Does not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.timeout_s = time_limit_s(group)
        self.global_ranks: list[int] = dist.get_process_group_ranks(group)
        self._backend = str(dist.get_backend(group))
        # Over the CPU, groups of our own can have Gloo where the user's has it, or has nothing.
        self._cpu_backend = cpu_backend(group)
        self._takes_gloo = self._cpu_backend in ("gloo", "pydist", "")
        self._store = own_store(group, self.size)
        self._num_prefixes: dict[str, int] = {}
        self.communicator: _C.Communicator | None = connect(
            self.store_prefix,
            self.rank,
            self.size,
            self.timeout_s,
            str(group.group_desc),
            self.global_ranks,
        )
        self._host_group: dist.ProcessGroup | None = None  # its operations hold it weakly
        self.operations: Operations = self.communicator or self._group_operations(group)
        self._device_communicators: dict[int, _C.NcclCommunicator] = {}
        self._equal_kinds: set[tuple[object, ...]] = set()  # of tensors broadcast on devices
        # "shared_memory", "hosts" or "process_group".
        self.transport = TRANSPORTS[1] if self.communicator is None else self.communicator.transport
        self._group = weakref.ref(group)
        self._retired: list[dist.ProcessGroup | _C.Communicator] = []
        self._side_operations: SideOperations | None = None
        self._side_group: dist.ProcessGroup | None = None
        self.join_session: object = None  # of _join.py, while ranks are in join()

    def _group_operations(self, group: dist.ProcessGroup) -> ProcessGroupOperations:
        """Of the user's group; of one of our own where that cannot take tensors of the CPU."""
        if not self._cpu_backend:
            group = self._host_group = self._own_group("host")
        return ProcessGroupOperations(group)

    def device_communicator(self, device: int) -> _C.NcclCommunicator:
        """For models' state, on that device; the first call for a device is collective."""
        if device not in self._device_communicators:
            self._device_communicators[device] = self.make_device_communicator(
                device, f"the state of models on device {device}", "restart the job"
            )
        return self._device_communicators[device]

    def make_device_communicator(self, device: int, name: str, remedy: str) -> _C.NcclCommunicator:
        """One more, for calls in an order of their own. Collective."""
        return _C.NcclCommunicator(
            store=self.store_prefix("nccl"),
            rank=self.rank,
            size=self.size,
            device=device,
            timeout_s=self.timeout_s,
            name=name,
            remedy=remedy,
            global_ranks=self.global_ranks,
        )

    @property
    def side_operations(self) -> SideOperations:
        """For collectives within a backward. Their first use is collective.

        A process group pairs calls by their order, and that of a round's calls depends on which
        gradients are ready first: there, these have a group of their own.
        """
        if self._side_operations is None:
            if self.communicator is not None:
                self._side_operations = self.communicator
            else:
                self._side_group = self._make_side_group()  # the operations hold it weakly
                self._side_operations = ProcessGroupOperations(self._side_group)
        return self._side_operations

    @side_operations.setter
    def side_operations(self, operations: SideOperations) -> None:
        self._side_operations = operations

    def _make_side_group(self) -> dist.ProcessGroup:
        if self._takes_gloo:
            return self._own_group("side")
        group = dist.new_group(
            self.global_ranks,
            timedelta(seconds=self.timeout_s),
            backend=self._backend,
            use_local_synchronization=True,
            group_desc="pydist: beside rounds",
        )
        assert isinstance(group, dist.ProcessGroup)
        return group

    def round_carrier(
        self, name: str, remedy: str, clue: str
    ) -> dist.ProcessGroup | _C.Communicator | None:
        """What a reducer's rounds talk through; None where they go through shared memory.

        One of its own, over hosts and with Gloo: its calls come when gradients are ready, which may
        be in another order on each rank beside what else backward sends (other wrappers, the user's
        own collectives). With other backends it is the user's group. Collective.
        """
        if self.transport == "shared_memory":
            return None
        own: dist.ProcessGroup | _C.Communicator
        if self.transport == "hosts":
            own = self._make_round_communicator(name, remedy, clue)
        elif self._takes_gloo:
            own = self._own_group("rounds")
        else:
            group = self._group()
            assert group is not None
            return group
        # Making it took all ranks, so that none is in a round of an earlier reducer any more.
        self._retired.clear()
        return own

    def _make_round_communicator(self, name: str, remedy: str, clue: str) -> _C.Communicator:
        group = Group(
            self.store_prefix, self.rank, self.size, self.timeout_s, name, self.global_ranks
        )
        return connect_hosts(group, find_hosts(group), remedy, clue, only_sums=True)

    def channel_group(self) -> dist.ProcessGroup | None:
        """What the stages of one pipeline talk through; None where they share memory. Collective.

        Over hosts and with Gloo a group of its own: a channel has receives posted at all times.
        """
        if self.transport == "shared_memory":
            return None
        if self.transport == "hosts":
            return self._own_group("channel")
        group = self._group()
        assert group is not None
        return self._own_group("channel") if self._takes_gloo else group

    def _own_group(self, purpose: str) -> dist.ProcessGroup:
        return own_gloo_group(self.store_prefix(purpose), self.rank, self.size, self.timeout_s)

    def retire(self, carrier: dist.ProcessGroup | _C.Communicator) -> None:
        """Takes the carrier of a reducer that has ended: peers may still be in its last round."""
        self._retired.append(carrier)

    def store_prefix(self, name: str) -> PrefixStore:
        """A store of fresh keys; all ranks must ask for the same names in the same order."""
        count = self._num_prefixes.get(name, 0)
        self._num_prefixes[name] = count + 1
        return PrefixStore(f"{name}/{count}", self._store)

    def exchange_bytes(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes, by rank. Collective."""
        length = torch.tensor([len(mine)], dtype=torch.int64)
        lengths = torch.empty(self.size, dtype=torch.int64)
        self.operations.all_gather(lengths, length, False)
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        gathered = torch.empty(self.size * longest, dtype=torch.uint8)
        self.operations.all_gather(gathered, padded, False)
        rows = gathered.view(self.size, longest).numpy()
        return [rows[rank, : int(lengths[rank])].tobytes() for rank in range(self.size)]

    @contextmanager
    def all_or_none(self, doing: str) -> Iterator[None]:
        """Runs what may raise on some ranks only; then the others raise too. Collective.

        A rank whose block raised raises that again, the others PeerError with its text.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        texts = self.exchange_bytes(b"" if problem is None else _problem_text(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                raise PeerError(f"rank {rank} raised in {doing}: {text.decode()}")

    def broadcast_tensors(self, tensors: list[Tensor], root: int = 0) -> None:
        """Gives all ranks the tensors of group rank `root`, in one operation. Collective.

        Strides must be the same on all ranks, which is checked for tensors that are dense.
        """
        with torch.no_grad():
            targets = [_without_repeats(tensor.detach()) for tensor in tensors]
            # What is written in place must be plain memory without gaps.
            dense = [t if _is_plain(t) else _plain_copy(t) for t in targets]
            self._broadcast_on_devices([t for t in dense if on_device(t)], root)
            on_host = [t for t in dense if not on_device(t)]
            if on_host or not dense:
                self.operations.broadcast_many(on_host, root)
            for target, source in zip(targets, dense, strict=True):
                if target is not source and self.rank != root:
                    target.copy_(source)

    def _broadcast_on_devices(self, tensors: list[Tensor], root: int) -> None:
        if self.size == 1:
            return
        by_device: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(device_index(tensor), []).append(tensor)
        for device, there in sorted(by_device.items()):
            self._check_equal_kinds(device, there)
            communicator = self.device_communicator(device)
            communicator.after_current_stream()
            communicator.broadcast(there, root, "the state of a model")
            communicator.before_current_stream()

    def _check_equal_kinds(self, device: int, tensors: list[Tensor]) -> None:
        """Raises MismatchError where ranks differ; they ask each other when anything is new."""
        kinds = (device, *[(tensor.shape, tensor.dtype) for tensor in tensors])
        if kinds in self._equal_kinds:
            return
        mine = hashlib.sha256(str(kinds).encode()).digest()
        for rank, theirs in enumerate(self.exchange_bytes(mine)):
            if theirs != mine:
                raise MismatchError(
                    f"rank {self.global_ranks[self.rank]} and rank {self.global_ranks[rank]} have "
                    "parameters or buffers of different shapes or dtypes to make equal; build the "
                    "same module on every rank"
                )
        self._equal_kinds.add(kinds)


def device_index(tensor: Tensor) -> int:
    """Of a tensor on a device; 0 for the one of the tests."""
    return max(0, tensor.get_device())


def _problem_text(problem: Exception) -> bytes:
    return f"{type(problem).__name__}: {problem}".encode()


def _without_repeats(tensor: Tensor) -> Tensor:
    """An expanded tensor's memory: one of each element that it repeats."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_plain(tensor: Tensor) -> bool:
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return bool(dense) and not tensor.is_conj() and not tensor.is_neg()


def _plain_copy(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


class _Engines:
    """The engines of living groups. They end with their group, not with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[int, Engine] = {}
        # One per group: making an engine waits for peers, who may be making another one first.
        self._making: dict[int, threading.Lock] = {}
        self._references: dict[int, weakref.ref[dist.ProcessGroup]] = {}

    def find(self, group: dist.ProcessGroup) -> Engine:
        engine = self._by_id.get(id(group))  # valid: a dying group takes its entry with it
        return engine if engine is not None else self._make(group)

    def _make(self, group: dist.ProcessGroup) -> Engine:
        key = id(group)
        with self._lock:
            if key not in self._references:
                self._references[key] = weakref.ref(group, lambda _: self._forget(key))
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._by_id:
                self._by_id[key] = Engine(group)
            return self._by_id[key]

    def _forget(self, key: int) -> None:
        self._by_id.pop(key, None)
        self._making.pop(key, None)
        self._references.pop(key, None)


_engines = _Engines()


def check_group(group: object) -> None:
    """Raises UsageError unless this is None or a group that this process belongs to."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this process is not a member of the group")
    raise UsageError(f"group must be a process group or None, not {group!r}")


def group_engine(group: dist.ProcessGroup | None = None) -> Engine:
    """The engine of a torch group, the default one where None. Its first use is collective."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise UsageError(
                "the default process group does not exist; call "
                "torch.distributed.init_process_group first"
            )
    return _engines.find(group)
