"""Owns the measurement of a replica audit: its time as a share of the steps between two audits."""

from statistics import median

import pydist
from bench.data_parallel import clear, set_up, take_steps
from bench.models import FULL, WORKLOADS
from bench.ranks import Rank, Ranks, Span, elapsed_s

NUM_TURNS = 9
NUM_AUDITS = 5
EVERY = 100


def take_audits(rank: Rank, contender: str) -> Span:
    """Some audits in a row, after one more that warms up."""
    model = rank.kept[contender].model

    def run() -> None:
        for _ in range(NUM_AUDITS):
            pydist.check_replicas(model)

    pydist.check_replicas(model)
    return rank.timed(run)


def audit_and_step_s(ranks: Ranks, name: str) -> tuple[float, float]:
    """Median seconds of an audit and of a training step of a workload, measured in turn."""
    steps = WORKLOADS[name].steps
    ranks.call(set_up, name, ("compute", "pydist"))
    audits_s, steps_s = [], []
    for _ in range(NUM_TURNS):
        audits_s.append(elapsed_s(ranks.call(take_audits, "pydist")) / NUM_AUDITS)
        steps_s.append(elapsed_s(ranks.call(take_steps, "pydist", steps)) / steps)
    ranks.call(clear)
    return median(audits_s), median(steps_s)


def main() -> None:
    with Ranks(2) as ranks:
        for name in FULL:
            audit_s, step_s = audit_and_step_s(ranks, name)
            share = audit_s / (EVERY * step_s)
            print(
                f"{name}: an audit {1e3 * audit_s:.3f} ms, a step {1e3 * step_s:.3f} ms: "
                f"{share:.3%} at audit_every={EVERY}"
            )


if __name__ == "__main__":
    from bench import replica_audit  # ranks find its functions by that name

    replica_audit.main()
