"""Owns the tests of how batches are cut, weighed and merged, and of where keywords go."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pydist import UsageError
from pydist._engine import group_engine
from pydist._keywords import (
    KeywordRoutes,
    Names,
    exchange_names,
    exchange_positional_names,
    positional_names,
)
from pydist._microbatches import (
    Slicer,
    merge_outputs,
    row_counts,
    shares,
    target_weights,
)
from pydist._trees import map_tensors, take_apart
from ranks import RankPool

# -- cutting ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9))
def test_rows_differ_by_one_and_the_larger_come_first(rows: int, num_microbatches: int) -> None:
    """C81: batches that do not divide, fewer rows than microbatches: never a piece without rows,
    all rows once and in order, and input and target cut alike."""
    x, y = torch.arange(rows * 3.0).view(rows, 3), torch.arange(rows)
    found = Slicer(num_microbatches).cut((x,), {}, y)
    assert found.num_present == min(rows, num_microbatches)
    assert found.rows == [len(target) for target in found.targets]
    assert found.rows == row_counts(rows, num_microbatches)
    assert found.rows == sorted(found.rows, reverse=True)
    assert max(found.rows) - min(found.rows) <= 1
    assert torch.equal(torch.cat([args[0] for args in found.args]), x)
    assert torch.equal(torch.cat(found.targets), y)
    assert sum(found.row_weights()) == pytest.approx(1)


def test_sequence_first() -> None:
    """C109: [T, B, 8] cut along dimension 1, targets too, and a [1, T] mask that is not."""
    x, y, mask = torch.randn(5, 6, 8), torch.randn(5, 6), torch.ones(1, 5)
    slicer = Slicer(3, chunk_dim=1, replicate=("mask",))
    found = slicer.cut((x,), {"mask": mask}, y)
    for i in range(3):
        assert torch.equal(found.args[i][0], x[:, 2 * i : 2 * i + 2])
        assert torch.equal(found.targets[i], y[:, 2 * i : 2 * i + 2])
        assert found.kwargs[i]["mask"] is mask


def test_dimensions_by_name() -> None:
    """Names are the forward's for what comes by position, and "target"; others are cut along 0."""
    x, memory, y = torch.randn(5, 6), torch.randn(2, 2, 6), torch.randn(6)
    slicer = Slicer(2, {"x": 1, "memory": -1}, positional_names=("x",))
    found = slicer.cut((x,), {"memory": memory}, y)
    assert torch.equal(found.args[1][0], x[:, 3:])
    assert torch.equal(found.kwargs[1]["memory"], memory[..., 3:])
    assert torch.equal(found.targets[1], y[3:])
    with pytest.raises(UsageError, match=r"target is to be cut along dimension 1, .* \(6,\)"):
        Slicer(2, 1).cut((x,), {}, y)


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Tensor
    lengths: list[Tensor]
    name: str = "batch"
    num_calls: int = dataclasses.field(default=0, init=False)


def test_values_of_any_shape_of_container() -> None:
    """C96: nested tuples, dicts, namedtuples, a frozen dataclass; numbers, strings, None and
    0-dim tensors are everybody's."""
    tokens = torch.arange(8).view(4, 2)
    nested = {
        "point": Point(tokens, [tokens + 1]),
        "batch": Batch(tokens + 2, [tokens + 3]),
        "rest": (None, True, 2.5, 3j, "a", b"b", torch.float32, torch.tensor(7)),
        "empty": {},
    }
    found = Slicer(2).cut((nested, False), {"extra": None, "cfg": ("a", 1)}, None)
    for i, rows in enumerate((slice(0, 2), slice(2, 4))):
        piece, flag = found.args[i]
        assert flag is False
        assert found.kwargs[i] == {"extra": None, "cfg": ("a", 1)}
        assert isinstance(piece["point"], Point)
        assert torch.equal(piece["point"].y[0], tokens[rows] + 1)
        assert type(piece["batch"]) is Batch
        assert piece["batch"].name == "batch"
        assert torch.equal(piece["batch"].tokens, tokens[rows] + 2)
        assert torch.equal(piece["batch"].lengths[0], tokens[rows] + 3)
        assert piece["rest"] == nested["rest"]
        assert piece["empty"] == {}
    assert nested["batch"].tokens.shape == (4, 2)


class Bag:
    """Not a container that anybody could know."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_tensors_in_an_unknown_object_are_not_overlooked() -> None:
    """They would go to every microbatch uncut, and train on the batch m times."""
    bag = Bag(torch.randn(4, 2))
    with pytest.raises(UsageError, match="batch has a Bag, which holds tensors"):
        Slicer(2).cut((torch.randn(4, 2),), {"batch": bag}, None)
    found = Slicer(2, replicate=("batch",)).cut((torch.randn(4, 2),), {"batch": bag}, None)
    assert found.kwargs[1]["batch"] is bag


def test_rows_that_differ() -> None:
    x, y = torch.randn(8, 2), torch.randn(6, 2)
    with pytest.raises(UsageError, match=r"8 in x, mask; 6 in target\. Name in replicate"):
        Slicer(2, positional_names=("x",)).cut((x,), {"mask": x}, y)
    with pytest.raises(UsageError, match="8 in positional argument 1; 6 in target"):
        Slicer(2).cut((None, x), {}, y)
    with pytest.raises(UsageError, match="no rows: target is empty"):
        Slicer(2).cut((), {}, torch.zeros(0, 3))
    with pytest.raises(UsageError, match="replicate is 'mask'"):
        Slicer(2, replicate="mask")


def test_one_row() -> None:
    """A mask of one row goes to all; a batch of one row is one microbatch."""
    x, mask = torch.randn(4, 2), torch.ones(1, 2)
    found = Slicer(2).cut((x,), {"mask": mask}, None)
    assert [kwargs["mask"] is mask for kwargs in found.kwargs] == [True, True]
    found = Slicer(4).cut((x[:1],), {"mask": mask}, torch.zeros(1))
    assert found.rows == [1]
    assert found.num_present == 1
    # The last stage's rank has the mask and no input, whose rows it cannot know: all may come.
    found = Slicer(4, has_first_stage=False).cut((None,), {"mask": mask}, None)
    assert found.rows is None
    assert found.num_present == 4
    with pytest.raises(UsageError, match="no tensor given on the last stage's rank has rows"):
        found.row_weights()
    found = Slicer(4, has_first_stage=False).cut((None,), {"mask": mask}, torch.zeros(1))
    assert found.rows == [1]


def test_a_rank_cuts_what_it_needs_and_compares_the_rest() -> None:
    x, y = torch.randn(4, 2), torch.randn(4)
    found = Slicer(2, has_first_stage=False).cut((x,), {}, y)
    assert found.args == [(None,), (None,)]
    assert torch.equal(found.targets[1], y[2:])
    found = Slicer(2, has_last_stage=False).cut((x,), {}, y)
    assert found.targets == [None, None]
    with pytest.raises(UsageError, match="4 in positional argument 0; 3 in target"):
        Slicer(2, has_first_stage=False).cut((x,), {}, y[:3])
    # Which of them chunk_dim names is known with the first stage alone.
    found = Slicer(2, {"x": 1}, has_first_stage=False).cut((torch.randn(7, 4),), {}, y)
    assert found.rows == [2, 2]


def test_in_place_changes() -> None:
    """A stage may change its microbatch in place: that touches no other one's graph. What is
    shared must not change: later microbatches would get it changed already."""
    x, mask = torch.randn(4, 2), torch.ones(1, 2)
    weight = torch.ones(2, requires_grad=True)
    found = Slicer(2).cut((x,), {"mask": mask}, None)
    outputs = []
    for args, kwargs in zip(found.args, found.kwargs, strict=True):
        hidden = args[0].mul_(2)
        outputs.append((hidden * weight * kwargs["mask"]).sum())
    outputs[0].backward()
    outputs[1].backward()
    assert torch.allclose(weight.grad, x.sum(0))
    found.check_unchanged()
    found.kwargs[1]["mask"].mul_(2)
    with pytest.raises(UsageError, match=r"a tensor of mask, shape \(1, 2\), was changed in place"):
        found.check_unchanged()


def test_an_input_that_wants_its_gradient_gets_it() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    for args in Slicer(2).cut((x,), {}, None).args:
        (args[0] ** 2).sum().backward()
    assert torch.equal(x.grad, 2 * x)


# -- weights ---------------------------------------------------------------------------------------


def batch_gradient(module: nn.Module, loss: Tensor) -> Tensor:
    module.zero_grad()
    loss.backward()
    return module.weight.grad.clone()


def test_weights_give_the_gradient_of_the_whole_batch() -> None:
    """C85: five rows in three microbatches; with ignored targets rows are the wrong weights and
    numbers of valid targets the right ones."""
    torch.manual_seed(0)
    module = nn.Linear(3, 4, bias=False)
    x, y = torch.randn(5, 3), torch.tensor([1, 2, 3, 0, -100])

    def by_parts(x: Tensor, y: Tensor, by_row: bool) -> Tensor:
        found = Slicer(3).cut((x,), {}, y)
        valid = target_weights(lambda target: (target != -100).sum(), found.targets)
        weights = found.row_weights() if by_row else shares(valid)
        losses = [
            weight * F.cross_entropy(module(args[0]), target)
            for args, target, weight in zip(found.args, found.targets, weights, strict=True)
            if weight > 0
        ]
        return sum(losses)

    expected = batch_gradient(module, F.cross_entropy(module(x), y))
    assert torch.allclose(batch_gradient(module, by_parts(x, y, False)), expected)
    valid = y.clamp(min=0)
    expected = batch_gradient(module, F.cross_entropy(module(x), valid))
    assert torch.allclose(batch_gradient(module, by_parts(x, valid, True)), expected)


def test_shares() -> None:
    assert shares([1.0, 0.0, 3.0]) == [0.25, 0, 0.75]
    assert shares([1.0, 3.0], total=8.0) == [0.125, 0.375]
    assert shares([0.0, 0.0]) == [0, 0]
    with pytest.raises(UsageError, match=r"loss_weight returned -1\.0 for microbatch 1"):
        target_weights(lambda target: target, [1, -1])
    with pytest.raises(UsageError, match="loss_weight returned nan"):
        target_weights(lambda target: torch.tensor(float("nan")), [1])


# -- outputs ---------------------------------------------------------------------------------------


def test_merging_undoes_cutting() -> None:
    x = torch.arange(10.0).view(5, 2)
    value = {"point": Point(x, x + 1), "batch": Batch(x, [x]), "none": None}
    pieces = [args[0] for args in Slicer(3).cut((value,), {}, None).args]
    merged = merge_outputs(pieces)
    assert torch.equal(merged["point"].y, x + 1)
    assert torch.equal(merged["batch"].lengths[0], x)
    assert merged["none"] is None
    assert merged["batch"].name == ["batch"] * 3
    assert torch.equal(merge_outputs([x.t(), x.t()], 1), torch.cat([x, x]).t())


def test_what_has_no_rows_becomes_a_list() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    merged = merge_outputs([(torch.ones(1), loss, i) for i, loss in enumerate(losses)])
    assert merged[1] == losses
    assert merged[2] == [0, 1]
    assert merge_outputs(losses) == losses
    assert merge_outputs([losses[0]]) == [losses[0]]
    assert merge_outputs([]) is None


def test_outputs_that_do_not_fit_together() -> None:
    with pytest.raises(UsageError, match=r"along dimension 0: their shapes are \(2, 3\), \(2, 4\)"):
        merge_outputs([torch.ones(2, 3), torch.ones(2, 4)])
    with pytest.raises(UsageError, match="microbatches 0 and 1 are built differently"):
        merge_outputs([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    one, other = Batch(torch.ones(1), []), Batch(torch.ones(1), [torch.ones(1)])
    with pytest.raises(UsageError, match="microbatches 0 and 1 are built differently"):
        merge_outputs([[one], [other]])


# -- containers ------------------------------------------------------------------------------------


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """The shape of Hugging Face's: a dataclass that is a mapping of its fields as well."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "loss"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


def test_dataclasses_among_other_containers() -> None:
    """Leaves before, in and after nested dataclasses keep their places."""
    value = [1, Batch(torch.ones(1), [torch.zeros(1), torch.ones(2)]), (2, ModelOutput(3)), 4]
    leaves, structure = take_apart(value)
    assert structure.build(leaves)[2] == value[2]
    changed = structure.build([(leaf, i) for i, leaf in enumerate(leaves)])
    assert changed[0] == (1, 0)
    assert changed[1].lengths[1][1] == 3
    assert changed[1].name == ("batch", 4)
    assert changed[2][0] == (2, 6)
    assert changed[2][1].logits == changed[2][1]["logits"] == (3, 7)
    assert changed[3] == (4, 9)
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert doubled[1].lengths[1].tolist() == [2, 2]
    assert take_apart(value)[1] == structure
    assert take_apart([1, 2, 3, 4])[1] != structure


# -- keywords --------------------------------------------------------------------------------------


def test_keywords_go_to_the_stages_that_name_them() -> None:
    routes = KeywordRoutes(
        {0: frozenset(), 1: frozenset({"mask"}), 2: frozenset({"mask", "scale"})}
    )
    given = {"mask": 1, "scale": 2}
    routes.check(given)
    assert [routes.of_stage(stage, given) for stage in range(3)] == [{}, {"mask": 1}, given]
    assert routes.of_stage(2, given) is given
    with pytest.raises(UsageError, match=r"argument maks; the stages' forwards name mask, scale"):
        routes.check({"maks": 1})
    with pytest.raises(UsageError, match="arguments a, b;"):
        routes.check({"a": 1, "mask": 2, "b": 3})
    anything = KeywordRoutes({0: None, 1: frozenset({"mask"})})
    anything.check({"whatever": 1})
    assert anything.of_stage(0, given) is given
    assert anything.of_stage(1, {"whatever": 1}) == {}


def test_options_that_name_nothing() -> None:
    """A misspelt mask would be cut, and a misspelt dimension be another one."""
    routes = KeywordRoutes({0: frozenset({"mask"}), 1: frozenset({"scale"})})
    routes.check_options(["x"], replicate=("mask",), chunk_dim={"x": 1, "target": 0})
    with pytest.raises(UsageError, match=r"replicate names maks, .* name mask, scale, target, x"):
        routes.check_options(["x"], replicate=("maks",))
    with pytest.raises(UsageError, match="chunk_dim names y, which no stage"):
        routes.check_options(["x"], replicate=(), chunk_dim={"y": 1})
    KeywordRoutes({0: None}).check_options([], replicate=("anything",))


class TakesTwo(nn.Module):
    def forward(self, x: Tensor, memory: Tensor, *rest: Tensor, mask: Any = None) -> Tensor:
        return x


def test_names_of_positional_arguments() -> None:
    assert positional_names(TakesTwo()) == ("x", "memory")
    assert positional_names(torch.compile(TakesTwo())) == ("x", "memory")


def exchanged(rank: int, world_size: int) -> tuple[dict[int, Names], tuple[str, ...]]:
    engine = group_engine()
    local: dict[int, Names] = {rank: frozenset({"mask", f"only{rank}"}), 3 - rank: None}
    positional = exchange_positional_names(engine, ["y", "x"] if rank == 0 else None)
    return exchange_names(engine, local), positional


def test_every_rank_knows_all_stages_names(pool2: RankPool) -> None:
    """Where stages are callables, only the rank that has a stage can look at its forward."""
    both = {rank: frozenset({"mask", f"only{rank}"}) for rank in range(2)}
    for found in pool2.run(exchanged):
        assert found == ({**both, 2: None, 3: None}, ("y", "x"))
