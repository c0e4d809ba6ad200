"""Owns a thin way to call NCCL's functions of the emulated device, for tests of the emulation."""

import ctypes
from typing import Any

import torch
import torch.distributed as dist

import emulated

IN_PROGRESS = 7
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("rest", ctypes.c_int * 8),
    ]


class NcclError(RuntimeError):
    """A result other than success."""

    def __init__(self, result: int) -> None:
        text = emulated.load().ncclGetErrorString(result).decode()
        super().__init__(f"{text}: {emulated.load().ncclGetLastError(None).decode()}")
        self.result = result


def check(result: int) -> None:
    if result != 0:
        raise NcclError(result)


class Nccl:
    """A communicator of the ranks' default group, on a stream of its own."""

    def __init__(self, blocking: bool = True) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.library = emulated.load()
        self.handle = ctypes.c_void_p()
        self.stream = emulated.make_stream()
        unique = UniqueId()
        if rank == 0:
            check(self.library.ncclGetUniqueId(ctypes.byref(unique)))
        message = [bytes(unique) if rank == 0 else None]
        dist.broadcast_object_list(message, 0)
        assert message[0] is not None
        unique = UniqueId.from_buffer_copy(message[0])
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21800, int(blocking))
        self.init_result = self.library.ncclCommInitRankConfig(
            ctypes.byref(self.handle), size, unique, rank, ctypes.byref(config)
        )

    def finish(self) -> None:
        check(self.init_result)
        check(self.library.ncclCommFinalize(self.handle))
        self.destroy()

    def destroy(self) -> None:
        check(self.library.ncclCommDestroy(self.handle))

    def abort(self) -> None:
        check(self.library.ncclCommAbort(self.handle))

    def async_error(self) -> int:
        result = ctypes.c_int()
        check(self.library.ncclCommGetAsyncError(self.handle, ctypes.byref(result)))
        return result.value

    def _call(self, name: str, *arguments: Any, stream: int | None) -> int:
        on = self.stream if stream is None else stream
        function = getattr(self.library, name)
        return int(function(*arguments, self.handle, ctypes.c_void_p(on)))

    def all_reduce(
        self, source: Any, target: Any, op: int | str = "sum", stream: int | None = None
    ) -> int:
        return self._call(
            "ncclAllReduce",
            address(source),
            address(target),
            ctypes.c_size_t(source.numel()),
            DTYPES[source.dtype],
            OPS[op] if isinstance(op, str) else op,
            stream=stream,
        )

    def reduce_scatter(self, source: Any, target: Any, op: str = "sum") -> int:
        count = ctypes.c_size_t(target.numel())
        dtype = DTYPES[source.dtype]
        pointers = (address(source), address(target))
        return self._call("ncclReduceScatter", *pointers, count, dtype, OPS[op], stream=None)

    def all_gather(self, source: Any, target: Any) -> int:
        count = ctypes.c_size_t(source.numel())
        pointers = (address(source), address(target))
        return self._call("ncclAllGather", *pointers, count, DTYPES[source.dtype], stream=None)

    def broadcast(self, tensor: Any, root: int) -> int:
        count = ctypes.c_size_t(tensor.numel())
        pointers = (address(tensor), address(tensor))
        dtype = DTYPES[tensor.dtype]
        return self._call("ncclBroadcast", *pointers, count, dtype, root, stream=None)

    def send(self, tensor: Any, peer: int, stream: int | None = None) -> int:
        count = ctypes.c_size_t(tensor.numel())
        dtype = DTYPES[tensor.dtype]
        return self._call("ncclSend", address(tensor), count, dtype, peer, stream=stream)

    def recv(self, tensor: Any, peer: int, stream: int | None = None) -> int:
        count = ctypes.c_size_t(tensor.numel())
        dtype = DTYPES[tensor.dtype]
        return self._call("ncclRecv", address(tensor), count, dtype, peer, stream=stream)

    def group_start(self) -> None:
        check(self.library.ncclGroupStart())

    def group_end(self) -> int:
        return int(self.library.ncclGroupEnd())

    def pre_mul_sum(self, scale: Any) -> int:
        """The reduction that multiplies by this tensor of one element first."""
        op = ctypes.c_int()
        check(
            self.library.ncclRedOpCreatePreMulSum(
                ctypes.byref(op), address(scale), DTYPES[scale.dtype], 1, self.handle
            )
        )
        return op.value

    def wait(self) -> None:
        """The current stream waits for what has been enqueued here."""
        event = emulated.make_event()
        emulated.record(event, self.stream)
        emulated.wait(0, event)

    def follow(self) -> None:
        """What is enqueued here from now on comes after the current stream."""
        event = emulated.make_event()
        emulated.record(event, 0)
        emulated.wait(self.stream, event)


def address(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
