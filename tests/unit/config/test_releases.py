"""What a release of DeepSpeed does wrong without an error keeps its rungs out, and stands in doctor and explain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autods.config import releases
from autods.config.base_config import check_base_config
from autods.config.deepspeed import get_key, merge, nest_key
from autods.config.problems import InstalledKeys, Problem, Question, find_problems
from autods.config.releases import find_tolerated, find_wrong_stages, name_defaults, set_precision
from autods.config.rungs import Rung, unmet_need
from autods.config.trainers import SCRIPT_KINDS
from autods.config.validator import EXPLAIN_RULES
from autods.errors import InputError
from autods.explainer.installed import describe
from autods.inspector import examine
from autods.inspector.toolchain import check_versions
from tests.support.machines import SOURCE, a_machine
from tests.support.planned import Planned, question
from tests.support.settings import fit_settings

RATIO = "zero_optimization.offload_optimizer.ratio"
REMEDY = f"leave {RATIO} at 1, or train by autods run, which mends it"
REMOVED = releases.read_known_keys().removed


SWITCHES = ("zero_optimization.zero_quantized_gradients", "zero_optimization.offload_optimizer.super_offload")


@pytest.fixture
def old_release(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """DeepSpeed 0.18.2, or the release of the test's parameter, seems to be installed."""
    version = getattr(request, "param", "0.18.2")
    monkeypatch.setattr(releases, "_installed", lambda: version)
    monkeypatch.setattr(examine, "installed_versions", lambda: {"deepspeed": version})
    return version


def with_ratio(ladder: tuple[Rung, ...], ratio: float) -> tuple[Rung, ...]:
    return tuple(replace(rung, ds_config=merge(rung.ds_config, nest_key(RATIO, ratio))) for rung in ladder)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_no_known_fault_of_the_installed_release_touches_a_rung(precision: str) -> None:
    ladder = question().ladder
    assert len(ladder) == 9
    assert (find_tolerated(ladder, precision, {}), find_wrong_stages(precision)) == ((), {})


@pytest.mark.parametrize(
    ("name", "ratio", "times"),
    [("zero3-offload-optimizer", 0.5, 1), ("zero3-offload-optimizer", 1, 0), ("zero2-offload", 0.5, 0)],
)
def test_a_plan_and_a_fit_are_warned_of_a_ratio_below_one(name: str, ratio: float, times: int) -> None:
    asked = question(largest=False, ladder=(name,))
    plan = Planned(replace(asked, ladder=with_ratio(asked.ladder, ratio)))
    notes = [note for note in plan.forecast.assumed if "learning-rate" in note]
    assert [note.endswith(f"; {REMEDY}") for note in notes] == [True] * times

    settings = fit_settings(SOURCE, hardware=a_machine(gpus=4), precision="bf16", ladder=name)
    settings = replace(settings, ladder=with_ratio(settings.ladder, ratio))
    checks = examine.check_ladder(settings, {}, is_built=lambda op: True, may_lock=lambda: True)
    remedies = [check.remedy for check in checks if check.name.startswith("deepspeed")]
    assert remedies == [REMEDY] * times


def test_explain_warns_of_a_ratio_below_one() -> None:
    def judge(stage: int, ratio: Any) -> list[tuple[str, str]]:
        config = merge({"zero_optimization": {"stage": stage}}, nest_key(RATIO, ratio))
        found = find_problems(
            Question(config=config, installed=InstalledKeys(version="0.19.8", defaults={})), EXPLAIN_RULES
        )
        return [
            (problem.severity, problem.hint)
            for problem in found
            if problem.key == RATIO and "learning-rate" in problem.problem
        ]

    assert judge(3, 0.3) == [("warning", REMEDY)]
    assert judge(3, 1) == judge(3, "auto") == judge(2, 0.3) == []


@pytest.mark.parametrize("key", SWITCHES)
def test_a_switch_of_a_users_config_that_is_wrong_is_warned_of(key: str) -> None:
    def list_faults(value: Any) -> list[str]:
        return [fault.key for fault in find_tolerated(question().ladder, "bf16", nest_key(key, value))]

    assert (list_faults(True), list_faults(False)) == ([key], [])
    config = merge({"zero_optimization": {"stage": 3}}, nest_key(key, True))
    found = find_problems(
        Question(config=config, installed=InstalledKeys(version="0.19.8", defaults={})), EXPLAIN_RULES
    )
    assert ("warning", f"leave {key} out") in [(each.severity, each.hint) for each in found if each.key == key]


@pytest.mark.parametrize("key", REMOVED)
@pytest.mark.parametrize("value", [{"enabled": False}, None, 0], ids=["a section", "null", "0"])
def test_a_removed_key_is_refused_whatever_its_value(key: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        check_base_config(nest_key(key, value), world_size=2, place="ds.json")
    lines = str(caught.value).splitlines()
    assert (len(lines), caught.value.exit_code) == (2, 2)
    assert lines[0] == f'ds.json: "{key}": DeepSpeed has removed it, and refuses the config'
    assert lines[1].strip() == REMOVED[key]


@pytest.mark.parametrize("old_release", ["0.19.7"], indirect=True)
def test_a_release_that_has_the_key_still_takes_it(old_release: str) -> None:
    config: Mapping[str, Any] = {"amp": {"enabled": False}, "nebula": {"enabled": False}}
    check_base_config(config, world_size=2)


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


def test_the_stages_that_go_wrong_are_those_of_the_precision(old_release: str) -> None:
    site = fit_settings(SOURCE, hardware=a_machine(gpus=4), precision="fp32").site
    assert sorted(site.wrong_stages) == [2]
    other = set_precision(site, "bf16")
    assert (other.precision, sorted(other.wrong_stages)) == ("bf16", [0, 2])


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


OFFLOAD = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
PINNED = "zero_optimization.offload_param.pin_memory"


@pytest.mark.parametrize(
    ("old_release", "clips_at", "pins"),
    [("0.18.2", 0.0, False), ("0.19.3", 1.0, False), ("0.19.5", 1.0, True)],
    indirect=["old_release"],
)
def test_a_written_config_names_what_changed_its_default(old_release: str, clips_at: float, pins: bool) -> None:
    named = name_defaults(OFFLOAD)
    assert (named["gradient_clipping"], get_key(named, PINNED)) == (clips_at, pins)
    assert "offload_optimizer" not in named["zero_optimization"]


def test_what_a_config_names_itself_stays() -> None:
    given = {"gradient_clipping": "auto", "zero_optimization": {"offload_param": {"pin_memory": False}}}
    assert name_defaults(given) == given
    assert name_defaults({}, without=("gradient_clipping",)) == {}


def test_named_defaults_are_those_of_the_installed_release() -> None:
    named = name_defaults({"zero_optimization": {"offload_param": {}, "offload_optimizer": {}}})
    defaults = describe({}).defaults
    keys = ["gradient_clipping", PINNED, "zero_optimization.offload_optimizer.pin_memory"]
    assert {key: get_key(named, key) for key in keys} == {key: defaults[key] for key in keys}


def test_clipping_is_left_to_a_library_that_sets_it() -> None:
    assert [row.name for row in SCRIPT_KINDS.values() if "gradient_clipping" in row.sets] == ["lightning"]
