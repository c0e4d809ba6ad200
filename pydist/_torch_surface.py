"""Owns the private names of torch's class that torch itself, Lightning and Accelerate use.

Most of them are inherited: scatter(), gather(), _default_broadcast_coalesced(),
_register_buffer_comm_hook(), _build_params_for_reducer() and others.
"""

import functools
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from pydist._buffers import synchronize_buffers
from pydist._comm_hooks import run_hooks, sum_over_ranks
from pydist._dynamo import untraced
from pydist.errors import UsageError

if TYPE_CHECKING:
    from pydist._engine import Engine
    from pydist.data_parallel import DataParallel


# Dynamo refuses to cut graphs into smaller pieces.
_DYNAMO_MIN_BUCKET_NBYTES = 1 << 20


class TorchReducer:
    """``model.reducer``: torch's reducer as far as anybody outside looks into it."""

    def __init__(self, model: "DataParallel") -> None:
        self._model = weakref.proxy(model)

    def prepare_for_forward(self) -> None:
        """Nothing is left to do when somebody calls this."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Makes the next backward a round, whatever was said when its forward ran."""
        self._model._reducer.prepare(True)
        self._model._reducer.watch(list(outputs), True)

    def _rebuild_buckets(self) -> bool:
        """False: buckets are laid out once, since units are reduced in any order."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is delayed: a static graph's first backward is a round as any other."""

    def _set_static_graph(self) -> None:
        model = self._model
        if model._reducer.counters()["num_rounds"]:
            model._log_and_throw(
                RuntimeError,
                "_set_static_graph() should be called before training loop starts: "
                f"{model._model_name} has averaged gradients already",
            )

    def _ddp_graph_static(self) -> bool:
        """True if every round so far used the same parameters."""
        return not self._model._reducer.ever_changed

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each trainable parameter in the last round, as int32."""
        model = self._model
        counts = torch.zeros(len(model._names), dtype=torch.int32)
        if model._reducer.counters()["num_rounds"]:
            counts += model._engine.size
            for index, ranks in model._reducer.unused_by_rank():
                counts[index] -= len(ranks)
        _, parameters = model._trainable_candidates()
        return counts[[parameter.requires_grad for parameter in parameters]]

    def _install_post_backward_futures(self, futures: list[Any]) -> None:
        """The next backward that is a round ends when these are complete, or raises their error."""
        self._model._reducer.call_after_round(functools.partial(_wait_for_all, list(futures)))

    def _check_reducer_finalized(self) -> None:
        if self._model._reducer.is_open:
            raise RuntimeError(
                f"a backward of {self._model._model_name} is not through with averaging gradients"
            )

    def _remove_autograd_hooks(self) -> None:
        self._model._reducer.detach_hooks()

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """A future of the bucket's sum over ranks."""
        return sum_over_ranks(self._model.process_group, bucket)

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """What a backward does with the bucket: the registered hook, else the sum over ranks."""
        if self._model._comm_hooks:
            return run_hooks(self._model, bucket)
        return self._run_allreduce_hook(bucket)


def _wait_for_all(futures: list[Any]) -> None:
    for future in futures:
        future.wait()


class TorchSurface(DistributedDataParallel):
    """What DataParallel has for the sake of others."""

    _engine: "Engine"
    _reducer: Any

    broadcast_bucket_size = 250 << 20  # bytes; only torch's functions look at it
    use_side_stream_for_tensor_copies = False
    _use_python_reducer = False
    _ddp_sink_clone = True  # outputs go through no node of ours, so there is nothing to clone

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)

    @property
    def reducer(self) -> TorchReducer:  # type: ignore[override]
        """The private names of torch's reducer."""
        return TorchReducer(self)  # type: ignore[arg-type]

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        """True once a backward has shown torch's hooks which buckets there are."""
        return bool(self._reducer is not None and self._reducer.counters()["num_rounds"])

    @property
    def modules_buffers(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The buffers that ranks share."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """They by name."""
        named = self.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}

    def _assign_modules_buffers(self) -> None:
        """modules_buffers and named_module_buffers are looked up each time."""

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        """Raises, and leaves a trace in _get_ddp_logging_data()."""
        if self.logger is not None:
            self.logger.set_error_and_log(f"{err_type.__name__}: {err_msg}")
        raise err_type(err_msg)

    # -- buffers --------------------------------------------------------------------------------

    def _syncs_buffers_now(self, after_forward: bool) -> bool:
        """Buffers follow before a forward, unless a hook was registered for after it."""
        hook = self.__dict__.get("buffer_hook")
        after = _BufferCommHookLocation.POST_FORWARD
        wanted_after = hook is not None and hook.buffer_comm_hook_location == after
        in_use = self.require_forward_param_sync and self.forward_sync_buffers
        return bool(in_use and wanted_after == after_forward)

    def _sync_buffers(self, root: int = 0) -> None:
        """At a synchronised forward: calls the hook that was registered, else broadcasts."""
        start_ns = time.monotonic_ns()
        if "buffer_hook" not in self.__dict__:
            self._sync_module_buffers(root)
        elif buffers := self.modules_buffers:
            # As with torch, a hook may write to what the graph of this forward has saved.
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
                self._sync_module_buffers(root)
        self._reducer.discount_wait(time.monotonic_ns() - start_ns)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            buffers = self.modules_buffers
            synchronize_buffers(self._engine, self.module, buffers, authoritative_rank)
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._engine.broadcast_tensors(list(tensors), authoritative_rank)

    # -- changes after construction -------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """As the argument static_graph; to be called before the first backward."""
        if not self.static_graph:
            self.reducer._set_static_graph()  # may raise
        super()._set_static_graph()  # type: ignore[no-untyped-call]

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Goes on with the ranks of another group, which all call this; others keep theirs."""
        if dist.distributed_c10d._rank_not_in_group(new_process_group):
            return
        if self._reducer is not None:
            gradients = [parameter.grad for parameter in self._module_parameters]
            if self._reducer.has_unreduced and any(grad is not None for grad in gradients):
                raise UsageError(
                    f"{self._model_name} has gradients that the ranks of its old group have not "
                    "averaged; average them by a backward outside no_sync(), or zero_grad() them"
                )
            self._reducer.detach_hooks()
        self.process_group = new_process_group
        self._build(init_sync=False)

    def _build(self, init_sync: bool) -> None:
        raise NotImplementedError

    @property
    def _model_name(self) -> str:
        raise NotImplementedError

    # -- torch.compile --------------------------------------------------------------------------

    @untraced
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module. Where it is compiled, TorchDynamo cuts its graph as buckets are cut."""
        if self.bucket_bytes_cap < _DYNAMO_MIN_BUCKET_NBYTES:
            return self.module(*inputs, **kwargs)
        outer = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = outer
