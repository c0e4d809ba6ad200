"""Owns which ranks form a pipeline, and which are its replicas: from groups or from a mesh."""

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pydist._engine import check_group
from pydist.errors import UsageError

# Of a mesh's dimensions.
PIPELINE = "pp"
DATA_PARALLEL = "dp"
TENSOR_PARALLEL = "tp"  # within stages: the model's own affair


@dataclass(frozen=True)
class PipelineGroups:
    """The groups that a rank belongs to.

    Attributes:
        pipeline: the ranks that hold the stages of one model, or None: all.
        replicas: the ranks that hold the same stages, one of each pipeline; None: one pipeline.
    """

    pipeline: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


def resolve_pipeline_groups(
    process_group: dist.ProcessGroup | None,
    data_parallel_group: dist.ProcessGroup | None,
    device_mesh: Any,
) -> PipelineGroups:
    """What PipelineParallel's arguments mean; UsageError where they contradict each other."""
    if device_mesh is not None:
        if process_group is not None or data_parallel_group is not None:
            raise UsageError(
                "give either device_mesh or process_group and data_parallel_group, not both"
            )
        return _of_mesh(device_mesh)
    check_group(process_group)
    check_group(data_parallel_group)
    if data_parallel_group is not None:
        _check_crossing(process_group, data_parallel_group)
    return PipelineGroups(process_group, data_parallel_group)


def _of_mesh(mesh: Any) -> PipelineGroups:
    names = mesh.mesh_dim_names
    known = {PIPELINE, DATA_PARALLEL, TENSOR_PARALLEL}
    if names is None or PIPELINE not in names or not set(names) <= known:
        raise UsageError(
            f'device_mesh must have a dimension "{PIPELINE}" and may have "{DATA_PARALLEL}" and '
            f'"{TENSOR_PARALLEL}", in any order, got {names}: {_fitting(tuple(mesh.shape))}'
        )
    replicas = mesh.get_group(DATA_PARALLEL) if DATA_PARALLEL in names else None
    return PipelineGroups(mesh.get_group(PIPELINE), replicas)


def _fitting(shape: tuple[int, ...]) -> str:
    """How to make a mesh of as many ranks."""
    if len(shape) == 3:
        return f'init_device_mesh("cpu", {shape}, mesh_dim_names=("dp", "pp", "tp"))'
    if len(shape) == 2:
        return f'init_device_mesh("cpu", {shape}, mesh_dim_names=("dp", "pp"))'
    return f'init_device_mesh("cpu", ({math.prod(shape)},), mesh_dim_names=("pp",))'


def _check_crossing(pipeline: dist.ProcessGroup | None, replicas: dist.ProcessGroup) -> None:
    """Two ranks that hold different stages cannot be replicas of each other."""
    replica_ranks = dist.get_process_group_ranks(replicas)
    pipeline_ranks = dist.get_process_group_ranks(pipeline)
    shared = sorted(set(replica_ranks) & set(pipeline_ranks))
    if len(shared) > 1:
        hint = (
            "; give process_group too, the ranks of one pipeline: by default it is all ranks"
            if pipeline is None
            else ""
        )
        raise UsageError(
            f"ranks {shared} are in the pipeline's group {pipeline_ranks} and in "
            f"data_parallel_group {replica_ranks}, but a pipeline and its replicas cross in one "
            f"rank{hint}"
        )
