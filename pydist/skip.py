"""Owns skips: tensors that go from one layer to a later one, past the layers between.

    @pydist.skippable(stash=("early",))
    class Encoder(nn.Module):
        def forward(self, x):
            x = self.body(x)
            pydist.skip.stash("early", x)
            return x

    @pydist.skippable(pop=("early",))
    class Decoder(nn.Module):
        def forward(self, x):
            return self.body(torch.cat([x, pydist.skip.pop("early")], 1))

In a pipeline the tensor goes from the stage of the one straight to that of the other, as does its
gradient. In a module that runs by itself it simply passes. (The idea is torchgpipe's; Lee et al.
2020, section 3.3.)
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from pydist import _C
from pydist._dynamo import untraced_with_callees
from pydist._engine import Engine
from pydist.errors import UsageError

ATTRIBUTE = "_pydist_skips"

# A class of modules, or one module.
Target = TypeVar("Target", bound=type[nn.Module] | nn.Module)


@dataclass(frozen=True)
class Declaration:
    """What one module of a model stashes and pops."""

    stage: int
    layer: int  # index in the unsplit model
    module: str  # its name there
    stash: tuple[str, ...]
    pop: tuple[str, ...]


@dataclass(frozen=True)
class Portal:
    """A skip whose ends are in different stages."""

    number: int  # of the port, from 1 on: 0 is from one stage to the next
    name: str
    from_stage: int
    to_stage: int


def skippable(*, stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Target], Target]:
    """Declares what a module's forward stashes and pops, so that a pipeline can plan for it.

    A decorator of classes. Where names differ between modules of a class, declare them for one:
    `pydist.skippable(stash=(f"level{level}",))(self)` in its __init__. Each name is stashed by one
    module of a model and popped by one, in the same layer or a later one. A module of a module is
    found too.

    Raises: UsageError if names are not strings.
    """
    names = {"stash": stash, "pop": pop}
    for what, given in names.items():
        if isinstance(given, str) or not all(isinstance(name, str) for name in given):
            raise UsageError(f"{what} is {given!r}; expected a tuple of names")

    def declare(target: Target) -> Target:
        earlier = getattr(target, ATTRIBUTE, {})
        merged = {what: (*earlier.get(what, ()), *given) for what, given in names.items()}
        setattr(target, ATTRIBUTE, merged)
        return target

    return declare


@untraced_with_callees
def stash(name: str, tensor: Tensor | None) -> None:
    """Keeps a tensor (or None) for the layer that pops this name. Called within a forward.

    Raises: UsageError if it is not a tensor; within a pipeline also if no module declares to stash
    this name, or if it is stashed a second time.
    """
    if tensor is not None and not isinstance(tensor, Tensor):
        raise UsageError(f"skip {name!r} is {type(tensor).__name__}; expected a tensor or None")
    if _is_recomputing():
        _check_recomputed(name, tensor)
        return
    if torch.is_grad_enabled():
        _stashed_without_grad.discard(name)
    else:
        _stashed_without_grad.add(name)
    if _C.in_stage():
        if name not in _declared_stashes:
            raise UsageError(
                f"skip {name!r} is stashed in a pipeline, but no module declares that; add "
                f'@pydist.skippable(stash=("{name}",)) to the class of the module that stashes it, '
                f'and @pydist.skippable(pop=("{name}",)) to that which pops it'
            )
        _C.put_skip(name, tensor)
    else:
        _outside_stages.tensors[name] = (tensor, _version_of(tensor))


@untraced_with_callees
def pop(name: str) -> Tensor | None:
    """Takes what an earlier layer stashed under this name. Called within a forward.

    Raises: UsageError if there is nothing, if the tensor was changed in place since, or if a
    checkpoint recomputes the caller: by then the tensor is gone. Pop before the checkpoint, and
    pass the tensor to the checkpointed function.
    """
    if _is_recomputing():
        raise UsageError(
            f"skip {name!r} is popped inside a checkpoint, which cannot pop it again to recompute; "
            "pop it before, and pass the tensor to the checkpointed function as an argument"
        )
    if _C.in_stage():
        return _C.take_skip(name)
    if name not in _outside_stages.tensors:
        raise UsageError(
            f"nothing is stashed as skip {name!r}: was it popped already, or did its layer not "
            "run or not stash it?"
        )
    tensor, version = _outside_stages.tensors.pop(name)
    if _version_of(tensor) != version:
        raise UsageError(
            f"the tensor stashed as skip {name!r} was changed in place before it was popped; stash "
            "tensor.clone(), or change it out of place"
        )
    return tensor


class _OutsideStages(threading.local):
    """What was stashed where no pipeline runs, with the tensor's version."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[Tensor | None, int]] = {}


_outside_stages = _OutsideStages()
_stashed_without_grad: set[str] = set()
_declared_stashes: set[str] = set()  # by modules of any pipeline of this process


def _is_recomputing() -> bool:
    """Whether this is within a backward, where a checkpoint runs its function again."""
    return torch._C._current_graph_task_id() != -1


def _check_recomputed(name: str, tensor: Tensor | None) -> None:
    """A reentrant checkpoint's forward builds no graph, so what left it there has no gradient."""
    if tensor is not None and tensor.requires_grad and name in _stashed_without_grad:
        raise UsageError(
            f"skip {name!r} is stashed inside a reentrant checkpoint, where its gradient would be "
            "lost; use checkpoint(..., use_reentrant=False), or return the tensor and stash it "
            "outside"
        )


def _version_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def declarations_of(stage: int, layers: Iterable[tuple[int, str, nn.Module]]) -> list[Declaration]:
    """Of the layers (index, name, module) of a stage, and the modules in them; `stash` knows them
    from then on."""
    found = []
    for layer, name, module in layers:
        for inner_name, inner in module.named_modules(prefix=name):
            # Not of the module alone: a compiled one shows what the one inside it has.
            declared = vars(inner).get(ATTRIBUTE, getattr(type(inner), ATTRIBUTE, None))
            if declared is not None:
                found.append(
                    Declaration(stage, layer, inner_name, declared["stash"], declared["pop"])
                )
                _declared_stashes.update(declared["stash"])
    return found


def exchange_declarations(engine: Engine, mine: list[Declaration]) -> list[Declaration]:
    """Those of all stages, where each rank knows its own stages'. Collective."""
    text = json.dumps([asdict(declaration) for declaration in mine])
    gathered = [json.loads(part) for part in engine.exchange_bytes(text.encode())]
    return [
        Declaration(**{**fields, "stash": tuple(fields["stash"]), "pop": tuple(fields["pop"])})
        for part in gathered
        for fields in part
    ]


def portals_of(declarations: Iterable[Declaration]) -> list[Portal]:
    """The skips that cross stages; the same on every rank, whatever the order of declarations.

    Raises: UsageError, naming modules and the skip, unless each name is stashed once, and then
    popped once.
    """
    ordered = sorted(declarations, key=lambda each: (each.stage, each.layer, each.module))
    stashing = _by_name(ordered, "stash")
    popping = _by_name(ordered, "pop")
    portals: list[Portal] = []
    for name, source in stashing.items():
        target = popping.pop(name, None)
        if target is None:
            raise UsageError(
                f"skip {name!r}, which {source.module} stashes, is popped by no module; declare "
                "who pops it with pydist.skippable(pop=...)"
            )
        if (target.stage, target.layer) < (source.stage, source.layer):
            raise UsageError(
                f"skip {name!r} is popped by {target.module}, before {source.module} stashes it; "
                "skips lead to later layers"
            )
        if source.stage != target.stage:
            portals.append(Portal(len(portals) + 1, name, source.stage, target.stage))
    for name, target in popping.items():
        raise UsageError(
            f"skip {name!r}, which {target.module} pops, is stashed by no module; declare who "
            "stashes it with pydist.skippable(stash=...)"
        )
    return portals


def _by_name(declarations: list[Declaration], what: str) -> dict[str, Declaration]:
    found: dict[str, Declaration] = {}
    for declaration in declarations:
        for name in getattr(declaration, what):
            if name in found:
                done = {"stash": "stashed", "pop": "popped"}[what]
                raise UsageError(
                    f"skip {name!r} is {done} twice, by {found[name].module} and "
                    f"{declaration.module}; give each its own name"
                )
            found[name] = declaration
    return found
