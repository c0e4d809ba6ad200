"""Owns DataParallel: the drop-in for torch's DistributedDataParallel on pydist's engine."""

import dataclasses
import time
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs

from pydist import _C
from pydist._arguments import (
    check_environment,
    check_parameter,
    default_group,
    resolve_bucket_caps,
    resolve_buffer_sync,
    resolve_delayed,
    resolve_devices,
    resolve_group,
    resolve_unused,
    resolve_wire_dtype,
)
from pydist._backward_optimizers import take_over_optimizers
from pydist._comm_hooks import (
    Hook,
    builtin_hook,
    check_comm_hook,
    engine_wire_dtype,
    hook_name,
    reducer_hook,
)
from pydist._dynamo import untraced, untraced_with_callees
from pydist._engine import group_engine
from pydist._join import JoinSurface
from pydist._logging_data import DataParallelLogger, note_errors
from pydist._mixed_precision import (
    apply_mixed_precision,
    check_mixed_precision,
    reduction_dtype,
)
from pydist._module_watch import ModuleWatch, check_lent, find_replacements, lent_tensors
from pydist._nesting import Nesting
from pydist._outputs import tensors_of
from pydist._replica_audit import ReplicaAudit, resolve_audit
from pydist._sparse import SparseMean, sparse_parameters
from pydist._torch_surface import TorchSurface
from pydist._verification import describe_tensors, verify_models, verify_settings
from pydist.errors import UsageError
from pydist.report import Report
from pydist.sync_batchnorm import adopt_sync_batchnorm

_T = TypeVar("_T", bound=torch.Tensor)

# Of a warning in forward: through it and Module.__call__ to the line that called the model.
_USER_STACKLEVEL = 6


class DataParallel(JoinSurface, TorchSurface):
    """Trains one replica of ``module`` per rank: every backward leaves the mean gradient on all.

    Takes the arguments of :class:`torch.nn.parallel.DistributedDataParallel`, and is an instance
    of it. Parameters and buffers start as the group's first rank has them. A rank's contribution
    to the mean is its ``.grad`` at the end of backward, zeros where there is none; a parameter
    that no rank used keeps its ``.grad``. All ranks get the same bits, whatever the bucket size.
    Layers of :class:`torch.nn.SyncBatchNorm`, which refuse the CPU, become
    :class:`pydist.SyncBatchNorm` in place.

    Args:
        module: the module, on the CPU, with the same parameters on every rank.
        device_ids, output_device: None for modules on the CPU; the one GPU of the module otherwise,
            where inputs are moved.
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
        wire_dtype: torch.bfloat16 or torch.float16: gradients of wider types travel in this one,
            which halves the bytes of float32. Each rank's contribution is rounded to it once (to
            nearest, ties to even), sums are taken in float32 in rank order, and the mean is rounded
            once more; ``.grad`` keeps its own type. What is too large for float16 (beyond 65504)
            arrives as infinity on every rank, where GradScaler finds it; bfloat16 has float32's
            range. A type that is not narrower than a gradient's own changes nothing for it. One
            rank alone rounds nothing.
        unused_parameters: what a trainable parameter means that no rank used in a step: "warn"
            once, "ignore", or "error". The last raises MismatchError at the end of that backward
            on every rank, also where only some ranks did not use it, and names them; the gradients
            are right then, and the next step may go on.
        audit_every: compare every bit of the parameters across ranks before the first forward and
            after so many steps each, as check_replicas() does, and raise MismatchError where they
            differ; None: never, or 100 where TORCH_DISTRIBUTED_DEBUG=DETAIL. Not within join().

    Raises:
        MismatchError: models differ between ranks; on every rank, naming rank and parameter.
        UsageError: the module cannot be trained this way.
        NotImplementedError: an argument of torch's DDP that is not there yet.
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

    # -- construction ---------------------------------------------------------------------------

    def _build(self, init_sync: bool) -> None:
        """Collective: a rank that cannot wrap its module lets the others know before it raises."""
        self._engine = group_engine(self.process_group)
        with self._engine.all_or_none(f"wrapping {self._model_name}"):
            check_environment()
            self._nesting.enclose(self.module, self.parameters_to_ignore)
            self._names, parameters = self._trainable_candidates()
            sparse = sparse_parameters(self.module)
            self._sparse = [i for i, p in enumerate(parameters) if id(p) in sparse]
            self._place(parameters)
            adopt_sync_batchnorm(self.module)
        if init_sync:
            verify_models(self._engine, self._model_name, describe_tensors(self._state()))
        verify_settings(self._engine, self._model_name, self._agreed_settings(parameters))
        if init_sync:
            self._engine.broadcast_tensors([tensor.detach() for _, _, tensor in self._state()])
        self._make_reducer(parameters)
        self.logger = DataParallelLogger(self)

    def _make_reducer(self, parameters: list[torch.Tensor]) -> None:
        self._reducer = _C.Reducer(
            parameters=parameters,
            names=self._names,
            store=self._engine.store_prefix("reducer"),
            group=None if self._engine.transport == "shared_memory" else self.process_group,
            rank=self._engine.rank,
            size=self._engine.size,
            timeout_s=self._engine.timeout_s,
            global_ranks=self._engine.global_ranks,
            settings=self._reducer_settings(),
        )
        self._watch = ModuleWatch(self.module)

    def _place(self, parameters: list[torch.Tensor]) -> None:
        """Where the module is, in torch's attributes."""
        where = resolve_devices(*self._device_arguments, parameters)
        self.device_ids, self.output_device = where.device_ids, where.output_device
        self.device, self.device_type = where.device, where.device.type
        self.is_multi_device_module = where.multi

    def _agreed_settings(self, parameters: list[torch.Tensor]) -> dict[str, Any]:
        """What units depend on, so that no rank reduces others than its peers."""
        return {
            "bucket_cap_mb": dataclasses.asdict(self._bucket_caps),
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "wire_dtype": self._wire_dtype,
            "mixed_precision": str(self.mixed_precision),
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "delayed parameters": self._delayed.settings(self._names),
            "unused_parameters": self.unused_parameters,
            "audit_every": self.audit_every,
            "number of parameters": len(parameters),
            "elements of each parameter": [p.numel() for p in parameters],
            "dtype of each parameter": [str(p.dtype) for p in parameters],
            "parameters with sparse gradients": [self._names[i] for i in self._sparse],
        }

    def _reducer_settings(self) -> dict[str, Any]:
        """What the C++ reducer reads (see bindings_reducer.cpp)."""
        return {
            "name": self._model_name,
            "backend": dist.get_backend(self.process_group),
            "bucket_caps_nbytes": self._bucket_caps.caps_nbytes,
            "skip_unused": self.skip_all_reduce_unused_params,
            "bucket_view": self.gradient_as_bucket_view,
            "comm_hook": reducer_hook(self),
            "wire_dtype": self._wire_dtype or engine_wire_dtype(self),
            "sparse": self._sparse,
            "average_sparse": SparseMean(self._engine),
            "unused_is_error": self.unused_parameters == "error",
            **self._delayed.settings(self._names),
        }

    @property
    def _model_name(self) -> str:
        return f"DataParallel({type(self.module).__name__})"

    @property
    def _module_parameters(self) -> list[torch.nn.Parameter]:  # type: ignore[override]
        return [parameter for _, parameter in self._not_ignored(self.module.named_parameters())]

    def _trainable_candidates(self) -> tuple[list[str], list[torch.Tensor]]:
        """Every parameter that could have a gradient: frozen ones too, for they may thaw."""
        names: list[str] = []
        parameters: list[torch.Tensor] = []
        for name, parameter in self._all_parameters():
            check_parameter(name, parameter)
            if parameter.is_floating_point() or parameter.is_complex():
                names.append(name)
                parameters.append(parameter)
        if not any(parameter.requires_grad for parameter in parameters):
            raise UsageError(
                "DataParallel is not needed when a module doesn't have any parameters "
                "that require a gradient."
            )
        return names, parameters

    def _state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Kind, name and tensor of all that ranks must agree on."""
        for name, parameter in self._all_parameters():
            yield "parameter", name, parameter
        for name, buffer in self._not_ignored(self.module.named_buffers()):
            yield "buffer", name, buffer

    def _all_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the module, and delayed ones that are not among them."""
        yield from self._not_ignored(self.module.named_parameters())
        yield from self._delayed.outside.items()

    def _not_ignored(self, named: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
        return ((name, tensor) for name, tensor in named if name not in self.parameters_to_ignore)

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

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
        if self._reducer is None:  # a copy, used for the first time
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
        if self.device_ids:
            inputs, kwargs = self._moved(inputs, kwargs)
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

    def _moved(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments on the module's own device."""
        assert self.device_ids is not None
        device = torch.device(self.device_type, self.device_ids[0])
        moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, False)
        return moved_inputs[0], moved_kwargs[0]

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
                "find_unused_parameters=True",
                UserWarning,
                stacklevel=_USER_STACKLEVEL,
            )

    def _named(self, indices: list[int]) -> str:
        return ", ".join(self._names[index] for index in indices)

    def report(self) -> Report:
        """What happened so far, readable as a table: buckets, bytes, times, late ranks, hints."""
        if self._reducer is None:
            self._build(init_sync=False)
        in_arena = self._engine.transport == "shared_memory" and not self.gradient_as_bucket_view
        return Report.of(
            model=self._model_name,
            transport=self._engine.transport,
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

    # -- communication hooks --------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Leaves communication to ``hook(state, bucket)``, which returns a future of the result.

        To be called by all ranks, once, before the first backward. From then on gradients travel in
        contiguous buckets of ``bucket_cap_mb``. The hook gets them in order, as
        :class:`torch.distributed.GradBucket`, one after another: the next when the future for the
        one before is complete. Gradients are not divided by the number of ranks. What the future
        holds, a tensor of as many elements, becomes the gradients of the bucket's parameters.

        An exception in the hook is raised by backward(); peers on which it was not raised raise
        PeerError. After a backward in which it was raised on all ranks, training can go on.

        Raises:
            RuntimeError: a hook is registered already.
            TypeError, UsageError: this is no hook.
            MismatchError: ranks register different hooks.
        """
        with note_errors(self.logger):
            check_comm_hook(hook)
        self._set_comm_hook(hook, state, hook_name(hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Registers the hook that torch.distributed.BuiltinCommHookType names."""
        self._set_comm_hook(builtin_hook(comm_hook_type), self.process_group, str(comm_hook_type))

    def _set_comm_hook(self, hook: Hook, state: Any, name: str) -> None:
        if self._comm_hooks:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self._wire_dtype is not None:
            raise UsageError(
                f"{self._model_name} was made with wire_dtype, but how gradients travel is a "
                "communication hook's own affair; leave away one of the two"
            )
        if self._reducer is None:  # a copy
            self._build(init_sync=False)
        if self._reducer.has_unreduced:
            raise UsageError(
                f"{self._model_name} has gradients that ranks have not averaged yet; register the "
                "communication hook before the first backward"
            )
        verify_settings(self._engine, self._model_name, {"communication hook": name})
        self._reducer.detach_hooks()
        self._comm_hooks.append((hook, state))
        _, parameters = self._trainable_candidates()
        self._make_reducer(parameters)
        assert self.logger is not None
        self.logger._set_comm_hook_name(name)

    # -- copies ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != default_group():
            raise RuntimeError("DataParallel can be copied or pickled with the default group only")
        state = dict(self.__dict__)
        for live in ("process_group", "_engine", "_watch", "_membership"):
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
