"""Owns a stand-in for a pipeline: a model of which each rank holds some layers, without messages.

Every rank trains the whole model, by one optimizer for its own layers and one for the others, so
that the parts together are what one process would have, and each rank can tell what that is.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from pydist._engine import group_engine
from pydist._partition import modules_of_sequential, partition_sequential, tied_parameters
from reference import draw

NUM_TOKENS, WIDTH = 11, 8
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Scale(nn.Module):
    """A parameter, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.full((WIDTH,), 0.5))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


def model(tied: bool = True) -> nn.Sequential:
    """Eight layers, of which the head shares the embedding's weight."""
    torch.manual_seed(5)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=nn.Embedding(NUM_TOKENS, WIDTH),
        first=nn.Linear(WIDTH, WIDTH),
        norm=nn.BatchNorm1d(WIDTH),
        act=nn.Tanh(),
        second=nn.Linear(WIDTH, WIDTH),
        scale=Scale(),
        third=nn.Linear(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, NUM_TOKENS, bias=False),
    )
    if tied:
        layers["head"].weight = layers["embedding"].weight  # type: ignore[assignment]
    return nn.Sequential(layers)


class Split:
    """A SplitModel: layers of `module` in equal stages, stage s on rank s modulo the ranks."""

    def __init__(self, module: nn.Sequential, num_stages: int) -> None:
        self.module = module
        self.engine = group_engine()
        each, more = divmod(len(module), num_stages)
        partition = partition_sequential(module, [each + (s < more) for s in range(num_stages)])
        self.layer_names: Sequence[str] = partition.layer_names
        modules = modules_of_sequential(module)
        self.local_layers = [
            (self.layer_names[i], modules[i])
            for stage in range(num_stages)
            if stage % self.engine.size == self.engine.rank
            for i in partition.layers_of(stage)
        ]
        groups = tied_parameters(partition, modules)
        self.tied_names = [[name for _, name in group] for group in groups]
        for group in groups:
            self._untie(group)

    def _untie(self, group: Sequence[tuple[int, str]]) -> None:
        """Gives each stage a leaf of its own, as a pipeline does: on the memory of the first one
        where that is on the same rank."""
        (first, _), *others = group
        for stage, name in others:
            layer, _, rest = name.rpartition(".")
            owner = self.module.get_submodule(layer)
            weight = getattr(owner, rest).detach()
            together = (stage - first) % self.engine.size == 0
            setattr(owner, rest, nn.Parameter(weight if together else weight.clone()))

    @property
    def local_parameters(self) -> list[nn.Parameter]:
        """What pp.parameters() gives: of a parameter that several local stages have, the first."""
        found = [parameter for _, layer in self.local_layers for parameter in layer.parameters()]
        return list({parameter.data_ptr(): parameter for parameter in reversed(found)}.values())[
            ::-1
        ]

    @property
    def other_parameters(self) -> list[nn.Parameter]:
        """Those of other ranks."""
        local = {parameter.data_ptr() for parameter in self.local_parameters}
        return [p for p in self.module.parameters() if p.data_ptr() not in local]

    def backward(self, step: int) -> Tensor:
        """The loss of one step. Gradients are set anew; those of tied parameters are summed."""
        self.module.zero_grad()
        loss = loss_of(self.module, step)
        loss.backward()
        for names in self.tied_names:
            parameters = [self.module.get_parameter(name) for name in names]
            total = sum(parameter.grad for parameter in parameters)
            for parameter in parameters:
                parameter.grad = total.clone()
        return loss.detach()


def loss_of(module: nn.Module, step: int) -> Tensor:
    tokens = (draw(0, step, 6).abs() * 4).long() % NUM_TOKENS
    return F.cross_entropy(module(tokens), (tokens + 1) % NUM_TOKENS)
