"""Owns the measuring of layers: how long each takes, and what it would cost to cut after it."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pydist._balance import LayerCosts
from pydist._outputs import tensors_of
from pydist._trees import map_tensors

NUM_RUNS = 5  # of each layer, of which the median counts
_COPY_NBYTES = 16 << 20

# call(index, layer, args) runs a layer; another one may add keyword arguments.
Call = Callable[[int, nn.Module, tuple[Any, ...]], Any]


def _plain_call(index: int, layer: nn.Module, args: tuple[Any, ...]) -> Any:
    return layer(*args)


def measured_costs(
    layers: Sequence[nn.Module],
    args: tuple[Any, ...],
    call: Call = _plain_call,
    num_runs: int = NUM_RUNS,
) -> LayerCosts:
    """Seconds that each layer takes, forward and backward, on the microbatch `args`, and seconds
    to copy its output and the gradient of that at the bandwidth measured here.

    Each layer runs `num_runs` times after one that does not count. Nothing is left of that:
    parameters keep their gradients and call no hooks, buffers (BatchNorm's statistics) and random
    generators keep their state. Modes are the current ones: autocast, train or eval.
    """
    tensors = tensors_of(args)
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    bandwidth = copy_bandwidth(device)
    work: list[float] = []
    output: list[float] = []
    gradient: list[float] = []
    with _random_state_kept(layers), torch.enable_grad():
        for index, layer in enumerate(layers):
            with stand_ins(layer):
                seconds, result = _time_layer(index, layer, args, call, num_runs, device)
            outputs = list(tensors_of(result))
            work.append(seconds)
            output.append(sum(t.nbytes for t in outputs) / bandwidth)
            gradient.append(sum(t.nbytes for t in outputs if t.requires_grad) / bandwidth)
            args = (_received(result),)
    return LayerCosts(work, output, gradient)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that one thread's copy reaches here, of a size beyond most caches; or one
    on the device, where links between devices are slower: what is cut there costs little anyway,
    since it travels while the device works."""
    source = torch.zeros(_COPY_NBYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds: list[float] = []
    for _ in range(NUM_RUNS):
        started = _now_s(device)
        target.copy_(source)
        seconds.append(_now_s(device) - started)
    return _COPY_NBYTES / statistics.median(seconds)


def _time_layer(
    index: int,
    layer: nn.Module,
    args: tuple[Any, ...],
    call: Call,
    num_runs: int,
    device: torch.device,
) -> tuple[float, Any]:
    seconds: list[float] = []
    result: Any = None
    for _ in range(num_runs + 1):
        inputs = tuple(_received(value) for value in args)
        started = _now_s(device)
        result = call(index, layer, inputs)
        roots = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        seconds.append(_now_s(device) - started)
    return statistics.median(seconds[1:]), result


def _now_s(device: torch.device) -> float:
    """Once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _received(value: Any) -> Any:
    """As a stage receives it: of its own memory, with a gradient where the sender's had one.

    No leaves, which a layer may not change in place.
    """
    return map_tensors(_received_tensor, value)


def _received_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


@contextmanager
def stand_ins(layer: nn.Module) -> Iterator[None]:
    """While it lasts, the layer computes with parameters that share memory with its own but have
    gradients and hooks of their own, and with copies of its buffers.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    try:
        for owner in layer.modules():
            kinds: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = [
                (owner._parameters, _other_parameter),
                (owner._buffers, torch.clone),
            ]
            for members, stand_in in kinds:
                for name, tensor in list(members.items()):
                    if tensor is not None:
                        kept.append((members, name, tensor))
                        if id(tensor) not in made:
                            made[id(tensor)] = stand_in(tensor)
                        members[name] = made[id(tensor)]
        yield
    finally:
        for members, name, tensor in reversed(kept):
            members[name] = tensor


def _other_parameter(parameter: Tensor) -> Tensor:
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


@contextmanager
def _random_state_kept(layers: Sequence[nn.Module]) -> Iterator[None]:
    devices = {p.device for layer in layers for p in layer.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
        yield
