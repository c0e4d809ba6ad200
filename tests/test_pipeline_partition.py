"""Owns the tests of how a model becomes stages: where it is cut, names, callables, shared parts."""

import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import UsageError
from pydist._balance import (
    LayerCosts,
    balanced,
    choose_balance,
    rank_costs,
)
from pydist._layer_times import measured_costs, stand_ins
from pydist._partition import (
    Partition,
    check_shared_statistics,
    declared_ties,
    modules_given,
    modules_of_list,
    modules_of_sequential,
    partition_list,
    partition_sequential,
    tied_parameters,
)

# -- where to cut ----------------------------------------------------------------------------------


def all_balances(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [
        [end - first for first, end in itertools.pairwise([0, *inner, num_layers])]
        for inner in cuts
    ]


def stage_costs(costs: LayerCosts, balance: list[int]) -> list[float]:
    """Written down again, by definition."""
    found: list[float] = []
    first = 0
    for count in balance:
        end = first + count
        cost = sum(costs.work[first:end])
        if end < len(costs.work) and costs.output:
            cost += costs.output[end - 1]
        if first > 0 and costs.gradient:
            cost += costs.gradient[first - 1]
        found.append(cost)
        first = end
    return found


@st.composite
def problems(draw: Any) -> tuple[LayerCosts, int]:
    num_layers = draw(st.integers(1, 9))
    numbers = st.lists(st.integers(0, 12), min_size=num_layers, max_size=num_layers)
    with_transfer = draw(st.booleans())
    costs = LayerCosts(
        draw(numbers),
        draw(numbers) if with_transfer else (),
        draw(numbers) if with_transfer else (),
    )
    return costs, draw(st.integers(1, num_layers))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_cut_has_a_cheaper_dearest_stage(problem: tuple[LayerCosts, int]) -> None:
    """Against all ways to cut up to nine layers, costs of sending included; among the best ones
    the squares of costs, and then of numbers of layers, are smallest."""
    costs, num_stages = problem
    found = balanced(costs, range(num_stages))
    assert sum(found) == len(costs.work)
    assert min(found) >= 1

    def order(balance: list[int]) -> tuple[float, ...]:
        each = stage_costs(costs, balance)
        squares = sum(cost**2 for cost in each)
        return max(each), squares, sum(count**2 for count in balance)

    assert order(found) == min(
        order(balance) for balance in all_balances(len(costs.work), num_stages)
    )


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 4))
def test_several_stages_per_rank(problem: tuple[LayerCosts, int], num_ranks: int) -> None:
    """What counts is a rank's stages together: never dearer than cutting for the dearest stage."""
    costs, num_stages = problem
    placement = [stage % num_ranks for stage in range(num_stages)]
    found = balanced(costs, placement)
    one_each = balanced(costs, range(num_stages))
    assert max(rank_costs(costs, found, placement)) <= max(rank_costs(costs, one_each, placement))
    assert sum(found) == len(costs.work)
    assert min(found) >= 1


@pytest.mark.parametrize(
    ("work", "placement"),
    [([7, 1, 8, 6, 9], [0, 1, 1, 0]), ([5, 9, 5, 6, 4], [0, 1, 0, 1])],
)
def test_ranks_count_rather_than_stages(work: list[int], placement: list[int]) -> None:
    """The cut with the cheapest stages puts 17 (19) on a rank, where 16 is possible."""
    costs = LayerCosts(work)

    def dearest(balance: list[int]) -> float:
        return max(rank_costs(costs, balance, placement))

    assert dearest(balanced(costs, range(4))) > 16
    assert dearest(balanced(costs, placement)) == 16
    assert min(dearest(balance) for balance in all_balances(5, 4)) == 16


def test_many_layers_are_cut_in_no_time() -> None:
    """600 layers into 16 stages: a quarter of a million sums, not one for each way to cut."""
    costs = LayerCosts([1.0 + (i * 7919 % 13) for i in range(600)])
    assert max(stage_costs(costs, balanced(costs, range(16)))) < 1.05 * sum(costs.work) / 16


def linears(*widths: int) -> nn.Sequential:
    """A Linear and a Tanh for each pair of widths."""
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.Tanh()]
    return nn.Sequential(*layers)


def test_balance_by_name() -> None:
    layers = list(linears(4, 4, 4, 4, 64))
    assert choose_balance(layers, "uniform", range(3)) == [3, 3, 2]
    # The last Linear has 320 of 380 parameters; activations, which cost nothing, even out layers.
    assert choose_balance(layers, "parameters", range(2)) == [5, 3]
    assert choose_balance(layers, None, range(2)) == [5, 3]
    assert choose_balance(layers, [1, 7], range(2)) == [1, 7]
    costs = LayerCosts([9, 0, 1, 1, 1, 1, 1, 1])
    assert choose_balance(layers, "time", range(2), costs) in ([1, 7], [2, 6])
    activations = [nn.Tanh() for _ in range(6)]
    assert choose_balance(activations, "parameters", range(3)) == [2, 2, 2]


@pytest.mark.parametrize(
    ("balance", "num_stages", "words"),
    [
        ([3, 3], 2, "adds up to 6 layers, but the nn.Sequential has 8"),
        ([8, 0], 2, "1 up"),
        ([4.0, 4.0], 2, "whole number"),
        ([4, 4], 3, "2 entries, .*, for 3 stages"),
        ("size", 2, '"uniform", "parameters", "time"'),
        (None, 9, "8 layers for 9 stages"),
        ("time", 2, "measured costs"),
    ],
)
def test_a_balance_that_cannot_be(balance: Any, num_stages: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose_balance(list(linears(4, 4, 4, 4, 4)), balance, range(num_stages))


def test_lazy_layers_have_no_number_of_parameters() -> None:
    layers = [nn.Linear(3, 3), nn.LazyLinear(4)]
    with pytest.raises(UsageError, match=r"layer 1 \(LazyLinear\) is lazy"):
        choose_balance(layers, None, range(2))
    assert choose_balance(layers, "uniform", range(2)) == [1, 1]


# -- measuring -------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Reentrant checkpointing, whose backward has a backward inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


class Pair(nn.Module):
    """Gives a dict with a tensor that wants no gradient."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": x * 2, "mask": torch.ones(4, 8), "scale": 3}


class Unpair(nn.Module):
    def forward(self, value: dict[str, Any]) -> Tensor:
        hidden: Tensor = value["hidden"].mul_(value["scale"])  # in place, on what it received
        return hidden * value["mask"]


def test_measuring_leaves_no_trace() -> None:
    """Gradients, hooks, BatchNorm's statistics, LSTM's flat weights and the generator are as
    before, and the next step is the one that it would have been."""
    calls: list[str] = []

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            Pair(),
            Unpair(),
            Checkpointed(),
            nn.LSTM(8, 8),
        )

    model, other = build(), build()
    x = torch.randn(4, 8)
    for module in (model, other):
        torch.manual_seed(4)
        module(x)[0].sum().backward()
    weight = model[0].weight
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("hook"))
    gradient = weight.grad
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    generator = torch.get_rng_state()

    costs = measured_costs(list(model), (x,), num_runs=2)

    assert not calls
    assert model[0].weight is weight
    assert weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    results = []
    for module in (model, other):
        torch.manual_seed(5)
        module(x)[0].sum().backward()
        results.append([parameter.grad for parameter in module.parameters()])
    assert all(map(torch.equal, *results))
    assert len(costs.work) == len(costs.output) == len(costs.gradient) == len(model)
    assert min(costs.work) > 0


def test_what_a_cut_costs_follows_its_bytes() -> None:
    """A wide boundary costs in proportion to its bytes, there and back; a mask only there."""
    x = torch.randn(4, 8)
    costs = measured_costs([nn.Linear(8, 512), nn.Linear(512, 8), Pair()], (x,), num_runs=1)
    assert costs.output[0] == pytest.approx(64 * costs.output[1])
    assert costs.output[0] == costs.gradient[0]
    assert costs.output[2] == pytest.approx(2 * costs.gradient[2])


class Clock:
    """Stands still but for a tick at each look, and for what layers say that they take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def look(self) -> float:
        self.seconds += 1e-3
        return self.seconds


class Takes(nn.Module):
    """So many seconds, in its first run a hundred more."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += self.seconds + (100 if self.num_runs == 0 else 0)
        self.num_runs += 1
        return x.clone()


def test_the_slow_layer_gets_a_stage_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the runs counts, without the first one, which warms up."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock.look)
    layers: list[nn.Module] = [Takes(clock, seconds) for seconds in (1, 2, 1, 9, 4, 3)]
    costs = measured_costs(layers, (torch.randn(2, 4),), num_runs=3)
    assert costs.work == pytest.approx([1.001, 2.001, 1.001, 9.001, 4.001, 3.001])
    assert [layer.num_runs for layer in layers] == [4] * 6
    assert choose_balance(layers, "time", range(3), costs) == [3, 1, 2]


def test_stand_ins_go_where_a_layer_raises() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    seen: list[bool] = []

    def failing() -> None:
        with stand_ins(layer):
            seen.append(layer.weight is weight)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert seen == [False]
    assert layer.weight is weight


# -- names, lists and callables --------------------------------------------------------------------


def test_names_are_those_of_the_unsplit_model() -> None:
    model = nn.Sequential(OrderedDict(stem=nn.Linear(2, 2), act=nn.Tanh(), head=nn.Linear(2, 2)))
    partition = partition_sequential(model, [1, 2])
    assert partition.layer_names == ("stem", "act", "head")
    assert [list(partition.layers_of(stage)) for stage in range(2)] == [[0], [1, 2]]
    assert [partition.stage_of(name) for name in model.state_dict()] == [0, 0, 1, 1]
    assert modules_of_sequential(model)[2] is model.head
    with pytest.raises(
        UsageError, match=r"no layer of the unsplit model has the name 'tail\.weight'"
    ):
        partition.stage_of("tail.weight")
    listed = partition_list([nn.Linear(2, 2), nn.Tanh], 2)
    assert listed == Partition(("0", "1"), (1, 1))


class OwnForward(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


def test_a_sequential_that_is_more_than_its_layers() -> None:
    """Splitting would silently lose a residual connection, a parameter or a hook of the whole."""
    with pytest.raises(UsageError, match="OwnForward to be split has a forward of its own"):
        partition_sequential(OwnForward(nn.Linear(2, 2)), [1])
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(UsageError, match=r"beside its layers \(scale\)"):
        partition_sequential(model, [1])
    model = nn.Sequential(nn.Linear(2, 2))
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="hooks on the whole model"):
        partition_sequential(model, [1])
    handle.remove()
    partition_sequential(model, [1])


def test_a_list_that_does_not_fit() -> None:
    """C113: a wrong number of stages is said when the pipeline is made, on every rank alike."""
    with pytest.raises(UsageError, match="2 modules for 4 stages"):
        partition_list([nn.Linear(2, 2), nn.Linear(2, 2)], 4)
    with pytest.raises(UsageError, match="entry 1 of the list of stages is int"):
        partition_list([nn.Linear(2, 2), 3], 2)
    with pytest.raises(UsageError, match="callable for stage 0 returned int"):
        modules_of_list([int], [0])


def test_only_local_callables_run_and_their_numbers_depend_on_the_seed_alone() -> None:
    made: list[int] = []

    def factory(index: int) -> Any:
        def make() -> nn.Module:
            made.append(index)
            return nn.Linear(3, 3)

        return make

    given = nn.Linear(3, 3)
    sources = [factory(0), given, factory(2), factory(3)]
    torch.manual_seed(7)
    generator = torch.get_rng_state()
    together = modules_of_list(sources, [0, 1, 2, 3])
    assert torch.equal(torch.get_rng_state(), generator)
    assert made == [0, 2, 3]
    torch.rand(5)  # how much was drawn before does not matter
    alone = modules_of_list(sources, [2])
    assert made == [0, 2, 3, 2]
    assert list(alone) == [2]
    assert together[1] is given
    assert modules_given(sources) == {1: given}
    weights = {stage: module.weight for stage, module in together.items()}
    assert torch.equal(alone[2].weight, weights[2])
    assert not torch.equal(weights[0], weights[2])
    torch.manual_seed(8)
    assert not torch.equal(modules_of_list(sources, [2])[2].weight, weights[2])


# -- what stages share -----------------------------------------------------------------------------


def test_tied_parameters() -> None:
    """C99: found by identity: a tied weight, a layer that occurs twice, and none within a stage."""
    embedding, repeated, head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11)
    head.weight = embedding.weight
    same_stage = nn.Linear(4, 4)
    same_stage.weight = repeated.weight
    model = nn.Sequential(embedding, repeated, same_stage, repeated, head)
    partition = partition_sequential(model, [1, 2, 2])
    groups = tied_parameters(partition, modules_of_sequential(model))
    assert groups == [
        ((0, "0.weight"), (2, "4.weight")),
        ((1, "1.weight"), (2, "3.weight")),
        ((1, "1.bias"), (2, "3.bias")),
    ]
    whole = partition_sequential(model, [5])
    assert tied_parameters(whole, modules_of_sequential(model)) == []
    assert declared_ties(partition, [("4.weight", "0.weight")]) == [groups[0]]
    with pytest.raises(UsageError, match="two or more stages"):
        declared_ties(partition, [("1.weight", "2.weight")])


def test_stages_must_not_share_running_statistics() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), nn.Sequential(norm))
    modules = modules_of_sequential(model)
    with pytest.raises(UsageError, match=r"stages 0 and 1 share one BatchNorm1d \(1 and 3.0\)"):
        check_shared_statistics(partition_sequential(model, [2, 2]), modules)
    check_shared_statistics(partition_sequential(model, [1, 3]), modules)
    norm.track_running_stats = False
    check_shared_statistics(partition_sequential(model, [2, 2]), modules)
