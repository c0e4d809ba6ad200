"""Owns how a module becomes a wrapped one: what ranks agree on first, and the engine's making."""

import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pydist import _C
from pydist._arguments import (
    BucketCaps,
    Delayed,
    check_device_options,
    check_environment,
    check_parameter,
    resolve_devices,
)
from pydist._comm_hooks import Hook, engine_wire_dtype, reducer_hook
from pydist._engine import Engine, device_index, group_engine
from pydist._logging_data import DataParallelLogger
from pydist._module_watch import ModuleWatch
from pydist._nesting import Nesting
from pydist._sparse import SparseMean, sparse_parameters
from pydist._torch_surface import TorchSurface
from pydist._verification import describe_tensors, verify_models, verify_settings
from pydist.errors import UsageError
from pydist.sync_batchnorm import adopt_sync_batchnorm

_T = TypeVar("_T", bound=torch.Tensor)


class Wrapping(TorchSurface):
    """DataParallel's part that is done once for a module, again for a copy or another group."""

    _algorithm: str
    _bucket_caps: BucketCaps
    _communicator: Any
    _comm_hooks: list[tuple[Hook, Any]]
    _delayed: Delayed
    _device_arguments: tuple[Any, Any]
    _engine: Engine
    _names: list[str]
    _nesting: Nesting
    _on_device: bool
    _wire_dtype: str | None
    audit_every: int | None
    parameters_to_ignore: set[str]
    skip_all_reduce_unused_params: bool
    unused_parameters: str

    # What a failed round's message says: what to do, and where to look after a peer's death.
    _remedy = "wrap the module again on every rank, or restart the job"
    _clue = "what did it print last? If it had less data, train inside `with model.join():`"

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
            self._check_sparse()
            adopt_sync_batchnorm(self.module)
        if init_sync:
            verify_models(self._engine, self._model_name, describe_tensors(self._state()))
        verify_settings(self._engine, self._model_name, self._agreed_settings(parameters))
        if init_sync:
            self._engine.broadcast_tensors([tensor.detach() for _, _, tensor in self._state()])
        self._make_reducer(parameters)
        self.logger = DataParallelLogger(self)

    def _make_reducer(self, parameters: list[torch.Tensor]) -> None:
        carrier = None
        if not self._on_device:
            carrier = self._engine.round_carrier(
                f"the reducer of {self._model_name}", self._remedy, self._clue
            )
        self._reducer = _C.Reducer(
            parameters=parameters,
            names=self._names,
            store=self._engine.store_prefix("reducer"),
            carrier=carrier,
            rank=self._engine.rank,
            size=self._engine.size,
            timeout_s=self._engine.timeout_s,
            global_ranks=self._engine.global_ranks,
            settings=self._reducer_settings(parameters),
        )
        if carrier is not None and carrier is not self.process_group:
            weakref.finalize(self._reducer, self._engine.retire, carrier).atexit = False
        self._watch = ModuleWatch(self.module)

    def _place(self, parameters: list[torch.Tensor]) -> None:
        """Where the module is, in torch's attributes."""
        where = resolve_devices(*self._device_arguments, self._names, parameters)
        self.device_ids, self.output_device = where.device_ids, where.output_device
        self.device, self.device_type = where.device, where.device.type
        self.is_multi_device_module = where.multi
        self._on_device = check_device_options(parameters, self._wire_dtype, self._algorithm)

    def _check_sparse(self) -> None:
        if self._on_device and self._sparse:
            raise NotImplementedError(
                f"parameter {self._names[self._sparse[0]]} has sparse gradients, which are "
                "averaged on the CPU only; make its Embedding or EmbeddingBag with sparse=False"
            )

    def _agreed_settings(self, parameters: list[torch.Tensor]) -> dict[str, Any]:
        """What units depend on, so that no rank reduces others than its peers."""
        return {
            "bucket_cap_mb": [nbytes / 2**20 for nbytes in self._bucket_caps.caps_nbytes],
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "wire_dtype": self._wire_dtype,
            "mixed_precision": str(self.mixed_precision),
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "delayed parameters": self._delayed.settings(self._names),
            "unused_parameters": self.unused_parameters,
            "audit_every": self.audit_every,
            "algorithm": self._algorithm,
            "on a GPU": self._on_device,
            "number of parameters": len(parameters),
            "elements of each parameter": [p.numel() for p in parameters],
            "dtype of each parameter": [str(p.dtype) for p in parameters],
            "parameters with sparse gradients": [self._names[i] for i in self._sparse],
        }

    def _reducer_settings(self, parameters: list[torch.Tensor]) -> dict[str, Any]:
        """What the C++ reducer reads (see bindings_reducer.cpp)."""
        return {
            "communicator": self._reducer_communicator(parameters),
            "algorithm": self._algorithm,
            "name": self._model_name,
            "remedy": self._remedy,
            "clue": self._clue,
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

    def _reducer_communicator(self, parameters: list[torch.Tensor]) -> Any:
        """One of its own: models' backwards may come in another order than other calls do."""
        self._communicator = None
        if self._on_device:
            self._communicator = self._engine.make_device_communicator(
                device_index(parameters[0]), f"the reducer of {self._model_name}", self._remedy
            )
        return self._communicator

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
        self._check_trainable(parameters)
        return names, parameters

    def _check_trainable(self, parameters: list[torch.Tensor]) -> None:
        if not any(parameter.requires_grad for parameter in parameters):
            raise UsageError(
                "DataParallel is not needed when a module doesn't have any parameters "
                "that require a gradient."
            )

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
