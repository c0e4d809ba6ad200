"""Owns the text of the demo: the source of the running Python's standard library, as batches."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LICENSE_NOTE = "Python Software Foundation License, https://docs.python.org/3/license.html"

# Every one of so many files is held out: whole files, so that no function is on both sides.
_HELD_OUT_EVERY = 16
_MIN_NUM_CHARACTERS = 200_000
_ENOUGH_NUM_CHARACTERS = 4_000_000


class NoTextError(RuntimeError):
    """This Python has no readable source of its standard library."""


@dataclass(frozen=True)
class StdlibText:
    """The text, coded by an alphabet, cut into a part for training and a part held out."""

    folder: str
    num_files: int
    alphabet: str
    train: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]

    def encode(self, text: str) -> list[int]:
        """The codes of `text`; every character must be in the alphabet."""
        return [self.alphabet.index(character) for character in text]

    def decode(self, codes: list[int]) -> str:
        """The text that `codes` stand for, its indents as spaces."""
        return "".join(self.alphabet[code] for code in codes).expandtabs(4)


def read_stdlib() -> StdlibText:
    """Reads the modules at the top of the standard library: no packages, so no tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = []
    num_characters = 0
    for path in sorted(folder.glob("*.py")):
        # Generated tables of numbers are not what Python code looks like.
        if path.name.startswith("_sysconfigdata") or num_characters >= _ENOUGH_NUM_CHARACTERS:
            continue
        source = path.read_bytes()
        if source.isascii():
            sources.append(_tab_indents(source.decode("ascii")))
            num_characters += len(sources[-1])
    if num_characters < _MIN_NUM_CHARACTERS:
        raise NoTextError(
            f"expected the source of Python's standard library in {folder}, found "
            f"{num_characters} characters in {len(sources)} files; use a Python that was installed "
            "with its .py files"
        )
    alphabet = "".join(sorted(set("".join(sources))))
    return StdlibText(
        folder=str(folder),
        num_files=len(sources),
        alphabet=alphabet,
        train=_code([s for i, s in enumerate(sources) if i % _HELD_OUT_EVERY != 0], alphabet),
        held_out=_code([s for i, s in enumerate(sources) if i % _HELD_OUT_EVERY == 0], alphabet),
    )


def _tab_indents(source: str) -> str:
    """One character for each level: a context then holds more code, and fewer runs of spaces."""
    source = source.replace("\r\n", "\n")
    return re.sub(r"^(?: {4})+", lambda indent: "\t" * (len(indent[0]) // 4), source, flags=re.M)


def _code(sources: list[str], alphabet: str) -> npt.NDArray[np.uint8]:
    """The sources one after the other, each character as its place in the alphabet."""
    place_of_byte = np.zeros(128, dtype=np.uint8)
    place_of_byte[np.frombuffer(alphabet.encode("ascii"), dtype=np.uint8)] = range(len(alphabet))
    return place_of_byte[np.frombuffer("\n".join(sources).encode("ascii"), dtype=np.uint8)]


def draw_batch(
    codes: npt.NDArray[np.uint8], num_sequences: int, context: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Sequences at random places and their successors: the same ones for the same seed."""
    starts = np.random.default_rng(seed).integers(0, len(codes) - context - 1, num_sequences)
    rows = codes[starts[:, None] + np.arange(context + 1)]
    sequences = torch.from_numpy(rows.astype(np.int64))
    return sequences[:, :-1], sequences[:, 1:]
