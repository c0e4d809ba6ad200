"""Owns how a model and the wishes of its user become this rank's part of a pipeline."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from pydist import _C, schedule
from pydist._auto_schedule import STEPS
from pydist._balance import Balance, LayerCosts, choose_balance
from pydist._engine import Engine
from pydist._keywords import (
    KeywordRoutes,
    exchange_names,
    exchange_positional_names,
    positional_names,
)
from pydist._layer_times import measured_costs
from pydist._mesh import check_crossing, localize_parameters
from pydist._microbatches import Slicer
from pydist._partition import (
    ModuleSource,
    Partition,
    TiedGroup,
    check_shared_statistics,
    declared_ties,
    modules_given,
    modules_of_list,
    modules_of_sequential,
    partition_list,
    partition_sequential,
    tied_parameters,
)
from pydist._pipeline_step import StepFrame
from pydist._running_statistics import StageStatistics
from pydist._stage import ModuleStage, Names, SequentialStage, keyword_names
from pydist._stage_device import agree_on_device, device_of, goes_over_device
from pydist._tied_weights import TiedWeights, separate_stages
from pydist._unsplit import LocalPart
from pydist._verification import verify_layers, verify_settings
from pydist.errors import UsageError
from pydist.schedule import Schedule
from pydist.skip import (
    Declaration,
    Portal,
    declarations_of,
    exchange_declarations,
    portals_of,
)

Model = nn.Sequential | Sequence[ModuleSource]

AUTO = "auto"


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
    tied: Sequence[Sequence[str]]
    deferred_batch_norm: bool
    example_input: Any  # of one microbatch, to measure layers with

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
        if self.schedule == AUTO and self.stages_per_rank not in (None, 1):
            raise UsageError(
                f'schedule="auto" needs one stage per rank, not {self.stages_per_rank}: others '
                "may be placed in several ways, and stages do not move once they have been measured"
            )


@dataclass
class PipelineParts:
    """This rank's part, ready to run. A SplitModel (see _unsplit.py)."""

    engine: Engine
    schedule: Schedule
    partition: Partition
    local_stages: dict[int, nn.Module]
    local_layers: list[tuple[str, nn.Module]]
    device: torch.device  # of the local stages
    is_asynchronous: bool  # the device works on while the host goes on
    tied_names: list[list[str]]
    aliases: list[nn.Parameter]  # leaves that are no parameters of their own
    trains: bool  # the schedule has backwards
    executor: _C.PipelineExecutor
    slicer: Slicer
    routes: KeywordRoutes
    frame: StepFrame
    _make_executor: Any

    @property
    def layer_names(self) -> Sequence[str]:
        """Of the unsplit model."""
        return self.partition.layer_names

    def change_schedule(self, plan: Schedule) -> None:
        """From the next step on; stages stay where they are."""
        self.schedule = plan
        self.executor = self._make_executor(plan)


def build_pipeline(
    engine: Engine,
    model_name: str,
    model: Model,
    settings: PipelineSettings,
    data_parallel_rank: int = 0,
    gradients_are_views: bool = False,
) -> PipelineParts:
    """Collective. Raises on every rank where one cannot."""
    costs = _measure_layers(engine, model_name, model, settings)
    with engine.all_or_none(f"making {model_name}"):
        settings.check()
        plan = _resolve_schedule(settings, engine.size)
        partition = _split(model, settings, plan, costs)
        local = [s for s, rank in enumerate(plan.placement) if rank == engine.rank]
        layers, groups = _take_layers(model, partition, local, settings)
        stages = {stage: _Stage(model, partition, stage, layers[stage]) for stage in local}
        statistics = [
            StageStatistics(stage.module, settings.deferred_batch_norm) for stage in stages.values()
        ]
        local_layers = [layer for stage in local for layer in layers[stage].items()]
        own_device = device_of(local_layers)
    device = agree_on_device(engine, own_device)
    verify_settings(engine, model_name, _agreed(settings, plan, partition, groups))
    verify_layers(engine, model_name, _layers_given(model, partition))
    with engine.all_or_none(f"making {model_name}"):
        check_crossing(LocalPart(local_layers), engine.global_ranks)
        is_cut = localize_parameters(*[layer for _, layer in local_layers])
    base_seed = int(engine.exchange_bytes(str(torch.initial_seed()).encode())[0])
    routes = KeywordRoutes(
        exchange_names(engine, {stage: found.names for stage, found in stages.items()})
    )
    first_names = exchange_positional_names(
        engine, stages[0].positional_names if 0 in stages else None
    )
    slicer = Slicer(
        settings.num_microbatches,
        settings.chunk_dim,
        settings.replicate,
        positional_names=first_names,
        has_first_stage=0 in stages,
        has_last_stage=plan.num_stages - 1 in stages,
    )
    routes.check_options(
        first_names,
        replicate=settings.replicate,
        chunk_dim=settings.chunk_dim if isinstance(settings.chunk_dim, Mapping) else (),
    )
    portals = portals_of(exchange_declarations(engine, _declared_skips(partition, layers)))
    links = _links(plan, portals, groups) if goes_over_device(device) else None
    channel = _make_channel(engine, model_name, device, links)
    tied = TiedWeights(engine, channel, groups, layers, plan.placement, gradients_are_views)

    def make_executor(plan: Schedule) -> _C.PipelineExecutor:
        return _C.PipelineExecutor(
            schedule=plan._plan,
            rank=engine.rank,
            channel=channel,
            stages={stage: found.code for stage, found in stages.items()},
            unpacks=not isinstance(model, nn.Sequential),
            portals=[(each.number, each.name, each.from_stage, each.to_stage) for each in portals],
            base_seed=base_seed % 2**64,
            data_parallel_rank=data_parallel_rank,
            device=None if device.type == "cpu" else device,
        )

    return PipelineParts(
        engine=engine,
        schedule=plan,
        partition=partition,
        local_stages={stage: found.module for stage, found in stages.items()},
        local_layers=local_layers,
        device=device,
        is_asynchronous=links is not None,
        tied_names=[[name for _, name in group] for group in groups],
        aliases=tied.aliases,
        trains=plan.has_backward,
        executor=make_executor(plan),
        slicer=slicer,
        routes=routes,
        frame=StepFrame(statistics, tied, is_cut),
        _make_executor=make_executor,
    )


class _Stage:
    """One stage of this rank: what the executor calls, and what that takes."""

    def __init__(
        self, model: Model, partition: Partition, stage: int, layers: dict[str, nn.Module]
    ) -> None:
        self.module: nn.Module
        self.code: Any
        self.names: Names
        first = next(iter(layers.values()))
        self.positional_names = positional_names(first)
        if isinstance(model, nn.Sequential):
            self.module = self.code = SequentialStage(layers, list(partition.layers_of(stage)))
            self.names = _union([keyword_names(layer, 1) for layer in layers.values()])
        else:
            self.module = first
            self.code = ModuleStage(first, stage)
            self.names = keyword_names(first)


def _union(names: Sequence[Names]) -> Names:
    found: set[str] = set()
    for some in names:
        if some is None:
            return None
        found |= some
    return frozenset(found)


def _measure_layers(
    engine: Engine, model_name: str, model: Model, settings: PipelineSettings
) -> LayerCosts | None:
    """What the first rank has measured, so that all ranks cut alike. Collective."""
    if settings.balance != "time":
        return None
    mine = b""
    with engine.all_or_none(f"measuring the layers of {model_name}"):
        if not isinstance(model, nn.Sequential):
            raise UsageError('balance="time" is for an nn.Sequential; a list is cut already')
        if settings.example_input is None:
            raise UsageError(
                'balance="time" measures the layers, and needs example_input for that: the input '
                "of one microbatch, on every rank"
            )
        if engine.rank == 0:
            costs = measured_costs(list(model), (settings.example_input,))
            mine = json.dumps(asdict(costs)).encode()
    return LayerCosts(**json.loads(engine.exchange_bytes(mine)[0]))


def _resolve_schedule(settings: PipelineSettings, num_ranks: int) -> Schedule:
    wanted = settings.schedule
    if isinstance(wanted, str):
        kind = STEPS[0] if wanted == AUTO else wanted
        return schedule.build(kind, num_ranks, settings.num_microbatches, settings.stages_per_rank)
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


def _split(
    model: Model, settings: PipelineSettings, plan: Schedule, costs: LayerCosts | None
) -> Partition:
    if isinstance(model, nn.Sequential):
        balance = choose_balance(list(model), settings.balance, plan.placement, costs)
        return partition_sequential(model, balance)
    if isinstance(model, nn.Module) or not isinstance(model, Sequence):
        raise UsageError(
            f"module is {type(model).__name__}; expected an nn.Sequential, or a list with one "
            "module (or zero-argument callable that makes it) per stage: wrap the model's parts in "
            "nn.Sequential(part, part, ...), in the order in which they run, or give them as a list"
        )
    if settings.balance is not None:
        raise UsageError(
            "balance says how many layers of an nn.Sequential each stage gets; a list has one "
            "module per stage already"
        )
    return partition_list(model, plan.num_stages)


def _layers_given(model: Model, partition: Partition) -> list[tuple[str, nn.Module]]:
    """Those that this rank was given as modules, whether it keeps them or not."""
    given = (
        modules_of_sequential(model) if isinstance(model, nn.Sequential) else modules_given(model)
    )
    return [(partition.layer_names[index], module) for index, module in given.items()]


def _take_layers(
    model: Model, partition: Partition, local: Sequence[int], settings: PipelineSettings
) -> tuple[dict[int, dict[str, nn.Module]], list[TiedGroup]]:
    """The local stages' layers by their names, and what all stages share."""
    if isinstance(model, nn.Sequential):
        seen = modules = modules_of_sequential(model)
    else:
        seen, modules = modules_given(model), modules_of_list(model, local)
    check_shared_statistics(partition, seen)
    groups = [*tied_parameters(partition, seen), *declared_ties(partition, settings.tied)]
    layers = {
        stage: {partition.layer_names[i]: modules[i] for i in partition.layers_of(stage)}
        for stage in local
    }
    separate_stages(groups, layers)
    return layers, groups


def _declared_skips(
    partition: Partition, layers: Mapping[int, dict[str, nn.Module]]
) -> list[Declaration]:
    found: list[Declaration] = []
    for stage, named in layers.items():
        indices = partition.layers_of(stage)
        triples = [(i, *item) for i, item in zip(indices, named.items(), strict=True)]
        found += declarations_of(stage, triples)
    return found


def _agreed(
    settings: PipelineSettings, plan: Schedule, partition: Partition, groups: list[TiedGroup]
) -> dict[str, Any]:
    return {
        "num_microbatches": settings.num_microbatches,
        "schedule": plan.name,
        "actions of the schedule": plan.actions,
        "layers of each stage": list(partition.balance),
        "names of the layers": list(partition.layer_names),
        "tied parameters": [list(map(list, group)) for group in groups],
        "chunk_dim": str(settings.chunk_dim),
        "replicate": list(settings.replicate),
        "loss_reduction": settings.loss_reduction,
        "deferred_batch_norm": settings.deferred_batch_norm,
    }


# (from rank, to rank)
Links = list[tuple[int, int]]


def _links(plan: Schedule, portals: Sequence[Portal], groups: Sequence[TiedGroup]) -> Links:
    """Which ranks send each other tensors: the same list on every rank."""
    rank_of = plan.placement
    ways = [(stage, stage + 1) for stage in range(plan.num_stages - 1)]
    ways += [(portal.from_stage, portal.to_stage) for portal in portals]
    found = {(rank_of[sender], rank_of[receiver]) for sender, receiver in ways}
    if plan.has_backward:  # gradients
        found |= {(receiver, sender) for sender, receiver in found}
    found |= {(rank_of[-1], rank) for rank in range(plan.num_ranks)}  # the loss
    for group in groups:
        ranks = [rank_of[stage] for stage, _ in group]
        found |= {(sender, receiver) for sender in ranks for receiver in ranks}
    return sorted((sender, receiver) for sender, receiver in found if sender != receiver)


def _make_channel(
    engine: Engine, model_name: str, device: torch.device, links: Links | None
) -> _C.Channel | None:
    """`links`: where tensors go from device to device; None: on the CPU. Collective."""
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
        device=None if links is None else device,
        links=links or [],
    )
