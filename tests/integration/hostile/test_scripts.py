"""A broken script ends in one message with the problem, its place and a fix; an odd script can be tuned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autods.types import Fit
from autods.workload import make_source
from tests.support.bad_scripts import FINE, GOOD, IN_A_TRIAL, IN_THE_SURVEY
from tests.support.faults import Fault, is_one_message
from tests.support.hostile import Case
from tests.support.script_trials import a_trial

OPTIONS = "--gpus 2 --gpu-memory 1GiB --device cpu --config quick --quiet --out out"


def faulty(bad: Fault) -> Case:
    line = f"fit train.py {OPTIONS} -- {{micro_batch_size}}"
    return Case(line, 2, bad.message, "ranks", files={"train.py": bad.text}, leaves=("out",), seconds=400)


def place(folder: Path, bad: Fault) -> str:
    return f"{folder}/train.py:{bad.line}: " if bad.line else f"{folder}/train.py: "


@pytest.mark.parametrize("fault", IN_THE_SURVEY)
def test_a_broken_script_is_reported_before_any_trial(meet, tmp_path, fault):
    bad = IN_THE_SURVEY[fault]
    assert is_one_message(meet(faulty(bad)).stderr, where=place(tmp_path, bad), message=bad.message)
    assert not list((tmp_path / "out").glob("logs/0*"))


@pytest.mark.parametrize("fault", IN_A_TRIAL)
def test_a_script_failing_in_the_first_trial_ends_the_fit(meet, tmp_path, fault):
    bad = IN_A_TRIAL[fault]
    assert is_one_message(meet(faulty(bad)).stderr, where=place(tmp_path, bad), message=bad.message)
    assert [folder.name for folder in (tmp_path / "out").glob("logs/0*")] == ["001-ddp"]


@pytest.mark.parametrize("oddity", FINE)
def test_an_odd_script_can_be_tuned(runner, tmp_path, oddity):
    old, new = FINE[oddity]
    path = tmp_path / "train.py"
    path.write_text(GOOD.replace(old, new, 1))
    source = make_source(path, argv=("{micro_batch_size}",))
    out = tmp_path / ("a long name of an output folder " * 4) / "out"
    runner.settings = replace(runner.settings, source=source, out=out, base={})
    runner.survey()
    outcome = runner.run(a_trial("zero1", accumulation=1), id=1).outcome
    assert isinstance(outcome, Fit), outcome
    assert all(log.stat().st_size < 2**26 for log in out.glob("logs/001-*/*.log"))
