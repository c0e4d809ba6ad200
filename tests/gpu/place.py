"""Owns where a section runs: the GPU, or the CPU with the emulation library; and how it times."""

import dataclasses
import os
import time
from collections.abc import Callable

import torch
from rows import Skip


@dataclasses.dataclass(frozen=True)
class Place:
    """One device, and whether it is an emulated one."""

    emulated: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.emulated else torch.device("cuda", 0)

    @property
    def backend(self) -> str:
        """Of torch's process groups."""
        return "gloo" if self.emulated else "nccl"

    def prepare(self) -> None:
        """To be called before any section's process is forked."""
        if self.emulated:
            import emulated

            os.environ[emulated.LIBRARY] = emulated.library()

    def enter(self) -> None:
        """To be called once in each process, before anything else uses the device."""
        if self.emulated:
            import emulated

            torch.set_num_threads(1)
            # It takes memory in a way that the emulated device's allocator does not know.
            torch.backends.mkldnn.set_flags(False)
            emulated.load()
            emulated.reset(0)
        else:
            from pydist import _device

            torch.cuda.set_device(self.device)
            _device.require_device(torch.empty(1, device=self.device), "the first tensor")

    def settle(self) -> None:
        """Waits for the device, and raises what it has run into since the last call."""
        if not self.emulated:
            torch.cuda.synchronize()
            return
        import emulated

        emulated.synchronize()
        faults = emulated.take_faults()
        if faults:
            raise AssertionError(f"the emulated device found {faults}")

    def elapsed_s(self, run: Callable[[], object]) -> float:
        """From the first work that `run` enqueues to the end of the last."""
        if self.emulated:
            return self.wall_s(run)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def wall_s(self, run: Callable[[], object]) -> float:
        """As a user's clock sees it: from an idle device to an idle device."""
        self.settle()
        started_s = time.perf_counter()
        run()
        self.settle()
        return time.perf_counter() - started_s

    def captured(
        self, make_step: Callable[[], Callable[[], object]], of_torch: bool = True
    ) -> Callable[[], None]:
        """What replays a step as a CUDA graph.

        The step is made, and warmed up, on the stream that it is captured on: autograd runs a
        parameter's accumulation on the stream that was current when its node was made.
        """
        if self.emulated:
            return emulated_graph(make_step, of_torch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step = make_step()
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # What other threads do, such as the watchdog of torch's own NCCL group, is no part of it.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        torch.cuda.synchronize()
        return graph.replay


def emulated_graph(
    make_step: Callable[[], Callable[[], object]], of_torch: bool
) -> Callable[[], None]:
    if of_torch:
        raise Skip("needs a GPU: what torch does on the CPU is in no graph")
    import emulated

    step = make_step()
    step()
    graph = emulated.Graph()
    with graph.capture():
        step()
    return graph.replay
