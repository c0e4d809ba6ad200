"""Owns what ranks tell each other in join(), and what those without inputs do about it.

    session    what the ranks of one engine do together from entering join() to leaving it
    active     a rank that still has inputs;  joined: one that has none left
    iteration  from one forward of an active rank to the next

Before every collective, active ranks announce it to the joined ones, which then take part in it
with zeros. While all ranks are active nothing is announced.
"""

import enum
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pydist._engine import Engine, Request, SideOperations
from pydist._process_group import SUM
from pydist.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from pydist._join import Member


class Model(Protocol):
    """What joining needs of a DataParallel."""

    module: torch.nn.Module
    process_group: Any
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _engine: Engine
    _reducer: Any
    _join_config: Any
    _authoritative_rank: int
    logger: Any

    @property
    def _model_name(self) -> str: ...
    def _state(self) -> Iterator[tuple[str, str, Tensor]]: ...
    def _sync_buffers(self, root: int) -> None: ...


class What(enum.IntEnum):
    JOINED = 0  # said by joined ranks
    END = 1  # of the model's iteration
    BUFFERS = 2
    ROUND = 3
    ALL_GATHER = 4
    ALL_REDUCE = 5


class Announcement(NamedTuple):
    what: int
    model: int = 0  # index of the member
    amount: int = 0  # the round's divisor; the number of elements, of float64


class Session:
    """What the ranks of one engine do together from entering join() to leaving it."""

    def __init__(self, engine: Engine, divide_by_active: bool) -> None:
        self.members: list[Member] = []
        # Whether an iteration goes on until the next forward, or ends with the model's backward
        # because another joinable's turn comes after it.
        self.open_ended = False
        self._engine = engine
        self._divide_by_active = divide_by_active
        self._divisor = 0
        self._side_operations: SideOperations | None = None
        self._notified = False  # in some iteration, by the first joinable
        self._shadowed = False  # a rank has joined
        self._ended: set[int] = set()  # models whose iteration has ended

    def takes(self, model: Model) -> bool:
        return not any(m.is_complete or m.model is model for m in self.members)

    # -- of active ranks ------------------------------------------------------------------------

    def begin_iteration(self, num_active: int) -> None:
        self._notified = True
        self._ended.clear()
        if num_active == self._engine.size:
            return
        self._divisor = num_active if self._divide_by_active else 0
        if not self._shadowed:
            self._shadowed = True
            self._engine.side_operations = _Announced(self._operations(), self)
        for index, member in enumerate(self.members):
            member.model._reducer.set_divisor(self._divisor)
            before_end = functools.partial(self.announce, What.ROUND, index, self._divisor)
            member.model._reducer.set_before_end(before_end)

    def check_notified(self, name: str) -> None:
        if not self._notified:
            raise UsageError(
                f"{name} is not the first in Join([...]): the joinables before it have not "
                "announced this iteration; list the one that is used first, first"
            )

    def announce(self, what: What, model: int, amount: int = 0) -> int:
        """Of what this active rank does next; returns the lowest active rank. Collective."""
        if not self._shadowed:
            return 0
        if model in self._ended:
            raise UsageError(
                f"in Join([...]), ranks that have joined expect one forward and one backward of "
                f"each model per iteration, but {self._text(Announcement(what, model, amount))} "
                "comes after these; use model.join(), where there is no such limit"
            )
        root, _ = self._exchange(Announcement(what, model, amount))
        if what == What.END or (what == What.ROUND and not self.open_ended):
            self._ended.add(model)
        return root

    def announce_side(self, what: What, amount: int) -> None:
        """Of a layer, which belongs to the iteration of any model."""
        going_on = (i for i in range(len(self.members)) if i not in self._ended)
        self.announce(what, next(going_on, 0), amount)

    def end_iteration(self, model: int | None = None) -> None:
        """Of one model or of all; nothing where it has ended already."""
        for index in range(len(self.members)) if model is None else [model]:
            if index not in self._ended:
                self.announce(What.END, index)

    # -- of joined ranks ------------------------------------------------------------------------

    def shadow(self, model: int) -> None:
        """Does what active ranks announce until the model's iteration ends. Collective."""
        if model == 0:
            self._ended.clear()
        while model not in self._ended:
            root, announced = self._exchange(Announcement(What.JOINED))
            self._follow(announced, root)

    def _follow(self, announced: Announcement, root: int) -> None:
        what, index, amount = announced
        if what == What.END:
            self._ended.add(index)
        elif what == What.BUFFERS:
            self.members[index].model._sync_buffers(root)
        elif what == What.ROUND:
            # Other joinables step an optimizer on joined ranks too (torch's ZeRO does).
            self.members[index].model._reducer.shadow_round(amount, not self.open_ended)
            if not self.open_ended:
                self._ended.add(index)
        else:
            self._shadow_side_operation(what, amount)

    def _shadow_side_operation(self, what: int, amount: int) -> None:
        zeros = torch.zeros(amount, dtype=torch.float64)
        if what == What.ALL_REDUCE:
            self._operations().all_reduce(zeros, SUM, False)
        else:
            everybody = torch.empty(self._engine.size * amount, dtype=torch.float64)
            self._operations().all_gather(everybody, zeros, False)

    # -- of both --------------------------------------------------------------------------------

    def _operations(self) -> SideOperations:
        """Those that are not announced. Their first use is collective."""
        if self._side_operations is None:
            self._side_operations = self._engine.side_operations
        return self._side_operations

    def _exchange(self, mine: Announcement) -> tuple[int, Announcement]:
        """The lowest active rank, and what active ranks announce."""
        width = len(mine)
        everybody = torch.empty(self._engine.size * width, dtype=torch.int64)
        self._operations().all_gather(everybody, torch.tensor(mine, dtype=torch.int64), False)
        rows = [Announcement(*row) for row in everybody.view(-1, width).tolist()]
        active = {rank: row for rank, row in enumerate(rows) if row.what != What.JOINED}
        if len(set(active.values())) > 1:
            listed = "; ".join(f"rank {r} goes on with {self._text(a)}" for r, a in active.items())
            raise MismatchError(
                f"in join(), ranks that still have inputs do different things: {listed}. This is "
                f"rank {self._engine.rank}. Make them run the same forwards and backwards"
            )
        return next(iter(active.items()))

    def _text(self, announced: Announcement) -> str:
        name = self.members[announced.model].name
        return {
            What.END: f"the end of an iteration of {name}",
            What.BUFFERS: f"the synchronisation of the buffers of {name}",
            What.ROUND: f"a backward of {name}",
            What.ALL_GATHER: f"SyncBatchNorm's forward, {announced.amount} elements",
            What.ALL_REDUCE: f"SyncBatchNorm's backward, {announced.amount} elements",
        }[What(announced.what)]

    def close(self) -> None:
        """Nothing is announced or divided otherwise any more."""
        if self._shadowed and self._side_operations is not None:
            self._engine.side_operations = self._side_operations
        self._shadowed = False
        for member in self.members:
            member.release()
        if self._engine.join_session is self:
            self._engine.join_session = None


class _Announced:
    """Side operations of an active rank, announced to joined ones."""

    def __init__(self, operations: SideOperations, session: Session) -> None:
        self._operations = operations
        self._session = session

    def all_gather(self, output: Tensor, input: Tensor, async_op: bool) -> Request | None:
        self._session.announce_side(What.ALL_GATHER, input.numel())
        return self._operations.all_gather(output, input, async_op)

    def all_reduce(self, tensor: Tensor, op: int, async_op: bool) -> Request | None:
        self._session.announce_side(What.ALL_REDUCE, tensor.numel())
        return self._operations.all_reduce(tensor, op, async_op)
