"""Owns how many layers each stage gets: what layers cost, and where to cut so that no stage is
dearer than it must be.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from torch import nn

from pydist.errors import UsageError

Balance = Sequence[int] | Literal["uniform", "parameters", "time"]


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """What each layer costs, in any one unit.

    `work[i]` is that of layer i itself. If a stage ends with layer i, it also pays `output[i]`, to
    send what the layer gives, and the stage after it `gradient[i]`, to send the gradient back.
    """

    work: Sequence[float]
    output: Sequence[float] = ()  # empty: sending costs nothing
    gradient: Sequence[float] = ()

    def work_before(self) -> list[float]:
        """Of the layers before each one, and of all."""
        return list(accumulate(self.work, initial=0.0))

    def stage_cost(self) -> Callable[[int, int], float]:
        """The function (first layer, end) -> cost of a stage of these layers."""
        num_layers = len(self.work)
        before = self.work_before()
        output = [0.0, *(self.output or [0.0] * num_layers)]
        gradient = [0.0, *(self.gradient or [0.0] * num_layers)]
        output[-1] = 0.0  # the model's own output is not sent

        def cost_of(first: int, end: int) -> float:
            return before[end] - before[first] + output[end] + gradient[first]

        return cost_of


def choose_balance(
    layers: Sequence[nn.Module],
    balance: Balance | None,
    rank_of_stage: Sequence[int],
    costs: LayerCosts | None = None,
) -> list[int]:
    """The number of consecutive layers of each stage, without communication.

    `balance`: these numbers themselves; "uniform", numbers that differ by one at most, the larger
    first; "parameters" (also None), by elements of parameters; "time", by `costs` (measured_costs
    of _layer_times.py). Equal arguments give equal results on every rank.
    """
    num_stages = len(rank_of_stage)
    if len(layers) < num_stages:
        raise UsageError(
            f"the nn.Sequential has {len(layers)} layers for {num_stages} stages; every stage "
            "needs one at least: use fewer ranks or stages_per_rank, or finer layers"
        )
    if balance is None or balance == "parameters":
        return balanced(LayerCosts(parameter_counts(layers)), rank_of_stage)
    if balance == "uniform":
        return _uniform(len(layers), num_stages)
    if balance == "time":
        if costs is None:
            raise UsageError('balance="time" needs the measured costs of the layers')
        return balanced(costs, rank_of_stage)
    if isinstance(balance, str):
        raise UsageError(
            f'balance is {balance!r}; expected "uniform", "parameters", "time" or the number of '
            "layers of each stage"
        )
    return _checked(list(balance), len(layers), num_stages)


def _uniform(num_layers: int, num_stages: int) -> list[int]:
    each, more = divmod(num_layers, num_stages)
    return [each + (stage < more) for stage in range(num_stages)]


def _checked(balance: list[int], num_layers: int, num_stages: int) -> list[int]:
    whole = all(isinstance(count, int) and not isinstance(count, bool) for count in balance)
    if not whole or min(balance, default=0) < 1:
        raise UsageError(f"balance is {balance}; every stage needs a whole number of layers, 1 up")
    if len(balance) != num_stages:
        raise UsageError(
            f"balance has {len(balance)} entries, {balance}, for {num_stages} stages; give one "
            "for each stage"
        )
    if sum(balance) != num_layers:
        raise UsageError(
            f"balance {balance} adds up to {sum(balance)} layers, but the nn.Sequential has "
            f"{num_layers}"
        )
    return balance


def parameter_counts(layers: Sequence[nn.Module]) -> list[float]:
    """Elements of each layer's parameters; what layers share counts in each of them."""
    counts: list[float] = []
    for index, layer in enumerate(layers):
        parameters = list(layer.parameters())
        if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
            raise UsageError(
                f"layer {index} ({type(layer).__name__}) is lazy: its parameters have no size "
                'yet; run the model once before, or give balance="uniform" or a list'
            )
        counts.append(sum(parameter.numel() for parameter in parameters))
    return counts


def balanced(costs: LayerCosts, rank_of_stage: Sequence[int]) -> list[int]:
    """The layers of each stage so that the dearest rank costs as little as possible.

    With one stage per rank this is exact. With several, it starts from the cut whose dearest stage
    is cheapest and moves single cuts for as long as that makes the dearest rank cheaper.
    """
    cuts = _cheapest_cuts(costs, len(rank_of_stage))
    if len(set(rank_of_stage)) < len(rank_of_stage):
        cuts = _improved_for_ranks(costs, cuts, rank_of_stage)
    return [end - first for first, end in pairwise(cuts)]


def _cheapest_cuts(costs: LayerCosts, num_stages: int) -> list[int]:
    """Where stages begin, and the end.

    First the smallest possible cost of the dearest stage, by dynamic programming over (stages, end
    layer). Many cuts have it, as activations have no parameters, say; so a second pass takes, among
    those below that cost, the one with the smallest sum of squares of costs, and of numbers of
    layers where that is equal. Sums, unlike maxima, can be built up from their best parts.
    """
    cost_of = costs.stage_cost()
    uniform = list(accumulate(_uniform(len(costs.work), num_stages), initial=0))
    attainable = max(cost_of(first, end) for first, end in pairwise(uniform))

    def single(first: int, end: int) -> tuple[float, ...]:
        return (cost_of(first, end),)

    def larger(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
        return max(left, right)

    (dearest,), _ = _best(costs, num_stages, attainable, single, larger)

    def squares(first: int, end: int) -> tuple[float, ...]:
        return (cost_of(first, end) ** 2, (end - first) ** 2)

    def added(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
        return (left[0] + right[0], left[1] + right[1])

    return _best(costs, num_stages, dearest, squares, added)[1]


_Value = tuple[float, ...]


def _best(
    costs: LayerCosts,
    num_stages: int,
    limit: float,
    value_of: Callable[[int, int], _Value],
    join: Callable[[_Value, _Value], _Value],
) -> tuple[_Value, list[int]]:
    """The smallest joined value over all ways to cut, no stage above `limit`, and its cuts."""
    cost_of, before = costs.stage_cost(), costs.work_before()
    num_layers = len(costs.work)
    # best[end]: of the first stages, which end there. Every stage has a layer.
    best: dict[int, tuple[_Value, list[int]]] = {}
    for end in range(1, num_layers - num_stages + 2):
        if cost_of(0, end) <= limit:
            best[end] = (value_of(0, end), [0, end])
    for stage in range(1, num_stages):
        longer: dict[int, tuple[_Value, list[int]]] = {}
        for end in range(stage + 1, num_layers - (num_stages - stage) + 2):
            found: tuple[_Value, int] | None = None
            for first in range(end - 1, stage - 1, -1):
                if before[end] - before[first] > limit:
                    break  # a longer stage costs more
                if first in best and cost_of(first, end) <= limit:
                    value = join(best[first][0], value_of(first, end))
                    if found is None or value < found[0]:
                        found = (value, first)
            if found is not None:
                longer[end] = (found[0], [*best[found[1]][1], end])
        best = longer
    return best[num_layers]


def rank_costs(
    costs: LayerCosts, balance: Sequence[int], rank_of_stage: Sequence[int]
) -> list[float]:
    """What each rank's stages cost together."""
    cost_of = costs.stage_cost()
    total = [0.0] * (max(rank_of_stage) + 1)
    first = 0
    for rank, count in zip(rank_of_stage, balance, strict=True):
        total[rank] += cost_of(first, first + count)
        first += count
    return total


def _improved_for_ranks(
    costs: LayerCosts, cuts: list[int], rank_of_stage: Sequence[int]
) -> list[int]:
    def loads(candidate: list[int]) -> list[float]:
        balance = [end - first for first, end in pairwise(candidate)]
        return sorted(rank_costs(costs, balance, rank_of_stage), reverse=True)

    lowest = loads(cuts)
    improving = True
    while improving:
        improving = False
        for index in range(1, len(cuts) - 1):
            for place in range(cuts[index - 1] + 1, cuts[index + 1]):
                candidate = [*cuts[:index], place, *cuts[index + 1 :]]
                if (found := loads(candidate)) < lowest:
                    cuts, lowest, improving = candidate, found, True
    return cuts
