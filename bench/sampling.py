"""Owns interleaved samples: who follows whom, differences within a turn, a ratio's certainty."""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

RESAMPLES = 2000


def interleaved(contenders: Sequence[T], num_turns: int) -> Iterator[tuple[int, T]]:
    """Turn and contender; turn -1 warms up, and nobody always follows the same one's caches."""
    for turn in range(-1, num_turns):
        shift = turn % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            yield turn, contender


def added_s(own_s: Sequence[float], base_s: Sequence[float]) -> float:
    """Median of the differences within each turn.

    Whatever slows the machine for longer than a turn slows both alike and drops out, which it
    would not from the difference of two medians.
    """
    return statistics.median(own - base for own, base in zip(own_s, base_s, strict=True))


def added_ratio(own_s: Sequence[float], peer_s: Sequence[float], base_s: Sequence[float]) -> float:
    """What `own` adds to `base`, as a share of what `peer` adds; infinite where that is nothing."""
    peer_added_s = added_s(peer_s, base_s)
    return added_s(own_s, base_s) / peer_added_s if peer_added_s > 0 else math.inf


def added_ratio_interval(
    own_s: Sequence[float], peer_s: Sequence[float], base_s: Sequence[float]
) -> tuple[float, float]:
    """The middle 90 % of the ratio over resampled turns (bootstrap); always the same ones."""
    generator = random.Random(0)
    turns = list(zip(own_s, peer_s, base_s, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        own, peer, base = zip(*generator.choices(turns, k=len(turns)), strict=True)
        ratios.append(added_ratio(own, peer, base))
    ratios.sort()
    return ratios[RESAMPLES // 20], ratios[-RESAMPLES // 20 - 1]
