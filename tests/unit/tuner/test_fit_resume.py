"""A whole fit of a made-up machine in a folder that an earlier one used: what is answered again, and what goes on."""

from __future__ import annotations

import itertools
import json
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.profiles import TuneLimits
from autods.config.settings import Settings
from autods.devices import Card
from autods.errors import InputError, Interrupted
from autods.events import Event, Note
from autods.journal import JOURNAL, trial_key, workspace
from autods.report.results.fit import FitReport
from autods.report.serialize import REPORT
from autods.system.host import Hardware
from autods.tuner.fit import fit
from autods.tuner.forecaster import NO_FORECASTER
from autods.types import ModelFacts, Record, Trial, WorkloadSource
from tests.support.settings import fit_settings
from tests.support.surfaces import Surface

pytestmark = pytest.mark.timeout(120)  # the first test imports Optuna, which is slow on a loaded machine

SOURCE = WorkloadSource(kind="file", path="/model.py", name="model", digest="0")
SURFACE = Surface(3)
LITTLE_S = 600.0  # of a budget that the search uses up


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@dataclass(slots=True)
class Machine:
    """Runs trials of one made-up model, and is stopped with Ctrl-C under the trial `killed_at`."""

    killed_at: int = 0
    ran: list[str] = field(default_factory=list)

    def survey(self) -> tuple[ModelFacts, Any]:
        return SURFACE.survey()

    def run(self, trial: Trial, *, id: int) -> Record:
        if len(self.ran) + 1 == self.killed_at:
            raise KeyboardInterrupt
        self.ran.append(trial_key(trial))
        return SURFACE.run(trial, id=id)

    def final_config(self, trial: Trial) -> dict[str, Any]:
        return {"train_batch_size": trial.knobs.train_batch(SURFACE.world_size)}


def asked(out: Path, *, used: int = 0, device: str = "cuda", **options: Any) -> Settings:
    """Settings of a machine on which other processes hold `used` bytes of each card, or of the host."""
    ranks, size = SURFACE.world_size, SURFACE.limit_bytes
    card = Card(index=0, name="a card", total_bytes=size, free_bytes=size - used, others_bytes=used)
    host = int(ranks * size / 0.8)
    hardware = Hardware(cpu="a CPU", cores=64, host_bytes=2 * host, host_free_bytes=host - used, cards=(card,) * ranks)
    settings = fit_settings(SOURCE, hardware=hardware, device=device, gpus=ranks, out=out, **options)
    tune = TuneLimits(trials=2, gain=1.03, turns=1)  # before the Gaussian process begins: that one needs torch
    return replace(settings, profile=replace(settings.profile, tune=tune))


def fitted(settings: Settings, machine: Machine, notes: list[str] | None = None) -> FitReport:
    def listen(event: Event) -> None:
        if notes is not None and isinstance(event, Note):
            notes.append(event.text)

    return fit(
        settings, listen=listen, start=lambda *_: nullcontext(machine), forecaster=lambda *_: nullcontext(NO_FORECASTER)
    )


def test_a_larger_budget_goes_on_from_the_finished_trials(tmp_path: Path) -> None:
    small, large, smaller = Machine(), Machine(), Machine()
    first = fitted(asked(tmp_path, max_trials=8), small)
    notes: list[str] = []
    second = fitted(asked(tmp_path, max_trials=50), large, notes)
    assert len(first.trials) <= 8 < len(second.trials)
    assert large.ran
    assert not set(small.ran) & set(large.ran)
    assert "it goes on from its trials" in notes[0]
    assert fitted(asked(tmp_path, max_trials=5), smaller) == second
    assert smaller.ran == []


def test_other_forecasts_do_not_get_the_old_report(tmp_path: Path) -> None:
    first, second = Machine(), Machine()
    fitted(asked(tmp_path, forecast=False), first)
    report = fitted(asked(tmp_path), second)
    assert report.question.forecast
    assert second.ran == []  # this forecaster knows nothing, so that the journal has every trial


def test_another_fit_is_refused_by_the_option_that_differs(tmp_path: Path) -> None:
    fitted(asked(tmp_path, max_trials=5), Machine())
    with pytest.raises(InputError, match=r"report\.json: belongs to another fit \(--seed: 0 there, 1 here\)"):
        fitted(asked(tmp_path, max_trials=5, seed=1), Machine())
    (tmp_path / "report.json").unlink()
    with pytest.raises(InputError, match=r"journal\.jsonl: belongs to another fit \(--seed: 0 there, 1 here\)"):
        fitted(asked(tmp_path, max_trials=5, seed=1), Machine())


def test_other_arguments_of_a_script_are_named(tmp_path: Path) -> None:
    def script(*argv: str) -> Settings:
        settings = asked(tmp_path, max_trials=5)
        return replace(settings, source=replace(settings.source, argv=argv, digest=argv[-1][:6]))

    fitted(script("--size", "small"), Machine())
    differs = "arguments after --: --size small there, --size 'as large' here"
    said = f"belongs to another fit (workload: small there, as lar here; {differs})"
    with pytest.raises(InputError, match=re.escape(said)):
        fitted(script("--size", "as large"), Machine())


@pytest.mark.parametrize("kept", [None, b""], ids=["missing", "empty"])
def test_a_report_without_its_journal_answers_its_question_alone(tmp_path: Path, kept: bytes | None) -> None:
    first = fitted(asked(tmp_path, max_trials=5), Machine())
    (tmp_path / JOURNAL).unlink()
    if kept is not None:
        (tmp_path / JOURNAL).write_bytes(kept)
    with pytest.raises(InputError, match=r"report\.json: belongs to another fit"):
        fitted(asked(tmp_path, max_trials=5, seed=1), Machine())
    assert fitted(asked(tmp_path, max_trials=5), Machine()) == first


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_other_memory_in_use_leaves_a_resumed_fit_its_journal(tmp_path: Path, device: str) -> None:
    whole = Machine()
    report = fitted(asked(tmp_path / "whole", device=device), whole)
    killed, rest = Machine(killed_at=10), Machine()
    with pytest.raises(Interrupted):
        fitted(asked(tmp_path / "killed", device=device), killed)
    resumed = fitted(asked(tmp_path / "killed", device=device, used=100 * 2**20 + 1), rest)
    assert killed.ran + rest.ran == whole.ran
    assert resumed.ds_config == report.ds_config
    assert resumed.question.device_bytes == report.question.device_bytes


def test_a_fit_whose_memory_is_gone_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fitted(asked(tmp_path), Machine(killed_at=4))
    taken = SURFACE.limit_bytes // 2
    with pytest.raises(InputError, match=r"it began with .* for a rank, and .* are free now"):
        fitted(asked(tmp_path, used=taken), Machine())


def test_a_resumed_fit_keeps_its_trials_where_time_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(slots=True)
    class Clock:
        """Tells the seconds that the trials of this driver took."""

        seconds: float = 0.0

        def monotonic(self) -> float:
            return self.seconds

    class Timed(Machine):
        def run(self, trial: Trial, *, id: int) -> Record:
            record = Machine.run(self, trial, id=id)
            clock.seconds += record.seconds
            return record

    clock = Clock()
    monkeypatch.setattr("autods.tuner.fit.time", clock)
    whole = Timed()
    report = fitted(asked(tmp_path / "whole", max_time=LITTLE_S), whole)
    killed, rest = Timed(killed_at=len(whole.ran)), Timed()
    with pytest.raises(Interrupted):
        fitted(asked(tmp_path / "killed", max_time=LITTLE_S), killed)
    clock.seconds = 0.0
    resumed = fitted(asked(tmp_path / "killed", max_time=LITTLE_S), rest)
    assert killed.ran + rest.ran == whole.ran
    assert resumed.ds_config == report.ds_config


def test_memory_that_became_free_is_named(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fitted(asked(tmp_path, used=SURFACE.limit_bytes // 4), Machine(killed_at=4))
    notes: list[str] = []
    report = fitted(asked(tmp_path), Machine(), notes)
    assert "3 finished trials are not run again; a rank keeps " in notes[0]
    assert report.question.device_bytes == SURFACE.limit_bytes - SURFACE.limit_bytes // 4


def test_a_fit_killed_at_any_byte_runs_no_finished_trial_twice(tmp_path: Path) -> None:
    """The driver dies while it writes its journal, at bytes spread over all of it and around each kind of line."""
    whole = Machine()
    report = fitted(asked(tmp_path / "whole"), whole)
    lines = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    ends = list(itertools.accumulate(map(len, lines)))
    middle = len(lines) // 2
    cuts = {0, 7, ends[0], ends[1] - 1, ends[middle] - 1, ends[middle], ends[-1] // 3, ends[-1] - 1}
    for cut in sorted(cuts):
        out = tmp_path / str(cut)
        with workspace(out, fresh=False):
            (out / JOURNAL).write_bytes(b"".join(lines)[:cut])
        kept = [json.loads(line) for line, end in zip(lines, ends, strict=True) if end <= cut]
        finished = [row["key"] for row in kept if row["kind"] == "finished"]
        rest = Machine()
        assert fitted(asked(out), rest).ds_config == report.ds_config
        assert finished + rest.ran == whole.ran, cut


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_report_that_was_half_written_is_written_again(tmp_path: Path, share: float) -> None:
    report, again = fitted(asked(tmp_path), Machine()), Machine()
    text = (tmp_path / REPORT).read_bytes()
    (tmp_path / REPORT).write_bytes(text[: int(share * len(text))])
    notes: list[str] = []
    assert fitted(asked(tmp_path), again, notes).ds_config == report.ds_config
    assert "report.json is damaged" in notes[0]
    assert again.ran == []
    assert json.loads((tmp_path / REPORT).read_bytes())["status"] == "fit"
