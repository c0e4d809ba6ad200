"""Owns the state of optimizers of a split model by the names of the unsplit model.

The format is that of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict for the
unsplit model: {"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}. A parameter
that stages share is there once, under its first name.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist._gather import gather_values
from pydist._mesh import part, whole
from pydist._trees import map_tensors
from pydist._unsplit import LocalPart, Order, SplitModel, first_names
from pydist.errors import UsageError

_NOT_OPTIONS = ("params", "param_names")  # torch's optimizers keep names if they are given some


def full_optim_state_dict(
    model: SplitModel, optimizer: Optimizer | None, rank0_only: bool = False
) -> dict[str, Any] | None:
    """The state of all ranks' optimizers, as a copy; on every rank, or on group rank 0 alone (None
    on the others). Collective.

    `optimizer` has parameters of this rank's stages; None where there are none. Groups of the same
    place in the list and the same options are one group.
    """
    with model.engine.all_or_none("full_optim_state_dict"):
        named = _NamedOptimizer(model, optimizer)
    parts = gather_values(
        model.engine, (named.state(shared=False), named.groups()), to_all=not rank0_only
    )
    if parts is None:
        return None
    state = {name: entry for part, _ in parts for name, entry in part.items()}
    order = Order(model.layer_names)
    return {
        "state": {name: state[name] for name in order.sorted([*state])},
        "param_groups": _merged(order, [groups for _, groups in parts]),
    }


def optim_state_dict(
    model: SplitModel, optimizer: Optimizer | None, initialize: bool = True
) -> dict[str, Any]:
    """This rank's entries of "state", as references, and all ranks' "param_groups". Collective.

    For torch.distributed.checkpoint: what a new optimizer is to load into must have its tensors
    already. `initialize` makes them, by a step that changes no parameter, as torch's own
    get_optimizer_state_dict does; without it what is loaded into the empty state gets lost.
    """
    with model.engine.all_or_none("optim_state_dict"):
        named = _NamedOptimizer(model, optimizer)
        if initialize and optimizer is not None:
            _initialize(optimizer)
    parts = gather_values(model.engine, named.groups())
    assert parts is not None
    return {
        "state": named.state(shared=True),
        "param_groups": _merged(Order(model.layer_names), parts),
    }


def load_optim_state_dict(
    model: SplitModel, optimizer: Optimizer | None, state: Mapping[str, Any]
) -> None:
    """Takes the entries of this optimizer's parameters, and their groups' options. Collective.

    Saved groups need not be this optimizer's groups, but parameters of one of its groups must have
    been in groups with equal options. A RuntimeError, the same on all ranks, names parameters that
    no saved group has.
    """
    with model.engine.all_or_none("load_optim_state_dict"):
        _check_format(state)
        missing, translated = _NamedOptimizer(model, optimizer).translated(state)
    texts = model.engine.exchange_bytes(json.dumps(missing).encode())
    absent = Order(model.layer_names).sorted([name for text in texts for name in json.loads(text)])
    if absent:
        quoted = ", ".join(f'"{name}"' for name in absent)
        raise RuntimeError(
            "Error(s) in loading the optimizer's state for PipelineParallel:\n\tMissing "
            f"parameter(s) in param_groups: {quoted}. "
        )
    with model.engine.all_or_none("load_optim_state_dict"):
        if optimizer is not None:
            optimizer.load_state_dict(translated)


def _check_format(state: Mapping[str, Any]) -> None:
    if "state" not in state or "param_groups" not in state:
        raise UsageError(
            f"the optimizer's state has the keys {', '.join(map(str, state))}; expected state and "
            "param_groups, as full_optim_state_dict returns them"
        )
    names = [name for group in state["param_groups"] for name in group["params"]]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(
            "the optimizer's state counts parameters instead of naming them: it is that of "
            "optimizer.state_dict(), which says nothing of another split. Save what "
            "full_optim_state_dict returns"
        )


class _NamedOptimizer:
    """One rank's optimizer, and the unsplit model's names for its parameters."""

    def __init__(self, model: SplitModel, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        self._first = first_names(model.tied_names)
        self._aliases = {names[0]: list(names) for names in model.tied_names}
        self._local = LocalPart(model.local_layers)  # keeps the parameters, and so their ids
        self._names: dict[int, list[str]] = {}  # by id of the parameter, the first one first
        for name, parameter in self._local.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        # Indices are those of optimizer.state_dict(): in order of groups.
        self._parameters: list[Tensor] = []
        for index, group in enumerate(optimizer.param_groups if optimizer is not None else []):
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise UsageError(
                        f"group {index} of the optimizer has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in this rank's stages; make the "
                        "optimizer from the pipeline's parameters()"
                    )
                self._parameters.append(parameter)
        self._named = self._first_names()
        # Of a parameter that several ranks have, the one with its first name gives its state.
        local = {name for names in self._names.values() for name in names}
        self._given = {index: name for index, name in self._named.items() if name in local}

    def _name(self, parameter: Tensor) -> str:
        name = self._names[id(parameter)][0]
        return self._first.get(name, name)

    def _first_names(self) -> dict[int, str]:
        """By index, in the order of this rank's layers; each name once."""
        place = {key: index for index, key in enumerate(self._names)}
        indices = range(len(self._parameters))
        ordered = sorted(indices, key=lambda index: place[id(self._parameters[index])])
        found: dict[str, int] = {}
        for index in ordered:
            found.setdefault(self._name(self._parameters[index]), index)
        return {index: name for name, index in found.items()}

    def state(self, shared: bool) -> dict[str, Any]:
        """By name; without `shared` only what this rank gives to the whole."""
        if self._optimizer is None:
            return {}
        entries = self._optimizer.state_dict()["state"]
        return {
            name: {key: whole(self._parameters[index], value) for key, value in entry.items()}
            for index, name in self._named.items()
            if (entry := entries.get(index)) is not None and (shared or index in self._given)
        }

    def groups(self) -> list[dict[str, Any]]:
        """With the names that this rank gives to the whole."""
        if self._optimizer is None:
            return []
        return [
            {
                **_options(group),
                "params": [n for i, n in self._given.items() if i in group["params"]],
            }
            for group in self._optimizer.state_dict()["param_groups"]
        ]

    def translated(self, state: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Names that no saved group has, and the rest as optimizer.load_state_dict takes it."""
        if self._optimizer is None:
            return [], {}
        saved_groups = state["param_groups"]
        group_of = {name: group for group in saved_groups for name in group["params"]}
        missing: list[str] = []
        entries: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for place, group in enumerate(self._optimizer.state_dict()["param_groups"]):
            sources: dict[str, Any] = {}
            for index in group["params"]:
                name = self._find(index, group_of)
                if name is None:
                    missing.append(self._name(self._parameters[index]))
                    continue
                sources[name] = group_of[name]
                if name in state["state"]:
                    entry = state["state"][name]
                    cut = {key: part(self._parameters[index], entry[key]) for key in entry}
                    entries[index] = map_tensors(torch.clone, cut)
            options = _common_options(place, sources)
            if not group["params"] and place < len(saved_groups):
                options = _options(saved_groups[place])
            groups.append({**group, **options})
        return missing, {"state": entries, "param_groups": groups}

    def _find(self, index: int, group_of: Mapping[str, Any]) -> str | None:
        """The name under which the parameter was saved."""
        parameter = self._parameters[index]
        first = self._name(parameter)
        names = [*self._aliases.get(first, [first]), *self._names[id(parameter)]]
        return next((name for name in names if name in group_of), None)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _common_options(place: int, sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of the saved groups that one of the optimizer's groups comes from."""
    options: dict[str, Any] | None = None
    first = ""
    for name, group in sources.items():
        found = _options(group)
        if options is None:
            options, first = found, name
        elif not _same(options, found):
            different = [k for k in found if k not in options or not _same(options[k], found[k])]
            raise UsageError(
                f"group {place} of the optimizer has {first} and {name}, which were saved in "
                f"groups with different options ({', '.join(different)}); make the optimizer's "
                "groups as they were when it was saved"
            )
    return options or {}


def _merged(order: Order, ranks: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One list of groups from those of all ranks."""
    places: list[tuple[int, dict[str, Any]]] = []
    for groups in ranks:
        for place, group in enumerate(groups):
            for other_place, merged in places:
                if other_place == place and _same(_options(merged), _options(group)):
                    merged["params"] = [*merged["params"], *group["params"]]
                    break
            else:
                places.append((place, dict(group)))
    found = [group for _, group in sorted(places, key=lambda item: item[0])]
    for group in found:
        group["params"] = order.sorted(group["params"])
    return found


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and bool(torch.equal(left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)


def _initialize(optimizer: Optimizer) -> None:
    """Gives an optimizer without state its tensors, by a step of learning rate zero with gradients
    of zero; what it counts is to be loaded afterwards.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = (
                    torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
                )
        optimizer.step()
        for entry in optimizer.state.values():
            if "step" in entry:
                entry["step"] *= 0  # nothing was learnt: it goes on as a new one
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
