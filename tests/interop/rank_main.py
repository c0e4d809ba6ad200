"""Owns the frame of the scripts here: one rank's training with one class, left in a file.

    torchrun --nproc-per-node 2 SCRIPT {torch,pydist} FOLDER

The scripts train on the Zen of Python, which comes with Python: nothing is downloaded.
"""

import codecs
import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pydist

CLASSES = {"torch": DistributedDataParallel, "pydist": pydist.DataParallel}


@dataclasses.dataclass
class Outcome:
    """What a training came to on one rank.

    Attributes:
        wrapper: the name of the class that wrapped the model.
        losses: this rank's, by step.
        grad_norms: of the averaged gradients, where the framework tells them, by step.
        parameters, buffers: of the unwrapped models, in the end; ranks may differ in buffers.
    """

    wrapper: str
    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def add_model(self, name: str, model: nn.Module) -> None:
        for key, parameter in model.named_parameters():
            self.parameters[f"{name}.{key}"] = parameter.detach()
        for key, buffer in model.named_buffers():
            self.buffers[f"{name}.{key}"] = buffer


def run(train: Callable[[type[nn.Module]], Outcome]) -> None:
    """Trains with the class that the command line names, and saves the Outcome."""
    name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    outcome = train(CLASSES[name])
    torch.save(dataclasses.asdict(outcome), Path(folder) / f"{name}-{os.environ['RANK']}.pt")


@contextlib.contextmanager
def in_torchs_place(data_parallel: type[nn.Module]) -> Iterator[None]:
    """For frameworks that look the class up in torch when they wrap a model."""
    with mock.patch.object(nn.parallel, "DistributedDataParallel", data_parallel):
        yield


def zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints it
        import this
    return codecs.decode(this.s, "rot13")


def windows(length: int) -> Tensor:
    """The text as bytes, cut into pieces of so many, half overlapping. Shape: (pieces, length)."""
    text = torch.tensor(list(zen().encode()), dtype=torch.int64)
    return text.unfold(0, length, length // 2).contiguous()
