"""Owns what a stage computes: nn.Sequential's results, and the same random numbers wherever it is.

Stages are run here one after another in this process, as the executor runs them on several ranks.
"""

import copy
import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import _C
from pydist._stage import ModuleStage, SequentialStage, keyword_names


def split(module: nn.Sequential, *sizes: int) -> list[SequentialStage]:
    layers = list(module._modules.items())
    stages, first = [], 0
    for size in sizes:
        end = first + size
        stages.append(SequentialStage(dict(layers[first:end]), range(first, end)))
        first = end
    assert first == len(layers)
    return stages


def run(stages: list[Any], value: Any, microbatch: int = 0, step: int = 0, **kwargs: Any) -> Any:
    for index, stage in enumerate(stages):
        with _C.StageContext(index, step, microbatch, True, 42, 0):
            value = stage(value, **kwargs)
    return value


class Attention(nn.Module):
    """Draws random numbers in C++, not by a dropout layer."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def noisy_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.5), Attention(), nn.RReLU(), nn.Linear(8, 8)
    )


def test_a_split_model_computes_what_the_whole_one_does() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)))
    x = torch.randn(4, 8)
    for sizes in ((5,), (2, 3), (1, 1, 1, 1, 1)):
        stages = split(model, *sizes)
        assert torch.equal(run(stages, x), model(x))
        assert {k for stage in stages for k in stage.state_dict()} == set(model.state_dict())
        assert {p for stage in stages for p in stage.parameters()} == set(model.parameters())


def test_random_numbers_do_not_depend_on_the_split() -> None:
    """A model with dropout was trained on 2 ranks and then on 4: the same masks, bit by bit."""
    model, x = noisy_model(), torch.randn(2, 3, 8)
    whole = run(split(model, 6), x)
    for sizes in ((3, 3), (1, 2, 3), (1, 1, 1, 1, 1, 1)):
        assert torch.equal(run(split(model, *sizes), x), whole)


def test_random_numbers_do_not_depend_on_the_order() -> None:
    """A schedule that runs microbatch 1 before 0, or stage 1 of one before stage 0 of another."""
    stages, x = split(noisy_model(), 2, 4), torch.randn(2, 3, 8)
    in_order = [run(stages, x, microbatch=i) for i in range(3)]
    torch.rand(5)
    backwards = [run(stages, x, microbatch=i) for i in (2, 1, 0)]
    assert all(map(torch.equal, in_order, reversed(backwards)))


def test_every_place_has_random_numbers_of_its_own() -> None:
    """Layers, steps, microbatches and data-parallel replicas must not share their masks."""
    ones, model = torch.ones(64, 64), nn.Dropout()
    masks = []
    for place in itertools.product((42, 43), (0, 1), (0, 1), (0, 1), (0, 1)):
        base_seed, step, microbatch, dp_rank, layer = place
        with _C.StageContext(0, step, microbatch, True, base_seed, dp_rank):
            masks.append(SequentialStage({"0": model}, [layer])(ones))
    for i, mask in enumerate(masks):
        # Independent masks agree in half of 4,096 places, give or take 32.
        assert 1800 < int((mask > 0).sum()) < 2300
        for other in masks[:i]:
            assert 1800 < int((mask == other).sum()) < 2300


def test_seeds_give_good_random_numbers() -> None:
    """Many seeds that differ in one bit: first numbers, means and normal samples are spread."""
    first, normal = [], []
    for microbatch in range(4096):
        with _C.StageContext(0, 0, microbatch, True, 0, 0):
            _C.seed_layer(0)
            first.append(torch.rand(1))
            normal.append(torch.randn(1))
    uniform = torch.cat(first)
    assert torch.histc(uniform, 16, 0, 1).sub(256).abs().max() < 80  # 5 deviations
    assert abs(float(torch.cat(normal).mean())) < 0.08
    assert abs(float(torch.cat(normal).std()) - 1) < 0.06
    assert uniform.unique().numel() > 4090


def test_the_users_random_stream_is_untouched() -> None:
    """Data augmentation between steps draws what it drew without a pipeline."""
    stages, x = split(noisy_model(), 2, 4), torch.randn(2, 3, 8)
    torch.manual_seed(7)
    torch.randn(3)  # half of a pair of normal samples is kept for the next call
    expected = torch.get_rng_state()
    run(stages, x)
    assert torch.equal(torch.get_rng_state(), expected)
    with pytest.raises(RuntimeError, match="shape"):
        run(stages, x[..., :5])
    assert torch.equal(torch.get_rng_state(), expected)


def test_without_seeds_layers_draw_from_the_users_stream() -> None:
    [stage], x = split(nn.Sequential(nn.Dropout()), 1), torch.ones(99)
    torch.manual_seed(3)
    expected = nn.functional.dropout(x)
    for context in (None, _C.StageContext(0, 0, 0, True, None, 0)):
        torch.manual_seed(3)
        if context is None:
            assert torch.equal(stage(x), expected)
        else:
            with context:
                assert torch.equal(stage(x), expected)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.body = body
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_with_the_same_mask(reentrant: bool) -> None:
    """Backward comes after other microbatches' forwards, outside of any stage's forward."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout())
    plain = split(nn.Sequential(nn.Tanh(), body), 1, 1)
    saving = split(nn.Sequential(nn.Tanh(), Checkpointed(copy.deepcopy(body), reentrant)), 1, 1)
    results = []
    for stages in (plain, saving):
        inputs = [torch.full((4, 8), i + 1.0, requires_grad=True) for i in range(3)]
        outputs = [run(stages, x, microbatch=i) for i, x in enumerate(inputs)]
        before = torch.get_rng_state()
        for output in outputs:
            output.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
        leaves = [*inputs, *stages[1].parameters()]
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    assert all(map(torch.equal, *results))


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return (x if mask is None else x * mask) * scale


class Anything(nn.Module):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x + sum(kwargs.values())


def test_keywords_go_to_the_layers_that_name_them() -> None:
    """A mask for the attention layers alone, among layers that know of none."""
    model = nn.Sequential(nn.Identity(), Masked(), nn.Tanh(), Masked())
    first, second, third = split(model, 2, 1, 1)
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    expected = (x * mask * 2).tanh() * mask * 2
    value = run([first], x, mask=mask, scale=2.0)
    assert torch.equal(run([third], run([second], value), mask=mask, scale=2.0), expected)
    assert torch.equal(run(split(model, 4), x, mask=mask, scale=2.0), expected)


def test_what_a_forward_names_is_known_through_wrappers() -> None:
    assert keyword_names(Masked(), 1) == {"mask", "scale"}
    assert keyword_names(Masked()) == {"x", "mask", "scale"}
    assert keyword_names(torch.compile(Masked(), backend="eager"), 1) == {"mask", "scale"}
    assert keyword_names(nn.Tanh(), 1) == set()
    assert keyword_names(Anything(), 1) is None
    built_in = nn.Tanh()
    built_in.forward = max  # type: ignore[method-assign]
    assert keyword_names(built_in) is None  # its signature is not known


def test_a_layer_with_any_keywords_gets_all_of_them() -> None:
    [stage] = split(nn.Sequential(nn.Identity(), Anything()), 2)
    assert torch.equal(run([stage], torch.zeros(2), a=1, b=2), torch.full((2,), 3.0))


def test_a_module_as_a_stage_takes_everything_its_predecessor_returned() -> None:
    stage = ModuleStage(Masked(), 1)
    x, mask = torch.randn(3), torch.randn(3)
    with _C.StageContext(1, 0, 0, True, 42, 0):
        assert torch.equal(stage(x, mask, scale=3.0), x * mask * 3)


def test_a_module_as_a_stage_draws_random_numbers_as_one_layer() -> None:
    torch.manual_seed(0)
    whole, x = noisy_model(), torch.randn(2, 3, 8)
    [sequential] = split(nn.Sequential(whole), 1)
    torch.rand(3)
    assert torch.equal(run([ModuleStage(whole, 0)], x), run([sequential], x))


def test_a_stage_is_a_sequential_with_its_hooks() -> None:
    [_, stage] = split(noisy_model(), 4, 2)
    seen: list[Any] = []
    stage.register_forward_hook(lambda module, args, output: seen.append(output))
    output = run([stage], torch.randn(2, 8))
    assert seen[0] is output
    assert [type(layer) for layer in stage] == [nn.RReLU, nn.Linear]
    assert list(stage[:1].state_dict()) == []
    assert list(stage[1:].state_dict()) == ["5.weight", "5.bias"]


def test_layers_may_have_any_name() -> None:
    """nn.Sequential(OrderedDict(...)) takes these; a stage's own attributes are not in the way."""
    names = ("_layer_indices", "_layer_keywords", "_forward_with", "index", "value")
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    [stage] = split(model, 5)
    x = torch.randn(1, 2)
    assert torch.equal(stage(x), model(x))
    assert list(stage.state_dict()) == list(model.state_dict())
    assert not stage.eval().training


def test_layers_that_are_replaced_later_are_the_ones_that_run() -> None:
    """convert_sync_batchnorm and quantisation put other modules where the old ones were."""
    [stage] = split(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 2)
    stage._modules["1"] = nn.Sigmoid()
    x = torch.randn(1, 2)
    assert torch.equal(stage(x), stage._modules["0"](x).sigmoid())  # type: ignore[misc]


def test_contexts_nest_and_end() -> None:
    """A stage whose forward runs another pipeline's stage."""
    assert not _C.in_stage()
    with _C.StageContext(0, 0, 0, True, 1, 0) as outer:
        with _C.StageContext(1, 0, 0, False, 1, 0):
            assert _C.in_stage()
            assert not _C.stage_trains()
        assert _C.stage_trains()
        with pytest.raises(ValueError, match="entered already"), outer:
            pass
        assert _C.in_stage()
    assert not _C.in_stage()
    _C.seed_layer(0)  # outside of stages: nothing
