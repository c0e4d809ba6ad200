"""Owns the checks of DataParallel on one device: every gradient is that of the plain model."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from place import Place
from rows import Rows
from torch import Tensor, nn
from world import AloneDataParallel, lone_group

import pydist

NUM_STEPS = 4
BATCH_SIZE = 24
WIDTH_IN, WIDTH, WIDTH_OUT = 37, 301, 5


class Net(nn.Module):
    """Large gradients, which travel alone, and many small ones of odd sizes; two ways through."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH_IN, WIDTH)
        self.large = nn.Linear(WIDTH, WIDTH)
        self.small = nn.ModuleList(nn.Linear(7, 7) for _ in range(12))
        self.norm = nn.LayerNorm(WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH_OUT)
        self.last = nn.Linear(WIDTH, WIDTH_OUT)
        self.uses_other = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = self.norm(hidden + torch.tanh(self.large(hidden)))
        narrow = hidden[:, :7]
        for layer in self.small:
            narrow = narrow + torch.tanh(layer(narrow))
        head = self.other if self.uses_other else self.last
        outputs: Tensor = head(hidden) + narrow.mean(dim=1, keepdim=True)
        return outputs


class TwoTypes(nn.Module):
    """Parameters of two types in turn, so that buckets of both are open at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH_IN, WIDTH_IN) for _ in range(6))
        for layer in self.layers[::2]:
            layer.to(torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs.to(layer.weight.dtype))).to(inputs.dtype)
        return inputs


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is made, wrapped and used, and how near its gradients come to the plain ones."""

    name: str
    make_model: Callable[[], nn.Module] = Net
    dtype: torch.dtype | None = torch.float32
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-6
    num_microbatches: int = 1  # of which all but the last are in no_sync()
    alternates: bool = False  # between the model's two ways, so that some parameters are unused
    sets_to_none: bool = True


TRAININGS = (
    Training("float32"),
    Training("float64", dtype=torch.float64, tolerance=1e-14),
    Training("bfloat16", dtype=torch.bfloat16, tolerance=2**-7),
    Training("float16", dtype=torch.float16, tolerance=2**-10),
    Training("two types", TwoTypes, dtype=None, tolerance=2**-7),
    Training("many buckets", arguments={"bucket_cap_mb": 0.002}),
    Training("bucket views", arguments={"gradient_as_bucket_view": True}),
    Training("bfloat16 wire", arguments={"wire_dtype": torch.bfloat16}, tolerance=2**-7),
    Training("float16 wire", arguments={"wire_dtype": torch.float16}, tolerance=2**-9),
    Training("float8 wire", arguments={"wire_dtype": torch.float8_e4m3fn}, tolerance=2**-3),
    Training("by NCCL's all-reduce", arguments={"algorithm": "nccl"}),
    Training("by the ring", arguments={"algorithm": "ring"}),
    Training("by slices", arguments={"algorithm": "slices"}),
    Training("no_sync, three microbatches", num_microbatches=3),
    Training("gradients zeroed in place", sets_to_none=False),
    Training(
        "unused parameters, others each step",
        arguments={"find_unused_parameters": True},
        alternates=True,
    ),
)


def make_plain(place: Place, training: Training) -> nn.Module:
    torch.manual_seed(0)
    plain = training.make_model().to(place.device)
    return plain if training.dtype is None else plain.to(training.dtype)


def make_models(place: Place, training: Training) -> tuple[nn.Module, nn.Module]:
    """A wrapped model and a plain one with the same weights."""
    plain = make_plain(place, training)
    model = AloneDataParallel(copy.deepcopy(plain), **training.arguments)
    return model, plain


def batch(place: Place, step: int, dtype: torch.dtype | None) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(BATCH_SIZE, WIDTH_IN, generator=generator)
    return values.to(place.device, dtype or torch.float32)


def one_step(model: nn.Module, inputs: Tensor, training: Training) -> None:
    """Leaves the gradients of all microbatches."""
    model.zero_grad(set_to_none=training.sets_to_none)
    parts = inputs.chunk(training.num_microbatches)
    if isinstance(model, pydist.DataParallel):
        with model.no_sync():
            for part in parts[:-1]:
                model(part).square().sum().backward()
    else:
        for part in parts[:-1]:
            model(part).square().sum().backward()
    model(parts[-1]).square().sum().backward()


def expect_same_gradients(
    rows: Rows, model: pydist.DataParallel, plain: nn.Module, tolerance: float
) -> None:
    """One comparison for all: absent gradients must be absent."""
    found, expected = [], []
    for (name, own), (_, other) in zip(
        model.module.named_parameters(), plain.named_parameters(), strict=True
    ):
        if (own.grad is None) != (other.grad is None):
            raise AssertionError(f"{name}: found {own.grad}, expected {other.grad}")
        if own.grad is not None and other.grad is not None:
            if own.grad.dtype != other.grad.dtype:
                raise AssertionError(f"{name}: a gradient of type {own.grad.dtype}")
            # Each on its own scale.
            largest = other.grad.double().abs().max().clamp_min(1e-30)
            found.append(own.grad.double().flatten() / largest)
            expected.append(other.grad.double().flatten() / largest)
    rows.expect_close(torch.cat(found), torch.cat(expected), tolerance)


def train(place: Place, rows: Rows, training: Training) -> None:
    model, plain = make_models(place, training)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, plain)]
    for step in range(NUM_STEPS):
        inputs = batch(place, step, training.dtype)
        for wrapped_or_plain in (model, plain):
            if training.alternates:
                inner = getattr(wrapped_or_plain, "module", wrapped_or_plain)
                inner.uses_other = step % 2 == 1
            one_step(wrapped_or_plain, inputs, training)
        expect_same_gradients(rows, model, plain, training.tolerance)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():  # so that rounding does not add up from step to step
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                own.copy_(other)
    if model._reducer.counters()["num_rounds"] < NUM_STEPS:
        raise AssertionError("gradients were not reduced: the check shows nothing")


def captured(place: Place, rows: Rows) -> None:
    """A step is captured once, and replayed on other inputs."""
    training = Training("captured")
    made: list[nn.Module] = []
    static = batch(place, 0, training.dtype)

    def make_step() -> Callable[[], None]:
        made.extend(make_models(place, training))
        return lambda: one_step(made[0], static, training)

    replay = place.captured(make_step)
    model, plain = made
    for step in range(1, 4):
        static.copy_(batch(place, step, training.dtype))
        replay()
        one_step(plain, batch(place, step, training.dtype), training)
        place.settle()
        expect_same_gradients(rows, model, plain, training.tolerance)


def compiled(place: Place, rows: Rows) -> None:
    """torch.compile of the wrapped module; the CPU has no compiler to spare, and traces only."""
    training = Training("compiled", tolerance=1e-5)
    model, plain = make_models(place, training)
    compiled_model = torch.compile(model, backend="aot_eager" if place.emulated else "inductor")
    for step in range(3):
        inputs = batch(place, step, training.dtype)
        model.zero_grad()
        compiled_model(inputs).square().sum().backward()
        one_step(plain, inputs, training)
        expect_same_gradients(rows, model, plain, training.tolerance)


def run(place: Place, rows: Rows) -> None:
    with lone_group(place):
        for training in TRAININGS:
            with rows.check(f"gradients: {training.name}"):
                train(place, rows, training)
        with rows.check("gradients: a step captured in a graph"):
            captured(place, rows)
        with rows.check("gradients: torch.compile"):
            compiled(place, rows)
