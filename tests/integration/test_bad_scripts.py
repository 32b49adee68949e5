"""A broken script ends in one message with the problem, its place and a fix; an odd script can be tuned."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from autods import api
from autods.cli.main import main
from autods.runner.runner import RayRunner
from autods.system.host import read_hardware
from autods.tuner.fit import fit
from autods.types import Fit
from autods.workload import make_source
from tests.support.bad_scripts import FINE, GOOD, IN_A_TRIAL, IN_THE_SURVEY
from tests.support.faults import is_one_message
from tests.support.fits import ignore
from tests.support.script_trials import a_trial
from tests.support.settings import fit_settings

ARGS = ("--", "{micro_batch_size}")


@pytest.fixture(scope="module")
def started(ray, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    (folder / "train.py").write_text(GOOD)
    source = make_source(folder / "train.py", argv=("{micro_batch_size}",))
    options = {"gpus": 2, "device": "cpu", "gpu_memory": "1GiB", "config": "quick", "out": folder / "out"}
    with RayRunner(fit_settings(source, hardware=read_hardware(), **options), ignore) as runner:
        yield runner


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def autods(started, capsys):
    """The command line on one zygote, which never runs a script and so serves all tests. Returns its standard error."""

    def run_fit(settings, listen):
        def start(settings, listen):
            started.settings, started.listen = settings, listen
            return contextlib.nullcontext(started)

        limits = replace(settings.profile.limits, stall_s=100.0, init_s=200.0)
        settings = replace(settings, profile=replace(settings.profile, limits=limits))
        return fit(settings, listen=listen, start=start)

    def autods(path, out):
        argv = ["fit", str(path), "--gpus", "2", "--gpu-memory", "1GiB", "--device", "cpu", "--config", "quick"]
        code = main([*argv, "--quiet", "--out", str(out), *ARGS], fit=replace(api.FIT, run=run_fit))
        assert code == 2
        return capsys.readouterr().err

    return autods


@pytest.mark.parametrize("fault", IN_THE_SURVEY)
def test_a_broken_script_is_reported_before_any_trial(autods, script, tmp_path, fault):
    bad = IN_THE_SURVEY[fault]
    path = script(bad.text)
    where = f"{path}:{bad.line}: " if bad.line else f"{path}: "
    assert is_one_message(autods(path, tmp_path / "out"), where=where, message=bad.message)
    assert not list((tmp_path / "out").glob("logs/0*"))


@pytest.mark.parametrize("fault", IN_A_TRIAL)
def test_a_script_failing_in_the_first_trial_ends_the_fit(autods, script, tmp_path, fault):
    bad = IN_A_TRIAL[fault]
    path = script(bad.text)
    where = f"{path}:{bad.line}: " if bad.line else f"{path}: "
    assert is_one_message(autods(path, tmp_path / "out"), where=where, message=bad.message)
    assert [folder.name for folder in (tmp_path / "out").glob("logs/0*")] == ["001-ddp"]


@pytest.mark.parametrize("oddity", FINE)
def test_an_odd_script_can_be_tuned(started, script, tmp_path, oddity):
    old, new = FINE[oddity]
    path = script(GOOD.replace(old, new, 1))
    source = make_source(path, argv=("{micro_batch_size}",))
    out = tmp_path / ("a long name of an output folder " * 4) / "out"
    started.settings = replace(started.settings, source=source, out=out)
    started.survey()
    outcome = started.run(a_trial("zero1", accumulation=1), id=1).outcome
    assert isinstance(outcome, Fit), outcome
    assert all(log.stat().st_size < 2**26 for log in out.glob("logs/001-*/*.log"))
