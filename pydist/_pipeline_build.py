"""Owns how a model and the wishes of its user become this rank's part of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pydist import _C, schedule
from pydist._balance import Balance, choose_balance
from pydist._engine import Engine
from pydist._keywords import KeywordRoutes, exchange_names
from pydist._microbatches import Slicer
from pydist._partition import (
    ModuleSource,
    Partition,
    modules_of_list,
    modules_of_sequential,
    partition_list,
    partition_sequential,
)
from pydist._stage import ModuleStage, Names, SequentialStage, keyword_names
from pydist._verification import verify_settings
from pydist.errors import UsageError
from pydist.schedule import Schedule

_Model = nn.Sequential | Sequence[ModuleSource]


@dataclass(frozen=True)
class PipelineSettings:
    """What the user asked for, the same on all ranks."""

    num_microbatches: int
    schedule: str | Schedule
    stages_per_rank: int | None
    balance: Balance | None
    chunk_dim: int | Mapping[str, int]
    replicate: Sequence[str]
    loss_reduction: str

    def check(self) -> None:
        """Raises UsageError for what no pipeline could do."""
        if not isinstance(self.num_microbatches, int) or self.num_microbatches < 1:
            raise UsageError(
                f"num_microbatches is {self.num_microbatches!r}; expected a whole number, 1 up"
            )
        if self.loss_reduction not in ("mean", "sum"):
            raise UsageError(
                f'loss_reduction is {self.loss_reduction!r}; expected "mean" or "sum", whichever '
                "loss_fn does over the rows of a batch"
            )


@dataclass(frozen=True)
class PipelineParts:
    """This rank's part, ready to run."""

    schedule: Schedule
    partition: Partition
    local_stages: dict[int, nn.Module]
    local_layers: list[tuple[str, nn.Module]]  # by their names in the unsplit model
    executor: _C.PipelineExecutor
    slicer: Slicer
    routes: KeywordRoutes


def build_pipeline(
    engine: Engine,
    model_name: str,
    model: _Model,
    settings: PipelineSettings,
    data_parallel_rank: int = 0,
) -> PipelineParts:
    """Collective. Raises on every rank where one cannot."""
    with engine.all_or_none(f"making {model_name}"):
        settings.check()
        plan = _resolve_schedule(settings, engine.size)
        partition = _split(model, settings, plan)
        local = [s for s, rank in enumerate(plan.placement) if rank == engine.rank]
        modules = (
            modules_of_sequential(model)
            if isinstance(model, nn.Sequential)
            else modules_of_list(model, local)
        )
        stages = {stage: _Stage(model, partition, stage, modules) for stage in local}
        layers = [layer for stage in stages.values() for layer in stage.layers.items()]
        _check_devices(layers)
    verify_settings(engine, model_name, _agreed(settings, plan, partition))
    base_seed = int(engine.exchange_bytes(str(torch.initial_seed()).encode())[0])
    names = exchange_names(engine, {stage: found.names for stage, found in stages.items()})
    executor = _C.PipelineExecutor(
        schedule=plan._plan,
        rank=engine.rank,
        channel=_make_channel(engine, model_name),
        stages={stage: found.code for stage, found in stages.items()},
        unpacks=not isinstance(model, nn.Sequential),
        base_seed=base_seed % 2**64,
        data_parallel_rank=data_parallel_rank,
    )
    return PipelineParts(
        schedule=plan,
        partition=partition,
        local_stages={stage: found.module for stage, found in stages.items()},
        local_layers=layers,
        executor=executor,
        slicer=Slicer(
            settings.num_microbatches,
            settings.chunk_dim,
            settings.replicate,
            has_first_stage=0 in stages,
            has_last_stage=plan.num_stages - 1 in stages,
        ),
        routes=KeywordRoutes(names),
    )


class _Stage:
    """One stage of this rank: its layers, and what the executor calls."""

    def __init__(
        self, model: _Model, partition: Partition, stage: int, modules: Mapping[int, nn.Module]
    ) -> None:
        indices = list(partition.layers_of(stage))
        self.layers = {partition.layer_names[index]: modules[index] for index in indices}
        self.module: nn.Module
        self.code: Any
        self.names: Names
        if isinstance(model, nn.Sequential):
            self.module = self.code = SequentialStage(self.layers, indices)
            self.names = _union([keyword_names(layer, 1) for layer in self.layers.values()])
        else:
            [self.module] = self.layers.values()
            self.code = ModuleStage(self.module, stage)
            self.names = keyword_names(self.module)


def _union(names: Sequence[Names]) -> Names:
    found: set[str] = set()
    for some in names:
        if some is None:
            return None
        found |= some
    return frozenset(found)


def _resolve_schedule(settings: PipelineSettings, num_ranks: int) -> Schedule:
    wanted = settings.schedule
    if isinstance(wanted, str):
        return schedule.build(
            wanted, num_ranks, settings.num_microbatches, settings.stages_per_rank
        )
    if not isinstance(wanted, Schedule):
        raise UsageError(
            f"schedule is {type(wanted).__name__}; expected the name of a kind "
            f"({', '.join(schedule.kinds())}) or a pydist.schedule.Schedule"
        )
    wanted.validate()
    if wanted.num_ranks != num_ranks:
        raise UsageError(
            f"the schedule {wanted.name} is for {wanted.num_ranks} ranks, but the pipeline's group "
            f"has {num_ranks}"
        )
    if wanted.num_microbatches != settings.num_microbatches:
        raise UsageError(
            f"the schedule {wanted.name} is for {wanted.num_microbatches} microbatches, but "
            f"num_microbatches is {settings.num_microbatches}"
        )
    if settings.stages_per_rank not in (None, wanted.num_stages // num_ranks):
        raise UsageError(
            f"the schedule {wanted.name} has {wanted.num_stages} stages on {num_ranks} ranks, but "
            f"stages_per_rank is {settings.stages_per_rank}; leave that away"
        )
    return wanted


def _split(model: _Model, settings: PipelineSettings, plan: Schedule) -> Partition:
    if isinstance(model, nn.Sequential):
        balance = choose_balance(list(model), settings.balance, plan.placement)
        return partition_sequential(model, balance)
    if isinstance(model, nn.Module) or not isinstance(model, Sequence):
        raise UsageError(
            f"module is {type(model).__name__}; expected an nn.Sequential, or a list with one "
            "module (or zero-argument callable that makes it) per stage"
        )
    if settings.balance is not None:
        raise UsageError(
            "balance says how many layers of an nn.Sequential each stage gets; a list has one "
            "module per stage already"
        )
    return partition_list(model, plan.num_stages)


def _check_devices(layers: Sequence[tuple[str, nn.Module]]) -> None:
    for layer_name, layer in layers:
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if tensor.device.type != "cpu":
                raise NotImplementedError(
                    f"{layer_name}.{name} is on {tensor.device}; pipelines run on the CPU for now"
                )


def _agreed(settings: PipelineSettings, plan: Schedule, partition: Partition) -> dict[str, Any]:
    return {
        "num_microbatches": settings.num_microbatches,
        "schedule": plan.name,
        "actions of the schedule": plan.actions,
        "layers of each stage": list(partition.balance),
        "names of the layers": list(partition.layer_names),
        "chunk_dim": str(settings.chunk_dim),
        "replicate": list(settings.replicate),
        "loss_reduction": settings.loss_reduction,
    }


def _make_channel(engine: Engine, model_name: str) -> _C.Channel | None:
    """Collective."""
    if engine.size == 1:
        return None
    return _C.Channel(
        store=engine.store_prefix("pipeline"),
        group=engine.channel_group(),
        rank=engine.rank,
        size=engine.size,
        timeout_s=engine.timeout_s,
        global_ranks=engine.global_ranks,
        name=model_name,
    )
