"""Holds the promise of hybrids: pipelines that train replicas give the mean over replicas of what
one process per replica gives, with every schedule, and all replicas have the same bits.

Four ranks: two pipelines of two ranks each.
"""

import contextlib
import copy
import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pydist
from conftest import Transport
from pipeline_reference import draw_batch, make_mlp, sgd
from pydist import PipelineParallel, schedule
from ranks import Outcome, fresh_ranks
from reference import OneProcess, assert_same_on_all_ranks, difference, expect_error

NUM_MICROBATCHES = 4
ORDERS = (("dp", "pp"), ("pp", "dp"))
MSE = nn.functional.mse_loss

Batch = tuple[Tensor, Tensor]


@functools.cache
def mesh_of(order: tuple[str, str] = ORDERS[0]) -> DeviceMesh:
    """Made once per process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=order)


def make_pipeline(model: nn.Module, **options: Any) -> PipelineParallel:
    """Of a copy that is another one on each replica: training starts from the first one's."""
    order = options.pop("order", ORDERS[0])
    arguments = {"num_microbatches": NUM_MICROBATCHES, "loss_fn": MSE, "balance": "uniform"}
    own = copy.deepcopy(model)
    mesh = mesh_of(order)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(1 + mesh.get_local_rank("dp"))
    where: dict[str, Any] = {"device_mesh": mesh}
    if options.pop("by_groups", False):
        where = {"process_group": mesh.get_group("pp"), "data_parallel_group": mesh.get_group("dp")}
    return PipelineParallel(own, **where, **{**arguments, **options})


def batch_of(replica: int, step: int, rows: int = 8) -> Batch:
    return draw_batch(10 * step + replica, rows)


def microbatch_loss(
    model: nn.Module, replica: int, batches: list[Batch], index: int, loss_fn: Any
) -> Tensor | None:
    """Weighted by its rows; None where the batch of this replica has no such microbatch."""
    x, target = batches[replica]
    pieces = min(NUM_MICROBATCHES, len(x))
    if index >= pieces:
        return None
    piece, goal = x.tensor_split(pieces)[index], target.tensor_split(pieces)[index]
    loss: Tensor = loss_fn(model(piece), goal) * (len(piece) / len(x))
    return loss


def expect_step(
    expected: OneProcess, batches: list[Batch], loss_fn: Any = MSE, synced: bool = True
) -> list[float]:
    """The losses of the replicas."""
    losses = [0.0, 0.0]

    def noted(model: nn.Module, replica: int, index: int) -> Tensor | None:
        loss = microbatch_loss(model, replica, batches, index, loss_fn)
        losses[replica] += 0.0 if loss is None else float(loss.detach())
        return loss

    for index in range(NUM_MICROBATCHES):
        expected.backward(noted, index, synced=False)
    if synced:
        expected.average()
    return losses


def step_of(pipeline: PipelineParallel, batch: Batch, **options: Any) -> Any:
    """Each rank gives what it has to give."""
    x, target = batch
    return pipeline.step(
        x if pipeline.has_first_stage else None,
        target=target if pipeline.has_last_stage else None,
        **options,
    )


def assert_matches(
    pipeline: PipelineParallel,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    factor: float = 1,
) -> None:
    """Gradients and parameters are those of `module`; replicas have the same bits."""
    theirs = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in pipeline.named_parameters():
        problem = difference(parameter.grad, theirs[name].grad, factor)
        assert problem is None, f"gradient of {name}: {problem}"
        problem = difference(parameter, theirs[name], 10 * factor)
        assert problem is None, f"{name}: {problem}"
    for values in (pipeline.parameters(), (p.grad for p in pipeline.parameters())):
        assert_same_on_all_ranks(values, group)


def assert_reduced_once(pipeline: PipelineParallel, num_rounds: int, kind: str) -> None:
    """Each unit once a step, and the first within the action that completes the gradients."""
    records = pipeline.records()
    for stage, replica in pipeline.replicas.items():
        reducer = replica.reducer_of_stage
        counters = reducer.counters()
        assert counters["num_rounds"] == num_rounds
        nbytes = sum(nbytes for _, nbytes, _ in reducer.units())
        assert counters["moved_nbytes"] == num_rounds * nbytes
        *_, (start_ns, end_ns) = (
            (record[1], record[2])
            for record in records
            if record[0].startswith((f"{stage}B", f"{stage}W"))
        )
        _, _, published_ns, backward_end_ns, _ = reducer.last_round_ns()
        assert start_ns <= published_ns <= backward_end_ns <= end_ns


def train(
    rank: int, world_size: int, order: tuple[str, str], kind: str, num_layers: int, options: Any
) -> None:
    mesh = mesh_of(order)
    replica = mesh.get_local_rank("dp")
    model = make_mlp(num_layers)
    expected = OneProcess(model, 2, sgd)
    pipeline = make_pipeline(model, order=order, schedule=kind, **options)
    optimizer = sgd(pipeline.parameters())
    pipeline.record()
    for step in range(3):
        batches = [batch_of(0, step), batch_of(1, step)]
        optimizer.zero_grad()
        expected.zero_grad()
        losses = expect_step(expected, batches)
        loss = step_of(pipeline, batches[replica])
        assert abs(float(loss) - losses[replica]) < 1e-6 * abs(losses[replica])
        for each in (optimizer, *expected.optimizers):
            each.step()
        assert_matches(pipeline, expected.module, mesh.get_group("dp"))
        assert_reduced_once(pipeline, step + 1, kind)


def train_with_every_schedule(rank: int, world_size: int, order: tuple[str, str]) -> None:
    for kind in schedule.kinds():
        if kind != "forward-only":
            train(rank, world_size, order, kind, 16, {})


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_schedule_on_two_by_two_ranks(transport: Transport, order: tuple[str, str]) -> None:
    """Losses, gradients and parameters over three steps are within 1e-6 of one process, whichever
    dimension of the mesh comes first; each unit is reduced once a step."""
    transport.pool(4).run(train_with_every_schedule, order)


def train_with_options(rank: int, world_size: int) -> None:
    for options in (
        {"bucket_cap_mb": 0.0001},
        {"gradient_as_bucket_view": True},
        {"unused_parameters": "error", "audit_every": 1},
    ):
        made_by = {"by_groups": True, "data_parallel_options": options}
        train(rank, world_size, ORDERS[0], "zb-v", 16, made_by)
    gradients = []
    for options in ({}, {"wire_dtype": torch.bfloat16}, {"hook": "bf16"}, {"hook": "own"}):
        hook = options.pop("hook", None)
        pipeline = make_pipeline(
            make_mlp(16), schedule="interleaved-1f1b", data_parallel_options=options
        )
        group = mesh_of().get_group("dp")
        for replica in pipeline.replicas.values():
            if hook == "bf16":
                replica.register_comm_hook(group, default_hooks.bf16_compress_hook)
            elif hook == "own":
                replica.register_comm_hook(group, sum_hook)
        step_of(pipeline, batch_of(mesh_of().get_local_rank("dp"), 0))
        assert_same_on_all_ranks((p.grad for p in pipeline.parameters()), group)
        gradients.append([p.grad for p in pipeline.parameters()])
    exact, narrow, hooked, summed = gradients
    for values in zip(exact, narrow, hooked, summed, strict=True):
        assert not torch.equal(values[0], values[1])
        assert torch.equal(values[1], values[2])
        assert difference(values[1], values[0], 1e4) is None
        assert difference(values[3], values[0]) is None


def sum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that the engine does not know."""
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def test_options_of_data_parallel(transport: Transport) -> None:
    """By groups that the user made: bucket sizes and views, and what a step that leaves a parameter
    unused means; and gradients that travel in a half type, or by a communication hook."""
    transport.pool(4).run(train_with_options)


def train_unevenly(rank: int, world_size: int) -> None:
    """Other numbers of rows on each replica, also fewer than microbatches, and local steps."""
    mesh = mesh_of()
    replica = mesh.get_local_rank("dp")
    model = make_mlp(16)
    for kind in ("1f1b", "interleaved-zb"):
        expected = OneProcess(model, 2)
        pipeline = make_pipeline(model, schedule=kind)
        for rows, synced in (((8, 5), True), ((2, 7), False), ((1, 3), True), ((6, 2), True)):
            batches = [batch_of(r, rows[r], rows[r]) for r in range(2)]
            losses = expect_step(expected, batches, synced=synced)
            if synced:
                loss = step_of(pipeline, batches[replica])
                assert_matches(pipeline, expected.module, mesh.get_group("dp"), factor=10)
            else:
                with pipeline.no_sync():
                    loss = step_of(pipeline, batches[replica])
            assert abs(float(loss) - losses[replica]) < 1e-6 * losses[replica]
        assert {r.reducer_of_stage.num_rounds for r in pipeline.replicas.values()} == {3}


def test_batches_of_other_sizes_and_no_sync(transport: Transport) -> None:
    """The mean over replicas of each one's own mean, as with DataParallel; gradients add up over
    steps, and those of a step under no_sync are averaged with the next."""
    transport.pool(4).run(train_unevenly)


IGNORED = -100


def token_batch(replica: int) -> Batch:
    """Classes of 6 tokens in 8 rows; many are to be ignored, and all in some microbatch."""
    x, _ = draw_batch(replica, 8)
    generator = torch.Generator().manual_seed(replica)
    target = torch.randint(0, 6, (8,), generator=generator)
    target[: 2 + 3 * replica] = IGNORED
    return x, target


def count_tokens(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def weigh_tokens(rank: int, world_size: int) -> None:
    mesh = mesh_of()
    model = make_mlp(15)
    loss_fn = functools.partial(nn.functional.cross_entropy, ignore_index=IGNORED)
    pipeline = make_pipeline(model, loss_fn=loss_fn, loss_weight=count_tokens)
    batches = [token_batch(0), token_batch(1)]
    loss = step_of(pipeline, batches[mesh.get_local_rank("dp")])
    x, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = loss_fn(model(x), target)
    expected.backward()
    assert_matches(pipeline, model, mesh.get_group("dp"), factor=10)
    dist.all_reduce(loss, group=mesh.get_group("dp"))
    assert abs(float(loss / 2) - float(expected.detach())) < 1e-6


def test_loss_weights_count_over_replicas(transport: Transport) -> None:
    """Token counts: the gradient is that of the mean over all tokens of all replicas, and so is the
    mean of the replicas' losses."""
    transport.pool(4).run(weigh_tokens)


def drop_out(rank: int, world_size: int) -> list[float]:
    """Both replicas get the same batch, by two schedules."""
    layers = [nn.Dropout() if isinstance(layer, nn.Tanh) else layer for layer in make_mlp(16)]
    losses = []
    for kind in ("1f1b", "zb-v"):
        torch.manual_seed(7)
        pipeline = make_pipeline(nn.Sequential(*layers), schedule=kind)
        losses.append(float(step_of(pipeline, batch_of(0, 0))))
    return losses


def test_replicas_draw_other_dropout_masks(transport: Transport) -> None:
    """Masks depend on the replica, not on the schedule."""
    losses = transport.pool(4).run(drop_out)
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert losses[0][0] == losses[0][1]
    assert losses[2][0] == losses[2][1]
    assert losses[0] != losses[2]


def follow_buffers(rank: int, world_size: int) -> None:
    mesh = mesh_of()
    group = mesh.get_group("dp")
    layers = [nn.BatchNorm1d(6) if isinstance(layer, nn.Tanh) else layer for layer in make_mlp(16)]
    pipeline = make_pipeline(nn.Sequential(*layers))
    before: dict[str, Tensor] = {}
    for step in range(2):
        step_of(pipeline, batch_of(mesh.get_local_rank("dp"), step))
        after = {name: buffer.clone() for name, buffer in pipeline.named_buffers()}
        if step == 0:
            before = after
    for name, buffer in before.items():
        if name.endswith("num_batches_tracked"):
            assert int(buffer) == NUM_MICROBATCHES
            assert int(after[name]) == 2 * NUM_MICROBATCHES
    statistics = [buffer for name, buffer in after.items() if name.endswith("running_mean")]
    assert statistics
    # The second step began with the first replica's; so did this one, which changes nothing more.
    assert pipeline._replicas is not None
    pipeline._replicas.begin_step()
    assert_same_on_all_ranks(pipeline.buffers(), group)


def test_buffers_follow_the_first_replica(transport: Transport) -> None:
    """Running statistics are the first replica's at the start of each step."""
    transport.pool(4).run(follow_buffers)


class Fragile(nn.Module):
    """Raises or kills its process in one microbatch's forward or backward, once."""

    def __init__(self, accident: Callable[[], None]) -> None:
        super().__init__()
        self.accident = accident
        self.countdown = -1
        self.in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.in_backward:
            if x.requires_grad:
                x.register_hook(lambda _: self.count())
        else:
            self.count()
        return x

    def count(self) -> None:
        self.countdown -= 1
        if self.countdown == -1:
            self.accident()


def raise_error() -> None:
    raise ArithmeticError("a loss scale of minus one")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fragile_mlp(accident: Callable[[], None]) -> nn.Sequential:
    layers = [Fragile(accident) if isinstance(layer, nn.Tanh) else layer for layer in make_mlp(16)]
    return nn.Sequential(*layers)


def fail_everywhere(rank: int, world_size: int, kind: str) -> None:
    """An accident on each rank, in its first, an inner and its last forward and backward."""
    mesh = mesh_of()
    replica = mesh.get_local_rank("dp")
    model = fragile_mlp(raise_error)
    expected = OneProcess(model, 2, sgd)
    pipeline = make_pipeline(model, schedule=kind)
    fragile = [module for module in pipeline.modules() if isinstance(module, Fragile)]
    optimizer = sgd(pipeline.parameters())
    batches = [batch_of(0, 0), batch_of(1, 0)]
    for victim in range(world_size):
        for in_backward in (False, True):
            for countdown in (0, 2, NUM_MICROBATCHES - 1):
                for part in fragile:
                    part.in_backward, part.countdown = in_backward, -1
                if rank == victim:
                    fragile[0].countdown = countdown
                kinds = ArithmeticError if rank == victim else pydist.PeerError
                error = expect_error(kinds, lambda: step_of(pipeline, batches[replica]))
                assert "a loss scale of minus one" in str(error)
        optimizer.zero_grad()
        expected.zero_grad()
        losses = expect_step(expected, batches)
        loss = step_of(pipeline, batches[replica])
        assert abs(float(loss) - losses[replica]) < 1e-6
        for each in (optimizer, *expected.optimizers):
            each.step()
        assert_matches(pipeline, expected.module, mesh.get_group("dp"))


@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_an_exception_reaches_all_ranks_of_all_pipelines(transport: Transport, kind: str) -> None:
    """Whoever raises, wherever: every rank of both pipelines raises its cause, and the next step
    gives the right gradients."""
    transport.pool(4).run(fail_everywhere, kind)


def refuse(rank: int, world_size: int) -> None:
    mesh = mesh_of()
    replica = mesh.get_local_rank("dp")
    pipeline = make_pipeline(make_mlp(16))
    batches = [batch_of(0, 0), batch_of(1, 0)]
    for victim in range(world_size):
        if rank == victim:
            wrong = (batches[replica][0], batches[replica][1][:3])
            error = expect_error(
                pydist.UsageError, lambda wrong=wrong: pipeline.step(wrong[0], target=wrong[1])
            )
            assert "rows" in str(error)
        else:
            error = expect_error(pydist.PeerError, lambda: step_of(pipeline, batches[replica]))
            assert "UsageError" in str(error)
        step_of(pipeline, batches[replica])


def test_wrong_arguments_reach_all_ranks_of_all_pipelines(transport: Transport) -> None:
    """A rank whose batch and target do not fit takes part in no action, and tells all others."""
    transport.pool(4).run(refuse)


def interrupt(rank: int, world_size: int) -> None:
    """Rank 2 is late, so that rank 0, its replica, waits for it: there it gets a Ctrl-C."""
    replica = mesh_of().get_local_rank("dp")
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    accident = functools.partial(be_late_and_interrupt, pids[0])
    pipeline = make_pipeline(fragile_mlp(accident if rank == 2 else raise_error))
    step_of(pipeline, batch_of(replica, 0))
    if rank == 2:
        next(m for m in pipeline.modules() if isinstance(m, Fragile)).countdown = 0
    kinds = KeyboardInterrupt if rank == 0 else pydist.PeerError
    error = expect_error(kinds, lambda: step_of(pipeline, batch_of(replica, 1)))
    assert rank == 0 or "interrupt" in str(error).lower()
    step_of(pipeline, batch_of(replica, 2))


def be_late_and_interrupt(pid: int) -> None:
    time.sleep(0.5)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.2)


def test_an_interrupt_while_a_rank_waits_for_its_replica(transport: Transport) -> None:
    """KeyboardInterrupt there, PeerError everywhere else, and the next step works."""
    transport.pool(4).run(interrupt)


def lose_rank(rank: int, world_size: int, victim: int, in_backward: bool) -> str:
    replica = mesh_of().get_local_rank("dp")
    pipeline = make_pipeline(fragile_mlp(kill_self))
    batch = batch_of(replica, 0)
    step_of(pipeline, batch)
    dist.barrier()
    for part in pipeline.modules():
        if isinstance(part, Fragile) and rank == victim:
            part.in_backward, part.countdown = in_backward, NUM_MICROBATCHES - 1
    error = expect_error(pydist.PeerError, lambda: step_of(pipeline, batch))
    again = expect_error(pydist.PeerError, lambda: step_of(pipeline, batch))
    return f"{error}\n{again}"


@pytest.mark.parametrize(("victim", "in_backward"), [(0, True), (3, False)])
def test_a_rank_is_killed(transport: Transport, victim: int, in_backward: bool) -> None:
    """SIGKILL in a backward of the first stage, and in a forward of the last: the other three ranks
    raise, at once the next time too."""
    outcomes: list[Outcome] = fresh_ranks(4, lose_rank, victim, in_backward, env=transport.env)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.ok, outcome.traceback
            assert outcome.exit_code == 0


def build_wrongly(rank: int, world_size: int) -> None:
    model = make_mlp(16)
    world = dist.group.WORLD

    def build(**options: Any) -> PipelineParallel:
        return PipelineParallel(copy.deepcopy(model), 2, MSE, **options)

    mesh = mesh_of()
    unnamed = init_device_mesh("cpu", (2, 2))
    for options, said in (
        ({"device_mesh": mesh, "process_group": world}, "not both"),
        ({"device_mesh": unnamed}, '"pp"'),
        ({"data_parallel_group": mesh.get_group("dp")}, "give process_group too"),
        ({"device_mesh": mesh, "data_parallel_options": {"dim": 1}}, "bucket_cap_mb"),
    ):
        error = expect_error(pydist.UsageError, lambda options=options: build(**options))
        assert said in str(error)
    replica = mesh.get_local_rank("dp")
    error = expect_error(
        pydist.MismatchError,
        lambda: build(device_mesh=mesh, schedule=("1f1b", "zb-h1")[replica]),
    )
    assert "actions" in str(error)
    schedules: tuple[Any, ...] = ("1f1b", 17)  # the second cannot be
    expect_error(
        (pydist.PeerError, pydist.UsageError)[replica],
        lambda: build(device_mesh=mesh, schedule=schedules[replica]),
    )


def test_errors_at_the_start(transport: Transport) -> None:
    """What contradicts itself, or differs between replicas, raises on every rank."""
    transport.pool(4).run(build_wrongly)


VOCABULARY = 11


def tied_model() -> nn.Sequential:
    """An embedding whose weight is the last layer's too."""
    torch.manual_seed(5)
    embedding = nn.Embedding(VOCABULARY, 6)
    head = nn.Linear(6, VOCABULARY, bias=False)
    head.weight = embedding.weight
    hidden = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(embedding, *hidden, head)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def train_tied(rank: int, world_size: int) -> None:
    """Steps are clipped by the norm over all stages, and every second one is a local one first."""
    mesh = mesh_of()
    replica = mesh.get_local_rank("dp")
    model = tied_model()
    for kind, options in (("1f1b", {}), ("zb-v", {"gradient_as_bucket_view": True})):
        pipeline = make_pipeline(
            model,
            schedule=kind,
            loss_fn=nn.functional.cross_entropy,
            data_parallel_options=options,
        )
        expected = OneProcess(model, 2, adam)
        optimizer = adam(pipeline.parameters())
        for step in range(3):
            optimizer.zero_grad()
            expected.zero_grad()
            for synced in (False, True) if step else (True,):
                tokens = [draw_tokens(2 * step + synced, r) for r in range(2)]
                expect_step(expected, tokens, nn.functional.cross_entropy, synced)
                with contextlib.nullcontext() if synced else pipeline.no_sync():
                    step_of(pipeline, tokens[replica])
            norm = pipeline.clip_grad_norm_(0.05)
            for module in expected.replicas:
                expected_norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            assert abs(float(norm) - float(expected_norm)) < 1e-5 * float(expected_norm)
            for each in (optimizer, *expected.optimizers):
                each.step()
            assert_matches(pipeline, expected.module, mesh.get_group("dp"), factor=10)
        state = pipeline.full_state_dict()
        assert state is not None
        assert torch.equal(state["0.weight"], state["7.weight"])
        if kind == "1f1b":  # both ranks of a pipeline have a copy
            own = dict(pipeline.named_parameters())
            copies = [own[name] for name in ("0.weight", "7.weight") if name in own]
            assert_same_on_all_ranks(copies)


def draw_tokens(step: int, replica: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, target = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
    return x, target


def test_c99_tied_weights_and_clipping(transport: Transport) -> None:
    """An embedding tied to the output layer, in two pipelines: its copies are equal in every bit
    on all four ranks; gradients are those of one process, also after a step under no_sync, and the
    norm counts each stage once."""
    transport.pool(4).run(train_tied)
