"""What a release of DeepSpeed does wrong without an error keeps its rungs out, and stands in doctor and explain."""

from __future__ import annotations

import importlib.metadata

import pytest

from autods.config import releases
from autods.config.releases import find_faults, find_wrong_stages
from autods.config.rungs import unmet_need
from autods.config.validator import EXPLAIN_RULES, InstalledKeys, Problem, Question, find_problems
from autods.inspector import examine
from autods.inspector.toolchain import check_versions
from tests.support.machines import SOURCE, a_machine
from tests.support.settings import fit_settings


@pytest.fixture
def old_release(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """DeepSpeed 0.18.2, or the release of the test's parameter, seems to be installed."""
    version = getattr(request, "param", "0.18.2")
    monkeypatch.setattr(releases, "_installed", lambda: version)
    monkeypatch.setattr(examine, "installed_versions", lambda: {"deepspeed": version})
    return version


def test_the_release_that_is_installed_has_no_known_fault() -> None:
    assert find_faults(importlib.metadata.version("deepspeed")) == ()


@pytest.mark.parametrize(
    ("version", "precision", "stages"),
    [
        ("0.17.5", "fp16", []),
        ("0.18.2", "fp16", [2]),
        ("0.18.2", "bf16", [0, 2]),
        ("0.18.2+cu130", "bf16", [0, 2]),
        ("0.18.3", "fp16", []),
        ("0.18.5", "bf16", [0]),
        ("0.18.6", "bf16", []),
        ("not installed", "bf16", []),
    ],
)
def test_wrong_stages_depend_on_release_and_precision(
    version: str, precision: str, stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "_installed", lambda: version)
    assert sorted(find_wrong_stages(precision)) == stages


def test_a_fit_leaves_rungs_out_whose_gradients_are_wrong(old_release: str) -> None:
    settings = fit_settings(SOURCE, hardware=a_machine(gpus=4), precision="bf16")
    reasons = {rung.name: unmet_need(rung, settings.site, None) for rung in settings.ladder}
    assert [name for name, reason in reasons.items() if reason and "wrong" in reason] == ["zero2", "zero2-offload"]
    assert reasons["zero2"] == (
        "DeepSpeed 0.18.2: ZeRO-2 computes wrong gradients, of a norm of 1.63 for 4.74, with the same first loss "
        "(DeepSpeed #7718); pip install 'deepspeed>=0.18.3'"
    )
    assert "65,536" in str(reasons["ddp"])
    assert reasons["zero1"] is None


@pytest.mark.parametrize("old_release", ["0.18.6"], indirect=True)
def test_a_fit_is_warned_of_what_is_slow_or_sometimes_wrong(old_release: str) -> None:
    def warned(ladder: str) -> list[str]:
        settings = fit_settings(SOURCE, hardware=a_machine(gpus=4), precision="bf16", ladder=ladder)
        checks = examine.check_ladder(settings, {}, is_built=lambda op: True, may_lock=lambda: True)
        return [check.result.partition(" (")[0] for check in checks if check.name.startswith("deepspeed")]

    assert [text.split()[0] for text in warned("zero2")] == ["ZeRO-2", "each"]
    assert [text.split()[0] for text in warned("zero3")] == ["each"]
    assert warned("ddp") == []


def test_doctor_names_the_faults_of_the_installed_release() -> None:
    checks = [check for check in check_versions(lambda: {"deepspeed": "0.18.5"}) if check.status != "ok"]
    assert [check.status for check in checks] == ["broken", "warning", "warning"]
    assert [check.remedy for check in checks] == [
        "pip install 'deepspeed>=0.18.6'",
        "pip install 'deepspeed>=0.19.7'",
        "pip install 'deepspeed>=0.18.7'",
    ]


def test_explain_judges_the_stage_by_the_installed_release() -> None:
    def judge(stage: int) -> list[Problem]:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        question = Question(config=config, installed=InstalledKeys(version="0.18.2", defaults={}))
        problems = find_problems(question, EXPLAIN_RULES)
        return [problem for problem in problems if problem.key == "zero_optimization.stage"]

    (wrong,) = judge(2)
    assert (wrong.severity, wrong.hint) == ("error", "pip install 'deepspeed>=0.18.3'")
    assert judge(3) == []
