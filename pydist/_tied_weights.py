"""Owns parameters that several stages share: each stage's own leaf, and the sum of their gradients.

Stages on different ranks have copies, stages of one rank aliases of the same memory. A stage's
backwards add up in its own leaf, so that its gradient depends on nothing but its microbatches; at
the end of a step all ranks add the stages' gradients in stage order. So the sum, and with it every
copy after an optimizer step, is the same in every bit on all ranks, and for every schedule and
placement. It equals the unsplit model's but for rounding: that one adds both uses of a parameter
for each microbatch.
"""

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pydist import _C
from pydist._engine import Engine
from pydist._partition import TiedGroup
from pydist.errors import MismatchError, UsageError

# Messages of the executor have ports from 0 on.
_KEY = ("gradient", 0, 0, -1)

# The layers of local stages, by stage and by name in the unsplit model.
LocalLayers = Mapping[int, dict[str, nn.Module]]


def separate_stages(groups: Sequence[TiedGroup], layers: LocalLayers) -> None:
    """Gives each local stage a leaf of its own for each parameter that it shares with another.

    In place, and before anything is made of the layers: the first local stage keeps its parameters,
    the others get aliases of the same memory. A module that is in two stages is replaced in the
    later one by a second module that shares everything with it but those parameters.
    """
    taken: dict[int, nn.Module] = {}
    for stage in sorted(layers):
        aliases: dict[int, nn.Parameter] = {}
        for group in groups:
            here = [(at, name) for at, name in group if at in layers]
            for at, name in here:
                if at == stage:
                    _check_hooks(name, _find(layers[stage], name))
            for at, name in here[1:]:
                if at == stage:
                    first = _find(layers[here[0][0]], here[0][1])
                    own = _find(layers[stage], name)
                    _check_alike(here[0][1], first, name, own)
                    aliases[id(own)] = _alias(first)
        done: dict[int, nn.Module] = {}
        for name, layer in layers[stage].items():
            layers[stage][name] = _with_aliases(layer, aliases, taken, done)
        taken.update((id(m), m) for layer in layers[stage].values() for m in layer.modules())


def _check_alike(name: str, first: nn.Parameter, other_name: str, other: nn.Parameter) -> None:
    one, two = _describe(first), _describe(other)
    if one != two:
        raise MismatchError(
            f"tied parameters differ: {other_name} is {two}, and {name} is {one}; they cannot share"
            " their memory"
        )


def _describe(parameter: nn.Parameter) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{tuple(parameter.shape)} {parameter.dtype}{frozen}"


def _check_hooks(name: str, parameter: nn.Parameter) -> None:
    """A hook on the one leaf of the unsplit model sees the gradient of all its uses at once. Here
    each stage has a leaf, and their sum is there after the last backward only."""
    kinds = {
        "register_hook": parameter._backward_hooks,
        "register_post_accumulate_grad_hook": getattr(
            parameter, "_post_accumulate_grad_hooks", None
        ),
    }
    for kind, hooks in kinds.items():
        if hooks:
            raise UsageError(
                f"the tied parameter {name} has a hook ({kind}), which would see the gradients of "
                "each stage that shares it on their own, not their sum; remove the hook, and "
                "change .grad between step() and the optimizer's step"
            )


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def _with_aliases(
    module: nn.Module,
    aliases: Mapping[int, nn.Parameter],
    taken: Mapping[int, nn.Module],
    done: dict[int, nn.Module],
) -> nn.Module:
    """The module with aliases in it; a second one where an earlier stage has taken it."""
    if id(module) in done:
        return done[id(module)]
    own = module
    if id(module) in taken and any(id(p) in aliases for p in module.parameters()):
        own = _second(module)
    done[id(module)] = own
    for name, parameter in list(own._parameters.items()):
        if id(parameter) in aliases:
            setattr(own, name, aliases[id(parameter)])  # an RNN keeps a list of them, too
    for name, child in own._modules.items():
        if child is not None:
            own._modules[name] = _with_aliases(child, aliases, taken, done)
    return own


def _second(module: nn.Module) -> nn.Module:
    """A module that shares everything with this one, but may be given other parameters."""
    second: nn.Module = module._replicate_for_data_parallel()  # RNNs know more of it
    del second._is_replica
    second._parameters = dict(module._parameters)
    second._buffers = module._buffers
    return second


def _find(layers: Mapping[str, nn.Module], name: str) -> nn.Parameter:
    """The parameter of this name in the unsplit model."""
    layer, _, rest = name.partition(".")
    try:
        return layers[layer].get_parameter(rest)
    except (AttributeError, KeyError):
        raise UsageError(f"there is no parameter {name}, which is to be tied") from None


class _Shared:
    """One shared parameter, seen from a rank that has stages with it."""

    def __init__(self, group: TiedGroup, layers: LocalLayers, rank_of_stage: Sequence[int]) -> None:
        self.name_of = dict(group)
        self.rank_of = {stage: rank_of_stage[stage] for stage in sorted(self.name_of)}
        self.leaves = {
            stage: _find(layers[stage], self.name_of[stage])
            for stage in self.rank_of
            if stage in layers
        }
        self.root = next(iter(self.rank_of.values()))  # whose value all copies start with
        (self.first, *self.aliases) = self.leaves.values()
        self.earlier: Tensor | None = None  # gradient of earlier steps

    def check(self) -> None:
        for stage, leaf in self.leaves.items():
            _check_hooks(self.name_of[stage], leaf)

    def link(self) -> None:
        """The parameter may have got other memory: by `p.data = ...`, or module.to(dtype)."""
        for alias in self.aliases:
            alias.data = self.first.data
            alias.requires_grad_(self.first.requires_grad)

    def keep_earlier(self, clone: bool) -> None:
        """Before a step: gradients of earlier steps are no part of what is exchanged."""
        earlier = self.first.grad
        self.earlier = earlier.clone() if clone and earlier is not None else earlier

    def clear(self) -> None:
        self.first.grad = None
        for alias in self.aliases:
            alias.grad = None

    def restore(self) -> None:
        """After a step that failed."""
        self.first.grad, self.earlier = self.earlier, None
        for alias in self.aliases:
            alias.grad = None

    def add_up(self, gradients: Mapping[int, Tensor | None], in_place: bool) -> None:
        """Sets .grad from those of all stages, the first of which may be written to."""
        total: Tensor | None = None
        for stage in self.rank_of:
            gradient = gradients[stage]
            if gradient is not None:
                total = gradient if total is None else total.add_(gradient)
        if total is None:
            self.first.grad = self.earlier
        elif self.earlier is not None and not in_place:
            self.first.grad = self.earlier.add_(total)
        else:
            self._set(total if self.earlier is None else total.add_(self.earlier), in_place)
        self.earlier = None
        for alias in self.aliases:
            alias.grad = None

    def _set(self, total: Tensor, in_place: bool) -> None:
        if in_place and self.first.grad is not None:
            self.first.grad.copy_(total)
        else:
            self.first.grad = total


class TiedWeights:
    """The shared parameters of a rank. Making one is collective over the pipeline.

    Copies are made equal to the first stage's. Call `link` before any step. In a training step,
    call `before_step` before its first action; `after_step` after the last one's gradients are
    there, before the channel's end_step(); and `failed_step` where the step failed.

    Args:
        channel: between the ranks of the pipeline; None where there is one rank.
        groups: all shared parameters of the model, the same on every rank.
        layers: of the local stages, after separate_stages().
        rank_of_stage: in the group of the pipeline.
        gradients_are_views: `.grad` is memory that the next round writes to, as with
            gradient_as_bucket_view=True in data parallelism.

    Raises:
        UsageError: a local stage has no parameter of such a name.
        MismatchError: copies have different shapes or dtypes, or one is frozen; on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        channel: "_C.Channel | None",
        groups: Sequence[TiedGroup],
        layers: LocalLayers,
        rank_of_stage: Sequence[int],
        gradients_are_views: bool = False,
    ) -> None:
        self._channel = channel
        self._rank = engine.rank
        self._gradients_are_views = gradients_are_views
        self._shared: list[_Shared] = []
        self._peers: list[int] = []
        self._set_aside = False  # from before_step until all gradients are there
        if not groups:
            return
        with engine.all_or_none("tying parameters"):
            local = [group for group in groups if any(stage in layers for stage, _ in group)]
            self._shared = [_Shared(group, layers, rank_of_stage) for group in local]
        _verify(engine, groups, self._shared)
        ranks = {rank for shared in self._shared for rank in shared.rank_of.values()}
        self._peers = sorted(ranks - {self._rank})
        self._make_equal()

    @property
    def aliases(self) -> list[nn.Parameter]:
        """Parameters that are no more than another stage's leaf of a parameter of this rank: no
        part of parameters(), and their .grad is None between steps."""
        return [alias for shared in self._shared for alias in shared.aliases]

    def link(self) -> None:
        """Makes aliases the memory of their parameters again. Not collective."""
        for shared in self._shared:
            shared.link()

    def check(self) -> None:
        """Before a training step: UsageError where a shared parameter has a hook."""
        for shared in self._shared:
            shared.check()

    def before_step(self) -> None:
        """Sets gradients of earlier steps aside. Not collective."""
        for shared in self._shared:
            shared.keep_earlier(self._gradients_are_views)
        self._set_aside = True  # and not before all are kept: an interrupt may come anywhere
        for shared in self._shared:
            shared.clear()

    @torch.no_grad()
    def average_earlier(self, mean: Callable[[Tensor], None]) -> None:
        """Where gradients of earlier steps, set aside, are not the mean over replicas yet: `mean`
        makes one of them, in place. Collective over replicas.
        """
        if not self._shared:
            return
        present = torch.tensor([float(shared.earlier is not None) for shared in self._shared])
        mean(present)
        for shared, share in zip(self._shared, present.tolist(), strict=True):
            if share > 0:  # else no replica has any: it stays None, as of a frozen parameter
                if shared.earlier is None:
                    shared.earlier = torch.zeros_like(shared.first)
                mean(shared.earlier)

    @torch.no_grad()
    def after_step(self) -> None:
        """Adds every stage's gradients of this step to .grad. Collective over ranks that share."""
        for peer in self._peers:
            leaves = [leaf for shared in self._with(peer) for leaf in shared.leaves.values()]
            self._send(peer, [_dense(leaf.grad) for leaf in leaves])
        received = {peer: iter(self._receive(peer)) for peer in self._peers}
        self._set_aside = False
        for shared in self._shared:
            gradients = {
                stage: _dense(shared.leaves[stage].grad)
                if rank == self._rank
                else next(received[rank])
                for stage, rank in shared.rank_of.items()
            }
            shared.add_up(gradients, self._gradients_are_views)

    def failed_step(self) -> None:
        """Puts gradients of earlier steps back, unless the failure came after this step's were
        there. Not collective."""
        if self._set_aside:
            self._set_aside = False
            for shared in self._shared:
                shared.restore()

    def _make_equal(self) -> None:
        if self._channel is None:
            return
        self._channel.begin_step("train")
        try:
            for peer in self._peers:
                self._send(
                    peer, [each.first for each in self._with(peer) if each.root == self._rank]
                )
            for peer in self._peers:
                mine = [each for each in self._with(peer) if each.root == peer]
                for shared, value in zip(mine, self._receive(peer), strict=True):
                    assert value is not None
                    with torch.no_grad():
                        shared.first.copy_(value)
            self._channel.end_step("to make tied parameters equal")
        except BaseException as error:
            self._channel.fail(
                f"{self._channel.describe(self._rank)} raised {type(error).__name__} when it made "
                f"tied parameters equal: {error}"
            )
            raise

    def _with(self, peer: int) -> list[_Shared]:
        """What the peer has, too; in the same order there."""
        return [shared for shared in self._shared if peer in shared.rank_of.values()]

    def _send(self, peer: int, tensors: Sequence[Tensor | None]) -> None:
        if self._channel is not None:
            self._channel.send(peer, _KEY, [(tensor, False) for tensor in tensors])

    def _receive(self, peer: int) -> list[Tensor | None]:
        if self._channel is None:
            return []
        slots, _, _ = self._channel.receive(peer, _KEY, "to have what stages share")
        return [tensor for tensor, _ in slots]


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _verify(engine: Engine, groups: Sequence[TiedGroup], local: Sequence[_Shared]) -> None:
    """Raises MismatchError on every rank unless all copies of a parameter are alike. Collective."""
    mine = {
        shared.name_of[stage]: _describe(leaf)
        for shared in local
        for stage, leaf in shared.leaves.items()
    }
    found: dict[str, str] = {}
    for text in engine.exchange_bytes(json.dumps(mine).encode()):
        found.update(json.loads(text))
    for group in groups:
        first, *others = [name for _, name in group]
        for other in others:
            if found[other] != found[first]:
                raise MismatchError(
                    f"tied parameters differ: {other} is {found[other]}, and {first} is "
                    f"{found[first]}; build the same model on every rank"
                )
