"""Holds what users of other pipelines ran into, one story each: batches that do not divide, losses
that are not means, arguments that are no tensors, outputs without gradients.

Ranks compute the reference themselves: one process that loops over the same microbatches.
"""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_reference import (
    assert_same_gradients,
    draw_batch,
    make_mlp,
    reference_step,
    train_both,
)
from pydist import GradScaler, MismatchError, PeerError, PipelineParallel, UsageError, schedule
from ranks import get_pool

mse = nn.functional.mse_loss


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


# -- batches ---------------------------------------------------------------------------------------


def batches_that_do_not_divide(rank: int, world_size: int) -> None:
    model = make_mlp(8)
    for rows, num_microbatches in [(8, 3), (5, 4), (2, 4), (1, 1), (1, 4)]:
        for kind in ("1f1b", "zb-v"):
            pipeline = PipelineParallel(copy.deepcopy(model), num_microbatches, mse, kind)
            train_both(model, pipeline, mse, num_microbatches, num_steps=2, rows=rows)
            whole = copy.deepcopy(model)
            x, target = draw_batch(0, rows)
            pipeline.zero_grad()
            for name, parameter in pipeline.named_parameters():
                parameter.data.copy_(dict(whole.named_parameters())[name].data)
            pipeline.step(x, target=target)
            mse(whole(x), target).backward()
            theirs = gradients(whole)
            for name, parameter in pipeline.named_parameters():
                torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_batches_that_do_not_divide(num_ranks: int) -> None:
    """C81 (pytorch#126600): receive buffers of the wrong size, pieces of zero rows, or a hang.
    Rows are shared out evenly, weights are shares of rows, and microbatches beyond the rows are
    absent."""
    get_pool(num_ranks).run(batches_that_do_not_divide)


def sizes_that_change(rank: int, world_size: int) -> None:
    model = make_mlp(8)
    pipeline = PipelineParallel(copy.deepcopy(model), 4, mse)
    for rows in (8, 3, 16, 1, 7):
        single = copy.deepcopy(model)
        x, target = draw_batch(rows, rows)
        pipeline.zero_grad()
        loss = pipeline.step(x, target=target)
        assert torch.equal(loss, reference_step(single, mse, x, target, 4))
        assert_same_gradients(dict(pipeline.named_parameters()), dict(single.named_parameters()))


def test_batch_sizes_may_change_from_step_to_step() -> None:
    get_pool(2).run(sizes_that_change)


def batch_and_target_of_different_sizes(rank: int, world_size: int) -> str:
    pipeline = PipelineParallel(make_mlp(4), 4, mse)
    x, _ = draw_batch(0, 2)
    _, target = draw_batch(0, 8)
    try:
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=target)
    except (MismatchError, PeerError) as error:
        good = make_mlp(4)
        train_both(good, PipelineParallel(copy.deepcopy(good), 4, mse), mse, 4, num_steps=1)
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_target_of_another_size_than_the_batch() -> None:
    """The batch and the target are given on different ranks: nobody sees both."""
    texts = get_pool(2).run(batch_and_target_of_different_sizes)
    assert all("rows" in text for text in texts)
    assert any(text.startswith("MismatchError") for text in texts)


# -- losses ----------------------------------------------------------------------------------------


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=-1)


def num_valid(target: Tensor) -> int:
    return int((target != -1).sum())


def weights_of_losses(rank: int, world_size: int) -> None:
    model = make_mlp(8)
    x, target = draw_batch(0)
    single = copy.deepcopy(model)
    pipeline = PipelineParallel(copy.deepcopy(model), 4, loss_fn=sum_loss, loss_reduction="sum")
    loss = pipeline.step(x, target=target)
    expected = reference_step(single, sum_loss, x, target, 4, weights=[1.0] * 4)
    assert torch.equal(loss, expected)
    assert_same_gradients(dict(pipeline.named_parameters()), dict(single.named_parameters()))

    # Unequal numbers of valid tokens, and a microbatch without any: the batch's own mean.
    labels = torch.tensor([0, -1, -1, -1, 3, 1, -1, -1])
    whole = copy.deepcopy(model)
    pipeline = PipelineParallel(copy.deepcopy(model), 4, token_loss, loss_weight=num_valid)
    loss = pipeline.step(x, target=labels)
    expected = token_loss(whole(x), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    theirs = gradients(whole)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-5, atol=1e-7)


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target, reduction="sum")


def test_mean_sum_and_token_weights() -> None:
    """C85 (torchtitan#2972): a mean loss divided by m, a sum not, and tokens by their number."""
    get_pool(2).run(weights_of_losses)


def accumulate(rank: int, world_size: int) -> None:
    model = make_mlp(4)
    single = copy.deepcopy(model)
    pipeline = PipelineParallel(copy.deepcopy(model), 2, mse)
    for step in range(3):
        x, target = draw_batch(step)
        pipeline.step(x, target=target)
        reference_step(single, mse, x, target, 2)
    assert_same_gradients(dict(pipeline.named_parameters()), dict(single.named_parameters()))


def test_several_steps_accumulate() -> None:
    """torch 2.13 divides what was accumulated once more."""
    get_pool(2).run(accumulate)


class Pairs:
    """Keeps what the loss got, by microbatch."""

    def __init__(self) -> None:
        self.means: list[tuple[float, float]] = []

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.means.append((output.mean().item(), target.mean().item()))
        return mse(output, target)


def outputs_meet_their_targets(rank: int, world_size: int) -> None:
    for kind in ("1f1b", "interleaved-1f1b", "zb-v"):
        pairs = Pairs()
        pipeline = PipelineParallel(
            [nn.Identity, Scale, nn.Identity, nn.Identity][: 2 * world_size]
            if kind != "1f1b"
            else [nn.Identity, Scale],
            4,
            pairs,
            kind,
        )
        x = torch.arange(7.0).repeat_interleave(1).reshape(7, 1).expand(7, 3).contiguous()
        pipeline.step(x, target=x)
        if pipeline.has_last_stage:
            assert [a for a, _ in pairs.means] == [b for _, b in pairs.means]
            assert len(pairs.means) == 4


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_outputs_meet_their_own_targets() -> None:
    """C92 (DeepSpeed#5729): output i came with labels i+1 where shapes varied."""
    get_pool(2).run(outputs_meet_their_targets)


def auxiliary_loss_and_scale(rank: int, world_size: int) -> None:
    model = make_mlp(4)
    x, target = draw_batch(0)
    scaled = PipelineParallel(copy.deepcopy(model), 4, mse)
    loss = scaled.step(x, target=target, loss_scale=1024.0)
    scaler = GradScaler(init_scale=1024.0)
    by_scaler = PipelineParallel(copy.deepcopy(model), 4, mse)
    assert torch.equal(by_scaler.step(x, target=target, loss_scale=scaler), loss)
    plain = PipelineParallel(copy.deepcopy(model), 4, mse)
    assert torch.equal(plain.step(x, target=target), loss)
    for one, two, three in zip(
        plain.parameters(), scaled.parameters(), by_scaler.parameters(), strict=True
    ):
        assert torch.equal(one.grad * 1024.0, two.grad)
        assert torch.equal(two.grad, three.grad)


def test_loss_scale() -> None:
    """C110 (torchtitan#803): a GradScaler around an internal backward."""
    get_pool(2).run(auxiliary_loss_and_scale)


# -- values between stages -------------------------------------------------------------------------


@dataclasses.dataclass
class Carried:
    hidden: Tensor
    mask: Tensor | None
    name: str


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, flag: bool = False, extra: Any = None, cfg: Any = ("a", 1)) -> Any:
        hidden = self.layer(x)
        carried = Carried(hidden, None, cfg[0])
        return carried, {"flag": flag, "sum": hidden.sum(), "count": torch.tensor(len(x))}, cfg


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(
        self, carried: Carried, more: dict[str, Any], config: Any, *, extra: Any = None
    ) -> Tensor:
        assert carried.mask is None
        assert carried.name == "b"
        assert config == ("b", 2)
        assert more["flag"] is True
        assert more["count"].dtype == torch.int64
        scale = extra["scale"] if extra is not None else 1.0
        return self.layer(carried.hidden) * scale + more["sum"] / more["count"]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = First(), Second()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.second(*self.first(x, **kwargs), extra=kwargs["extra"])


class WithKeywords(nn.Module):
    def __init__(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, x: Tensor) -> Any:
        return self.module(x, **self.kwargs)


def values_of_all_kinds(rank: int, world_size: int) -> None:
    model = Both()
    single = copy.deepcopy(model)
    x, target = draw_batch(0)
    kwargs: dict[str, Any] = {"flag": True, "extra": {"scale": 2.0}, "cfg": ("b", 2)}
    for kind in ("gpipe", "zb-h1"):
        single.zero_grad()
        expected = reference_step(WithKeywords(single, kwargs), mse, x, target, 4)
        theirs = dict(single.named_parameters())
        pipeline = PipelineParallel(
            [copy.deepcopy(model.first), copy.deepcopy(model.second)],
            4,
            mse,
            kind,
            stages_per_rank=2 // world_size,
        )
        assert torch.equal(pipeline.step(x, target=target, **kwargs), expected)
        names = {"0": "first", "1": "second"}
        own = {
            names[name[0]] + name[1:]: parameter for name, parameter in pipeline.named_parameters()
        }
        assert_same_gradients(own, theirs)


def test_values_of_all_kinds_cross() -> None:
    """C96 (torchtitan#3112): bool, None, strings, tuples, dicts and dataclasses between stages and
    as keyword arguments."""
    get_pool(2).run(values_of_all_kinds)


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, bool]:
        return self.main(x), self.side(x), bool(x[0, 0] > 0)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, main: Tensor, side: Tensor, both: bool) -> Tensor:
        return self.layer(main + side if both else main)


class Chained(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(*self.first(x))
        return output


def outputs_that_are_not_always_used(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    forked, choosing = Forked(), Choosing()
    for positive in ([0, 1, 0, 1], [0, 0, 0, 0]):
        x, target = draw_batch(0)
        for index, sign in enumerate(positive):
            x[2 * index, 0] = 1.0 if sign else -1.0
        for kind in ("1f1b", "zb-h1"):
            parts = [copy.deepcopy(forked), copy.deepcopy(choosing)]
            single = nn.ModuleList(copy.deepcopy(parts))
            pipeline = PipelineParallel(parts, 4, mse, kind)
            pipeline.step(x, target=target)
            reference_step(Chained(single[0], single[1]), mse, x, target, 4)
            assert_same_gradients(
                dict(pipeline.named_parameters()), dict(single.named_parameters())
            )


def test_outputs_that_are_not_always_used() -> None:
    """C94 (pytorch#152827): a received tensor that gets no gradient, in some microbatches or in
    all: the parameters behind it get what they get in one process, zeros or None."""
    get_pool(2).run(outputs_that_are_not_always_used)


def frozen_stages(rank: int, world_size: int) -> None:
    for frozen in (range(4), range(4, 8), []):
        model = make_mlp(8)
        for index in frozen:
            for parameter in model[index].parameters():
                parameter.requires_grad_(False)
        for kind in ("1f1b", "zb-v"):
            pipeline = PipelineParallel(copy.deepcopy(model), 3, mse, kind, balance="uniform")
            single = copy.deepcopy(model)
            x, target = draw_batch(0)
            pipeline.step(x, target=target)
            reference_step(single, mse, x, target, 3)
            assert_same_gradients(
                dict(pipeline.named_parameters()), dict(single.named_parameters())
            )


def test_frozen_stages() -> None:
    get_pool(2).run(frozen_stages)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        assert mask.shape == (1, x.shape[0])
        return self.layer(x) * mask.t().unsqueeze(-1)


def sequence_first(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    stages = [Masked(), Masked()]
    single = copy.deepcopy(stages)
    x, target = torch.randn(5, 6, 8), torch.randn(5, 6, 8)
    mask = torch.rand(1, 5)
    pipeline = PipelineParallel(stages, 3, mse, chunk_dim=1, replicate=("mask",))
    pipeline.step(x, target=target, mask=mask)
    for piece, goal in zip(x.tensor_split(3, 1), target.tensor_split(3, 1), strict=True):
        (mse(single[1](single[0](piece, mask=mask), mask=mask), goal) / 3).backward()
    theirs = dict(nn.ModuleList(single).named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad)


def test_another_dimension_and_replicated_arguments() -> None:
    """C109 (pytorch#148458): [T, B, 8] cut along dimension 1, and a mask that is not cut."""
    get_pool(2).run(sequence_first)


def arguments_of_later_stages(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    stages: list[Any] = [nn.Linear(8, 8), Masked()]
    x, target, mask = torch.randn(4, 3, 8), torch.randn(4, 3, 8), torch.rand(1, 2)
    pipeline = PipelineParallel(stages, 2, mse, replicate=("mask",))
    if rank == 0:
        pipeline.step(x)
    else:
        pipeline.step(target=target, mask=mask)
    try:
        pipeline.step(x, target=target)
    except (TypeError, PeerError) as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error} {notes}"
    return ""


def test_arguments_that_only_a_later_stage_takes() -> None:
    """C112 (pytorch#128115): given where the stage is; missing, it is that stage's TypeError, and
    the others name the action."""
    texts = get_pool(2).run(arguments_of_later_stages)
    assert texts[1].startswith("TypeError")
    assert "mask" in texts[1]
    assert "1F0" in texts[1]
    assert texts[0].startswith("PeerError")
    assert "TypeError" in texts[0]
    assert "1F0" in texts[0]


# -- metrics, evaluation ---------------------------------------------------------------------------


def count_positive(output: Tensor, target: Tensor) -> dict[str, Any]:
    assert not torch.is_grad_enabled()
    return {"rows": len(output), "positive": (output > 0).float().mean()}


def evaluation(rank: int, world_size: int) -> None:
    model = make_mlp(8)
    x, target = draw_batch(0, 7)
    for kind in ("1f1b", "interleaved-zb"):
        pipeline = PipelineParallel(copy.deepcopy(model), 3, mse, kind)
        with torch.no_grad():
            expected = sum(
                mse(model(piece), goal) * (len(piece) / 7)
                for piece, goal in zip(x.tensor_split(3), target.tensor_split(3), strict=True)
            )
        loss = pipeline.evaluate(x, target=target)
        assert torch.equal(loss, expected)
        with torch.no_grad():
            output = pipeline(x)
            result = pipeline.evaluate(
                x, target=target, metrics=count_positive, return_outputs=True
            )
        assert torch.equal(result.loss, expected)
        assert result.metrics["rows"] == pytest.approx(sum(r * r / 7 for r in (3, 2, 2)))
        torch.testing.assert_close(
            result.metrics["positive"], (model(x) > 0).float().mean(), check_dtype=False
        )
        for found in (output, result.outputs):
            if pipeline.has_last_stage:
                assert not found.requires_grad
                torch.testing.assert_close(found, model(x).detach())
            else:
                assert found is None
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        result = pipeline.step(x, target=target, return_outputs=True)
        assert result.metrics is None
        assert (result.outputs is not None) == pipeline.has_last_stage


def test_evaluation_runs_no_backward() -> None:
    """C89 (pytorch#157795): losses and outputs without gradients, merged in order."""
    get_pool(2).run(evaluation)


def modes(rank: int, world_size: int) -> None:
    pipeline = PipelineParallel(make_mlp(4), 2, mse)
    assert pipeline.eval() is pipeline
    assert not any(module.training for module in pipeline.modules())
    assert not any(stage.training for stage in pipeline.local_stages.values())
    pipeline.train()
    assert all(stage.training for stage in pipeline.local_stages.values())


def test_train_and_eval() -> None:
    get_pool(2).run(modes)


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight.square().sum()


def auxiliary_losses(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), WithAuxiliary()]

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return mse(output[0], target) + 0.1 * output[1]

    def metrics(output: tuple[Tensor, Tensor], target: Tensor) -> dict[str, Tensor]:
        return {"auxiliary": output[1]}

    single = nn.Sequential(*copy.deepcopy(stages))
    x, target = draw_batch(0)
    for kind in ("1f1b", "zb-h1"):
        single.zero_grad()
        pipeline = PipelineParallel(copy.deepcopy(stages), 4, loss_fn, kind)
        result = pipeline.step(x, target=target, metrics=metrics)
        reference_step(single, loss_fn, x, target, 4)
        torch.testing.assert_close(result.metrics["auxiliary"], single[1](x)[1].detach())
        assert_same_gradients(dict(pipeline.named_parameters()), dict(single.named_parameters()))


def test_an_auxiliary_loss_in_one_stage() -> None:
    """C114 (Megatron-LM#1444): a metric that one stage has does not make the others hang."""
    get_pool(2).run(auxiliary_losses)


def metrics_of_numpy(rank: int, world_size: int) -> str:
    pipeline = PipelineParallel(make_mlp(2), 4, mse, "gpipe")
    x, target = draw_batch(0)

    def metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
        values = output.detach().numpy()
        first = np.float64(values[0, 0])
        return {"mean": values.mean(), "first": first, "one": np.ones(1), "rows": np.int64(2)}

    result = pipeline.step(x, target=target, metrics=metrics)
    assert all(type(value) is float for value in result.metrics.values())
    output = pipeline(x)
    if output is not None:
        assert result.metrics["mean"] == pytest.approx(output.mean().item())
        assert result.metrics["first"] == pytest.approx(output[::2, 0].mean().item())
    assert (result.metrics["one"], result.metrics["rows"]) == (1.0, 2.0)
    try:
        pipeline.step(x, target=target, metrics=lambda output, target: {"shape": "2 by 6"})
    except (UsageError, PeerError) as error:
        return str(error)
    return ""


def test_metrics_may_be_numbers_of_numpy() -> None:
    """As mean() and scikit-learn give them. Half of them were refused, as what 'cannot go to the
    next stage'; what is no number is named."""
    for text in get_pool(2).run(metrics_of_numpy):
        assert "metric 'shape' is of type str; metrics(output, target) gives a dict of n" in text


# -- autocast --------------------------------------------------------------------------------------


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        output = self.layer(x)
        assert output.dtype == torch.bfloat16
        return output


def float_loss(output: Tensor, target: Tensor) -> Tensor:
    return mse(output.float(), target)


def under_autocast(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    stages = [Casting(), Casting()]
    single = nn.Sequential(*copy.deepcopy(stages))
    x, target = draw_batch(0)
    for kind in ("1f1b", "zb-h1"):
        single.zero_grad()
        pipeline = PipelineParallel(copy.deepcopy(stages), 4, float_loss, kind)
        total = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipeline.step(x, target=target)
            losses = [
                float_loss(single(piece), goal) / 4
                for piece, goal in zip(x.tensor_split(4), target.tensor_split(4), strict=True)
            ]
        for each in losses:
            each.backward()
            total = each.detach() if total is None else total + each.detach()
        assert torch.equal(loss, total)
        assert_same_gradients(dict(pipeline.named_parameters()), dict(single.named_parameters()))
        seen = {dtype for stage in pipeline.local_stages.values() for dtype in stage.seen}
        assert seen == ({torch.float32} if rank == 0 else {torch.bfloat16})


def test_autocast_reaches_the_stages() -> None:
    """C107 (pytorch#116183): autocast outside had no effect, or boundaries had a fixed type."""
    get_pool(2).run(under_autocast)


# -- wrong arguments -------------------------------------------------------------------------------


def wrong_constructions(rank: int, world_size: int) -> list[str]:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    five = schedule.build("1f1b", num_ranks=2, num_microbatches=5)
    three = schedule.build("1f1b", num_ranks=3, num_microbatches=2)
    wrong: list[Any] = [
        lambda: PipelineParallel(layers, 2, mse, "interleaved-1f1b"),
        lambda: PipelineParallel(layers, 2, mse, "zb-v"),
        lambda: PipelineParallel(layers[:1], 2, mse),
        lambda: PipelineParallel(nn.Sequential(layers[0]), 2, mse),
        lambda: PipelineParallel(layers, 2, mse, five),
        lambda: PipelineParallel(layers, 2, mse, three),
        lambda: PipelineParallel(layers, 2, mse, "unknown"),
        lambda: PipelineParallel(layers, 0, mse),
        lambda: PipelineParallel(layers, 2, mse, loss_reduction="max"),
        lambda: PipelineParallel(nn.Linear(2, 2), 2, mse),
        lambda: PipelineParallel(layers, 2, mse, balance=[1, 1]),
        lambda: PipelineParallel(layers, 1 if rank else 2, mse),
    ]
    texts = []
    for make in wrong:
        with pytest.raises((ValueError, RuntimeError)) as error:
            make()
        texts.append(f"{type(error.value).__name__}: {error.value}")
    return texts


def test_wrong_constructions_raise_on_every_rank() -> None:
    """C113 (torchtitan#774): a stage count that does not fit the schedule was a KeyError inside."""
    first, second = get_pool(2).run(wrong_constructions)
    assert first == second
    words = [
        "2 modules for 4 stages",
        "2 modules for 4 stages",
        "1 modules for 2",
        "1 layers for 2",
    ]
    for text, word in zip(first, words, strict=False):
        assert word in text
    assert "5 microbatches" in first[4]
    assert "3 ranks" in first[5]
    assert first[-1].startswith("MismatchError")


def wrong_steps(rank: int, world_size: int) -> list[str]:
    model = make_mlp(4)
    pipeline = PipelineParallel(copy.deepcopy(model), 2, mse)
    x, target = draw_batch(0)
    no_loss = PipelineParallel(copy.deepcopy(model), 2)
    wrong: list[Any] = [
        lambda: pipeline.step(None, target=target),
        lambda: pipeline.step(target=target),
        lambda: pipeline.step(x, target=target, flag=True),
        lambda: no_loss.step(x, target=target),
        lambda: no_loss.evaluate(x, target=target),
    ]
    texts = []
    for step in wrong:
        with pytest.raises((UsageError, PeerError)) as error:
            step()
        texts.append(f"{type(error.value).__name__}: {error.value}")
        dist.barrier()  # a rank keeps its last failure only
    train_both(model, pipeline, mse, 2, num_steps=1)
    return texts


def test_wrong_steps_raise_on_every_rank_and_the_next_one_works() -> None:
    first, second = get_pool(2).run(wrong_steps)
    for text in first[:3]:
        assert text.startswith("UsageError")
    for index, word in enumerate(
        ["needs the batch", "needs the batch", "flag", "loss_fn", "loss_fn"]
    ):
        assert word in first[index]
        assert word in second[index]
