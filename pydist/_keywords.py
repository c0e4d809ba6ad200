"""Owns which stage gets which keyword argument: those that its forward names."""

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from pydist._engine import Engine
from pydist.errors import UsageError

# The keyword arguments that a stage's forward takes; None: any.
Names = frozenset[str] | None


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the forward's positional parameters, as far as it names them."""
    inner = getattr(module, "_orig_mod", module)  # torch.compile's wrapper takes anything
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(inner.forward).parameters.values()
    except (TypeError, ValueError):  # of a forward that is no Python function
        return ()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def exchange_names(engine: Engine, local: Mapping[int, Names]) -> dict[int, Names]:
    """Every stage's names, where each rank knows those of its own stages. Collective."""
    mine = {stage: None if names is None else sorted(names) for stage, names in local.items()}
    found: dict[int, Names] = {}
    for text in engine.exchange_bytes(json.dumps(mine).encode()):
        for stage, names in json.loads(text).items():
            found[int(stage)] = None if names is None else frozenset(names)
    return found


def exchange_positional_names(engine: Engine, mine: Sequence[str] | None) -> tuple[str, ...]:
    """Those of the first stage's forward, where one rank knows them and the others pass None.
    Collective."""
    texts = engine.exchange_bytes(json.dumps(mine).encode())
    return next((tuple(names) for text in texts if (names := json.loads(text)) is not None), ())


class KeywordRoutes:
    """Which of a step's keyword arguments each stage gets."""

    def __init__(self, names_by_stage: Mapping[int, Names]) -> None:
        """`names_by_stage` has all stages, those of other ranks too."""
        self._names_by_stage = dict(names_by_stage)
        self._accepted: dict[tuple[str, ...], None] = {}  # that have been checked

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises UsageError if there is an argument that no stage takes."""
        key = tuple(given)
        if key in self._accepted:
            return
        known = self._names_by_stage.values()
        if all(names is not None for names in known):
            taken = frozenset().union(*(names for names in known if names is not None))
            unknown = [name for name in given if name not in taken]
            if unknown:
                raise UsageError(
                    f"no stage's forward takes the keyword argument{'s'[: len(unknown) > 1]} "
                    f"{', '.join(unknown)}; the stages' forwards name "
                    f"{', '.join(sorted(taken)) or 'none'}; loss_fn's target is given as target="
                )
        self._accepted[key] = None

    def shared(self, given: Collection[str]) -> list[str]:
        """Which of `given` several stages get."""
        all_names = self._names_by_stage.values()
        return [
            name for name in given if sum(names is None or name in names for names in all_names) > 1
        ]

    def check_options(self, positional_names: Sequence[str], **options: Collection[str]) -> None:
        """Raises UsageError if an option (replicate=..., chunk_dim=...) names an argument that
        nobody takes: it would have no effect. `positional_names` as of the first stage.
        """
        known = {"target", *positional_names}
        for names in self._names_by_stage.values():
            if names is None:
                return
            known |= names
        for option, given in options.items():
            may_name = known | {"output"} if option == "chunk_dim" else known
            unknown = [name for name in given if name not in may_name]
            if unknown:
                raise UsageError(
                    f"{option} names {', '.join(unknown)}, which no stage's forward takes; it may "
                    f"name {', '.join(sorted(may_name))}"
                )

    def of_stage(self, stage: int, given: dict[str, Any]) -> dict[str, Any]:
        """What of `given` the stage's forward takes; `given` itself where that is everything."""
        names = self._names_by_stage[stage]
        if names is None or names.issuperset(given):
            return given
        return {name: value for name, value in given.items() if name in names}
