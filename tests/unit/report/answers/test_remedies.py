"""What a fit says where nothing fits: what lacked, in which tier, and the ways out."""

from __future__ import annotations

from dataclasses import replace

from autods.forecast.values import RungForecast, TierForecast
from autods.report import FitReport
from autods.report.answers.remedies import describe_shortage, list_remedies
from autods.report.results.fit import ClosestRung, FitQuestion
from autods.types import Outcome, OutOfMemory, Skipped, Tier
from tests.support.reports import LADDER, hopeless_report, record
from tests.support.reports import failed as failure

GIB = 2**30


def ran_out(tier: Tier, limit_bytes: int | None = None) -> OutOfMemory:
    evidence, advice = "the OOM killer struck", "offload less"
    return OutOfMemory(tier=tier, rank=-1, phase="build", evidence=evidence, limit_bytes=limit_bytes, advice=advice)


def ended(**outcomes: Outcome) -> FitReport:
    """Nothing fits, and the closest rung is not known."""
    trials = tuple(record(number, rung, outcome) for number, (rung, outcome) in enumerate(outcomes.items()))
    question = FitQuestion(workload="gpt", gpus=8, device="cuda", device_bytes=80 * GIB, ladder=LADDER)
    return FitReport(status="nothing_fits", trials=trials, question=question)


def test_rungs_that_ran_out_of_host_memory_were_tried() -> None:
    report = ended(ddp=ran_out("host", 64 * GIB), zero2=ran_out("host", 64 * GIB))
    assert describe_shortage(report) == "each rung ran out of host memory"
    assert [*list_remedies(report)] == [
        "ddp ran out of host memory: offload less",
        "zero2 ran out of host memory: offload less",
        "more host memory: 64.0 GiB were full",
        "more nodes (--gpus 8 --nodes 2): the ranks on each then need less of its memory",
        "a smaller workload: shorter sequences, or a smaller model",
    ]
    skipped = replace(report, skipped=(Skipped(rung="zero3-nvme", reason="no --nvme-path was given"),))
    assert describe_shortage(skipped) == "each rung that was tried ran out of host memory"


def test_tiers_and_failures_are_counted_where_rungs_differ() -> None:
    report = ended(ddp=ran_out("host"), zero1=ran_out("host"), zero2=ran_out("nvme"), zero3=failure())
    assert describe_shortage(report) == "2 rungs ran out of host memory, 1 ran out of disk space, 1 failed"
    advice = [*list_remedies(report)]
    assert {"more host memory", "more disk space (NVMe)", "zero3: apt-get install libaio-dev"} <= {*advice}


def test_the_last_trial_of_a_rung_tells_how_it_ended() -> None:
    report = ended(ddp=failure())
    again = replace(report, trials=(*report.trials, record(1, "ddp", ran_out("device"))))
    assert describe_shortage(again) == "each rung ran out of device memory"
    advice = [*list_remedies(again)]
    assert advice[0] == "more memory per rank (--gpu-memory)"
    assert not any("libaio" in line or "more nodes" in line for line in advice)


def test_a_failure_is_advised_on_beside_the_closest_rung() -> None:
    report = hopeless_report()
    report = replace(report, trials=(*report.trials, record(4, "zero2-offload", failure())))
    assert [*list_remedies(report)][:2] == ["--gpu-memory 512MiB", "zero2-offload: apt-get install libaio-dev"]


def refuse(rung: str, gib: int) -> RungForecast:
    """The forecast of a rung that needs so much host memory, of 503 GiB."""
    held = TierForecast(peak_bytes=gib * GIB, low_bytes=(gib - 50) * GIB, high_bytes=gib * GIB, limit_bytes=503 * GIB)
    return RungForecast(rung=rung, verdict="cannot_fit", reason="needs more", micro_batch=1, memory={"host": held})


def test_a_shortage_by_the_forecast_names_its_tier_and_size() -> None:
    forecast = (refuse("zero3", 900), refuse("zero3-offload", 950))
    closest = ClosestRung(rung="zero3", missing_bytes=347 * GIB, tier="host")
    report = replace(ended(), forecast=forecast, closest=closest)
    missing = "by its forecast at least 347.0 GiB of host memory are missing"
    assert describe_shortage(report) == f"zero3 comes closest, {missing}"
    advice = [*list_remedies(report)]
    assert advice[0] == "347.0 GiB more host memory, or more: the shortage is a lower bound"
    assert [line.partition(" (")[0] for line in advice[1:]] == ["more nodes", advice[-1]]


def test_trials_and_forecasts_that_lack_memory_are_told_apart() -> None:
    report = replace(ended(ddp=ran_out("pinned"), zero1=ran_out("pinned")), forecast=(refuse("zero3-offload", 900),))
    counts = "2 rungs ran out of pinned memory, 1 would run out of host memory by the forecast"
    assert describe_shortage(report) == counts
    need = "zero3-offload needs 900.0 GiB of host memory on a node, 397.0 GiB more than there is"
    assert f"more host memory: {need}" in [*list_remedies(report)]
