"""Owns the tests of _get_ddp_logging_data(): torch's keys, with what they mean in torch."""

import contextlib
import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

from conftest import Transport
from models import OneUnused
from pydist import DataParallel, MismatchError, UsageError
from reference import draw, expect_error

STRINGS = ["module_name", "device_ids", "backend_name", "dtypes", "bucket_sizes"]
STRINGS += ["master_port", "master_addr", "torch_distributed_debug", "cuda_visible_devices"]
STRINGS += ["gloo_socket_ifname", "gloo_device_transport"]
RUN_STRINGS = ["rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"]
RUN_STRINGS += ["prev_iteration_grad_ready_order_indices"]
INTEGERS = ["world_size", "rank", "output_device", "broadcast_buffers", "bucket_cap_bytes"]
INTEGERS += ["find_unused_parameters", "gradient_as_bucket_view", "is_multi_device_module"]
INTEGERS += ["has_sync_bn", "iteration", "num_parameter_tensors", "total_parameter_size_bytes"]
INTEGERS += ["gloo_num_threads"]
DURATIONS = ["forward_compute_time", "backward_compute_time", "backward_comm_time"]
DURATIONS += ["backward_compute_comm_overlap_time"]
RUN_INTEGERS = ["has_rebuilt_buckets", "unused_parameter_size", "num_buckets_reduced"]
RUN_INTEGERS += ["can_set_static_graph"]
RUN_INTEGERS += DURATIONS + ["avg_" + name for name in DURATIONS]
RUN_INTEGERS += ["forward_compute_time_start", "backward_compute_time_start"]
RUN_INTEGERS += ["backward_comm_time_start", "backward_compute_time_end", "backward_comm_time_end"]


class Three(nn.Module):
    """Three layers without bias, as in torch's test."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 10, bias=False)
        self.fc2 = nn.Linear(10, 50, bias=False)
        self.fc3 = nn.Linear(50, 4, bias=False)
        self.extra = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))  # type: ignore[no-any-return]


def take_step(model: nn.Module, rank: int, step: int, width: int) -> None:
    model(draw(rank, step, 4, width)).square().mean().backward()


def sampled(rank: int, world_size: int) -> dict[str, Any]:
    model = DataParallel(Three(), gradient_as_bucket_view=True)
    start = model._get_ddp_logging_data()
    assert sorted(start) == sorted(STRINGS + INTEGERS)
    model._set_ddp_runtime_logging_sample_rate(2)
    for step in range(20):
        with model.no_sync(), torch.no_grad():
            model(draw(rank, step, 4, 2))
        take_step(model, rank, step, 2)
        data = model._get_ddp_logging_data()
        if step == 0:
            assert data == start
        else:
            assert data["iteration"] == (step if step <= 10 or step % 2 == 0 else step - 1)
            assert sorted(data) == sorted(STRINGS + RUN_STRINGS + INTEGERS + RUN_INTEGERS)
            check_times(data)
    return {**model._get_ddp_logging_data()}


def check_times(data: dict[str, Any]) -> None:
    for prefix in ("", "avg_"):
        forward, backward, communication, overlap = (data[prefix + name] for name in DURATIONS)
        assert min(forward, backward, communication) >= 1
        assert min(backward, communication) >= overlap >= 0
    moments = [data[f"{name}_time_start"] for name in ("forward_compute", "backward_compute")]
    moments += [data["backward_comm_time_start"], data["backward_comm_time_end"]]
    assert moments == sorted(moments)
    assert moments[1] <= data["backward_compute_time_end"] <= moments[3]


def test_keys_and_values(transport: Transport) -> None:
    """All of torch's keys, sampled when torch samples: in the first ten steps, then every second
    as asked for. Steps without a round do not count, nor does a frozen parameter."""
    for rank, data in enumerate(transport.pool(2).run(sampled)):
        nbytes = 4 * (20 + 500 + 200)
        expected = {
            "world_size": 2,
            "rank": rank,
            "module_name": "Three",
            "device_ids": "",
            "output_device": -1,
            "broadcast_buffers": 1,
            "bucket_cap_bytes": 25 * 1024 * 1024,
            "find_unused_parameters": 0,
            "gradient_as_bucket_view": 1,
            "is_multi_device_module": 0,
            "backend_name": "gloo",
            "iteration": 18,
            "dtypes": "float",
            "total_parameter_size_bytes": nbytes,
            "num_parameter_tensors": 3,
            "bucket_sizes": str(nbytes),
            "rebuilt_bucket_sizes": str(nbytes),
            "has_rebuilt_buckets": 1,
            "rebuilt_per_bucket_param_indices": "2 1 0",
            "prev_iteration_grad_ready_order_indices": "2, 1, 0",
            "unused_parameter_size": 0,
            "num_buckets_reduced": 1,
            "has_sync_bn": 0,
            "gloo_num_threads": 2,
            "can_set_static_graph": 1,
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "N/A"),
            "master_addr": "127.0.0.1",
        }
        assert {key: data[key] for key in expected} == expected


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(200, 100, bias=False).double()
        self.fc2 = nn.Linear(100, 100, bias=False)
        self.norm = nn.SyncBatchNorm(100)
        self.half = None
        self.small = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


def arguments(rank: int, world_size: int) -> None:
    model = DataParallel(Large(), bucket_cap_mb=1.5, broadcast_buffers=False, static_graph=True)
    data = model._get_ddp_logging_data()
    assert data["dtypes"] == "c10::BFloat16, double, float"
    assert data["has_sync_bn"] == data["static_graph"] == 1
    assert data["broadcast_buffers"] == 0
    assert data["bucket_cap_bytes"] == int(1.5 * 1024 * 1024)
    sizes = [int(size) for size in data["bucket_sizes"].split(", ")]
    assert sorted(sizes) == [4, 800, 40_000, 160_000]
    assert "join_uneven_inputs" not in data
    assert "comm_hook" not in data
    assert model.logger is not None
    model.logger._set_uneven_input_join()
    model.register_comm_hook(None, debugging_hooks.noop_hook)
    data = model._get_ddp_logging_data()
    assert data["comm_hook"] == "noop_hook"
    # One tensor goes to the hook, so all that is float is in one bucket.
    assert sorted(map(int, data["bucket_sizes"].split(", "))) == [4, 40_800, 160_000]
    assert data["join_uneven_inputs"] == 1


def test_construction(pool2: Any) -> None:
    """Arguments, dtypes in torch's spelling, sizes of units, and what torch sets from outside."""
    pool2.run(arguments)


class Either(nn.Module):
    """Rank 0 uses all, the others not `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(100, 100, bias=False)
        self.b = nn.Linear(100, 100, bias=False)
        self.c = nn.Linear(100, 100, bias=False)
        self.rank = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if self.rank == 0 else x


def unused(rank: int, world_size: int, static: bool) -> dict[str, Any]:
    model = DataParallel(Either(), find_unused_parameters=not static, static_graph=static)
    for step in range(3):
        take_step(model, rank, step, 100)
    return dict(model._get_ddp_logging_data())


def test_unused_parameters(transport: Transport) -> None:
    """Their size is what this rank did not use. Buckets are final where torch's would be; unused
    buckets count as reduced as long as skip_all_reduce_unused_params does not say otherwise."""
    for static in (False, True):
        for rank, data in enumerate(transport.pool(2).run(unused, static)):
            assert data["unused_parameter_size"] == 40_000 * (1 if rank == 0 else 2)
            assert data["num_buckets_reduced"] == 3
            assert data["has_rebuilt_buckets"] == int(static)
            order = data["prev_iteration_grad_ready_order_indices"]
            assert order == ("1, 0" if rank == 0 else "0")
            assert data.get("rebuilt_per_bucket_param_indices", "") == ("2, 1, 0" if static else "")


def errors(rank: int, world_size: int) -> None:
    model = DataParallel(OneUnused(), unused_parameters="error")
    assert "has_error" not in model._get_ddp_logging_data()
    error = expect_error(UsageError, lambda: model._set_ddp_runtime_logging_sample_rate(0))
    assert "sample rate is 0; should be equal or greater than 1" in str(error)
    data = model._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert "should be equal or greater than 1" in data["error"]
    assert data["iteration"] == 0
    expect_error(TypeError, lambda: model.register_comm_hook({}, {}))  # type: ignore[arg-type]
    assert "must be callable" in model._get_ddp_logging_data()["error"]
    model = DataParallel(OneUnused(), unused_parameters="error")
    error = expect_error(MismatchError, lambda: take_step(model, rank, 0, 10))
    data = model._get_ddp_logging_data()
    assert data["error"] == str(error)
    assert data["iteration"] == data["has_error"] == 1


def test_errors_are_logged(transport: Transport) -> None:
    """Those of arguments after construction, and those of a backward."""
    transport.pool(2).run(errors)


def printed(rank: int, world_size: int, level: Any) -> str:
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            model = DataParallel(Three())
            for step in range(3):
                take_step(model, rank, step, 2)
        return text.getvalue()
    finally:
        dist.set_debug_level(before)


def test_debug_levels_print(pool2: Any) -> None:
    """INFO: the first rank writes a line at the start; DETAIL: every rank, and at sampled steps."""
    level = dist.DebugLevel
    assert pool2.run(printed, level.OFF) == ["", ""]
    first, second = pool2.run(printed, level.INFO)
    assert second == ""
    assert len(first.splitlines()) == 1
    assert first.startswith("[pydist, rank 0] constructed:")
    assert "module_name=Three" in first
    for rank, text in enumerate(pool2.run(printed, level.DETAIL)):
        lines = text.splitlines()
        assert [line.split(":")[0] for line in lines] == [
            f"[pydist, rank {rank}] constructed",
            f"[pydist, rank {rank}] iteration 1",
            f"[pydist, rank {rank}] iteration 2",
        ]
        assert "backward_compute_time=" in lines[1]
