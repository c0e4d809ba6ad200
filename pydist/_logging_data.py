"""Owns what torch's users read from _get_ddp_logging_data(), by torch's names, from our reducer."""

import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from pydist.errors import UsageError

if TYPE_CHECKING:
    from pydist._wrapping import Wrapping

_CONSTRUCTED = "constructed"

# As torch: every round of the first ten is sampled, then one in so many.
_FIRST_SAMPLES = 10
_SAMPLE_RATE = 100
_GLOO_NUM_THREADS = 2

# How C++ spells them, as in torch's data.
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
# By backend, "" for all: the key and the variable that it shows.
_VARIABLES = {
    "": {
        "master_port": "MASTER_PORT",
        "master_addr": "MASTER_ADDR",
        "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
        "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    },
    "gloo": {
        "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
        "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    },
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}
# Durations of the last sampled round, and their means over samples under "avg_" + name.
_DURATIONS = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


class DataParallelLogger:
    """Stands where torch has its dist.Logger: `model.logger`, with its methods.

    Runtime statistics are those of the round before the last sampled forward, times in
    nanoseconds, points in time since 1970. `has_rebuilt_buckets` means, as in torch, that buckets
    are final; ours are from the start, so the rebuilt ones are the first ones.

    With TORCH_DISTRIBUTED_DEBUG=INFO the first rank writes its data to stderr at the start; with
    DETAIL every rank does, also where torch samples, and DataParallel audits its replicas.
    """

    def __init__(self, model: "Wrapping") -> None:
        self._model = weakref.ref(model)  # which owns this
        self._sample_rate = _SAMPLE_RATE
        self._num_forwards = 0
        self._num_samples = 0
        self._strings: dict[str, str] = {}
        self._integers: dict[str, int] = {}
        self.set_construction_data_and_log()

    # -- torch's methods ------------------------------------------------------------------------

    def set_construction_data_and_log(self, *_: Any) -> None:
        """What is known from the start; torch gives some of it as arguments."""
        model = self._model_now()
        group, parameters = model.process_group, self._trainable()
        self._set(
            module_name=type(model.module).__name__,
            device_ids=", ".join(str(device) for device in model.device_ids or []),
            output_device=_device_number(model.output_device),
            broadcast_buffers=int(model.forward_sync_buffers),
            has_sync_bn=int(
                any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.module.modules())
            ),
            bucket_cap_bytes=model.bucket_bytes_cap,
            find_unused_parameters=int(model.find_unused_parameters),
            gradient_as_bucket_view=int(model.gradient_as_bucket_view),
            is_multi_device_module=int(model.is_multi_device_module),
            world_size=group.size(),
            rank=group.rank(),
            backend_name=dist.get_backend(group),
            iteration=0,
            num_parameter_tensors=len(parameters),
            total_parameter_size_bytes=sum(p.nbytes for p in parameters.values()),
            dtypes=", ".join(sorted({_DTYPES[p.dtype] for p in parameters.values()})),
            bucket_sizes=self._bucket_sizes(),
        )
        if model.static_graph:
            self._set_static_graph()
        self._set_environment(str(self._strings["backend_name"]))
        self._log(_CONSTRUCTED, self._data())

    def set_runtime_stats_and_log(self) -> None:
        """To be called before every forward whose backward is a round."""
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        sampled = number <= _FIRST_SAMPLES or number % self._sample_rate == 0
        if number == 0 or not sampled:
            return
        self._integers["iteration"] = number
        self._set_times()
        self._set_order()
        self._log(f"iteration {number}", {**self._integers})

    def set_error_and_log(self, error: str) -> None:
        self._set(has_error=1, error=error, iteration=self._num_forwards)
        self._log("error", {"error": error})

    def _set_static_graph(self) -> None:
        self._set(static_graph=1)

    def _set_comm_hook_name(self, name: str) -> None:
        self._set(comm_hook=name, bucket_sizes=self._bucket_sizes())  # units are others with it

    def _set_uneven_input_join(self) -> None:
        self._set(join_uneven_inputs=1)

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        error = self._model_now()._reducer.last_error
        if error and "error" not in self._strings:
            self.set_error_and_log(error)
        return SimpleNamespace(strs_map=dict(self._strings), ints_map=dict(self._integers))

    def set_sample_rate(self, sample_rate: int) -> None:
        """After the first ten rounds, one in so many is sampled."""
        if sample_rate < 1:
            error = (
                f"DDP runtime logging sample rate is {sample_rate}; "
                "should be equal or greater than 1"
            )
            self.set_error_and_log(error)
            raise UsageError(error)
        self._sample_rate = sample_rate

    # -- ours -----------------------------------------------------------------------------------

    def _model_now(self) -> "Wrapping":
        model = self._model()
        assert model is not None
        return model

    def _trainable(self) -> dict[str, torch.Tensor]:
        """What torch numbers: parameters that require a gradient, in order."""
        model = self._model_now()
        known = set(model._names)
        named = model._all_parameters()
        return {name: p for name, p in named if name in known and p.requires_grad}

    def _set(self, **values: str | int) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self._strings[name] = value
            else:
                self._integers[name] = value

    def _data(self) -> dict[str, str | int]:
        return {**self._strings, **self._integers}

    def _set_environment(self, backend: str) -> None:
        for kind in ("", backend):
            for key, variable in _VARIABLES.get(kind, {}).items():
                self._strings[key] = os.environ.get(variable, "N/A")
        if backend == "gloo":
            self._integers["gloo_num_threads"] = _GLOO_NUM_THREADS

    def _units(self) -> list[list[int]]:
        """torch's numbers of the trainable parameters in each unit; units without any left out."""
        model = self._model_now()
        numbers = {name: number for number, name in enumerate(self._trainable())}
        units = [
            [numbers[model._names[i]] for i in members if model._names[i] in numbers]
            for _, _, members in model._reducer.units()
        ]
        return [unit for unit in units if unit]

    def _bucket_sizes(self) -> str:
        sizes = [parameter.nbytes for parameter in self._trainable().values()]
        return ", ".join(str(sum(sizes[number] for number in unit)) for unit in self._units())

    def _set_times(self) -> None:
        """Of the last round, and means over the samples."""
        moments = self._model_now()._reducer.last_round_ns()
        forward, backward, published, backward_end, finished = moments
        durations = (
            backward - forward,
            backward_end - backward,
            finished - published,
            max(0, backward_end - published),
        )
        self._num_samples += 1
        for name, duration in zip(_DURATIONS, durations, strict=True):
            mean = self._integers.get(f"avg_{name}", 0)
            self._integers[name] = duration
            self._integers[f"avg_{name}"] = mean + round((duration - mean) / self._num_samples)
        since_1970 = time.time_ns() - time.monotonic_ns()
        self._set(
            forward_compute_time_start=forward + since_1970,
            backward_compute_time_start=backward + since_1970,
            backward_comm_time_start=published + since_1970,
            backward_compute_time_end=backward_end + since_1970,
            backward_comm_time_end=finished + since_1970,
        )

    def _set_order(self) -> None:
        """Which parameters came when, or not at all, in the last round."""
        model = self._model_now()
        reducer, parameters, units = model._reducer, self._trainable(), self._units()
        numbers = {name: number for number, name in enumerate(parameters)}
        names = model._names
        order = [numbers[names[i]] for i in reducer.ready_order() if names[i] in numbers]
        rank, size = model.process_group.rank(), model.process_group.size()
        unused = [(names[i], ranks) for i, ranks in reducer.unused_by_rank()]
        nowhere = {numbers[name] for name, ranks in unused if len(ranks) == size}
        # Without the argument torch reduces every bucket, used or not.
        skips = getattr(model, "skip_all_reduce_unused_params", False)
        reduced = [unit for unit in units if not (skips and nowhere.issuperset(unit))]
        final = reducer.num_rounds > 0 and (model.static_graph or not model.find_unused_parameters)
        self._set(
            prev_iteration_grad_ready_order_indices=", ".join(map(str, order)),
            unused_parameter_size=sum(
                parameters[name].nbytes for name, ranks in unused if rank in ranks
            ),
            num_buckets_reduced=len(reduced),
            has_rebuilt_buckets=int(final),
        )
        if final:
            self._set(
                rebuilt_bucket_sizes=self._bucket_sizes(),
                rebuilt_per_bucket_param_indices=", ".join(
                    " ".join(map(str, unit)) for unit in units
                ),
            )
        if not model.static_graph:
            self._set(can_set_static_graph=int(not reducer.last_round_changed))

    def _log(self, what: str, data: dict[str, Any]) -> None:
        level = get_debug_level()
        rank = self._model_now().process_group.rank()
        first = level == DebugLevel.INFO and rank == 0 and what == _CONSTRUCTED
        if first or level == DebugLevel.DETAIL:
            listed = ", ".join(f"{key}={value}" for key, value in sorted(data.items()))
            print(f"[pydist, rank {rank}] {what}: {listed}", file=sys.stderr, flush=True)


@contextmanager
def note_errors(logger: "DataParallelLogger | None") -> Iterator[None]:
    """What raises within is found in the data, as is what raises in a backward."""
    try:
        yield
    except Exception as error:
        if logger is not None:
            logger.set_error_and_log(f"{type(error)}: {error}")
        raise


def _device_number(device: Any) -> int:
    """torch's number of an output device: -1 for none, and for the CPU."""
    if device is None:
        return -1
    index = torch.device("cuda", device).index if isinstance(device, int) else device.index
    return -1 if index is None else int(index)
