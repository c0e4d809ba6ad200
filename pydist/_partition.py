"""Owns what each stage of a pipeline consists of: its layers, their names in the unsplit model,
and what stages share with each other.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from pydist.errors import UsageError

ModuleSource = nn.Module | Callable[[], nn.Module]


@dataclasses.dataclass(frozen=True)
class Partition:
    """Which layers each stage has.

    Of an nn.Sequential, layers are its children; of a list of modules, each is one stage and one
    layer. `layer_names` are what names in the unsplit model's state_dict begin with: the keys of
    the nn.Sequential, or "0", "1", ... as nn.Sequential(*modules) has them.
    """

    layer_names: tuple[str, ...]
    balance: tuple[int, ...]  # layers of each stage

    @property
    def num_stages(self) -> int:
        return len(self.balance)

    def layers_of(self, stage: int) -> range:
        """Global indices of the stage's layers."""
        first = sum(self.balance[:stage])
        return range(first, first + self.balance[stage])

    def stage_of_layer(self, layer: int) -> int:
        """Of a global layer index."""
        for stage in range(self.num_stages):
            if layer in self.layers_of(stage):
                return stage
        raise UsageError(f"layer {layer} of {len(self.layer_names)} does not exist")

    def stage_of(self, name: str) -> int:
        """The stage that has the parameter or buffer of this name in the unsplit model."""
        layer, _, rest = name.partition(".")
        if layer not in self.layer_names or not rest:
            raise UsageError(
                f"no layer of the unsplit model has the name {name!r}; names begin with one of "
                f"{', '.join(self.layer_names)}"
            )
        return self.stage_of_layer(self.layer_names.index(layer))


def partition_sequential(module: nn.Sequential, balance: Sequence[int]) -> Partition:
    """Of an nn.Sequential that is no more than its layers; `balance` as from choose_balance."""
    kind = type(module)
    where = f"the {kind.__name__} to be split"
    if kind.forward is not nn.Sequential.forward or "forward" in vars(module):
        raise UsageError(
            f"{where} has a forward of its own, which splitting would lose; pass a plain "
            "nn.Sequential, or a list with one module per stage"
        )
    own = [*module._parameters, *module._buffers]
    if own:
        raise UsageError(
            f"{where} has parameters or buffers beside its layers ({', '.join(own)}), which no "
            "stage would have; move them into a layer"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks):
        raise UsageError(
            f"{where} has hooks on the whole model, which would not be called; register them on "
            "layers"
        )
    return Partition(tuple(module._modules), tuple(balance))


def partition_list(sources: Sequence[ModuleSource], num_stages: int) -> Partition:
    """Of a list with one module, or zero-argument callable that makes it, per stage."""
    for index, source in enumerate(sources):
        if not callable(source):  # modules are, too
            raise UsageError(
                f"entry {index} of the list of stages is {type(source).__name__}; expected an "
                "nn.Module or a zero-argument callable that returns one"
            )
    if len(sources) != num_stages:
        raise UsageError(
            f"the list has {len(sources)} modules for {num_stages} stages (ranks times "
            "stages_per_rank); give one module, or callable, for each stage"
        )
    names = tuple(str(index) for index in range(num_stages))
    return Partition(names, (1,) * num_stages)


def modules_of_sequential(module: nn.Sequential) -> dict[int, nn.Module]:
    """All layers by their global index."""
    return dict(enumerate(module._modules.values()))


def modules_given(sources: Sequence[ModuleSource]) -> dict[int, nn.Module]:
    """Those of the list that are modules already, which every rank has."""
    return {i: source for i, source in enumerate(sources) if isinstance(source, nn.Module)}


def modules_of_list(
    sources: Sequence[ModuleSource], local_stages: Iterable[int]
) -> dict[int, nn.Module]:
    """The modules of these stages; callables are called for these alone, in stage order.

    A callable runs with torch's default generator seeded from (torch.initial_seed(), stage), and
    the generator is put back afterwards. So what a stage starts with depends on the seed alone and
    not on the number of ranks, and stages of one shape do not start alike on ranks that were seeded
    alike. It is not what calling all of them in a row would give.
    """
    built: dict[int, nn.Module] = {}
    for stage in sorted(local_stages):
        source = sources[stage]
        built[stage] = source if isinstance(source, nn.Module) else _made(source, stage)
    return built


def _made(source: Callable[[], nn.Module], stage: int) -> nn.Module:
    # Asking a device for its state would start CUDA.
    num_devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with torch.random.fork_rng(devices=range(num_devices)):
        torch.manual_seed(_mixed(torch.initial_seed(), stage))
        module = source()
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"the callable for stage {stage} returned {type(module).__name__}; expected an "
            "nn.Module"
        )
    return module


def _mixed(seed: int, stage: int) -> int:
    """Far apart for stages and seeds that are close (the finalizer of splitmix64)."""
    mask = (1 << 64) - 1
    x = (seed + (stage + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


# One parameter that stages share: (stage, name in the unsplit model) once for each stage, in order
# of stages.
TiedGroup = tuple[tuple[int, str], ...]


def tied_parameters(partition: Partition, modules: Mapping[int, nn.Module]) -> list[TiedGroup]:
    """The parameters that layers of different stages hold as one object, in the order of their
    first names; `modules` are the layers by global index, before any is dropped or copied.

    All ranks must find the same, so of a list pass what modules_given returns. A stage that has a
    parameter under several names is listed with the first.
    """
    found: dict[int, dict[int, str]] = {}
    for stage in range(partition.num_stages):
        for layer in partition.layers_of(stage):
            if layer in modules:
                prefix = partition.layer_names[layer]
                for name, parameter in modules[layer].named_parameters(prefix):
                    found.setdefault(id(parameter), {}).setdefault(stage, name)
    return [tuple(names.items()) for names in found.values() if len(names) > 1]


def declared_ties(partition: Partition, ties: Collection[Sequence[str]]) -> list[TiedGroup]:
    """Groups that the user gives by names of the unsplit model, for modules made by callables:
    those share nothing that all ranks could see.
    """
    groups: list[TiedGroup] = []
    for names in ties:
        members = sorted((partition.stage_of(name), name) for name in names)
        if len(members) < 2 or len({stage for stage, _ in members}) < len(members):
            raise UsageError(
                f"tied parameters ({', '.join(names)}): give one name in each of two or more stages"
            )
        groups.append(tuple(members))
    return groups


def check_shared_statistics(partition: Partition, modules: Mapping[int, nn.Module]) -> None:
    """Raises UsageError where stages share a module that keeps running statistics: each stage
    would go on with its own, other than the unsplit model.
    """
    first: dict[int, tuple[int, str]] = {}
    for layer in sorted(modules):
        stage = partition.stage_of_layer(layer)
        for name, module in modules[layer].named_modules(prefix=partition.layer_names[layer]):
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                continue
            other, other_name = first.setdefault(id(module), (stage, name))
            if other != stage and module.track_running_stats:
                raise UsageError(
                    f"stages {other} and {stage} share one {type(module).__name__} ({other_name} "
                    f"and {name}), whose running statistics would part; give each its own, or put "
                    "both uses into one stage"
                )
