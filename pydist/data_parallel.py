"""Owns DataParallel: the drop-in for torch's DistributedDataParallel on pydist's engine."""

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs

from pydist import _C
from pydist._arguments import (
    check_parameter,
    default_group,
    resolve_algorithm,
    resolve_bucket_caps,
    resolve_buffer_sync,
    resolve_delayed,
    resolve_group,
    resolve_unused,
    resolve_wire_dtype,
)
from pydist._backward_optimizers import take_over_optimizers
from pydist._comm_hooks import Hook
from pydist._dynamo import untraced, untraced_with_callees
from pydist._hook_surface import HookSurface
from pydist._join import JoinSurface
from pydist._mixed_precision import (
    apply_mixed_precision,
    check_mixed_precision,
    reduction_dtype,
)
from pydist._module_watch import ModuleWatch, check_lent, find_replacements, lent_tensors
from pydist._nesting import Nesting
from pydist._outputs import tensors_of
from pydist._replica_audit import ReplicaAudit, resolve_audit
from pydist.errors import UsageError
from pydist.report import Report

_NUM_NAMED = 10  # parameters, in a warning

# Of a warning in forward: through it and Module.__call__ to the line that called the model.
_USER_STACKLEVEL = 6


class DataParallel(JoinSurface, HookSurface):
    """Trains one replica of ``module`` per rank: every backward leaves the mean gradient on all.

    Takes the arguments of :class:`torch.nn.parallel.DistributedDataParallel`, and is an instance
    of it. Parameters and buffers start as the group's first rank has them. A rank's contribution
    to the mean is its ``.grad`` at the end of backward, zeros where there is none; a parameter
    that no rank used keeps its ``.grad``. All ranks get the same bits, whatever the bucket size.
    Layers of :class:`torch.nn.SyncBatchNorm`, which refuse the CPU, become
    :class:`pydist.SyncBatchNorm` in place.

    Args:
        module: the module, on the CPU or on one GPU per process, with the same parameters on every
            rank.
        device_ids, output_device: as in torch: for a module on a GPU, a list of that one, where
            inputs are moved to; None for modules on the CPU, and where inputs stay where they are.
        dim: the dimension along which scatter() and gather() cut and join tensors.
        broadcast_buffers, forward_sync_buffers: buffers follow the first rank's before each
            forward that comes after a synchronised one. Default: True. The first name is
            deprecated. At the start they are the first rank's in any case.
        init_sync: verify the model across ranks, and send the first rank's state, at the start.
        process_group, device_mesh: the ranks, as a group or as a 1-D mesh (or one dimension of a
            larger mesh); default: all.
        bucket_cap_mb, bucket_cap_mb_list: small gradients travel together in buckets of about this
            many MiB; default 25, and 1 for the first. A list has the sizes of successive buckets,
            the last that of all further ones, and wins.
        find_unused_parameters: parameters that a step does not use are always handled; True says
            that they are expected, else the first such step warns with their names.
        check_reduction: deprecated, as in torch.
        gradient_as_bucket_view: ``.grad`` are views of the buckets that are reduced.
        static_graph: promises that every step uses the same parameters; warns when one does not.
        delay_all_reduce_named_params, param_to_hook_all_reduce: pairs of name and parameter, which
            may be the module's or not, that travel together, and not before the gradient of the
            other argument, a parameter, is there (or backward ends). They are among the parameters
            that start as the first rank has them.
        skip_all_reduce_unused_params: over a process group, what no rank used in the last step
            travels only if this one turns out to use it, and then at the end of backward. Ranks may
            use what they like in any step. Shared memory moves what is used anyway.
        mixed_precision: torch's _MixedPrecision. The module's forward gets floating-point inputs
            and computes with copies of its parameters in ``param_dtype``, cast anew each time;
            buffers are in ``buffer_dtype`` for good. Parameters, ``.grad``, optimizers and the
            parameters of a state dict stay as they were. Gradients travel in ``reduce_dtype``, by
            default ``param_dtype``, as with ``wire_dtype``; with gradient_as_bucket_view in their
            own type, which is more exact.
        batched_grad_copy: changes nothing: gradients are always copied into a bucket in one pass.
        wire_dtype: torch.bfloat16, torch.float16 or, on GPUs, torch.float8_e4m3fn (with a scale for
            every block of elements): gradients of wider types travel in this one,
            which halves the bytes of float32. Each rank's contribution is rounded to it once (to
            nearest, ties to even), sums are taken in float32 in rank order, and the mean is rounded
            once more; ``.grad`` keeps its own type. What is too large for float16 (beyond 65504)
            arrives as infinity on every rank, where GradScaler finds it; bfloat16 has float32's
            range. A type that is not narrower than a gradient's own changes nothing for it. One
            rank alone rounds nothing. Over several hosts, gradients of float32 travel in it between
            hosts alone: the mean of each host's ranks is what is rounded, and other types travel as
            they are.
        unused_parameters: what a trainable parameter means that no rank used in a step: "warn"
            once, "ignore", or "error". The last raises MismatchError at the end of that backward
            on every rank, also where only some ranks did not use it, and names them; the gradients
            are right then, and the next step may go on.
        audit_every: compare every bit of the parameters across ranks before the first forward and
            after so many steps each, as check_replicas() does, and raise MismatchError where they
            differ; None: never, or 100 where TORCH_DISTRIBUTED_DEBUG=DETAIL. Not within join().
        algorithm: of modules on GPUs: how means are computed. "nccl" is NCCL's all-reduce, "ring" a
            ring over NCCL's send and receive, "slices" has each rank add one part of everybody's
            gradients, in float32 and in rank order: the bits of the CPU. "auto" takes the fastest
            by a cost model that all ranks agree on, and "slices" for float16, where sums overflow.

    On GPUs gradients are reduced on a stream of NCCL's while backward goes on, and the host waits
    for nothing in a step that uses all trainable parameters; on a rank that does not, backward()
    waits for the other ranks to say what they used. What is wrong on some rank is then found in the
    step after. Steps can be captured in CUDA graphs, after one that was not, if they use every
    trainable parameter. Sparse gradients are for modules on the CPU.

    Raises:
        MismatchError: models differ between ranks; on every rank, naming rank and parameter.
        UsageError: the module cannot be trained this way.
        NotImplementedError: a module on a GPU has sparse gradients.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        unused_parameters: str = "warn",
        audit_every: int | None = None,
        algorithm: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if check_reduction:
            warnings.warn(
                "check_reduction is deprecated and does nothing; leave it away",
                FutureWarning,
                stacklevel=2,
            )
        self.forward_sync_buffers = resolve_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.process_group = resolve_group(process_group, device_mesh, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.parameters_to_ignore: set[str] = set(
            getattr(module, "_ddp_params_and_buffers_to_ignore", [])
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._device_arguments = (device_ids, output_device)
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self._bucket_caps = resolve_bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = self._bucket_caps.largest_nbytes
        self.bucket_bytes_cap_list = self._bucket_caps.given_nbytes
        self.bucket_bytes_cap_default = self._bucket_caps.is_default
        self._delayed = resolve_delayed(
            delay_all_reduce_named_params,
            param_to_hook_all_reduce,
            module,
            self.parameters_to_ignore,
        )
        self.mixed_precision = check_mixed_precision(mixed_precision)
        if wire_dtype is None and not gradient_as_bucket_view:
            wire_dtype = reduction_dtype(self.mixed_precision)
        self._wire_dtype = resolve_wire_dtype(wire_dtype)
        self._algorithm = resolve_algorithm(algorithm)
        if self.mixed_precision is not None:
            apply_mixed_precision(module, self.mixed_precision, self.parameters_to_ignore)
        self._warned_unused = False
        self._nesting = Nesting()
        self._lazy_init_ran = False
        self._comm_hooks: list[tuple[Hook, Any]] = []
        self.unused_parameters = resolve_unused(unused_parameters, find_unused_parameters)
        self.audit_every = resolve_audit(audit_every)
        self._audit = ReplicaAudit(self.audit_every)
        self._build(init_sync)

    # -- training -------------------------------------------------------------------------------

    @untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; a backward from its outputs averages gradients, except in no_sync()."""
        if self._nesting.stands_aside():
            return self.module(*inputs, **kwargs)
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        if not self._nesting.inner:
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        with self._nesting.averaging_for_inner():
            output = self._run_ddp_forward(*inputs, **kwargs)
        return self._post_forward(output)

    @untraced_with_callees
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What comes before the module's own forward; its arguments, moved where they belong."""
        if self._reducer is None:  # a copy
            if not torch.is_grad_enabled():  # evaluated, maybe on one rank alone
                return self._arguments_for_module(inputs, kwargs)
            self._build(init_sync=False)
        if not self._lazy_init_ran:
            take_over_optimizers(self._module_parameters)
            self._lazy_init_ran = True
        self._warn_of_last_round()
        if torch.is_grad_enabled():
            if self._watch.changed():
                self._follow_changes()
            if self.require_backward_grad_sync:
                self._observe()
            self._reducer.prepare(self.require_backward_grad_sync)
        if self._join_config.enable:
            start_ns = time.monotonic_ns()
            self._membership.before_forward(self.will_sync_module_buffers())
            self._reducer.discount_wait(time.monotonic_ns() - start_ns)
        if self._syncs_buffers_now(after_forward=False):
            self._sync_buffers(self._buffer_root())
        return self._arguments_for_module(inputs, kwargs)

    def _arguments_for_module(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """The same on the module's own device, and in its precision."""
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, False)
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            return _cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    def _observe(self) -> None:
        """What watches training from step to step."""
        assert self.logger is not None
        self.logger.set_runtime_stats_and_log()
        if self._audit.is_due(self._reducer.num_rounds) and not self._join_config.enable:
            start_ns = time.monotonic_ns()
            self._audit.run(self._engine, self._model_name, self._state())
            self._reducer.discount_wait(time.monotonic_ns() - start_ns)

    @untraced_with_callees
    def _post_forward(self, output: Any) -> Any:
        """What comes after it: backward from `output` will be a round."""
        if self._reducer is None:
            return output
        if self._syncs_buffers_now(after_forward=True):
            self._sync_buffers(self._buffer_root())
        synchronize = self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._reducer.watch(list(tensors_of(output)), synchronize)
            self.require_forward_param_sync = synchronize
        else:
            self.require_forward_param_sync = False
        if self._join_config.enable:
            self._membership.after_forward(synchronize)
        return output

    def _buffer_root(self) -> int:
        """The rank that all get the buffers of; in join(), ranks that have joined learn of it."""
        return self._membership.buffer_root() if self._join_config.enable else 0

    def _follow_changes(self) -> None:
        """Parameters are others than at the last forward: takes them over, or raises."""
        now = list(self._all_parameters())
        wrapped = self._reducer.parameters()
        lent = lent_tensors(wrapped, now)
        if lent:
            check_lent(self._model_name, lent)
            return  # the parameters come back after this forward
        try:
            self._names, replaced = find_replacements(self._model_name, self._names, wrapped, now)
            for index, parameter in replaced.items():
                check_parameter(self._names[index], parameter)
                self._reducer.replace(index, parameter)
        except (UsageError, NotImplementedError, RuntimeError) as error:
            text = f"on rank {self._engine.global_ranks[self._engine.rank]}, {error}"
            if self.require_backward_grad_sync:
                self._reducer.fail(text)
            raise type(error)(text) from None
        self._watch = ModuleWatch(self.module)

    def _warn_of_last_round(self) -> None:
        if self._warned_unused:
            return
        if self.static_graph:
            if self._reducer.last_round_changed:
                self._warned_unused = True
                names = self._named(self._reducer.changed_since_first_round())
                warnings.warn(
                    f"{self._model_name} was made with static_graph=True, but these parameters "
                    f"were used in some steps only: {names}; gradients are right nevertheless",
                    UserWarning,
                    stacklevel=_USER_STACKLEVEL,
                )
        elif self.unused_parameters == "warn" and self._reducer.last_round_had_unused:
            self._warned_unused = True
            names = self._named(self._reducer.unused_in_last_round())
            warnings.warn(
                f"no rank used these parameters of {self._model_name} in the last step: {names}; "
                "gradients are right nevertheless. If this is meant, say so with "
                'find_unused_parameters=True or unused_parameters="ignore"',
                UserWarning,
                stacklevel=_USER_STACKLEVEL,
            )

    def _named(self, indices: list[int]) -> str:
        names = [self._names[index] for index in indices[:_NUM_NAMED]]
        more = f" and {len(indices) - _NUM_NAMED} more" if len(indices) > _NUM_NAMED else ""
        return ", ".join(names) + more

    def report(self) -> Report:
        """What happened so far, readable as a table: buckets, bytes, times, late ranks, hints."""
        if self._reducer is None:
            self._build(init_sync=False)
        transport = "nccl" if self._on_device else self._engine.transport
        in_arena = transport in ("shared_memory", "hosts") and not self.gradient_as_bucket_view
        return Report.of(
            model=self._model_name,
            transport=transport,
            rank=self._engine.rank,
            size=self._engine.size,
            names=self._names,
            reducer=self._reducer,
            allocator=_C.install_allocator() if in_arena else "",
        )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """From the tenth step on one in so many gives the data of _get_ddp_logging_data()."""
        if self._reducer is None:
            self._build(init_sync=False)
        assert self.logger is not None
        self.logger.set_sample_rate(sample_rate)

    # -- copies ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != default_group():
            raise RuntimeError("DataParallel can be copied or pickled with the default group only")
        state = dict(self.__dict__)
        for live in ("process_group", "_engine", "_watch", "_membership", "_communicator"):
            state.pop(live, None)
        state["_join_config"] = _JoinConfig.construct_disabled_join_config()
        state["_reducer"] = state["logger"] = None
        state["_comm_hooks"] = []  # as torch: hooks are to be registered again
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        self.process_group = default_group()  # the rest at the first forward, which is collective

    def _remove_autograd_hooks(self) -> None:
        """Leaves gradients local from now on, until the next forward hooks the parameters again."""
        if self._reducer is not None:
            self._reducer.detach_hooks()

    def will_sync_module_buffers(self) -> bool:
        """True if the next forward gives all ranks the first rank's buffers."""
        wanted = self.require_forward_param_sync and self.forward_sync_buffers
        return bool(wanted and self.modules_buffers)

    def __del__(self) -> None:
        reducer = self.__dict__.get("_reducer")
        if reducer is not None:
            reducer.detach_hooks()
