"""Owns the public names of pydist; refuses with one sentence where it cannot work."""

from pydist import _import_checks
from pydist._version import __version__
from pydist.errors import (
    HostError,
    MismatchError,
    PeerError,
    ResourceError,
    TimeoutError,
    UsageError,
)

_import_checks.check_all()

# What needs torch and the extension comes after the checks.
from pydist import schedule, skip
from pydist._replica_audit import check_replicas
from pydist.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    irecv,
    isend,
    monitored_barrier,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
    symmetric_empty,
)
from pydist.data_parallel import DataParallel
from pydist.grad_scaler import GradScaler
from pydist.pipeline_parallel import PipelineParallel
from pydist.skip import skippable
from pydist.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "DataParallel",
    "GradScaler",
    "HostError",
    "MismatchError",
    "PeerError",
    "PipelineParallel",
    "ResourceError",
    "SyncBatchNorm",
    "TimeoutError",
    "UsageError",
    "__version__",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "check_replicas",
    "convert_sync_batchnorm",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "schedule",
    "send",
    "skip",
    "skippable",
    "symmetric_empty",
]
