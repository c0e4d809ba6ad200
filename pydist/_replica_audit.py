"""Owns the comparison of replicas while they train: every bit of every parameter, on all ranks."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from pydist import _C
from pydist._engine import check_group, group_engine
from pydist.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from pydist._engine import Engine

# Kind, name and tensor.
_Entry = tuple[str, str, torch.Tensor]
# What a rank says of a tensor: kind, name, shape, dtype, hash of its bytes.
_Described = list[Any]
_MISSING: _Described = [""] * 5

_BLOCK_NBYTES = 64 << 10  # of a tensor that differs, until the element is found
_NUM_NAMED = 5  # tensors that differ as well
_DETAIL_EVERY = 100  # steps, where TORCH_DISTRIBUTED_DEBUG=DETAIL


def check_replicas(
    model: torch.nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    buffers: bool = False,
) -> None:
    """Compares every bit of the model's parameters across ranks, frozen ones included. Collective.

    Costs one pass over the parameters at about the speed of memory, and one tiny message: 64-bit
    hashes (csrc/base/hash.h), which are certainly different where a single bit is.

    Args:
        model: a DataParallel or any module. What `_ddp_params_and_buffers_to_ignore` names is left
            out.
        process_group: the ranks; default: those of a DataParallel, else all.
        buffers: compare buffers as well. Running statistics of normalisations may well differ
            between forwards.

    Raises:
        MismatchError: on every rank: the first tensor that differs, on which ranks, and the values
            of its first element that does.
        UsageError: a parameter is on the meta device, and has no bits.
    """
    check_group(process_group)
    if process_group is None:
        process_group = getattr(model, "process_group", None)
    module, name = model, type(model).__name__
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        module = model.module
        name = f"{name}({type(module).__name__})"
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
    # DataParallel also knows of parameters outside its module.
    parameters = getattr(model, "_all_parameters", module.named_parameters)()
    state: list[_Entry] = [("parameter", key, value) for key, value in parameters]
    if buffers:
        state += [("buffer", key, value) for key, value in module.named_buffers()]
    kept = [entry for entry in state if entry[1] not in ignored]
    compare_replicas(group_engine(process_group), name, kept, "")


class ReplicaAudit:
    """Compares the parameters of a training once in some number of steps; None: never."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._last = -1  # steps before the last comparison; -1: there was none
        self._now = 0

    def is_due(self, num_steps: int) -> bool:
        """The same on all ranks, as is the number of steps so far."""
        self._now = num_steps
        if self._every is None:
            return False
        since = num_steps - self._last
        return self._last < 0 or since >= self._every or since < 0

    def run(self, engine: "Engine", model_name: str, state: Iterable[_Entry]) -> None:
        """Compares what `state` gives, buffers left out. Collective; raises MismatchError."""
        before, self._last = self._last, self._now
        when = f" after {self._now} steps"
        if before >= 0:
            when += f" (after {before} they were equal)"
        parameters = [entry for entry in state if entry[0] == "parameter"]
        compare_replicas(engine, model_name, parameters, when)


def resolve_audit(audit_every: int | None) -> int | None:
    """A number of steps, None for never."""
    if audit_every is None:
        return _DETAIL_EVERY if get_debug_level() == DebugLevel.DETAIL else None
    if not isinstance(audit_every, int) or audit_every < 1:
        raise UsageError(f"audit_every is {audit_every!r}; expected a number of steps, at least 1")
    return audit_every


def compare_replicas(engine: "Engine", model_name: str, state: list[_Entry], when: str) -> None:
    """Raises MismatchError on every rank unless all of them have the same bits. Collective."""
    described = [
        [
            kind,
            name,
            list(tensor.shape),
            str(tensor.dtype),
            *_C.hash_tensors([_plain(name, tensor)]),
        ]
        for kind, name, tensor in state
    ]
    text = json.dumps(described).encode()
    if not _all_equal(engine, text):
        everybody = [json.loads(other) for other in engine.exchange_bytes(text)]
        raise MismatchError(_difference(engine, model_name, state, everybody, when))


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements, one after the other, on the CPU."""
    if tensor.device.type == "meta":
        raise UsageError(f"{name} is on the meta device and has nothing to compare")
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _all_equal(engine: "Engine", text: bytes) -> bool:
    (hashed,) = _C.hash_tensors([torch.frombuffer(bytearray(text), dtype=torch.uint8)])
    code = torch.frombuffer(bytearray(hashed.to_bytes(8, "little")), dtype=torch.int64)
    codes = torch.empty(engine.size, dtype=torch.int64)
    engine.operations.all_gather(codes, code, False)
    return bool((codes == codes[0]).all())


def _difference(
    engine: "Engine",
    model_name: str,
    state: list[_Entry],
    everybody: list[list[_Described]],
    when: str,
) -> str:
    """What differs, in words that are the same on all ranks. Collective."""
    start = f"the replicas of {model_name} differ{when}: "
    num_tensors = max(map(len, everybody))
    padded = [listed + [_MISSING] * (num_tensors - len(listed)) for listed in everybody]
    columns = [list(column) for column in zip(*padded, strict=True)]
    for index, column in enumerate(columns):
        groups = _groups([str(entry[:4]) for entry in column])
        if len(groups) > 1:
            told = "; ".join(f"on {_named(ranks)} {_head(column[ranks[0]])}" for ranks in groups)
            return f"{start}they do not have the same tensors; number {index} is {told}"
    differing = [i for i, column in enumerate(columns) if len({entry[4] for entry in column}) > 1]
    first = differing[0]
    kind, name = columns[first][0][:2]
    who = _who(_groups([entry[4] for entry in columns[first]]), engine.size)
    values = _values(engine, _plain(name, state[first][2]))
    others = _others([columns[i][0][1] for i in differing[1:]])
    return f"{start}{kind} {name} is the first that differs, {who}. {values}{others}"


def _head(entry: _Described) -> str:
    if entry is _MISSING:
        return "missing"
    kind, name, shape, dtype = entry[:4]
    return f"{kind} {name} of shape {shape} and {dtype}"


def _groups(values: list[Any]) -> list[list[int]]:
    """Ranks by value, the largest group first, then by rank."""
    found: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _who(groups: list[list[int]], size: int) -> str:
    if 2 * len(groups[0]) > size:
        odd = sorted(rank for group in groups[1:] for rank in group)
        return f"on {_named(odd)}; {_named(groups[0])} agree"
    return "between " + " and ".join(_named(group) for group in groups) + " without a majority"


def _values(engine: "Engine", tensor: torch.Tensor) -> str:
    """The first element that differs, as every rank has it. Collective."""
    data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    blocks = list(data.split(_BLOCK_NBYTES))
    codes = engine.exchange_bytes(json.dumps(_C.hash_tensors(blocks)).encode())
    columns = list(zip(*map(json.loads, codes), strict=True))
    block = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
    pieces = engine.exchange_bytes(blocks[block].numpy().tobytes())
    width = tensor.element_size()
    count = len(pieces[0]) // width
    element = next(
        i for i in range(count) if len({p[i * width : (i + 1) * width] for p in pieces}) > 1
    )
    place = _unravel(block * (_BLOCK_NBYTES // width) + element, tensor.shape)
    bits = [piece[element * width : (element + 1) * width] for piece in pieces]
    told = "; ".join(f"{_value(bits[r[0]], tensor.dtype)} on {_named(r)}" for r in _groups(bits))
    return f"Its element {place} is {told}"


def _unravel(index: int, shape: torch.Size) -> list[int]:
    place: list[int] = []
    for length in reversed(shape):
        index, last = divmod(index, length)
        place.insert(0, last)
    return place


def _value(bits: bytes, dtype: torch.dtype) -> str:
    value = torch.frombuffer(bytearray(bits), dtype=dtype).item()
    return f"{value!r} (0x{bits[::-1].hex()})"


def _others(names: list[str]) -> str:
    """The tensors that differ too, and what may be the reason."""
    also = ""
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        verb = "differs" if len(names) == 1 else "differ"
        also = f"; {', '.join(names[:_NUM_NAMED])}{more} {verb} as well"
    return (
        f"{also}. Ranks drift apart where one changes parameters alone (a step that others skip, "
        "another learning rate or optimizer state, an initialisation after wrapping) or where its "
        "memory is faulty"
    )
