"""Holds that a newcomer's mistakes with pipelines are refused, on all ranks, by a sentence that
says what to do; and that waits in vain say once, in one sentence, who waited for whom in what.
"""

import functools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pydist
from conftest import Transport
from pipeline_reference import draw_batch, make_mlp
from pydist import MismatchError, PeerError, PipelineParallel, UsageError, schedule
from pydist.schedule import ScheduleError
from ranks import fresh_ranks, get_pool
from reference import expect_error

mse = nn.functional.mse_loss


def expect_usage(words: str, call: Callable[[], Any]) -> None:
    error = expect_error(UsageError, call)
    assert words in str(error), error


def text_of(error: BaseException) -> str:
    """With its notes, which Python 3.10 does not have."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# -- the target ------------------------------------------------------------------------------------


def failing_metrics(output: Tensor, target: Tensor) -> dict[str, float]:
    raise ValueError("no metrics")


def forget_the_target(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    pipeline = PipelineParallel(make_mlp(4), 2, mse)
    for run in (pipeline.step, pipeline.evaluate):
        error = expect_error((AttributeError, PeerError), functools.partial(run, x))
        assert isinstance(error, AttributeError) == (rank == 1)
        where = "in loss_fn (target= was not given on this rank)"
        assert where in text_of(error), text_of(error)
        metrics = functools.partial(run, x, target=target, metrics=failing_metrics)
        error = expect_error((ValueError, PeerError), metrics)
        assert "microbatch 0), in metrics" in text_of(error), text_of(error)
        expect_usage("give the target as target=", functools.partial(run, x, target))
        expect_usage("given as target=", functools.partial(run, x, target=target, labels=target))
        run(x, target=target)
    # A stage that fails is not taken for the loss.
    error = expect_error(Exception, lambda: pipeline.step(x[:, :2], target=target))
    assert "loss_fn" not in text_of(error)


def test_a_forgotten_or_misplaced_target() -> None:
    """mse_loss said that None has no size(), in "the forward"; step(x, y) raised TypeErrors about
    SequentialStage.forward()."""
    get_pool(2).run(forget_the_target)


# -- what is given to step() -----------------------------------------------------------------------


def return_wrong_metrics(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    pipeline = PipelineParallel(make_mlp(4), 2, mse)
    for wrong, words in (
        (1.5, "metrics returned float for microbatch 0"),
        ({"a": "much"}, "metric 'a' is of type str"),
        ({3: 1.0}, "metrics returned a dict with the key 3 for microbatch 0"),
    ):
        call = functools.partial(
            pipeline.evaluate, x, target=target, metrics=lambda *_, wrong=wrong: wrong
        )
        error = expect_error(UsageError if rank == 1 else PeerError, call)
        assert words in str(error), error
    result = pipeline.step(
        x, target=target, metrics=lambda *_: {"a": torch.tensor(2), "b": np.ones(1)}
    )
    assert result.metrics == {"a": 2.0, "b": 1.0}


def scale_by_torch(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    pipeline = PipelineParallel(make_mlp(4), 2, mse)
    scaler = torch.amp.GradScaler("cpu")
    words = "use pydist.GradScaler, whose ranks decide together"
    call = functools.partial(pipeline.step, x, target=target)
    if world_size == 1:
        call(loss_scale=scaler)
    else:
        expect_usage(words, lambda: call(loss_scale=scaler))
    call(loss_scale=pydist.GradScaler())


def train_without_backward(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    pipeline = PipelineParallel(make_mlp(4), 2, mse, "forward-only")
    expect_usage("forward-only has no backward", lambda: pipeline.step(x, target=target))
    pipeline.evaluate(x, target=target)


def test_what_step_is_given() -> None:
    """Strange metrics raised TypeErrors deep inside; torch's scaler let stages part; forwards alone
    left no gradients, silently."""
    get_pool(2).run(return_wrong_metrics)
    get_pool(2).run(scale_by_torch)
    get_pool(1).run(scale_by_torch)
    get_pool(2).run(train_without_backward)


class Undeclared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pydist.skip.stash("nobody's", x)
        return x


def stash_undeclared(rank: int, world_size: int) -> None:
    x, target = draw_batch(0)
    pipeline = PipelineParallel(nn.Sequential(Undeclared(), *make_mlp(3)), 2, mse)
    words = 'add @pydist.skippable(stash=("nobody\'s",)) to the class'
    error = expect_error((UsageError, PeerError), lambda: pipeline.step(x, target=target))
    assert words in str(error), error
    assert isinstance(error, UsageError) == (rank == 0)


def test_a_skip_that_nobody_declares() -> None:
    """It was found out only where the other stage popped it, and not why."""
    get_pool(2).run(stash_undeclared)


# -- construction ----------------------------------------------------------------------------------


class Branching(nn.Module):
    pass


def make_wrongly(rank: int, world_size: int) -> None:
    make = functools.partial(PipelineParallel, make_mlp(4), 2, mse)
    options = {"bucket_cap_mb": 1}
    expect_usage("(bucket_cap_mb) would have", lambda: make(data_parallel_options=options))
    wrapped = "in nn.Sequential(part, part, ...)"
    expect_usage(wrapped, lambda: PipelineParallel(Branching(), 2, mse))  # type: ignore[arg-type]
    with torch.device("meta"):
        model = make_mlp(4)
    expect_usage("callables that make the stages' modules", lambda: PipelineParallel(model, 2, mse))
    for shape, names, hint in (
        ((2,), ("pipe",), '(2,), mesh_dim_names=("pp",))'),
        ((1, 2), ("data", "pipe"), '(1, 2), mesh_dim_names=("dp", "pp"))'),
        ((1, 1, 2), ("a", "b", "c"), '(1, 1, 2), mesh_dim_names=("dp", "pp", "tp"))'),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        expect_usage(hint, lambda mesh=mesh: make(device_mesh=mesh))
    error = expect_error(MismatchError, lambda: PipelineParallel(make_mlp(4), 2 + rank, mse))
    assert "PipelineParallel was made differently on different ranks" in str(error)


def test_what_a_pipeline_is_made_of() -> None:
    get_pool(2).run(make_wrongly)


def make_of_different_models(rank: int, world_size: int) -> None:
    one = nn.Linear(4, 4)
    other = nn.Linear(4, 4, bias=False) if rank == 1 else nn.Linear(4, 4)
    wider = nn.Linear(4, 5 if rank == 1 else 4)
    double = nn.Linear(4, 4, dtype=torch.float64 if rank == 1 else None)
    words = "layer 1 of rank 1 has {}, that of rank 0 has {}"
    for last, theirs, mine in (
        (wider, "weight of shape (5, 4) and torch.float32", "weight of shape (4, 4) and"),
        (double, "weight of shape (4, 4) and torch.float64", "weight of shape (4, 4) and"),
        (other, "no further tensor", "bias of shape (4,) and torch.float32"),
    ):
        for model in (nn.Sequential(one, last), [one, last]):
            make = functools.partial(PipelineParallel, model, 2, mse, balance=None)
            if isinstance(model, nn.Sequential):
                make = functools.partial(make, balance=[1, 1])
            error = expect_error(MismatchError, make)
            assert words.format(theirs, mine) in str(error), error
    # What only one rank is given is nobody else's concern.
    PipelineParallel([nn.Linear(4, 4) if rank == 0 else Branching, lambda: wider], 2, mse)


def test_models_must_be_the_same_on_all_ranks() -> None:
    """A stage of another width on one rank was accepted where the cut was the same: a rank's own
    stages then came from a model that the others did not know."""
    get_pool(2).run(make_of_different_models)


def test_names_of_schedules() -> None:
    for wrong, meant in (("1F1B", "1f1b"), ("GPIPE", "gpipe"), ("zb_h1", "zb-h1")):
        for call in (schedule.build, lambda kind, *_: schedule.default_stages_per_rank(kind)):
            with pytest.raises(ScheduleError, match=f"'auto'.* Did you mean '{meant}'"):
                call(wrong, 2, 4)
    with pytest.raises(ScheduleError, match=r"'auto'[^?]*$"):
        schedule.build("quick", 2, 4)


def test_a_plot_is_titled_with_its_sizes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = schedule.build("1f1b", 3, 5).plot(tmp_path / "plan.png")
    assert figure.axes[0].get_title(loc="left") == "1f1b: 3 ranks, 3 stages, 5 microbatches"


# -- waits -----------------------------------------------------------------------------------------

CHECKED = "microbatch 0 in step 2 (evaluate), to run 1F0"


def wait_in_vain(rank: int, world_size: int, accident: str) -> list[str]:
    """The texts of the errors."""
    x, target = draw_batch(0)
    pipeline = PipelineParallel(make_mlp(4), 2, mse)
    pipeline.step(x, target=target)
    if rank == 0 and accident == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        return []
    calls = {
        "full_state_dict": pipeline.full_state_dict,
        "clip_grad_norm_": lambda: pipeline.clip_grad_norm_(1.0),
    }
    call = calls.get(accident, lambda: pipeline.evaluate(x, target=target))
    return [str(expect_error((pydist.TimeoutError, PeerError), call))]


def test_waits_are_described_once(transport: Transport) -> None:
    """They read "waited 5 s for rank 0 in receiving the input of stage 1, microbatch 0 in step 2
    (evaluate), to run rank 1 (pid 7), in 1F0 (forward of ...", and twice where a rank was dead."""
    env = {**transport.env, "PYDIST_TIMEOUT_S": "2"}
    killed = fresh_ranks(2, wait_in_vain, "kill", env=env)[1].value
    assert killed is not None
    for text in (killed[0], idle_text(env)):
        assert text.count("receiving the input of stage 1") == 1, text
        assert CHECKED in text
        assert "to run rank" not in text


def idle_text(env: dict[str, str]) -> str:
    value = fresh_ranks(2, wait_in_vain, "idle", env=env)[1].value
    text: str = value[0]
    return text


@pytest.mark.parametrize("method", ["full_state_dict", "clip_grad_norm_"])
def test_a_method_called_on_one_rank_alone_is_named(method: str) -> None:
    """The error named "all_gather of 1 int64 per rank", which nobody had called."""
    [text] = fresh_ranks(2, wait_in_vain, method, env={"PYDIST_TIMEOUT_S": "2"})[1].value
    assert text.startswith(f"{method}(), which all ranks of the pipeline must call"), text


def fail_before_the_other_begins(rank: int, world_size: int) -> str:
    x, target = draw_batch(0)
    pipeline = PipelineParallel(make_mlp(4), 2, mse)
    pipeline.step(x, target=target)
    if rank == 0:
        expect_usage("positional", lambda: pipeline.step(x, target))
    torch.distributed.barrier()
    if rank == 0:
        return ""
    return str(expect_error(PeerError, lambda: pipeline.step(x, target=target)))


def test_a_failure_of_a_step_that_this_rank_had_not_begun() -> None:
    """It said that "rank 1 had ended the step", which is not the one that failed."""
    _, text = get_pool(2).run(fail_before_the_other_begins)
    assert re.search(r"\(rank 1 \(pid \d+\) was about to begin that step\)$", text), text
