import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.forecast.values import PartitionedBuild
from autods.report import FitReport, from_dict, read, to_dict, write, write_so_far
from autods.report.results.fit import Spread
from tests.support.plans import RUNGS, rung, speed
from tests.support.reports import LIMIT, MIB, WINNING, fit, fitting_report, hopeless_report, record

CONTRACT = {
    "status", "rung", "knobs", "ds_config", "throughput", "memory", "certificate", "forecast", "trials", "versions",
    "hardware", "seconds",
}  # fmt: skip


def test_report_json_has_every_key_of_the_contract() -> None:
    data = to_dict(fitting_report())
    assert data.keys() >= CONTRACT
    assert data["throughput"] == {"samples_per_second": 41.7, "tokens_per_second": 2668.8}
    assert data["knobs"]["micro_batch"] == 4


def test_every_tier_is_named_and_an_unmeasured_one_is_null() -> None:
    memory = to_dict(fitting_report())["memory"]
    assert list(memory) == ["device", "host", "pinned", "nvme"]
    assert memory["device"] == {"peak_bytes": int(393.4 * MIB), "limit_bytes": LIMIT, "in_use_bytes": None}
    assert memory["pinned"] is None


def test_a_trial_row_has_its_purpose_as_phase_and_outcome_kind() -> None:
    first, *_, last = to_dict(fitting_report())["trials"]
    assert first.keys() >= {"id", "rung", "knobs", "phase", "outcome", "seconds"}
    assert (first["phase"], last["phase"]) == ("walk", "grow")
    assert first["outcome"]["kind"] == "out_of_memory"
    assert first["outcome"].keys() >= {"tier", "rank", "phase", "evidence", "wanted_bytes", "free_bytes"}


SPLIT = PartitionedBuild(rung="zero3", verdict="fits", tier="host", ranks=8, whole_bytes=2**41, split_bytes=2**39)


@pytest.mark.parametrize(
    "report",
    [
        fitting_report(),
        hopeless_report(),
        replace(hopeless_report(), partitioned=SPLIT),
        FitReport(status="nothing_fits"),
    ],
)
def test_a_report_survives_json(report: FitReport) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(report)))) == report


def test_forecasts_of_a_report_that_is_read_are_written_alike() -> None:
    timed = rung("zero2", 40, verdict="fits", host=320, speed=speed(8.0))
    written = json.loads(json.dumps(to_dict(replace(fitting_report(), forecast=(*RUNGS, timed)))))
    assert json.loads(json.dumps(to_dict(from_dict(written)))) == written
    assert [row["verdict"] for row in written["forecast"]] == [*(row.verdict for row in RUNGS), "fits"]


def test_nan_becomes_null_because_json_has_none() -> None:
    report = replace(fitting_report(), trials=(record(1, "ddp", fit(losses=(1.0, math.nan))),))
    text = json.dumps(to_dict(report), allow_nan=False)
    outcome = from_dict(json.loads(text)).trials[0].outcome
    assert outcome.kind == "fit"
    assert math.isnan(outcome.losses[1])


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_norm_that_is_no_number_can_be_read(norm: float) -> None:
    compared = replace(fit(losses=(1.0, math.nan)), gradient_norms=(0.5, norm))
    text = json.dumps(to_dict(replace(fitting_report(), trials=(record(1, "ddp", compared),))), allow_nan=False)
    outcome = from_dict(json.loads(text)).trials[0].outcome
    assert outcome.kind == "fit"
    assert outcome.gradient_norms[0] == 0.5
    assert math.isnan(outcome.gradient_norms[1])


@pytest.mark.parametrize("data", [{}, {"status": "maybe"}, {**to_dict(hopeless_report()), "trials": [{"id": 1}]}])
def test_what_is_no_report_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(InputError, match="not the report"):
        from_dict(data)


def test_keys_of_a_later_version_are_dropped() -> None:
    assert from_dict({**to_dict(hopeless_report()), "weather": "fine"}) == hopeless_report()


def test_a_fit_writes_its_config_and_its_report(tmp_path: Path) -> None:
    write(fitting_report(), tmp_path / "new")
    assert json.loads((tmp_path / "new/ds_config.json").read_text())["zero_optimization"] == {"stage": 3}
    assert read(tmp_path / "new") == fitting_report()
    names = ["accelerate.yaml", "ds_config.json", "ds_config_hf.json", "report.json"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names


def test_best_config_so_far_stays_until_the_fit_is_finished(tmp_path: Path) -> None:
    write_so_far({"train_micro_batch_size_per_gpu": 2}, tmp_path)
    write_so_far({"train_micro_batch_size_per_gpu": 4}, tmp_path)
    so_far = tmp_path / "ds_config_so_far.json"
    assert json.loads(so_far.read_text()) == {"train_micro_batch_size_per_gpu": 4}
    write(fitting_report(), tmp_path)
    assert not so_far.exists()


def test_when_nothing_fits_no_config_is_left_from_before(tmp_path: Path) -> None:
    write(fitting_report(), tmp_path)
    write(hopeless_report(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        write(fitting_report(), tmp_path / "file" / "out")
    assert caught.value.place == str(tmp_path / "file" / "out" / "ds_config.json")
    assert caught.value.hint == "give another place"


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(EnvironmentBroken, match="No space left"):
        write(fitting_report(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"status": "fit"}'])
def test_a_missing_or_damaged_report_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    assert caught.value.place == str(tmp_path / "report.json")


def test_the_winning_knobs_keep_the_batch_identity() -> None:
    assert WINNING.train_batch(2) == 16


def test_a_report_of_before_answers_with_the_median() -> None:
    report = fitting_report()
    answer = next(each for each in report.trials if each.trial.rung == "zero3" and each.trial.knobs == report.knobs)
    again = [replace(answer, id=90 + number, outcome=fit(393.4, rate)) for number, rate in enumerate((30.0, 20.0))]
    row = to_dict(replace(report, trials=(*report.trials, *again)))
    read_again = from_dict({**row, "spread": None})
    assert read_again.throughput is not None
    assert read_again.throughput.samples_per_second == 30.0
    assert read_again.spread == Spread(low=20.0, high=41.7, trials=3)
