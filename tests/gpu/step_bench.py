"""Owns the timing of training steps of a GPT of 125M parameters: alone, torch's DDP, pydist."""

import dataclasses
import gc

import torch
from place import Place
from profiling import launches
from rows import Rows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import AloneDataParallel, lone_group

import pydist
from bench import gpu
from bench.record import Case
from bench.sampling import interleaved
from gpt_model import Gpt, ModelSize

# Twelve layers of width 768, as GPT-2; the vocabulary makes it 125M with a head of its own.
FULL = ModelSize(width=768, num_layers=12, num_heads=12, context=1024)
TINY = ModelSize(width=32, num_layers=2, num_heads=2, context=16)
NUM_SYMBOLS = 25_600
# The batch is doubled until a step takes this long, so that launches are not all there is.
MIN_STEP_S = 0.1
MAX_SEQUENCES = 64
NUM_TURNS = 9
STEPS_PER_SAMPLE = 3
TOLERANCE = 0.02  # of a gradient's norm


@dataclasses.dataclass
class Trainee:
    """One contender's model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, symbols: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(symbols, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def wrapped(contender: str, model: nn.Module) -> nn.Module:
    if contender == "ddp":
        return DistributedDataParallel(model)
    if contender == "ddp, bucket views":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if contender == "pydist":
        return pydist.DataParallel(model)
    if contender == "pydist, reducing":
        return AloneDataParallel(model)
    return model


def make_trainee(place: Place, contender: str) -> Trainee:
    """The same weights for all."""
    torch.manual_seed(0)
    size, num_symbols = (TINY, 64) if place.emulated else (FULL, NUM_SYMBOLS)
    model = Gpt(size, num_symbols)
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():  # behind zeros gradients would be zeros
            nn.init.normal_(parameter, std=0.02)
    model = wrapped(contender, model.to(place.device, torch.bfloat16))
    return Trainee(model, torch.optim.SGD(model.parameters(), lr=1e-2))


def make_batch(place: Place, num_sequences: int) -> tuple[Tensor, Tensor]:
    size, num_symbols = (TINY, 64) if place.emulated else (FULL, NUM_SYMBOLS)
    generator = torch.Generator().manual_seed(1)
    shape = (num_sequences, size.context + 1)
    symbols = torch.randint(num_symbols, shape, generator=generator).to(place.device)
    return symbols[:, :-1].contiguous(), symbols[:, 1:].contiguous()


def fitting_batch(place: Place, trainee: Trainee) -> tuple[Tensor, Tensor]:
    """Long enough a step, if memory for it is there several times over."""
    num_sequences = 2 if place.emulated else 8
    while True:
        batch = make_batch(place, num_sequences)
        for _ in range(2):
            step_s = place.wall_s(lambda: trainee.step(*batch))  # noqa: B023
        if place.emulated or step_s >= MIN_STEP_S or 2 * num_sequences > MAX_SEQUENCES:
            return batch
        peak_nbytes = torch.cuda.max_memory_allocated()
        if 3 * peak_nbytes > torch.cuda.get_device_properties(0).total_memory:
            return batch
        num_sequences *= 2


def first_gradients(trainee: Trainee, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    trainee.model(*batch).backward()
    gradients = [p.grad.detach().clone() for p in trainee.model.parameters()]  # type: ignore[union-attr]
    trainee.optimizer.zero_grad()
    return gradients


def num_differing(found: list[Tensor], expected: list[Tensor]) -> int:
    """Parameters whose gradients differ by more than bf16's rounding and the device's order."""
    pairs = zip(found, expected, strict=True)
    return sum(
        int(not (a.float() - b.float()).norm() <= TOLERANCE * b.float().norm()) for a, b in pairs
    )


def measure(place: Place) -> Case:
    trainees = {name: make_trainee(place, name) for name in gpu.STEP_CONTENDERS}
    batch = fitting_batch(place, trainees["plain"])
    num_turns, num_steps = (2, 1) if place.emulated else (NUM_TURNS, STEPS_PER_SAMPLE)
    trainees["plain"] = make_trainee(place, "plain")  # with the weights of the others again
    expected = first_gradients(trainees["plain"], batch)
    wrong = {
        name: num_differing(first_gradients(trainee, batch), expected)
        for name, trainee in trainees.items()
        if name != "plain"
    }
    del expected
    gc.collect()

    def steps(trainee: Trainee) -> None:
        for _ in range(num_steps):
            trainee.step(*batch)

    samples_s: dict[str, list[float]] = {name: [] for name in trainees}
    for turn, name in interleaved(list(trainees), num_turns):
        seconds = place.wall_s(lambda: steps(trainees[name])) / num_steps  # noqa: B023
        samples_s[name] += [seconds] if turn >= 0 else []
    parameters = list(trainees["plain"].model.parameters())
    case = Case(
        "GPT",
        {
            "kind": "step",
            "num_parameters": sum(p.numel() for p in parameters),
            "dtype": "bf16",
            "num_tokens": batch[0].numel(),
        },
        samples_s,
        wrong,
    )
    for name, trainee in trainees.items():
        kernels, copies = launches(place, lambda: trainee.step(*batch))  # noqa: B023
        case.facts[f"kernels of {name}"] = kernels
        case.facts[f"copies of {name}"] = copies
    return case


def run(place: Place, rows: Rows) -> None:
    with lone_group(place), rows.check("step time, and the plain model's gradients"):
        case = measure(place)
        rows.add_case(case)
        if any(case.wrong_results.values()):
            raise AssertionError(
                f"gradients that differ from the plain model's: {case.wrong_results}"
            )
        if not all(case.facts[f"kernels of {name}"] for name in gpu.STEP_CONTENDERS):
            raise AssertionError("the profiler recorded nothing")
