"""Owns skips: tensors that pass over layers, whether these are in one process or in many stages."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pydist
import ranks
from pydist import _C, skip
from pydist._engine import group_engine
from pydist._stage import SequentialStage
from pydist.skip import Portal


class Down(nn.Module):
    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level
        self.body = nn.Linear(4, 4)
        pydist.skippable(stash=(f"level{level}",))(self)

    def forward(self, x: Tensor) -> Tensor:
        skip.stash(f"level{self.level}", x)
        return self.body(x).tanh()


class Up(nn.Module):
    def __init__(self, level: int, reentrant: bool | None = None) -> None:
        super().__init__()
        self.level = level
        self.body = nn.Linear(8, 4)
        self.reentrant = reentrant
        pydist.skippable(pop=(f"level{level}",))(self)

    def forward(self, x: Tensor) -> Any:
        passed = skip.pop(f"level{self.level}")
        assert passed is not None
        if self.reentrant is None:
            return self.join(x, passed)
        return checkpoint(self.join, x, passed, use_reentrant=self.reentrant)

    def join(self, x: Tensor, passed: Tensor) -> Tensor:
        return self.body(torch.cat([x, passed], -1)).tanh()


def unet(reentrant: bool | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Down(0), Down(1), Down(2), nn.Tanh(), *(Up(level, reentrant) for level in (2, 1, 0))
    )


def split(module: nn.Sequential, sizes: tuple[int, ...]) -> list[SequentialStage]:
    layers = list(module._modules.items())
    ends = list(itertools.accumulate(sizes))
    return [
        SequentialStage(dict(layers[end - size : end]), range(end - size, end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def portals(stages: list[SequentialStage]) -> list[Portal]:
    declarations = []
    for index, stage in enumerate(stages):
        layers = zip(stage._layer_indices, stage._modules.items(), strict=True)
        named = [(i, name, module) for i, (name, module) in layers if module is not None]
        declarations += skip.declarations_of(index, named)
    return skip.portals_of(declarations)


def run(stages: list[SequentialStage], value: Tensor, microbatch: int = 0) -> Tensor:
    """Every stage by itself, with what the layout says in its hands before and after."""
    travelling: dict[int, Tensor | None] = {}
    for index, stage in enumerate(stages):
        context = _C.StageContext(index, 0, microbatch, True, 42, 0)
        for portal in portals(stages):
            if portal.to_stage == index:
                context.put(portal.name, travelling.pop(portal.number))
        with context:
            value = stage(value)
        for portal in portals(stages):
            if portal.from_stage == index:
                travelling[portal.number] = context.take(portal.name)
    assert not travelling
    return value


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_split_unet_equals_the_whole_one(reentrant: bool | None) -> None:
    """A U-Net could not be split without passing every level through all stages between."""
    whole, x = unet(), torch.randn(3, 4)
    expected = whole(x)
    expected.sum().backward()
    for sizes in ((7,), (3, 4), (1, 2, 3, 1), (1,) * 7):
        module = unet(reentrant)
        output = run(split(module, sizes), x)
        assert torch.equal(output, expected)
        output.sum().backward()
        for p, q in zip(module.parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)


def test_the_layout_names_the_stages_of_both_ends() -> None:
    """What stays within a stage is no message; ports are numbered the same on every rank."""
    assert portals(split(unet(), (7,))) == []
    assert (
        portals(split(unet(), (2, 3, 2)))
        == [
            Portal(1, "level0", 0, 2),
            Portal(2, "level1", 0, 2),
            Portal(3, "level2", 1, 1),
        ][:2]
    )
    assert portals(split(unet(), (1, 3, 1, 2))) == [
        Portal(1, "level0", 0, 3),
        Portal(2, "level1", 1, 3),
        Portal(3, "level2", 1, 2),
    ]


def test_microbatches_do_not_mix() -> None:
    """Two forwards before the first backward, as in every pipeline."""
    module = unet()
    stages = split(module, (3, 4))
    inputs = [torch.randn(2, 4), torch.randn(2, 4)]
    outputs = [run(stages, x, i) for i, x in enumerate(inputs)]
    assert all(torch.equal(output, module(x)) for output, x in zip(outputs, inputs, strict=True))


@pydist.skippable(stash=("a",))
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        skip.stash("a", x)
        return x * 1


@pydist.skippable(pop=("a",))
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        passed = skip.pop("a")
        return x if passed is None else x + passed


@pydist.skippable(stash=("a", "b"))
class StashTwo(nn.Module):
    pass


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((Stash(), nn.Sequential(Stash()), Pop()), r"'a' is stashed twice, by 0 and 1\.0;"),
        ((Stash(), Pop(), nn.Sequential(nn.Tanh(), Pop())), r"'a' is popped twice, by 1 and 2\.1;"),
        ((StashTwo(), Pop()), r"'b', which 0 stashes, is popped by no module"),
        ((nn.Tanh(), Pop()), r"'a', which 1 pops, is stashed by no module"),
        ((nn.Sequential(Pop()), Stash()), r"'a' is popped by 0\.0, before 1 stashes it"),
    ],
)
def test_a_wrong_declaration_names_module_and_skip(
    layers: tuple[nn.Module, ...], message: str
) -> None:
    """However it is split: found when the pipeline is made, not in a step."""
    for sizes in ((len(layers),), (1,) * len(layers)):
        with pytest.raises(pydist.UsageError, match=message):
            portals(split(nn.Sequential(*layers), sizes))


def test_names_are_declared_as_tuples() -> None:
    with pytest.raises(pydist.UsageError, match="stash is 'early'; expected a tuple of names"):
        pydist.skippable(stash="early")
    with pytest.raises(pydist.UsageError, match=r"pop is \(3,\)"):
        pydist.skippable(pop=(3,))  # type: ignore[arg-type]


def test_a_module_adds_to_what_its_class_declares() -> None:
    module = pydist.skippable(pop=("b",))(Pop())
    both = nn.Sequential(StashTwo(), module)
    assert [p.name for p in portals(split(both, (1, 1)))] == ["a", "b"]
    with pytest.raises(pydist.UsageError, match="'b', which 0 stashes"):
        portals(split(nn.Sequential(StashTwo(), Pop()), (1, 1)))


def test_none_passes_too() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            skip.stash("a", None)
            return x

    module = nn.Sequential(pydist.skippable(stash=("a",))(Nothing()), Pop())
    x = torch.ones(2)
    assert torch.equal(module(x), x)
    for sizes in ((2,), (1, 1)):
        assert torch.equal(run(split(module, sizes), x), x)
    with pytest.raises(pydist.UsageError, match="'a' is float; expected a tensor"):
        skip.stash("a", 1.0)  # type: ignore[arg-type]


def test_what_is_not_there_cannot_be_popped() -> None:
    with pytest.raises(pydist.UsageError, match="nothing is stashed as skip 'a': was it"):
        Pop()(torch.ones(1))
    context = _C.StageContext(2, 0, 3, True, None, 0)
    with context, pytest.raises(pydist.UsageError, match="'a' in stage 2, microbatch 3: was it"):
        Pop()(torch.ones(1))


def test_a_change_in_place_after_stashing_is_an_error() -> None:
    """ReLU(inplace=True) behind the stashing layer: the popping one saw the change in one process,
    and not where a stage ended between them."""
    module = nn.Sequential(Same(), nn.ReLU(inplace=True), Pop())
    x = torch.tensor([-1.0, 1.0])
    for call in (
        lambda: module(x.clone()),
        lambda: run(split(module, (3,)), x.clone()),
        lambda: run(split(module, (2, 1)), x.clone()),
    ):
        with pytest.raises(pydist.UsageError, match="'a' was changed in place before it was"):
            call()
    # The split between them: the change happens where the next stage is, to a tensor of its own.
    before = nn.Sequential(nn.ReLU(inplace=True), Stash(), Pop())
    assert torch.equal(before(x.clone()), torch.tensor([0.0, 2.0]))


@pydist.skippable(stash=("a",))
class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        skip.stash("a", x)
        return x


def test_stashing_twice_in_a_stage_is_an_error() -> None:
    stages = split(nn.Sequential(Same(), Same()), (2,))
    skip.declarations_of(0, [(0, "0", Same())])
    context = _C.StageContext(0, 0, 0, True, None, 0)
    with context, pytest.raises(pydist.UsageError, match="'a' is stashed a second time"):
        stages[0](torch.ones(1))


def test_a_failed_forward_does_not_disturb_the_next() -> None:
    """Outside of a pipeline nobody clears what a forward that raised has stashed."""
    module = nn.Sequential(Stash(), nn.Linear(2, 2), Pop())
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(1, 3))
    x = torch.ones(1, 2)
    assert torch.equal(module(x), module[1](x) + x)
    with torch.inference_mode():
        assert torch.equal(module(x), module[1](x) + x)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.body = body
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("staged", [False, True])
def test_stashing_inside_a_checkpoint(staged: bool) -> None:
    """Recomputation must not stash again; and a reentrant one has lost the gradient by then."""
    x = torch.randn(3, 4)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Stash()), nn.Tanh(), Pop())
    kept = copy.deepcopy(plain)
    kept[1] = Checkpointed(kept[1], False)
    grads = []
    with torch.no_grad():
        kept(x)  # evaluation builds no graph either, and takes nothing from the training after it
    for module in (plain, kept):
        inputs = [x, x * 2]
        if staged:
            outputs = [run(split(module, (2, 2)), part) for part in inputs]
        else:
            outputs = [module(part) for part in inputs]
        for output in outputs:
            output.sum().backward()
        grads.append(module[0].weight.grad)
    assert torch.equal(*grads)
    assert not skip._outside_stages.tensors
    lost = copy.deepcopy(plain)
    lost[1] = Checkpointed(lost[1], True)
    output = run(split(lost, (2, 2)), x) if staged else lost(x)
    with pytest.raises(pydist.UsageError, match="'a' is stashed inside a reentrant checkpoint"):
        output.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_popping_inside_a_checkpoint_says_what_to_do(reentrant: bool) -> None:
    """When it recomputes, the tensor is gone: better an error than another microbatch's."""
    model = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Tanh())
    model.append(Checkpointed(nn.Sequential(Pop(), nn.Sigmoid()), reentrant))
    for output in (model(torch.randn(2, 4)), run(split(model, (3, 1)), torch.randn(2, 4))):
        with pytest.raises(pydist.UsageError, match="'a' is popped inside a checkpoint"):
            output.sum().backward()


def test_a_frozen_part_may_stash_within_a_checkpoint() -> None:
    """no_grad in the forward itself is not a reentrant checkpoint."""

    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                skip.stash("a", x * 2)
            return x * 1

    for reentrant in (False, True):
        body = pydist.skippable(stash=("a",))(Frozen())
        model = nn.Sequential(nn.Linear(4, 4), Checkpointed(body, reentrant), Pop())
        model(torch.randn(2, 4)).sum().backward()
        assert model[0].weight.grad is not None


def exchange(rank: int, world_size: int) -> list[Portal]:
    """Each rank has built one stage only, from a list of factories."""
    engine = group_engine()
    layers = {0: Down(0), 1: nn.Tanh(), 2: Up(0)}
    mine = skip.declarations_of(rank, [(rank, str(rank), layers[rank])])
    return skip.portals_of(skip.exchange_declarations(engine, mine))


def test_ranks_that_know_only_their_own_stages_agree(pool3: ranks.RankPool) -> None:
    assert pool3.run(exchange) == [[Portal(1, "level0", 0, 2)]] * 3


def test_compiled_layers_may_stash_and_pop() -> None:
    module = unet()
    x = torch.randn(3, 4)
    expected = module(x)
    compiled = nn.Sequential(*(torch.compile(layer, backend="eager") for layer in module))
    assert torch.equal(compiled(x), expected)
    assert torch.equal(run(split(compiled, (2, 5)), x), expected)
