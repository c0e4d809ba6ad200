"""Owns the rows of the benchmark of options: how both sides wrap a model and take a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from bench.models import ResidualStack

# Differences of gradients, of the largest: each side may round twice, by half a last place.
EXACT = 1e-4
FP16 = 4 * 2.0**-11
BF16 = 4 * 2.0**-9
ROUNDING = 1e-6  # of the parameters' own size

# State and hook, for register_comm_hook().
Hook = tuple[Any, Callable[..., Any]]


def allreduce_hook() -> Hook:
    return None, default_hooks.allreduce_hook


def fp16_hook() -> Hook:
    return None, default_hooks.fp16_compress_hook


def power_sgd_hook() -> Hook:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=0
    )
    return state, powerSGD_hook.powerSGD_hook


@dataclass(frozen=True)
class Shape:
    """A stack of layers, with one rank's batch and how many steps are timed in a row."""

    num_layers: int
    width: int
    batch_size: int
    steps: int

    def make_model(self) -> ResidualStack:
        """The same parameters every time."""
        torch.manual_seed(0)
        return ResidualStack(self.num_layers, self.width)


LARGE = Shape(9, 1024, batch_size=16, steps=4)
DEEP = Shape(210, 32, batch_size=16, steps=6)
TINY = Shape(3, 32, batch_size=4, steps=2)


@dataclass(frozen=True)
class Wrapping:
    """How a contender wraps its model."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    make_hook: Callable[[], Hook] | None = None


VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}


@dataclass(frozen=True)
class Option:
    """One row: how the contenders are wrapped, and what a step of theirs is."""

    name: str
    wrappings: Mapping[str, Wrapping | None]  # by contender; None: compute alone
    shape: Shape = LARGE
    num_microbatches: int = 1  # of which all but the last are in no_sync()
    skips: bool = False  # every third layer, others in every step
    ranks_skip_alike: bool = True
    joined: bool = False
    # Of pydist's parameters to the peer's; None: ranks agree, the loss is finite, and
    # the hook ran as often.
    tolerance: float | None = EXACT
    peer: str = "ddp"


def _hooked(
    name: str, make_hook: Callable[[], Hook], tolerance: float | None, **arguments: Any
) -> Option:
    wrappings = {
        "compute": None,
        "ddp": Wrapping({**VIEWS, **arguments}, make_hook),
        "pydist": Wrapping(arguments, make_hook),
    }
    return Option(name, wrappings, tolerance=tolerance)


_BOTH = {"compute": None, "ddp": Wrapping(VIEWS), "pydist": Wrapping()}
_UNUSED = {"compute": None, "ddp": Wrapping({**VIEWS, **UNUSED}), "pydist": Wrapping(UNUSED)}
OPTIONS = {
    option.name: option
    for option in (
        Option("a third unused", _UNUSED, skips=True),
        Option("a third unused, per rank", _UNUSED, skips=True, ranks_skip_alike=False),
        Option("a third unused, deep", _UNUSED, DEEP, skips=True),
        Option("no_sync, 8 microbatches", _BOTH, replace(LARGE, steps=1), num_microbatches=8),
        _hooked("allreduce_hook", allreduce_hook, EXACT),
        _hooked("fp16_compress_hook", fp16_hook, FP16),
        # One bucket: with several, DDP's calls over Gloo come in different orders on its ranks.
        _hooked("powerSGD_hook, rank 1", power_sgd_hook, None, **VIEWS, bucket_cap_mb=100),
        Option(
            "wire bf16, DDP fp16 hook",
            {
                "compute": None,
                "ddp": Wrapping(VIEWS, fp16_hook),
                "pydist": Wrapping({"wire_dtype": torch.bfloat16}),
            },
            tolerance=BF16,
        ),
        Option("join()", _BOTH, joined=True),
    )
}

# An audit in every step beside none: the difference is one audit.
_AUDITED = {"pydist": Wrapping(), "audited": Wrapping({"audit_every": 1})}
AUDITS = {
    option.name: option
    for option in (
        Option("audit", _AUDITED, tolerance=0.0, peer="audited"),
        Option("audit, deep", _AUDITED, DEEP, tolerance=0.0, peer="audited"),
    )
}
