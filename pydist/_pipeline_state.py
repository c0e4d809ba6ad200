"""Owns a split model's state_dict: its local part, the whole, and loading either."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydist._gather import gather_values
from pydist._unsplit import LocalPart, Order, SplitModel
from pydist.errors import PeerError


class IncompatibleKeys(NamedTuple):
    """What load_state_dict returns, as torch's does."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def state_dict(model: SplitModel, keep_vars: bool = False) -> dict[str, Any]:
    """This rank's part, with the names of the unsplit model; a reference to it, as torch's is."""
    found: dict[str, Any] = LocalPart(model.local_layers).state_dict(keep_vars=keep_vars)
    return found


def full_state_dict(model: SplitModel, rank0_only: bool = False) -> dict[str, Any] | None:
    """The unsplit model's state_dict, as a copy, in its order; on every rank, or on group rank 0
    alone (None on the others). Collective. A tied parameter is there under each of its names.
    """
    local = state_dict(model)
    metadata: dict[str, Any] = getattr(local, "_metadata", {})
    parts = gather_values(model.engine, (dict(local), dict(metadata)), to_all=not rank0_only)
    if parts is None:
        return None
    values: dict[str, Any] = {}
    versions: OrderedDict[str, Any] = OrderedDict()
    for part, its_metadata in parts:
        values.update(part)
        versions.update(its_metadata)
    whole = OrderedDict((name, values[name]) for name in Order(model.layer_names).sorted([*values]))
    whole._metadata = versions  # type: ignore[attr-defined]
    return whole


def load_state_dict(
    model: SplitModel, state: Mapping[str, Any], strict: bool = True
) -> IncompatibleKeys:
    """Takes this rank's part of the unsplit model's state_dict, or a local one. Collective.

    What is missing or unexpected is judged for the model as a whole and is the same on all ranks,
    and so is the RuntimeError, with torch's words, that `strict` makes of it. As with torch, what
    fits has been loaded by then.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state)}.")
    loading = _Loading(model)
    loading.load(state)
    missing, unexpected, problems = loading.compare()
    if strict:
        for what, names in (("Unexpected", unexpected), ("Missing", missing)):
            if names:
                problems.insert(0, f"{what} key(s) in state_dict: {_quoted(names)}. ")
    if problems:
        text = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in loading state_dict for PipelineParallel:\n\t{text}")
    return IncompatibleKeys(missing, unexpected)


class _Loading:
    """One rank's loading, and what it has to tell the others about it."""

    def __init__(self, model: SplitModel) -> None:
        self._model = model
        self._part = LocalPart(model.local_layers)
        self._expected = list(self._part.state_dict())
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._accepted: list[str] = []
        self._problems: list[str] = []
        self._error: Exception | None = None

    def load(self, state: Mapping[str, Any]) -> None:
        try:
            keys = self._part.load_state_dict(self._prepared(state), strict=False)
        except RuntimeError as error:  # "Error(s) in ...:", and a line for each
            self._problems = str(error).split("\n\t")[1:] or [str(error)]
            self._missing = [name for name in self._expected if name not in state]
            self._unexpected = [name for name in state if name not in self._expected]
        except Exception as error:
            self._error = error
        else:
            self._missing, self._unexpected = list(keys.missing_keys), list(keys.unexpected_keys)
        unexpected = set(self._unexpected)
        self._accepted = [name for name in state if name not in unexpected]

    def _prepared(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the one value that torch would leave in a tied parameter, the last name's, under
        all of its names."""
        changed: dict[str, Any] = {}
        for names in self._model.tied_names:
            there = [name for name in names if name in state]
            if there:
                changed.update(dict.fromkeys(there, state[there[-1]]))
        if not changed:
            return state
        prepared = OrderedDict(state) | changed
        prepared._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
        return prepared

    def compare(self) -> tuple[list[str], list[str], list[str]]:
        """Missing and unexpected names, and other problems, of all ranks together. Collective."""
        mine = {
            "missing": self._missing,
            "unexpected": self._unexpected,
            "known": [*self._expected, *self._accepted],
            "problems": self._problems,
            "error": "" if self._error is None else f"{type(self._error).__name__}: {self._error}",
        }
        texts = self._model.engine.exchange_bytes(json.dumps(mine).encode())
        if self._error is not None:
            raise self._error
        all_ranks = [json.loads(text) for text in texts]
        for rank, report in enumerate(all_ranks):
            if report["error"]:
                raise PeerError(f"rank {rank} raised in load_state_dict: {report['error']}")
        known = {name for report in all_ranks for name in report["known"]}
        unexpected = _once(name for report in all_ranks for name in report["unexpected"])
        return (
            Order(self._model.layer_names).sorted(
                _once(name for report in all_ranks for name in report["missing"])
            ),
            [name for name in unexpected if name not in known],
            _once(problem for report in all_ranks for problem in report["problems"]),
        )


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
