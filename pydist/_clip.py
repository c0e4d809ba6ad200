"""Owns the clipping of gradients by their norm over all stages."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from pydist._mesh import norms, whole
from pydist._process_group import SUM
from pydist._unsplit import LocalPart, Order, SplitModel, first_names
from pydist.errors import UsageError

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of norms


class GradientClip:
    """torch.nn.utils.clip_grad_norm_ for a split model. Making one is collective.

    Ranks add up one small table with the norm of each gradient, of which they then take the norm
    as torch does: in the unsplit model's order and dtype. So the total is the same in every bit on
    all ranks, and the same as torch's on the unsplit model.
    """

    def __init__(self, model: SplitModel) -> None:
        self._model = model
        self._first = first_names(model.tied_names)
        mine = list(self._counted())
        texts = model.engine.exchange_bytes(json.dumps(mine).encode())
        names = [name for text in texts for name in json.loads(text)]
        order = Order(model.layer_names).sorted(names)
        self._num_parameters = len(order)
        place = {name: index for index, name in enumerate(order)}
        self._places = {name: place[name] for name in mine}

    def _counted(self) -> dict[str, Tensor]:
        """This rank's parameters by name, of those that stages share the first stage's alone."""
        return {
            name: parameter
            for name, parameter in LocalPart(self._model.local_layers).named_parameters()
            if self._first.get(name, name) == name
        }

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scales all ranks' gradients so that the norm of all of them, seen as one vector, is at
        most `max_norm`; returns what it was before. Collective; arguments as torch's.
        """
        total = self._total_norm(float(norm_type), foreach)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients of all stages is {total}, "
                "so they cannot be clipped; pass error_if_nonfinite=False to scale by it anyway"
            )
        parameters = list(LocalPart(self._model.local_layers).parameters())
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
        return total

    def _total_norm(self, norm_type: float, foreach: bool | None) -> Tensor:
        engine = self._model.engine
        # The norms; whether there is a gradient; how many there are of each dtype; ranks that fail.
        size = self._num_parameters
        sizes = [size, size, len(_DTYPES), 1]
        table = torch.zeros(sum(sizes), dtype=torch.float64)
        problem: Exception | None = None
        device: torch.device | None = None
        try:
            device = self._fill(table, norm_type, foreach)
        except Exception as error:
            problem = error
            table[-1] = 1.0
        engine.operations.all_reduce(table, SUM, False)
        of_each, present, counts, failed = table.split(sizes)
        if bool(failed):
            with engine.all_or_none("clip_grad_norm_"):
                if problem is not None:
                    raise problem
        if not bool(present.any()):
            return torch.tensor(0.0)
        dtype = _promoted([d for d, n in zip(_DTYPES, counts.tolist(), strict=True) if n > 0])
        total: Tensor = torch.linalg.vector_norm(of_each[present > 0].to(dtype), norm_type)
        return total if device is None else total.to(device)

    def _fill(self, table: Tensor, norm_type: float, foreach: bool | None) -> torch.device | None:
        """Returns where the gradients are, if there are any; on a GPU this waits for them."""
        places: list[int] = []
        gradients: list[Tensor] = []
        for name, parameter in self._counted().items():
            if name not in self._places:
                raise UsageError(
                    f"parameter {name} was added to a stage after the pipeline was made; add it "
                    "before"
                )
            if parameter.grad is not None:
                places.append(self._places[name])
                gradients.append(whole(parameter, parameter.grad))
        if not gradients:
            return None
        with torch.no_grad():
            found = norms(gradients, norm_type, foreach)
        index = torch.tensor(places)
        table[index] = torch.stack([norm.to(torch.float64) for norm in found]).cpu()
        table[index + self._num_parameters] = 1.0
        for norm in found:
            table[2 * self._num_parameters + _DTYPES.index(norm.dtype)] += 1
        return gradients[0].device


def clip_parts_(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for an unsplit model, some of whose parameters are parts of
    DTensors. Collective over the meshes of these."""
    gradients = [whole(p, p.grad) for p in parameters if p.grad is not None]
    with torch.no_grad():
        found = norms(gradients, norm_type, foreach)
        total = torch.nn.utils.get_total_norm(found, norm_type, error_if_nonfinite, foreach)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
    return total


def _promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found
