"""Owns the tests of the cost model of sums over hosts: closed forms, the fit, and what is shown."""

import random
import re

import pytest

from bench import host_cost_model, hosts
from bench.host_cost_model import Costs, Sum, fit
from bench.record import Case, Record

MIB = 2**20
FREE = Costs(1e-12, 1e-12, 1e-12, 1e-20, 1e-20, 1e-12, 4.0)
TRUE = Costs(3e-4, 3e-5, 5e-5, 4e-10, 5e-10, 0.06, 3.0)


def test_with_nothing_but_a_link_it_is_the_floor() -> None:
    """Every host sends 2 (H - 1) / H of the buffer."""
    for num_hosts, share in ((2, 1.0), (3, 4 / 3), (128, 2 * 127 / 128)):
        what = Sum((2,) * num_hosts, 32 * MIB, 1e9)
        assert what.sent_nbytes == pytest.approx(share * 32 * MIB)
        assert FREE.predict_s(what) == pytest.approx(share * 32 * MIB * 8 / 1e9, rel=1e-3)


def test_with_nothing_but_work_cores_share_it() -> None:
    costs = Costs(1e-12, 1e-12, 1e-12, 1e-9, 1e-20, 1e-12, 4.0)
    what = Sum((2, 2), 32 * MIB, 1e13, cores=2)
    assert costs.predict_s(what) == pytest.approx(4 * 32 * MIB * 1e-9 / 2, rel=1e-3)
    alone = Sum((2, 2), 32 * MIB, 1e13, cores=2, sharing_hosts=1)
    assert costs.predict_s(alone) == pytest.approx(2 * 32 * MIB * 1e-9 / 2, rel=1e-3)


def test_segments_and_exchanges_are_those_of_the_engine() -> None:
    sizes = {1000: 1, 512 * 1024: 1, MIB: 2, 4 * MIB: 8, 32 * MIB: 8, 64 * MIB: 16}
    assert {size: Sum((1, 1), size, 1e9).num_segments for size in sizes} == sizes
    assert [Sum((1,) * count, MIB, 1e9).exchanges for count in (2, 3, 9)] == [1, 2, 2]


def test_half_of_both_overlaps_as_the_exponent_says() -> None:
    """Where work takes as long as the link: 2^(1/p) of either."""
    costs = Costs(1e-12, 1e-12, 1e-12, 1e-20, 2e-9, 1e-12, 2.0)
    what = Sum((1, 1), 32 * MIB, 4e9, cores=2)
    assert costs.work_s(what) == pytest.approx(costs.link_s(what), rel=1e-3)
    assert costs.predict_s(what) == pytest.approx(2**0.5 * costs.link_s(what), rel=1e-3)


def test_delay_is_added_for_every_exchange() -> None:
    near, far = (Sum((1, 1, 1), MIB, 1e9, delay_s=delay_s) for delay_s in (0.0, 0.01))
    assert TRUE.predict_s(far) - TRUE.predict_s(near) == pytest.approx(0.03)


def everywhere() -> list[Sum]:
    return [
        Sum(layout, 2**power, rate)
        for layout in ((1, 1), (2, 2), (1, 1, 1))
        for power in range(14, 26, 2)
        for rate in (1e9, 1e10)
    ]


def test_the_fit_finds_what_made_the_samples() -> None:
    """With 2 % of noise, it predicts a shape that it has not seen within 5 %."""
    noise = random.Random(0)
    samples = [(what, TRUE.predict_s(what) * noise.uniform(0.98, 1.02)) for what in everywhere()]
    costs = fit(samples)
    for what in (Sum((2, 1), 3 * MIB, 2.5e9), Sum((2, 2, 2), 16 * MIB, 1e9)):
        assert costs.predict_s(what) == pytest.approx(TRUE.predict_s(what), rel=0.05)


def record_of(costs: Costs) -> Record:
    cases = []
    for layout in hosts.MODEL_LAYOUTS:
        for rate in hosts.MODEL_RATES:
            for nbytes in hosts.MODEL_SIZES:
                seconds = costs.predict_s(Sum(layout, nbytes, rate))
                name = f"{nbytes}, {hosts.layout_text(layout)}, {rate:g}"
                parameters = {
                    "kind": "sum",
                    "layout": hosts.layout_text(layout),
                    "rate_bit_per_s": rate,
                    "nbytes": nbytes,
                }
                cases.append(Case(name, {**parameters}, {"pydist": [seconds]}, {"pydist": 0}))
    machine: dict[str, int | float | str] = {"cores": 2}
    return Record("hosts", "none", "full", [2, 3, 4, 6], cases, "none", "never", machine, {})


def test_cases_are_held_out_and_predicted() -> None:
    """Of sizes, shapes and rates; what is held out does not move the fit."""
    record = record_of(TRUE)
    costs, groups = host_cost_model.judged(record)
    assert set(groups) == {
        "fitted",
        "held-out sizes",
        "held-out rate",
        "held-out shape 2 + 1",
        "held-out shape 2 + 2 + 2",
    }
    assert max(one.error for cases in groups.values() for one in cases) < 0.01
    for case in record.cases:
        if host_cost_model.group_of(case) != "fitted":
            case.medians_s["pydist"] *= 3
    assert host_cost_model.judged(record)[0] == costs
    assert not host_cost_model.aims(record)[0].met


def test_what_is_projected_is_called_so() -> None:
    lines = host_cost_model.projection(record_of(TRUE))
    assert "not measured" in lines[0]
    header, rows = lines[2], [line for line in lines[4:] if line]
    assert "projected" in header
    assert not re.search("measured", header)
    assert sum(line.split("|")[1].strip() == "1024" for line in rows) == 9


def test_more_hosts_are_never_faster_and_the_floor_is_never_beaten() -> None:
    for nbytes in host_cost_model.PROJECTED_SIZES:
        times = []
        for ranks in host_cost_model.PROJECTED_RANKS:
            what = host_cost_model.projected(ranks, 1e10, nbytes)
            times.append(TRUE.predict_s(what))
            assert times[-1] > what.floor_s
        assert times == sorted(times)
