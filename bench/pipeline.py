"""Owns the benchmark of pipelines: torch's schedules over Gloo and ours, on the same stages."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from bench import command_line
from bench.ranks import Rank, Ranks, Span, elapsed_s
from bench.record import Case, Parameter, Record
from bench.sampling import added_ratio, added_ratio_interval, added_s, interleaved
from bench.stages import (
    NUM_RANKS,
    TORCH_SCHEDULES,
    Alone,
    PydistTrainee,
    ReplayTrainee,
    TorchTrainee,
    Trainee,
    Workload,
)
from bench.table import Aim, table, time_text
from pydist import schedule
from pydist.schedule import ActionRecord, Schedule, Simulation

NAME = "pipeline"

# "floor" is our executor with each rank's actions and no peer; beside these, samples hold "ideal",
# the floor and what the schedule makes a rank wait, and "predicted", the simulator's step.
CONTENDERS: dict[str, Callable[[Rank, str, Workload], Trainee]] = {
    "torch": TorchTrainee,
    "pydist": PydistTrainee,
    "floor": ReplayTrainee,
}
NUM_TURNS = {True: 3, False: 30}
FULL = (
    Workload("width 1024", width=1024, rows=32, num_microbatches=8, steps=1),
    Workload("width 32", width=32, rows=16, num_microbatches=8, steps=10),
    Workload("width 32, 64 microbatches", width=32, rows=16, num_microbatches=64, steps=3),
)
QUICK = (Workload("tiny", width=8, rows=2, num_microbatches=4, steps=2),)

LONG_MICROBATCH_S = 5e-3
TOLERANCE = 1e-4  # of torch's gradients, which are scaled after they were added up


def set_up(
    rank: Rank, kind: str, workload: Workload, contenders: tuple[str, ...] = tuple(CONTENDERS)
) -> None:
    """Builds every contender with the same parameters."""
    for contender in contenders:
        rank.kept[contender] = CONTENDERS[contender](rank, kind, workload)


def take_steps(rank: Rank, contender: str) -> Span:
    """Some steps in a row, after one more that warms the caches."""
    trainee: Trainee = rank.kept[contender]

    def run() -> None:
        for _ in range(trainee.workload.steps):
            trainee.step()

    trainee.step()
    return rank.timed(run)


def recorded_step(rank: Rank, contender: str) -> list[ActionRecord]:
    trainee: PydistTrainee = rank.kept[contender]
    rank.barrier()
    return trainee.recorded_step()


def num_wrong(rank: Rank) -> dict[str, int]:
    """Elements of gradients that are not those of one process; of torch's, beyond rounding."""
    wrong = {}
    for contender in CONTENDERS:
        trainee: Trainee = rank.kept[contender]
        trainee.forward_and_backward()
        expected = Alone(trainee.plan.num_stages, trainee.workload).gradients_of(trainee.local)
        wrong[contender] = 0
        for parameter, alone in zip(trainee.parameters, expected, strict=True):
            found = parameter.grad
            if found is None:
                wrong[contender] += alone.numel()
            elif contender == "torch":
                bound = TOLERANCE * alone.abs().max()
                wrong[contender] += int((~((found - alone).abs() <= bound)).sum())
            else:
                wrong[contender] += int((found != alone).sum())
        trainee.forget()
    return wrong


def clear(rank: Rank) -> None:
    rank.kept.clear()


def simulated(plan: Schedule, ranks: Sequence[Sequence[ActionRecord]]) -> Simulation:
    """The schedule with each stage's mean times of F, B, I and W."""
    actions = [action for rank in ranks for action in rank]
    return plan.simulate(**vars(schedule.Costs.measured(actions, plan.num_stages)))


def measure_case(ranks: Ranks, kind: str, workload: Workload, quick: bool) -> Case:
    ranks.call(set_up, kind, workload)
    plan = schedule.build(kind, NUM_RANKS, workload.num_microbatches)
    samples_s, parts_s = take_turns(ranks, plan, workload, NUM_TURNS[quick])
    wrong_by_rank = ranks.call(num_wrong)
    wrong = {name: sum(wrong[name] for wrong in wrong_by_rank) for name in CONTENDERS}
    ranks.call(clear)
    parameters: dict[str, Parameter] = {
        "workload": workload.name,
        "schedule": kind,
        "stages": plan.num_stages,
        "microbatches": workload.num_microbatches,
        "actions": len(plan.actions[0]),
        "steps": workload.steps,
    }
    facts: dict[str, Parameter] = {k: statistics.median(v) for k, v in parts_s.items()}
    return Case(f"{kind}, {workload.name}", parameters, samples_s, wrong, facts)


def take_turns(
    ranks: Ranks, plan: Schedule, workload: Workload, num_turns: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Samples by contender, with what the simulator says; and the parts of our step by rank."""
    samples_s: dict[str, list[float]] = defaultdict(list)
    parts_s: dict[str, list[float]] = defaultdict(list)
    for turn, contender in interleaved(list(CONTENDERS), num_turns):
        seconds = elapsed_s(ranks.call(take_steps, contender)) / workload.steps
        recorded = [] if contender == "torch" else ranks.call(recorded_step, contender)
        if turn < 0:
            continue
        samples_s[contender].append(seconds)
        if contender == "floor":
            work_s = max(sum(action.work_s for action in actions) for actions in recorded)
            bubble_s = simulated(plan, recorded).makespan - work_s
            samples_s["ideal"].append(seconds + bubble_s)
        elif contender == "pydist":
            samples_s["predicted"].append(simulated(plan, recorded).makespan)
            for rank, actions in enumerate(recorded):
                for name, part_s in parts_of(actions).items():
                    parts_s[f"rank {rank} {name}"].append(part_s)
    return samples_s, parts_s


PARTS = ("F", "B", "I", "W", "wait", "between")


def parts_of(actions: Sequence[ActionRecord]) -> dict[str, float]:
    """Where the time of one rank's step went, from its first action to its last."""
    parts = dict.fromkeys(PARTS, 0.0)
    for action in actions:
        parts[action.kind] += action.work_s
        parts["wait"] += 1e-9 * action.wait_ns
    span_s = 1e-9 * (actions[-1].end_ns - actions[0].start_ns)
    parts["between"] = span_s - sum(parts.values())
    return parts


def measure(quick: bool, command: str) -> Record:
    with Ranks(NUM_RANKS) as ranks:
        cases = [
            measure_case(ranks, kind, workload, quick)
            for workload in (QUICK if quick else FULL)
            for kind in TORCH_SCHEDULES
        ]
    return Record(NAME, command, "quick" if quick else "full", [NUM_RANKS], cases)


def overhead_s(case: Case, contender: str) -> float:
    """Of one action."""
    return added_s(case.samples_s[contender], case.samples_s["ideal"]) / int(
        case.parameters["actions"]
    )


def overhead_ratio(case: Case) -> float:
    return added_ratio(*(case.samples_s[name] for name in ("pydist", "torch", "ideal")))


def off_prediction(case: Case) -> float:
    """How far the measured step is from the simulator's, of the latter."""
    return abs(case.medians_s["pydist"] / case.medians_s["predicted"] - 1)


def microbatch_s(case: Case) -> float:
    """What one microbatch keeps a rank busy, all its stages and kinds of actions."""
    return case.medians_s["floor"] / int(case.parameters["microbatches"])


STEP_HEADER = ("schedule", "torch", "pydist", "of torch's", "predicted", "pydist / it", "wrong")
OVERHEAD_HEADER = (
    "schedule",
    "actions",
    "floor",
    "ideal",
    "torch",
    "pydist",
    "of torch's",
    "90 % of",
    "beyond the floor",
)


def render(record: Record) -> list[str]:
    lines = ["Two ranks, one thread each: forward and backward of 8 layers, Linear and Tanh."]
    workloads = dict.fromkeys(str(case.parameters["workload"]) for case in record.cases)
    for workload in workloads:
        cases = [case for case in record.cases if case.parameters["workload"] == workload]
        count = cases[0].parameters["microbatches"]
        lines += ["", f"{workload}, {count} microbatches of {time_text(microbatch_s(cases[0]))}:"]
        lines += ["", *table(STEP_HEADER, [_step_row(case) for case in cases])]
        lines += ["", "Overhead of an action, beyond the ideal step:", ""]
        lines += table(OVERHEAD_HEADER, [_overhead_row(case) for case in cases])
        lines += ["", "Where pydist's time goes, from a rank's first action to its last:", ""]
        rows = [_parts_row(case, rank) for case in cases for rank in range(record.ranks[0])]
        lines += table(("schedule", "rank", *PARTS), rows)
    return [*lines, ""]


def _step_row(case: Case) -> tuple[str, ...]:
    medians_s = case.medians_s
    return (
        str(case.parameters["schedule"]),
        time_text(medians_s["torch"]),
        time_text(medians_s["pydist"]),
        f"{medians_s['pydist'] / medians_s['torch']:.2f}",
        time_text(medians_s["predicted"]),
        f"{medians_s['pydist'] / medians_s['predicted']:.3f}",
        str(sum(case.wrong_results.values())),
    )


def _overhead_row(case: Case) -> tuple[str, ...]:
    own_s, peer_s = case.samples_s["pydist"], case.samples_s["torch"]
    low, high = added_ratio_interval(own_s, peer_s, case.samples_s["ideal"])
    return (
        str(case.parameters["schedule"]),
        str(case.parameters["actions"]),
        time_text(case.medians_s["floor"]),
        time_text(case.medians_s["ideal"]),
        time_text(overhead_s(case, "torch")),
        time_text(overhead_s(case, "pydist")),
        f"{overhead_ratio(case):.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{added_ratio(own_s, peer_s, case.samples_s['floor']):.3f}",
    )


def _parts_row(case: Case, rank: int) -> tuple[str, ...]:
    parts_s = [float(case.facts[f"rank {rank} {name}"]) for name in PARTS]
    cells = [time_text(part_s) if part_s else "-" for part_s in parts_s]
    return str(case.parameters["schedule"]), str(rank), *cells


def aims(record: Record) -> list[Aim]:
    found = []
    for workload in dict.fromkeys(case.parameters["workload"] for case in record.cases):
        cases = [case for case in record.cases if case.parameters["workload"] == workload]
        ratio, where = max((overhead_ratio(case), case.name) for case in cases)
        text = f"{workload}: overhead of an action, of torch's"
        found.append(Aim(text, 0.1, ratio, False, "", where))
    long = [case for case in record.cases if microbatch_s(case) >= LONG_MICROBATCH_S]
    if long:
        off, where = max((off_prediction(case), case.name) for case in long)
        text = "microbatches of 5 ms or more: step, off the simulator's"
        found.append(Aim(text, 5.0, 100 * off, False, "%", where))
    ratio, where = max(
        (case.medians_s["pydist"] / case.medians_s["torch"], case.name) for case in record.cases
    )
    return [*found, Aim("step, of torch's", 1.0, ratio, False, "", where)]


if __name__ == "__main__":
    command_line.run_one(NAME)
