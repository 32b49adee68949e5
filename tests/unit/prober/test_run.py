"""The whole probe on made-up machines: the folder, the journal, the reports, and how it ends."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError, Interrupted
from autods.events import Note
from autods.prober.probe_settings import ProbeSettings
from autods.report.answers.probe import make_probe_document
from autods.report.results.probe import CellResult, ProbeReport, Ratio
from autods.report.serialize import probe_to_dict as to_dict
from autods.report.serialize import to_csv
from autods.report.trial_names import name_conditions
from autods.runner.testing import failed, fit, out_of_memory, surface
from autods.types import Fit, Outcome, Trial
from tests.support import terminal
from tests.support.probes import FACTS, HERE, LIMIT, MIB, Bench, ask, probed

SURFACE = surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=100 * MIB)


def shown(report: ProbeReport, width: int = 150) -> str:
    return terminal.printed(make_probe_document(report), width)


def test_a_probe_measures_every_cell_and_names_the_fastest(tmp_path: Path) -> None:
    bench = Bench(SURFACE)
    report = probed(ask(tmp_path, "rung=zero1,zero2", "micro_batch=1,2,8"), bench)
    assert report.status == "done"
    assert [cell.status for cell in report.cells] == ["fit", "fit", "out_of_memory"] * 2
    assert len(bench.asked) == 2 * (3 + 3 + 1)
    said = shown(report)
    assert "model on 2 cpu ranks × 416.0 MiB, bf16, each cell 3 times" in said
    assert "✗ device lacks ≥ 100.0 MiB" in said
    assert "fastest: cell 2, zero1, micro_batch 2" in said
    assert "cells 3, 6" in said


def test_table_and_files_name_cells_that_are_the_same(tmp_path: Path) -> None:
    report = probed(ask(tmp_path, "rung=zero1,zero2-offload", "pin_memory=on,off"), Bench(SURFACE))
    said = shown(report)
    assert "= 1" in said
    assert "cells 1-2  pin_memory has no effect under zero1: nothing is offloaded" in said
    assert [cell["same_as"] for cell in to_dict(report)["cells"]] == [None, 1, None, None]
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [row["pin_memory"] for row in rows] == ["true", "false", "true", "false"]
    assert rows[1]["same_as"] == "1"
    assert float(rows[0]["device_peak_bytes"]) == 200 * MIB
    assert rows[0]["ratio_times"] == ""
    assert json.loads((tmp_path / "out" / "probe.json").read_text()) == to_dict(report)
    assert (tmp_path / "out" / "probe.csv").read_text().splitlines()[0].startswith("cell,rung,pin_memory,status")


def test_a_narrow_terminal_names_the_columns_it_leaves_out(tmp_path: Path) -> None:
    report = probed(
        ask(tmp_path, "rung=zero1,zero2", "zero_optimization.reduce_bucket_size=1e6,1e7", "env.A=0,1"), Bench(SURFACE)
    )
    wide, narrow = shown(report, 150), shown(report, 58)
    assert "device:" not in wide
    assert "device: on a wider terminal" in narrow
    assert all(len(line) <= 58 for line in narrow.splitlines() if line.startswith((" 1 ", " 2 ")))
    assert "10,000,000" in narrow


def test_of_samples_that_differ_in_length_tokens_are_compared(tmp_path: Path) -> None:
    def answer(trial: Trial) -> Outcome:
        length = int(trial.conditions["seq_len"])
        return replace(fit(peak_bytes=MIB, samples_per_second=64 / length), tokens_per_second=length * 1.0)

    report = probed(ask(tmp_path, "seq_len=64,128"), Bench(answer))
    assert report.compared == (1, "tokens")
    ratio = report.cells[1].ratio
    assert ratio is not None
    assert ratio.times == pytest.approx(2)
    assert "tokens/s" in shown(report)


def test_ratios_within_the_noise_are_marked(tmp_path: Path) -> None:
    report = probed(ask(tmp_path, "micro_batch=1,2"), Bench(lambda trial: fit(peak_bytes=MIB)))
    assert "≈ 1.00" in shown(report)
    assert "not told apart from cell 1" in shown(report)
    assert "fastest: cell 1, ddp, micro_batch 1: 1 samples/s, within the noise of cell 2" in shown(report)
    faster = probed(ask(tmp_path, "micro_batch=1,4"), Bench(_slightly_faster), fresh=True)
    assert "fastest: cell 2, ddp, micro_batch 4: 1.01 samples/s, within the noise of cell 1" in shown(faster)
    assert not Ratio(times=1.1, low=0.9, high=1.3).differs
    assert Ratio(times=1.3, low=1.1, high=1.5).differs


def _slightly_faster(trial: Trial) -> Outcome:
    return fit(peak_bytes=MIB, samples_per_second=1.01 if trial.knobs.micro_batch > 1 else 1.0)


def test_ratios_are_to_the_first_cell_that_fits(tmp_path: Path) -> None:
    report = probed(ask(tmp_path, "micro_batch=8,2,1"), Bench(SURFACE))
    assert report.compared == (2, "samples")
    assert "× cell 2" in shown(report)


def test_that_no_cell_fits_is_a_result(tmp_path: Path) -> None:
    report = probed(ask(tmp_path, "micro_batch=8,9"), Bench(SURFACE))
    assert report.status == "nothing_fits"
    assert "no cell fits" in shown(report)


def test_a_probe_that_was_interrupted_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    question = ask(tmp_path, "micro_batch=1,2", "rung=zero1,zero2")
    first = Bench(SURFACE, killed_at=6)
    with pytest.raises(Interrupted):
        probed(question, first)
    assert not (tmp_path / "out" / "probe.json").exists()
    notes: list[object] = []
    second = Bench(SURFACE)
    report = probed(question, second, notes.append)
    assert len(first.asked) == 5
    assert len(second.asked) == 12 - 5
    assert second.surveyed == []
    assert Note(text="resuming: 5 finished trials are not run again") in notes
    assert [record.id for record in sorted(report.trials, key=lambda record: record.id)] == list(range(1, 13))


def test_other_memory_in_use_leaves_a_resumed_probe_its_journal(tmp_path: Path) -> None:
    def here(free: int) -> ProbeSettings:
        hardware = replace(HERE, host_free_bytes=free)
        return ask(tmp_path, "rung=zero2-offload", "micro_batch=1,2", gpu_memory=None, hardware=hardware)

    first, second = Bench(SURFACE, killed_at=4), Bench(SURFACE)
    with pytest.raises(Interrupted):
        probed(here(HERE.host_free_bytes), first)
    report = probed(here(HERE.host_free_bytes - MIB - 1), second)
    assert len(first.asked) + len(second.asked) == 6
    assert report.question.device_bytes == here(HERE.host_free_bytes).settings.device_bytes


def test_a_finished_probe_reports_its_trials_again(tmp_path: Path) -> None:
    for question in (
        ask(tmp_path, capacity=True, forecast=False),
        ask(tmp_path, "micro_batch=1,2", out=tmp_path / "b"),
    ):
        first, again = probed(question, Bench(SURFACE)), Bench(SURFACE)
        assert probed(question, again).trials == first.trials
        assert again.asked == []


def test_more_repeats_go_on_with_those_that_are_there(tmp_path: Path) -> None:
    probed(ask(tmp_path, repeats=2), Bench(SURFACE))
    more = Bench(SURFACE)
    assert probed(ask(tmp_path, repeats=5), more).cells[0].repeats == 5
    assert [trial.repeat for trial in more.asked] == [2, 3, 4]


def test_another_probe_does_not_use_the_same_folder(tmp_path: Path) -> None:
    probed(ask(tmp_path, "micro_batch=1"), Bench(SURFACE))
    with pytest.raises(InputError, match="--fresh"):
        probed(ask(tmp_path, "micro_batch=1,2"), Bench(SURFACE))
    bench = Bench(SURFACE)
    probed(ask(tmp_path, "micro_batch=1,2"), bench, fresh=True)
    assert len(bench.asked) == 6


def test_probes_without_a_folder_get_one_each_by_what_they_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {ask(tmp_path, line, out=None).settings.out for line in ("micro_batch=1", "micro_batch=2", "rung=zero1")}
    assert len(folders) == 3
    assert all(folder.name.startswith("model-probe-") for folder in folders)


def test_a_full_disk_ends_the_probe_and_its_trial_is_run_again_later(tmp_path: Path) -> None:
    full = failed(failure="infrastructure", action="fix_environment", evidence="No space left on device")
    with pytest.raises(EnvironmentBroken, match="No space left"):
        probed(ask(tmp_path), Bench(lambda trial: full))
    assert probed(ask(tmp_path), Bench(SURFACE)).status == "done"


def test_a_bug_of_the_workload_in_every_cell_is_the_users_to_mend(tmp_path: Path) -> None:
    wrong = failed(failure="user_code", action="fix_code", evidence="model.py:3: ValueError: no")
    with pytest.raises(InputError, match="ValueError: no"):
        probed(ask(tmp_path, "micro_batch=1,2"), Bench(lambda trial: wrong))

    def answer(trial: Trial) -> Outcome:
        return wrong if trial.knobs.micro_batch == 2 else SURFACE(trial)

    report = probed(ask(tmp_path, "micro_batch=1,2"), Bench(answer), fresh=True)
    assert [cell.status for cell in report.cells] == ["fit", "failed"]
    assert "ValueError: no" in shown(report)


def test_a_hang_at_one_line_ends_the_probe_after_two_trials(tmp_path: Path) -> None:
    bench = Bench(lambda trial: replace(failed(evidence="no rank moved for 60 s"), hung_at="/home/me/model.py:3"))
    with pytest.raises(InputError, match=r"/home/me/model\.py:3: it hangs here: no rank moved for 60 s"):
        probed(ask(tmp_path, "micro_batch=1,2,3"), bench)
    assert len(bench.asked) == 2


def test_a_host_that_is_full_is_named_as_the_tier(tmp_path: Path) -> None:
    report = probed(ask(tmp_path), Bench(lambda trial: out_of_memory(tier="host", action="less_host_memory")))
    assert report.cells[0].tier == "host"
    assert "✗ host full" in shown(report)


def test_what_was_assumed_and_what_cpu_ranks_cannot_show_is_said(tmp_path: Path) -> None:
    notes = "\n".join(probed(ask(tmp_path, "env.NCCL_ALGO=Ring,Tree"), Bench(SURFACE)).notes)
    assert "assumed: rung ddp" in notes
    assert "assumed: micro batch 1" in notes
    assert "CPU ranks talk through gloo" in notes


def test_surveys_are_made_once_for_each_kind_of_workload(tmp_path: Path) -> None:
    bench = Bench(SURFACE)
    probed(ask(tmp_path, "seq_len=8,16", "rung=zero1,zero2", "micro_batch=1,2"), bench)
    assert [said["seq_len"] for said in bench.surveyed] == [8, 16]


def test_a_line_of_progress_says_what_distinguishes_its_trial(tmp_path: Path) -> None:
    question = ask(
        tmp_path, "rung=zero1", "checkpointing=on,off", "env.NCCL_ALGO=Ring,Tree", "precision=bf16,fp32", "seq_len=8"
    )
    bench = Bench(SURFACE)
    probed(question, bench)
    axes = {axis.name: axis.values for axis in question.axes}
    assert name_conditions(axes, bench.asked[0]) == "checkpointing on, NCCL_ALGO Ring, precision bf16"


def test_json_keeps_every_tier_and_has_no_infinity(tmp_path: Path) -> None:
    noisy = replace(fit(peak_bytes=MIB), spread=float("nan"))
    told = to_dict(probed(ask(tmp_path), Bench(lambda trial: noisy)))
    assert set(told["cells"][0]["memory"]) == {"device", "host", "pinned", "nvme"}
    json.dumps(told, allow_nan=False)


def test_the_cell_of_a_capacity_is_shown_with_its_boundary(tmp_path: Path) -> None:
    question = ask(tmp_path, "rung=zero1,zero2", capacity=True, forecast=False)
    report = probed(question, Bench(SURFACE))
    said = shown(report)
    assert "largest" in said
    assert "3 fits, 4 does not: device lacks 84.0 MiB or more" in said
    assert "largest micro batch: 3 with zero1, by trials; as large in cell 2" in said
    assert all(isinstance(cell, CellResult) and cell.micro_batch == 3 for cell in report.cells)
    assert FACTS.checkpointing
    assert all(isinstance(record.outcome, Fit) for record in report.trials if record.trial.knobs.micro_batch < 4)
