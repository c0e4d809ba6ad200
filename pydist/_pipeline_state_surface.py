"""Owns PipelineParallel's methods about parameters: names, state, clipping, optimizers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pydist._clip import GradientClip
from pydist._optim_state import full_optim_state_dict, load_optim_state_dict, optim_state_dict
from pydist._pipeline_state import IncompatibleKeys, full_state_dict, load_state_dict
from pydist._unsplit import SplitModel
from pydist.errors import TimeoutError


@contextmanager
def _naming(method: str) -> Iterator[None]:
    """Says which method it was that waited for other ranks in vain."""
    try:
        yield
    except TimeoutError as error:
        error.args = (f"{method}(), which all ranks of the pipeline must call: {error}",)
        raise


class PipelineState(nn.Module):
    """What a pipeline says of its parameters: by the names of the unsplit model."""

    _split_model: SplitModel
    _aliases: frozenset[int]  # ids of leaves that only stand for another stage's parameter
    _clip: GradientClip | None

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of local stages; a parameter that several of them share is there once."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) not in self._aliases:
                yield name, parameter

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any] | None:
        """The unsplit model's state_dict, as a copy; on every rank, or on the first alone.

        Collective. state_dict() is this rank's part of it.
        """
        with _naming("full_state_dict"):
            return full_state_dict(self._split_model, rank0_only)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Takes this rank's part of the unsplit model's state_dict, or a local one. Collective.

        Missing and unexpected keys are judged for the model as a whole, and are the same on all
        ranks. `assign` must be False.
        """
        if assign:
            raise NotImplementedError("load_state_dict of a pipeline copies; assign must be False")
        with _naming("load_state_dict"):
            return load_state_dict(self._split_model, state_dict, strict)

    def full_optim_state_dict(
        self, optimizer: Optimizer | None, rank0_only: bool = False
    ) -> dict[str, Any] | None:
        """The state of all ranks' optimizers by names of the unsplit model, as a copy. Collective.

        `optimizer` has parameters of this rank; None where it has none.
        """
        with _naming("full_optim_state_dict"):
            return full_optim_state_dict(self._split_model, optimizer, rank0_only)

    def optim_state_dict(
        self, optimizer: Optimizer | None, initialize: bool = True
    ) -> dict[str, Any]:
        """This rank's part of it, for torch.distributed.checkpoint. Collective.

        `initialize` makes what a new optimizer has not yet, without changing a parameter: a
        checkpoint is loaded into what is there, and into nothing where that is empty.
        """
        with _naming("optim_state_dict"):
            return optim_state_dict(self._split_model, optimizer, initialize)

    def load_optim_state_dict(self, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
        """Takes what belongs to this rank's parameters, saved with any split. Collective."""
        with _naming("load_optim_state_dict"):
            load_optim_state_dict(self._split_model, optimizer, state)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ over all stages; returns the total norm. Collective."""
        with _naming("clip_grad_norm_"):
            if self._clip is None:
                self._clip = GradientClip(self._split_model)
            return self._clip.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)
