"""Owns what a report advises: rules, each with the evidence that makes it speak."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydist.report import Report

# Below these shares of a step, or of the bytes, nothing is worth a change of the program.
_SHARE_OF_TIME = 0.1
_SHARE_OF_BYTES = 0.2
# A straggler is waited for at least so many times as long as the next one.
_STANDS_OUT = 2.0
# Rounds before times mean something: the first ones allocate memory and warm up.
_ROUNDS = 5

# Bytes a round: copying fewer is not worth a word.
_NBYTES = 1 << 20

_ASKED_FOR = ("wire type",)
_INSTEAD_OF_PACKING = {
    "communication hook": "a communication hook gets buckets; without one, or with wire_dtype, the "
    "engine does more of the work in place",
    "small": "they belong to parameters below 32 KiB; fewer and larger parameters (fused "
    "projections, say) are reduced without a copy",
    "bucket view": "gradient_as_bucket_view=True asks for it; left at False, large gradients are "
    "reduced where autograd writes them",
    "shared storage": "their memory is shared with other tensors, as after cat, expand or where "
    "one gradient feeds two parameters",
    "held by user code": "a hook or a variable keeps the gradient's tensor; let go of it before "
    "backward goes on",
    "has a graph (create_graph)": "create_graph=True keeps a graph on gradients",
    "other strides": "the gradient's memory is laid out otherwise than the parameter's; a "
    "contiguous parameter, or contiguous() on what enters the layer, may avoid it",
    "not used here": "ranks use different parameters, and send zeros for those they do not use",
    "not in the arena": "another tensor's memory was reused, or .grad was kept: "
    "zero_grad(set_to_none=True) lets gradients be born in place",
}


def advise(report: "Report") -> tuple[str, ...]:
    """What would help, the most important first; empty where nothing stands out."""
    if report.num_rounds == 0 or report.size == 1:
        return ()
    hints = [*_about_transport(report), *_about_copies(report)]
    if report.num_rounds >= _ROUNDS:
        hints = [*_about_waiting(report), *_about_reducing(report), *hints]
    return (*hints, *_about_unused(report))


def _ms(report: "Report", seconds: float) -> str:
    return f"{1e3 * seconds / report.num_rounds:.1f} ms"


def _about_waiting(report: "Report") -> Iterator[str]:
    waited = sorted((late.waited_s for late in report.late), reverse=True)
    if not waited or sum(waited) < _SHARE_OF_TIME * report.total_s:
        return
    step = _ms(report, report.total_s)
    worst = report.late[0]
    if len(waited) == 1 or waited[0] >= _STANDS_OUT * waited[1]:
        yield (
            f"rank {worst.rank} slows the others down: in a step of {step} they wait "
            f"{_ms(report, worst.waited_s)} for it. Look at its share of the data, its machine, "
            "and what it does alone (logging, checkpoints)"
        )
    else:
        yield (
            f"ranks take turns in coming last: in a step of {step} they wait "
            f"{_ms(report, sum(waited))} for one another. Batches may differ in size, or more "
            "ranks and threads than processor cores be at work"
        )


def _about_reducing(report: "Report") -> Iterator[str]:
    if report.reducing_s < _SHARE_OF_TIME * report.total_s:
        return
    yield (
        f"reducing after backward takes {_ms(report, report.reducing_s)} of a step of "
        f"{_ms(report, report.total_s)}. Fewer rounds (gradients accumulated under no_sync()) or "
        "larger batches make it rarer; a smaller bucket_cap_mb lets more of it begin earlier"
    )


def _about_transport(report: "Report") -> Iterator[str]:
    if report.transport == "process_group" and report.forced_transport:
        yield (
            "PYDIST_TRANSPORT=process_group keeps ranks from sharing memory; unset it, and ranks "
            "of one host reduce gradients in place"
        )


def _about_copies(report: "Report") -> Iterator[str]:
    total = report.born_nbytes + sum(report.packed_nbytes.values())
    if report.transport not in ("shared_memory", "hosts") or total == 0:
        return
    for reason, nbytes in sorted(report.packed_nbytes.items(), key=lambda item: -item[1]):
        if nbytes < max(_SHARE_OF_BYTES * total, _NBYTES * report.num_rounds):
            return
        if reason in _ASKED_FOR:
            continue
        instead = _INSTEAD_OF_PACKING.get(reason, reason)
        if reason == "not in the arena" and report.allocator:
            instead = f"gradients cannot be born in place: {report.allocator}"
        yield f"{100 * nbytes / total:.0f} % of the gradient bytes are copied: {instead}"


def _about_unused(report: "Report") -> Iterator[str]:
    nowhere = [one.name for one in report.unused if len(one.ranks) == report.size]
    if nowhere:
        yield (
            f"no rank used {len(nowhere)} parameters in the last round ({nowhere[0]}, for "
            "example); requires_grad_(False) saves the optimizer their memory"
        )
