"""Holds pipelines whose tensors are on a device, the emulated one, to what they promise on the CPU:
the bits of one process, whatever fails in between. Streams run late and in random order there.
"""

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emulated
from channels import activation, gradient, make_channel, receive_tensor, send_tensor, step
from emulated import emulated_pool, run_on_device
from pipeline_reference import draw_batch, make_mlp, reference_step, sgd, train_both
from pydist import PipelineParallel, schedule
from pydist._C import Channel
from pydist._stage_device import check_place, device_of
from pydist.errors import PeerError, UsageError
from pydist.skip import pop, skippable, stash
from ranks import start_ranks
from reference import OneProcess
from test_channel import same_bits, values
from test_pipeline_hybrid import (
    assert_matches,
    batch_of,
    expect_step,
    make_pipeline,
    mesh_of,
    step_of,
)

mse = nn.functional.mse_loss


def links(size: int) -> list[tuple[int, int]]:
    """Between all pairs."""
    return [(a, b) for a in range(size) for b in range(size) if a != b]


def device_channel(size: int, **options: Any) -> Channel:
    return make_channel(device=torch.device("cpu"), links=links(size), **options)


def channel_of(pipeline: PipelineParallel) -> Channel:
    channel = pipeline._parts.frame._tied._channel
    assert channel is not None
    return channel


# -- whole steps --------------------------------------------------------------------------------

MICROBATCHES = {2: (2, 5), 3: (5,), 4: (8,)}


def every_schedule_is_exact(rank: int, world_size: int) -> int:
    model = make_mlp(16)
    count = 0
    for num_microbatches in MICROBATCHES[world_size]:
        for kind in schedule.kinds():
            if kind == "forward-only":
                continue
            if kind == "dualpipe-v" and num_microbatches < 2 * world_size:
                continue
            try:
                pipeline = PipelineParallel(
                    copy.deepcopy(model), num_microbatches, mse, kind, balance="uniform"
                )
                train_both(model, pipeline, mse, num_microbatches)
            except Exception as error:
                error.add_note(f"{kind}, {num_microbatches} microbatches")
                raise
            assert channel_of(pipeline).counters()["device_nbytes"] > 0
            count += 1
    return count


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_schedule_gives_the_bits_of_one_process(num_ranks: int) -> None:
    counts = emulated_pool(num_ranks).run(every_schedule_is_exact, seed=num_ranks)
    assert min(counts) >= 8


def shapes_that_change(rank: int, world_size: int) -> None:
    model = make_mlp(8)
    pipeline = PipelineParallel(copy.deepcopy(model), 3, mse)
    single = copy.deepcopy(model)
    own, theirs = dict(pipeline.named_parameters()), dict(single.named_parameters())
    for number, rows in enumerate((8, 3, 11, 2, 8)):  # the fourth has an absent microbatch
        x, target = draw_batch(number, rows)
        expected = reference_step(single, mse, x, target, 3)
        assert torch.equal(pipeline.step(x, target=target), expected)
        assert torch.equal(pipeline.evaluate(x, target=target), expected)
        for name, parameter in own.items():
            assert torch.equal(parameter.grad, theirs[name].grad), name


def test_shapes_change_from_microbatch_to_microbatch_and_from_step_to_step() -> None:
    emulated_pool(2).run(shapes_that_change)


def nothing_is_described_twice(rank: int, world_size: int) -> None:
    model = make_mlp(8)
    pipeline = PipelineParallel(copy.deepcopy(model), 3, mse)  # of 3, 3 and 2 rows
    counters = []
    for number in range(4):
        x, target = draw_batch(number)
        pipeline.step(x, target=target)
        counters.append(channel_of(pipeline).counters())
    before, after = counters[1], counters[3]
    # How values are put together, and two sizes of them; those of the result too on the last rank.
    assert after["num_described"] == before["num_described"] == 3 + rank
    assert after["num_messages"] > before["num_messages"]


def test_what_a_value_looks_like_is_told_once() -> None:
    emulated_pool(2).run(nothing_is_described_twice)


class Pair(nn.Module):
    """A tuple, with an integer tensor and a nested dict; no gradient for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.linear(x)
        positions = torch.arange(x.shape[0])
        return y, {"positions": positions, "unused": y * 2, "detached": [y.detach(), None, 3]}


class TakesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, y: Tensor, extra: dict[str, Any]) -> Tensor:
        detached, nothing, three = extra["detached"]
        assert nothing is None
        assert three == 3
        return self.linear(y).relu_() + detached + extra["positions"].unsqueeze(1)


def nested_values(rank: int, world_size: int) -> None:
    torch.manual_seed(4)
    stages = [Pair(), TakesPair()]
    single = copy.deepcopy(stages)

    def whole(x: Tensor) -> Tensor:
        result: Tensor = single[1](*single[0](x))
        return result

    pipeline = PipelineParallel(stages, 4, mse)
    for number in range(3):
        x, target = draw_batch(number)
        for each in [*stages, *single]:
            each.zero_grad()
        losses = []
        for piece, goal in zip(x.chunk(4), target.chunk(4), strict=True):
            loss = mse(whole(piece), goal)
            loss.backward(torch.tensor(0.25))
            losses.append(loss.detach() * 0.25)
        assert torch.equal(pipeline.step(x, target=target), sum(losses))
        for parameter, expected in zip(
            stages[rank].parameters(), single[rank].parameters(), strict=True
        ):
            assert torch.equal(parameter.grad, expected.grad)


def test_nested_values_and_gradients_that_nobody_wants() -> None:
    emulated_pool(2).run(nested_values)


class KeepsItsOutput(nn.Module):
    """Returns the same memory for every microbatch, filled anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 6), persistent=False)
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept.copy_(x)
        return self.kept


def output_is_filled_again(rank: int, world_size: int) -> None:
    pipeline = PipelineParallel([KeepsItsOutput(), nn.Linear(6, 6)], 4, mse)
    x, _ = draw_batch(0)
    for _ in range(3):
        outputs = pipeline(x)
        if rank == 1:
            # A kernel of another number of rows may round otherwise.
            parts = [pipeline.local_stages[1](part) for part in x.chunk(4)]
            assert torch.equal(outputs, torch.cat(parts))


def test_a_stage_may_fill_its_output_again() -> None:
    emulated_pool(2).run(output_is_filled_again)


@skippable(stash=("early",))
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        stash("early", y)
        return torch.tanh(y)


@skippable(pop=("early",))
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        early = pop("early")
        assert early is not None
        return x * early


class Whole(nn.Sequential):
    """The same layers in one process."""

    def forward(self, x: Tensor) -> Tensor:
        y = self[0].linear(x)
        z = torch.tanh(y)
        for layer in self[1:-1]:
            z = layer(z)
        return z * y


def skips(rank: int, world_size: int) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(Stash(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Pop())
    for kind in ("1f1b", "zb-h1"):
        whole = Whole(*copy.deepcopy(model))
        pipeline = PipelineParallel(copy.deepcopy(model), 4, mse, kind, balance=[1, 2, 2])
        for number in range(3):
            x, target = draw_batch(number)
            whole.zero_grad()
            pipeline.zero_grad()
            expected = reference_step(whole, mse, x, target, 4)
            assert torch.equal(pipeline.step(x, target=target), expected)
            for name, parameter in pipeline.named_parameters():
                assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name


def test_skips_over_stages() -> None:
    emulated_pool(3).run(skips)


def dropout_is_that_of_one_rank(rank: int, world_size: int) -> list[Tensor]:
    torch.manual_seed(9)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)
    )
    pipeline = PipelineParallel(model, 4, mse, "zb-h1" if world_size == 2 else "1f1b")
    return [pipeline.step(*draw_batch(k)[:1], target=draw_batch(k)[1]) for k in range(3)]


def test_dropout_depends_on_nothing_but_the_seed() -> None:
    (alone,) = emulated_pool(1).run(dropout_is_that_of_one_rank)
    for num_ranks in (2, 3):
        for losses in emulated_pool(num_ranks).run(dropout_is_that_of_one_rank):
            assert all(map(torch.equal, losses, alone))


def tied_clipped_and_saved(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), last)
    single = copy.deepcopy(model)
    pipeline = PipelineParallel(model, 4, mse)
    optimizers = [sgd(single.parameters()), sgd(pipeline.parameters())]
    for number in range(3):
        x, target = draw_batch(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference_step(single, mse, x, target, 4)
        pipeline.step(x, target=target)
        expected = nn.utils.clip_grad_norm_(single.parameters(), 0.1)
        assert torch.allclose(pipeline.clip_grad_norm_(0.1), expected)
        for optimizer in optimizers:
            optimizer.step()
    whole = pipeline.full_state_dict()
    assert whole is not None
    for name, value in single.state_dict().items():
        assert torch.allclose(whole[name], value, atol=1e-6), name
    pipeline.load_state_dict(whole)


def test_tied_weights_clipping_and_state() -> None:
    emulated_pool(2).run(tied_clipped_and_saved)


def auto_schedule(rank: int, world_size: int) -> str:
    model = make_mlp(8)
    pipeline = PipelineParallel(copy.deepcopy(model), 4, mse, "auto")
    train_both(model, pipeline, mse, 4, num_steps=5)
    return pipeline.schedule.name


def test_auto_measures_the_device() -> None:
    assert emulated_pool(2).run(auto_schedule) == ["auto", "auto"]


def hybrid_of_four(rank: int, world_size: int, kind: str) -> None:
    mesh = mesh_of()
    replica = mesh.get_local_rank("dp")
    model = make_mlp(16)
    expected = OneProcess(model, 2, sgd)
    pipeline = make_pipeline(model, schedule=kind)
    optimizer = sgd(pipeline.parameters())
    for number in range(3):
        batches = [batch_of(0, number), batch_of(1, number)]
        optimizer.zero_grad()
        expected.zero_grad()
        losses = expect_step(expected, batches)
        loss = step_of(pipeline, batches[replica])
        assert abs(float(loss) - losses[replica]) < 1e-6 * abs(losses[replica])
        for each in (optimizer, *expected.optimizers):
            each.step()
        assert_matches(pipeline, expected.module, mesh.get_group("dp"))


@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_two_pipelines_train_replicas(kind: str) -> None:
    emulated_pool(4).run(hybrid_of_four, kind)


# -- failures -----------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises in one of its forwards, or backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.countdown = {"forward": -1, "backward": -1}

    def tick(self, what: str) -> None:
        self.countdown[what] -= 1
        if self.countdown[what] == -1:
            raise ValueError(f"planned, in {what}")

    def forward(self, x: Tensor) -> Tensor:
        self.tick("forward")
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.tick("backward"))
        return y


def step_fails_and_the_next_works(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(*[Fails() for _ in range(world_size)])
    pipeline = PipelineParallel(copy.deepcopy(model), 6, mse, kind)
    x, target = draw_batch(0, 12)
    for what, number, where in [
        (what, number, where)
        for what in ("forward", "backward")
        for number in (0, 2, 5)
        for where in range(world_size)
    ]:
        if where == rank:
            pipeline.local_stages[rank][0].countdown[what] = number
        with pytest.raises(ValueError if where == rank else PeerError, match="planned"):
            pipeline.step(x, target=target)
        pipeline.zero_grad()
        expected = copy.deepcopy(model)
        loss = reference_step(expected, mse, x, target, 6)
        assert torch.equal(pipeline.step(x, target=target), loss)
        for name, parameter in pipeline.named_parameters():
            assert torch.equal(parameter.grad, expected.get_parameter(name).grad), name
        pipeline.zero_grad()


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb-h1"])
def test_after_a_step_that_raised_the_next_works(kind: str) -> None:
    emulated_pool(3).run(step_fails_and_the_next_works, kind, seed=1)


def messages_of_failed_steps(rank: int, world_size: int) -> None:
    channel = device_channel(2, ring_nbytes=4096)
    for attempt in range(4):
        try:
            with step(channel):
                if rank == 0:
                    for microbatch in range(20):
                        key = activation(microbatch)
                        send_tensor(channel, 1, key, torch.full((40 + attempt,), 1.0 * microbatch))
                    receive_tensor(channel, 1, gradient(0))
                else:
                    receive_tensor(channel, 0, activation(3 + attempt))
                    raise ValueError("planned")
        except (ValueError, PeerError):
            pass
        with step(channel):  # what was sent in vain does not come in the place of this
            if rank == 0:
                send_tensor(channel, 1, activation(0), torch.full((40,), -1.0))
            else:
                got = receive_tensor(channel, 0, activation(0))
                assert torch.equal(got, torch.full((40,), -1.0))
    if rank == 1:
        assert channel.counters()["num_dropped"] > 0


def test_links_still_pair_up_after_messages_that_nobody_wanted() -> None:
    for seed in range(3):
        emulated_pool(2).run(messages_of_failed_steps, seed=seed)


def values_in_any_order(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    sent = values()
    channel = device_channel(2)
    for _ in range(3):
        with step(channel):
            if rank == 0:
                for microbatch, tensor in enumerate(sent.values()):
                    send_tensor(channel, 1, activation(microbatch), tensor)
                channel.send(1, gradient(0), [(None, False), (torch.ones(3), False)])
            else:
                slots, _, _ = channel.receive(0, gradient(0), "")
                assert slots[0][0] is None
                for microbatch, (name, tensor) in reversed(list(enumerate(sent.items()))):
                    got = receive_tensor(channel, 0, activation(microbatch))
                    assert same_bits(got, tensor), name
                    if got.numel() and got.dtype == torch.float32:
                        got.fill_(7.0)  # it is this rank's own


def test_every_value_arrives_whole_and_in_any_order() -> None:
    emulated_pool(2).run(values_in_any_order)


def stands_in(rank: int, world_size: int, killed: int) -> None:
    run_on_device(rank, world_size, a_rank_dies, (killed,), 0)


def a_rank_dies(rank: int, world_size: int, killed: int) -> None:
    model = make_mlp(6)
    pipeline = PipelineParallel(copy.deepcopy(model), 4, mse)
    x, target = draw_batch(0)
    pipeline.step(x, target=target)
    if rank == killed:
        layer = pipeline.local_stages[rank][0]
        layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    for _ in range(2):
        with pytest.raises(PeerError, match=f"rank {killed} "):
            pipeline.step(x, target=target)


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_rank_that_dies_is_named(killed: int) -> None:
    env = {emulated.LIBRARY: emulated.library()}
    outcomes = start_ranks(3, stands_in, killed, env=env).join()
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok == (rank != killed), outcome.traceback


# -- arguments ----------------------------------------------------------------------------------


def test_all_of_a_rank_is_on_one_device() -> None:
    layer = nn.Linear(2, 2)
    assert device_of([("0", layer), ("1", nn.Tanh())]) == torch.device("cpu")
    assert device_of([("0", nn.Tanh())]) is None
    with pytest.raises(UsageError, match=r"0\.weight is on the meta device"):
        device_of([("0", nn.Linear(2, 2, device="meta"))])


def test_a_batch_elsewhere_is_named() -> None:
    elsewhere, here = torch.empty(2, device="meta"), torch.device("cpu")
    check_place((torch.ones(2), None, 3), "the batch", here, "first")
    check_place((torch.ones(2), elsewhere), "the batch", torch.device("meta"), "first")
    with pytest.raises(UsageError, match="the batch is on meta, but the first stage on cpu"):
        check_place((elsewhere,), "the batch", here, "first")
    with pytest.raises(UsageError, match=r"the target is on the CPU.*\.to\('meta'\)"):
        check_place({"a": torch.ones(2)}, "the target", torch.device("meta"), "last")
