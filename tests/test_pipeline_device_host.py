"""Holds steps of a pipeline on a device to what the host does in them: it enqueues, and waits for
nothing. So a step can be captured in a graph; launches of that, and steps, come after each other.
"""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch

import emulated
from channels import activation, gradient, receive_tensor, send_tensor, step
from emulated import Graph, emulated_pool, set_option
from pipeline_reference import draw_batch, make_mlp, reference_step, sgd
from pydist import PipelineParallel
from reference import OneProcess
from test_pipeline_device import device_channel, mse
from test_pipeline_hybrid import (
    assert_matches,
    batch_of,
    expect_step,
    make_pipeline,
    mesh_of,
    step_of,
)


@contextlib.contextmanager
def without_host_waits() -> Iterator[None]:
    """No event is complete for the host meanwhile; who waits for one makes the device complain."""
    emulated.synchronize()
    set_option("hides_completion", 1)
    yield
    set_option("hides_completion", 0)


# -- waits --------------------------------------------------------------------------------------


def steady_steps(rank: int, world_size: int, kind: str) -> None:
    pipeline = PipelineParallel(make_mlp(8), 4, mse, kind)
    for number in range(6):
        x, target = draw_batch(number)
        waits = number < 3  # "auto" measures the first steps
        with contextlib.nullcontext() if waits else without_host_waits():
            pipeline.step(x, target=target)
            pipeline.evaluate(x, target=target)
            pipeline.zero_grad()


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "auto"])
def test_a_steady_step_waits_for_nothing(kind: str) -> None:
    emulated_pool(2).run(steady_steps, kind)


def steady_steps_of_replicas(rank: int, world_size: int) -> None:
    replica = mesh_of().get_local_rank("dp")
    pipeline = make_pipeline(make_mlp(16))
    for number in range(4):
        waits = number < 2  # layouts are made in the first one, or agreed upon
        with contextlib.nullcontext() if waits else without_host_waits():
            step_of(pipeline, batch_of(replica, number))
            pipeline.zero_grad()


def test_nor_does_one_of_replicas() -> None:
    emulated_pool(4).run(steady_steps_of_replicas)


# -- graphs -------------------------------------------------------------------------------------


def messages_of_a_graph(rank: int, world_size: int) -> None:
    channel = device_channel(2)
    sent = [torch.full((5,), 1.0 + k) for k in range(3)]

    def exchange() -> list[torch.Tensor]:
        with step(channel):
            if rank == 0:
                for microbatch, tensor in enumerate(sent):
                    send_tensor(channel, 1, activation(microbatch), tensor)
                return [receive_tensor(channel, 1, gradient(0))]
            got = [receive_tensor(channel, 0, activation(k)) for k in range(3)]
            send_tensor(channel, 0, gradient(0), torch.full((7,), 9.0))
            return got

    expected = [torch.full((7,), 9.0)] if rank == 0 else sent

    def assert_received(got: list[torch.Tensor]) -> None:
        for tensor, value in zip(got, expected, strict=True):
            assert torch.equal(tensor, value)
            tensor.zero_()

    assert_received(exchange())
    graph = Graph()
    with graph.capture():
        captured = exchange()
    for _ in range(3):
        graph.replay()
        assert_received(captured)
        assert_received(exchange())


def test_launches_of_a_graph_and_steps_use_the_same_links() -> None:
    for seed in range(3):
        emulated_pool(2).run(messages_of_a_graph, seed=seed)


def captured_step(rank: int, world_size: int) -> None:
    model = make_mlp(8)
    pipeline = PipelineParallel(copy.deepcopy(model), 4, mse)
    x, target = draw_batch(7)

    def train() -> None:
        model.zero_grad()
        pipeline.zero_grad()
        expected = reference_step(model, mse, x, target, 4)
        assert torch.equal(pipeline.step(x, target=target), expected)
        for name, parameter in pipeline.named_parameters():
            assert torch.equal(parameter.grad, model.get_parameter(name).grad), name
        assert torch.equal(pipeline.evaluate(x, target=target), expected)

    train()
    graph = Graph()
    with graph.capture():
        pipeline.step(x, target=target)
        pipeline.evaluate(x, target=target)
    train()
    for _ in range(2):
        graph.replay()
        train()


def test_a_step_joins_the_capture_of_a_graph() -> None:
    """What links do meanwhile ends in the graph's own stream, and steps outside work."""
    emulated_pool(2).run(captured_step)


def captured_step_of_replicas(rank: int, world_size: int) -> None:
    mesh = mesh_of()
    replica = mesh.get_local_rank("dp")
    model = make_mlp(16)
    expected = OneProcess(model, 2, sgd)
    pipeline = make_pipeline(model)
    optimizer = sgd(pipeline.parameters())

    def train(number: int) -> None:
        batches = [batch_of(0, number), batch_of(1, number)]
        optimizer.zero_grad()
        expected.zero_grad()
        expect_step(expected, batches)
        step_of(pipeline, batches[replica])
        for each in (optimizer, *expected.optimizers):
            each.step()
        assert_matches(pipeline, expected.module, mesh.get_group("dp"))

    train(0)
    train(1)
    optimizer.zero_grad()
    graph = Graph()
    with graph.capture():
        step_of(pipeline, batch_of(replica, 7))
    for number in range(2, 4):
        graph.replay()
        train(number)


def test_a_step_of_replicas_joins_it_too() -> None:
    emulated_pool(4).run(captured_step_of_replicas)
