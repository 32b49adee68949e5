"""What each rung spends in communication: from the ranks' counts to the lines that a person reads."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autods.devices import Card
from autods.journal import read_record
from autods.report.answers.trials import chart_trials, describe_machine, list_trials
from autods.report.answers.trials import describe_communication as lines_of
from autods.report.serialize import from_dict, to_dict
from autods.runner.node_messages import RankExit
from autods.types import Collective, Communication, Fit
from tests.support.ends import outcome, rank_exit
from tests.support.journaled import FIT
from tests.support.journaled import record as journaled
from tests.support.reports import HARDWARE, WINNING, fit, fitting_report, oom, record
from tests.support.terminal import shown

MIB = 2**20


def counted(calls: int, size: int, seconds: float | None) -> dict[str, object]:
    return {"calls": calls, "bytes": size, "sent_bytes": size, "seconds": seconds}


def ran(rank: int, communication: object) -> RankExit:
    timing = {"step_s": [0.5], "steps_s": 1.0, "losses": [2.0], "build_s": 0.1, "init_s": 0.1}
    peaks = {"device": 100, "host": 50, "pinned": 0}
    result = {**timing, "peaks": peaks, "examined": None, "communication": communication}
    return rank_exit(rank, result=result)


def gathering(mib: int, seconds: float | None, step_s: float | None = 2.0) -> Communication:
    small = Collective(calls=1, bytes=4, sent_bytes=4, seconds=None if seconds is None else 0.0)
    gather = Collective(calls=3, bytes=2 * mib * MIB, sent_bytes=mib * MIB, seconds=seconds)
    return Communication(ops={"all_reduce": small, "all_gather": gather}, step_s=step_s)


def test_the_rank_that_did_most_counts_and_the_one_that_waited_least() -> None:
    fits = outcome(
        ran(0, {"ops": {"all_reduce": counted(2, 100, 0.3)}, "step_s": 1.0}),
        ran(1, {"ops": {"all_reduce": counted(2, 100, 0.1), "send": counted(1, 7, None)}, "step_s": 1.1}),
    )
    assert isinstance(fits, Fit)
    assert fits.communication == Communication(
        ops={
            "all_reduce": Collective(calls=2, bytes=100, sent_bytes=100, seconds=0.1),
            "send": Collective(calls=1, bytes=7, sent_bytes=7, seconds=None),
        },
        step_s=1.1,
    )


def test_a_failed_trial_whose_log_is_not_quoted_names_it(tmp_path: Path) -> None:
    records = [record(number, "zero3", oom(rank=0)) for number in range(1, 42)]
    for number in (1, 41):
        folder = tmp_path / "logs" / f"{number:03d}-zero3"
        folder.mkdir(parents=True)
        (folder / "rank0.log").write_text("its last line")
    first, *_, last = list_trials(records, tmp_path, lambda trial: "").items
    assert (first.text, last.text) == ("its last line", "")
    assert not [sentence for sentence in first.sentences if "quotes" in sentence]
    assert last.sentences[-1].startswith("Its log is logs/041-zero3/rank0.log: this page quotes")


def test_a_chart_sets_configs_without_headroom_apart() -> None:
    roomy, full = fit(380, rate=5), fit(415, rate=9)
    trials = [record(1, "zero3", roomy), record(2, "zero3", full, knobs=WINNING)]
    speeds, peaks = chart_trials(trials, 416 * MIB, usable_bytes=400 * MIB)
    assert list(speeds.lines) == list(peaks.lines)
    assert [name.endswith(", no headroom") for name in speeds.lines] == [False, True]


def test_a_share_is_known_only_where_every_collective_was_timed() -> None:
    assert gathering(10, 0.5).share == pytest.approx(0.25)
    assert gathering(10, None).share is None
    assert gathering(10, 0.5, step_s=None).share is None


def test_a_report_without_communication_can_be_read() -> None:
    row = json.loads(json.dumps(asdict(journaled())))
    del row["outcome"]["communication"]
    assert read_record(row).outcome == FIT


def test_communication_survives_the_journal_and_the_report() -> None:
    told = replace(fit(), communication=gathering(10, 0.5))
    assert read_record(json.loads(json.dumps(asdict(record(5, "zero3", told))))).outcome == told
    report = replace(fitting_report(), trials=(record(5, "zero3", told),))
    assert from_dict(json.loads(json.dumps(to_dict(report)))).trials[0].outcome == told


def test_fastest_trial_with_timed_collectives_stands_for_its_rung() -> None:
    trials = (
        record(1, "ddp", oom()),
        record(2, "zero1", replace(fit(rate=99), communication=gathering(7, None))),
        record(3, "zero3", replace(fit(rate=5), communication=gathering(10, 0.5))),
        record(4, "zero3", replace(fit(rate=9), communication=gathering(20, 1.0)), knobs=WINNING),
        record(5, "zero3", replace(fit(rate=50), communication=gathering(30, None))),
    )
    said = {rung: str(line) for rung, line in lines_of(replace(fitting_report(), trials=trials))}
    assert list(said) == ["zero1", "zero3"]
    assert said["zero1"].startswith("sends 7.0 MiB: all_gather 7.0 MiB in 3 calls")
    assert said["zero3"].startswith("sends 20.0 MiB, 50% of a step where nothing overlaps: all_gather")


def test_the_terminal_shows_communication_where_there_is_any() -> None:
    told = replace(fit(), communication=gathering(10, 0.5))
    assert "sends 10.0 MiB" in shown(replace(fitting_report(), trials=(record(5, "zero3", told),)), 100)
    assert "ommunication of a rank" not in shown(fitting_report(), 100)


def test_equal_cards_of_a_machine_are_counted() -> None:
    card = Card(index=0, name="NVIDIA H100", total_bytes=80 * 2**30, free_bytes=0)
    other = Card(index=8, name="NVIDIA L4", total_bytes=24 * 2**30, free_bytes=0)
    cards = (*(replace(card, index=index) for index in range(8)), other)
    facts = dict(describe_machine(replace(HARDWARE, cards=cards), {}).items)
    assert facts["cards"] == "8 × NVIDIA H100 (80.0 GiB), NVIDIA L4 (24.0 GiB)"
