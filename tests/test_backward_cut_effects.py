"""What a cut backward does besides gradients: hooks, work, memory, errors; when it is not cut."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cut_stage
import pydist
from pydist._C import testing

WIDTH = 4


def rows(seed: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def row_inputs(microbatch: int) -> list[Tensor]:
    return [rows(microbatch)]


class Opaque(torch.autograd.Function):
    """x @ weight, with what a test wants to do in its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, in_backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.in_backward = in_backward
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = ctx.in_backward(gradients[0])
        return gradient @ weight.t(), x.t() @ gradient, None


# Hooks: the log of a run must be that of a whole backward.


def hooked_run(cut: bool) -> tuple[list[str], list[Tensor | None]]:
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False)
    scale = nn.Parameter(torch.ones(WIDTH))
    log: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: log.append(name)

    parameters = {"weight": first.weight, "bias": first.bias, "last": last.weight, "scale": scale}
    accumulators = []
    for name, parameter in parameters.items():
        parameter.register_hook(note(f"tensor hook of {name}"))
        parameter.register_post_accumulate_grad_hook(note(f"accumulated {name}"))
        accumulators.append(torch.autograd.graph.get_gradient_edge(parameter).node)
        accumulators[-1].register_hook(note(f"after node of {name}"))
        accumulators[-1].register_prehook(note(f"before node of {name}"))
    received, edge = testing.receive(rows())
    received.register_hook(note("received"))
    hidden = first(received)
    hidden.register_hook(lambda gradient: log.append("hidden") or gradient * 2)
    hidden.grad_fn.register_prehook(note("before hidden's node"))
    hidden.retain_grad()
    scaled = hidden * scale
    scaled.grad_fn.register_hook(note("after scaled's node"))  # so it cannot run twice
    output = last(torch.tanh(scaled))
    output.grad_fn.register_prehook(note("before output's node"))
    output.retain_grad()
    stage = testing.StageBackward([output], [edge])
    gradients = [torch.ones_like(output)]
    if cut:
        stage.input(gradients)
        assert first.weight.grad is None
        assert last.weight.grad is None
        log.append("W")
        stage.weight()
    else:
        stage.backward(gradients)
    result = [*(parameter.grad for parameter in parameters.values()), hidden.grad, output.grad]
    return log, result + stage.input_gradients()


def test_hooks_run_as_often_as_in_a_whole_backward() -> None:
    whole_log, whole = hooked_run(cut=False)
    log, cut = hooked_run(cut=True)
    in_w = log[log.index("W") + 1 :]
    log.remove("W")
    assert sorted(log) == sorted(whole_log)
    assert len(set(log)) == len(log), "each once"
    assert [entry for entry in in_w if "weight" in entry] == [
        "tensor hook of weight",
        "before node of weight",
        "accumulated weight",
        "after node of weight",
    ]
    for one, other in zip(whole, cut, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_a_node_runs_though_nothing_arrives_at_it() -> None:
    """Autograd calls nodes with undefined gradients, and counts on hooks having been called."""

    def run(cut: bool) -> list[str]:
        weight = nn.Parameter(torch.randn(WIDTH))
        node = torch.autograd.graph.get_gradient_edge(weight).node
        log: list[str] = []
        node.register_hook(lambda *_: log.append("reached"))
        received, edge = testing.receive(rows())
        used, unused = Halves.apply(received)
        stage = testing.StageBackward([used.sum() + Nothing.apply(unused * weight).sum()], [edge])
        if cut:
            stage.input([torch.ones(())])
            assert log == []
            stage.weight()
        else:
            stage.backward([torch.ones(())])
        assert weight.grad is None
        return log

    assert run(cut=True) == run(cut=False) == ["reached"]


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return sum((g for g in gradients if g is not None), torch.zeros(3, WIDTH))


class Nothing(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


# Work.


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_each_product_is_computed_once() -> None:
    """Two for each layer, one in I and one in W; running the engine twice over the whole graph,
    for inputs first and parameters then, would take three."""
    depth = 5
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    received, edge = testing.receive(rows())
    stage = testing.StageBackward([nn.Sequential(*layers)(received)], [edge])
    with Counter() as in_input:
        stage.input([torch.ones(3, WIDTH)])
    with Counter() as in_weight:
        stage.weight()
    assert in_input.calls["mm"] == depth
    assert in_input.calls["gelu_backward"] == depth
    assert "sum" not in in_input.calls, "that is the biases'"
    assert in_weight.calls["mm"] == depth
    assert in_weight.calls["sum"] == depth
    assert "gelu_backward" not in in_weight.calls


# Memory.


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Nothing may need the collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.usefixtures("without_gc")
def test_what_lives_until_when() -> None:
    layer, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    received, edge = testing.receive(rows())
    hidden = layer(received)
    active = F.gelu(hidden)  # saves `hidden`; the head saves `active` for its weight
    output = head(active)
    given = torch.ones_like(output)
    refs = {
        "received": storage_of(received),
        "hidden": storage_of(hidden),
        "active": storage_of(active),
        "output": storage_of(output),
        "given": storage_of(given),
    }

    def alive() -> set[str]:
        return {name for name, ref in refs.items() if not ref.expired()}

    at_the_end_of_i: list[set[str]] = []
    received.register_hook(lambda _: at_the_end_of_i.append(alive()))
    stage = testing.StageBackward([output], [edge])
    del received, hidden, active, output
    assert alive() == {"received", "hidden", "active", "given"}, "an output is its receiver's"
    stage.input([given])
    del given
    assert alive() == {"received", "active", "given"}, "what W needs, for the two weights"
    assert at_the_end_of_i == [alive()], "freed as I goes, as in a whole backward"
    (gradient,) = stage.input_gradients()
    assert gradient is not None
    refs = {**refs, "gradient": storage_of(gradient)}
    del gradient
    assert "gradient" not in alive()
    stage.weight()
    assert alive() == set(), "although the stage's object lives"
    assert layer.weight.grad is not None


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("way", ["B", "I", "nothing", "failed"])
def test_nothing_is_left(way: str) -> None:
    def fail(gradient: Tensor) -> Tensor:
        if way == "failed":
            raise KeyError("in backward")
        return gradient

    weight, scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
    received, edge = testing.receive(rows())
    hidden = torch.tanh(received * scale)
    output = Opaque.apply(hidden, weight, fail) * scale
    refs = [storage_of(tensor) for tensor in (received, hidden, output)]
    stage = testing.StageBackward([output], [edge])
    del received, hidden, output
    given = [torch.ones(3, WIDTH)]
    if way == "B":
        stage.backward(given)
        assert all(ref.expired() for ref in refs)
    elif way == "I":
        stage.input(given)
    elif way == "failed":
        with pytest.raises(KeyError, match="in backward"):
            stage.input(given)
    del stage, edge, given
    assert all(ref.expired() for ref in refs)


# Handing over between two stages of one rank.


def test_two_stages_of_a_rank_share_memory_but_no_graph() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    received, edge = testing.receive(rows())
    output = first(received)
    above = testing.StageBackward([output], [edge])
    handed, handed_edge = testing.receive(output.detach())
    assert handed.data_ptr() == output.data_ptr()
    below = testing.StageBackward([second(handed)], [handed_edge])
    below.input([torch.ones(3, WIDTH)])
    assert first.weight.grad is None
    gradients = below.input_gradients()
    assert edge.take_gradient() is None
    above.backward(gradients)
    below.weight()
    x = rows().requires_grad_()
    expected = torch.autograd.grad(
        second(first(x)).sum(), [first.weight, second.weight, x], materialize_grads=True
    )
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    (arrived,) = above.input_gradients()
    found = (first.weight.grad, second.weight.grad, arrived)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_change_in_place_of_what_another_stage_saved_raises() -> None:
    """As it does in one model: the version is shared."""
    received, edge = testing.receive(rows())
    output = torch.tanh(received)  # saves its result
    above = testing.StageBackward([output], [edge])
    handed, _ = testing.receive(output.detach())
    handed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        above.backward([torch.ones(3, WIDTH)])


def test_an_input_that_is_not_used_gets_no_gradient() -> None:
    (used, used_edge), (_, unused_edge) = testing.receive(rows()), testing.receive(rows(1))
    layer = nn.Linear(WIDTH, 1)
    stage = testing.StageBackward([layer(used)], [used_edge, unused_edge])
    stage.input([torch.ones(3, 1)])
    one, other = stage.input_gradients()
    assert one is not None
    assert other is None
    stage.weight()
    assert layer.weight.grad is not None


def test_a_backward_in_the_forward_counts() -> None:
    """As in the unsplit model, where it would go on to the layers before."""
    received, edge = testing.receive(rows())
    (received * 3).sum().backward()
    stage = testing.StageBackward([received * 2], [edge])
    stage.input([torch.ones(3, WIDTH)])
    (gradient,) = stage.input_gradients()
    assert gradient is not None
    assert torch.equal(gradient, torch.full((3, WIDTH), 5.0))


# Errors.


@pytest.mark.parametrize("action", ["B", "I", "W"])
def test_an_error_in_a_users_function_is_that_error(action: str) -> None:
    class OwnError(Exception):
        pass

    def fail(_: Tensor) -> Tensor:
        raise OwnError("out of luck")

    weight, other = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(3, WIDTH))
    received, edge = testing.receive(rows())
    if action == "W":
        output = received * Opaque.apply(other, weight, fail)
    else:
        output = Opaque.apply(received, weight, fail) * other
    stage = testing.StageBackward([output], [edge])
    if action == "W":
        stage.input([torch.ones(3, WIDTH)])
    with pytest.raises(OwnError, match="out of luck"):
        {
            "B": lambda: stage.backward([torch.ones(3, WIDTH)]),
            "I": lambda: stage.input([torch.ones(3, WIDTH)]),
            "W": stage.weight,
        }[action]()
    before = other.grad
    stage.weight()  # nothing is left of it
    assert other.grad is before


def test_a_gradient_changed_in_place_between_i_and_w_raises() -> None:
    """Autograd forbids it, but a whole backward would often hide it."""
    bias = nn.Parameter(torch.randn(3, WIDTH))
    received, edge = testing.receive(rows())
    hidden = received * 1
    hidden.register_hook(lambda gradient: gradient.mul_(2))
    stage = testing.StageBackward([hidden + bias], [edge])
    stage.input([torch.ones(3, WIDTH)])
    with pytest.raises(pydist.errors.UsageError, match="AddBackward0 was changed in place"):
        stage.weight()


def test_a_leaf_of_i_may_take_the_memory_of_what_w_needs() -> None:
    """`view` gives a leaf that the cut leaves to I the memory of the gradient that arrived at the
    addition, and the next microbatch adds to it in place before the first one's W."""

    class TakesApart(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            return gradients[0] * 1, gradients[0].view(3, WIDTH)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.late, self.early = (nn.Parameter(torch.randn(3, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return TakesApart.apply(x @ self.weight, self.early) + self.late

    whole = cut_stage.run(Stage, row_inputs, "torch")
    cut_stage.assert_same(whole, cut_stage.run(Stage, row_inputs, "deferred"))


@pytest.mark.parametrize("action", ["backward", "input"])
def test_compiled_autograd_is_refused(action: str) -> None:
    received, edge = testing.receive(rows())
    stage = testing.StageBackward([received * nn.Parameter(torch.ones(WIDTH))], [edge])
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with pytest.raises(pydist.errors.UsageError, match="compiled autograd"), enabled:
        getattr(stage, action)([torch.ones(3, WIDTH)])


def test_a_gradient_too_many_is_refused() -> None:
    received, edge = testing.receive(rows())
    stage = testing.StageBackward([received * 2, received.detach()], [edge])
    with pytest.raises(pydist.errors.UsageError, match=r"output 1 .* does not require one"):
        stage.input([torch.ones(3, WIDTH), torch.ones(3, WIDTH)])
    with pytest.raises(pydist.errors.UsageError, match="runs once"):
        stage.input([torch.ones(3, WIDTH), None])


def test_a_gradient_of_another_shape_is_refused() -> None:
    received, edge = testing.receive(rows())
    stage = testing.StageBackward([received @ nn.Parameter(torch.randn(WIDTH, 2))], [edge])
    with pytest.raises(RuntimeError, match="shape"):
        stage.input([torch.ones(3, 7)])


# What is not cut.


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.num_calls = 0
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.4), nn.Linear(8, WIDTH))
        self.inner.register_forward_pre_hook(self.count)

    def count(self, *_: object) -> None:
        self.num_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_are_recomputed_once(use_reentrant: bool) -> None:
    """Without reentrance the whole stage runs in I, as W would compute the forward again. With it
    the checkpoint is one opaque node, whose weights get their gradients in I."""
    modules: list[Checkpointed] = []

    def make() -> nn.Module:
        modules.append(Checkpointed(use_reentrant))
        return modules[-1]

    whole = cut_stage.run(make, row_inputs, "B")
    cut_stage.assert_same(cut_stage.run(make, row_inputs, "torch"), whole)
    found = cut_stage.run(make, row_inputs, "deferred")
    cut_stage.assert_same(whole, found)
    assert not found.weights_without_gradient_after_i
    (why,) = found.why_not
    assert ("torch.utils.checkpoint" in why) == (not use_reentrant)
    assert [module.num_calls for module in modules] == [6, 6, 6], "forward, and once more each"


def test_checkpointed_layers_are_cut_on_request() -> None:
    def make() -> nn.Module:
        return Checkpointed(use_reentrant=False)

    whole = cut_stage.run(make, row_inputs, "B")
    found = cut_stage.run(make, row_inputs, "deferred", split_checkpointed=True)
    cut_stage.assert_same(whole, found)
    assert found.weights_without_gradient_after_i
    assert found.why_not == {""}


def test_other_hooks_on_what_is_saved_are_no_obstacle() -> None:
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return self.layers(x)

    whole = cut_stage.run(Offloaded, row_inputs, "torch")
    found = cut_stage.run(Offloaded, row_inputs, "deferred")
    cut_stage.assert_same(whole, found)
    assert found.weights_without_gradient_after_i
    assert found.why_not == {""}


@pytest.mark.parametrize("partly", [False, True])
def test_compiled_stages(partly: bool) -> None:
    """A compiled backward runs once: wholly in I, or, beside layers that are cut, not cut."""

    def make() -> nn.Module:
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        compiled = torch.compile(inner, backend="aot_eager")
        return nn.Sequential(compiled, nn.Linear(WIDTH, WIDTH)) if partly else compiled

    whole = cut_stage.run(make, row_inputs, "B", 2)
    found = cut_stage.run(make, row_inputs, "deferred", 2)
    cut_stage.assert_same(whole, found)
    assert not found.weights_without_gradient_after_i
    (why,) = found.why_not
    assert ("compile the whole stage" in why) == partly
