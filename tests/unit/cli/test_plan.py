from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from autods.api import UseCase
from autods.cli.main import main
from autods.config.plan_settings import PlanSettings, resolve_plan
from autods.errors import EnvironmentBroken, InputError, Interrupted
from autods.events import Note
from autods.forecast.values import ForecastListener, PartitionedBuild
from autods.report.results.plan import PlanReport
from autods.requests import PlanRequest
from tests.support.plans import LAPTOP, RUNGS, SOURCE, comparison, forecast, hopeless

ASKED = ("plan", "llama/config.json", "--gpus", "8", "--gpu-memory", "80GiB", "--host-memory", "1TiB")


class Fake:
    """The use case without a simulator: what it was asked is kept, how the plan ends is given."""

    def __init__(self, end: Callable[[], PlanReport]) -> None:
        self.end = end
        self.request: PlanRequest | None = None

    def resolve(self, request: PlanRequest) -> PlanSettings:
        self.request = request
        known = PlanRequest(request.workload, gpus=request.gpus, gpu_memory=request.gpu_memory, on=request.on)
        return resolve_plan(known, SOURCE, hardware=LAPTOP)

    def run_plan(self, settings: PlanSettings, listen: ForecastListener) -> PlanReport:
        listen(Note(text="preparing the simulated device"))
        return self.end()

    def __call__(self, *argv: str) -> int:
        return main(argv, plan=UseCase(self.resolve, self.run_plan))


def raising(error: BaseException) -> Fake:
    def end() -> PlanReport:
        raise error

    return Fake(end)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_prints_its_table_to_stdout_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(forecast)(*ASKED) == 0
    out, err = capsys.readouterr()
    assert "Use zero2, micro batch" in out
    assert "preparing the simulated device" in err
    assert "preparing" not in out


def test_that_nothing_fits_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(hopeless)(*ASKED) == 1
    assert "Nothing fits" in capsys.readouterr().out


def test_a_check_for_ci_fails_where_nothing_surely_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(forecast)(*ASKED, "--require", "fits") == 0
    tight = partial(forecast, RUNGS[:2])
    assert Fake(tight)(*ASKED) == 0
    assert Fake(tight)(*ASKED, "--require", "fits") == 1
    assert Fake(forecast)(*ASKED, "--require", "tight") == 2
    assert "give --require fits" in capsys.readouterr().err


def test_verbose_adds_the_intervals_and_the_bars(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(forecast)(*ASKED, "--verbose") == 0
    assert "40.0 (36.0–44.0) / 80.0 GiB" in capsys.readouterr().out


def test_the_line_is_given_where_building_decides(capsys: pytest.CaptureFixture[str]) -> None:
    def end() -> PlanReport:
        plan = forecast()
        return replace(plan, sites=(replace(plan.sites[0], built_whole=("zero3",)),))

    Fake(end)(*ASKED)
    out = capsys.readouterr().out
    assert "building the whole model in each rank decides" in " ".join(out.split())
    assert f"with --zero-init: autods {' '.join(ASKED)} --zero-init\n" in out
    Fake(forecast)(*ASKED)
    assert "--zero-init" not in capsys.readouterr().out


def test_a_split_build_is_offered_as_a_line_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    def end() -> PlanReport:
        plan = hopeless()
        build = PartitionedBuild(
            rung="zero3", verdict="fits", tier="host", ranks=8, whole_bytes=2**41, split_bytes=2**39
        )
        return replace(plan, sites=(replace(plan.sites[0], partitioned=build),))

    line = f"autods {' '.join(ASKED)} --zero-init"
    assert Fake(end)(*ASKED) == 1
    assert f"with --zero-init: {line}\n" in capsys.readouterr().out
    Fake(end)(*ASKED, "--json")
    out, err = capsys.readouterr()
    assert json.loads(out)["partitioned"]["split_bytes"] == 2**39
    assert f"{line.removesuffix(' --zero-init')} --json --zero-init" in err


def test_several_machines_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(comparison)("plan", "llama", "--on", "all") == 0
    assert "a100-80gb is the smallest that is enough" in capsys.readouterr().out


def test_json_prints_the_contract_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(forecast)(*ASKED, "--json", "--quiet") == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["rungs"]) == 5
    assert err == ""


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(lambda: replace(forecast(), seconds=math.inf))(*ASKED, "--json", "--quiet") == 0
    assert json.loads(capsys.readouterr().out)["seconds"] is None


def test_every_option_reaches_the_plan() -> None:
    fake = Fake(forecast)
    more = ("--nodes", "2", "--nvme", "2TiB", "--nvme-path", "/n", "--micro-batch", "4", "--seq-len", "512")
    rest = (
        "--precision",
        "fp16",
        "--checkpointing",
        "off",
        "--with",
        "c",
        "--base-config",
        "base.json",
        "--ladder",
        "zero1,zero2",
    )
    last = ("--strategies", "a", "--task", "seq2seq", "--target-len", "64", "--lora", "8,q", "--global-batch", "64")
    script = ("--kind", "script", "--", "--epochs", "3", "{ds_config}")
    assert (
        fake(*ASKED, *more, *rest, *last, "--no-largest", "--zero-init", "--as-written", "--device", "cpu", *script)
        == 0
    )
    assert fake.request == PlanRequest(
        "llama/config.json", kind="script", script_args=("--epochs", "3", "{ds_config}"), gpus=8, nodes=2,
        gpu_memory="80GiB", host_memory="1TiB", nvme="2TiB", nvme_path="/n", device="cpu", task="seq2seq", seq_len=512,
        target_len=64, lora="8,q", micro_batch=4, global_batch=64, precision="fp16", checkpointing="off",
        zero_init=True, as_written=True, base_config="base.json", ladder="zero1,zero2", strategies=("a",),
        with_rungs="c", largest=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("plan", "model.py", "--gpus", "8"), "say which to forecast for"),
        (("plan", "model.py", "--on", "b200"), "the catalogue has no machine 'b200'\n  did you mean b200-192gb?"),
        (("plan", "model.py", "--on", "a100-80g"), "did you mean a100-80gb?"),
        (("plan", "model.py", "--on", "mine"), "it has t4-16gb, "),
        (("plan", "model.py", "--gpus", "0", "--gpu-memory", "1GiB"), "at least one rank"),
        (("plan", "model.py", "--gpus", "8", "--gpu-memory", "many"), "'many' is not a size"),
        (("plan",), "Missing argument 'WORKLOAD'"),
        (("plan", "model.py", "--seq-len", "8k"), "'--seq-len': '8k' is not a whole number"),
    ],
)
def test_wrong_input_exits_2_with_two_lines(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert Fake(forecast)(*argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) <= 2
    assert "autods fit" not in err
    assert out == ""


@pytest.mark.parametrize("workload", ["no-such.py", "no-such/config.json", "meta-llama/Llama-2-7b"])
def test_a_missing_workload_is_refused_at_once(capsys: pytest.CaptureFixture[str], workload: str) -> None:
    assert main(["plan", workload, "--gpus", "8", "--gpu-memory", "80GiB"]) == 2
    err = capsys.readouterr().err
    assert workload in err
    assert "cannot be read" in err


def test_an_interrupt_exits_130_and_promises_nothing_to_go_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (Interrupted("stopped"), KeyboardInterrupt()):
        assert raising(error)(*ASKED) == 130
        assert capsys.readouterr().err.endswith("interrupted: nothing is left running\n")


@pytest.mark.parametrize(
    ("error", "code"), [(InputError("wrong", place="model.py:3"), 2), (EnvironmentBroken("no g++"), 3)]
)
def test_errors_have_their_exit_code_in_json_too(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    assert raising(error)(*ASKED, "--json") == code
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == code


def test_help_shows_examples_and_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--on", "--host-memory", "--nvme", "--task", "--seq-len", "--checkpointing", "--largest", "130"):
        assert option in text
    assert "which machine do I need?" in text


@pytest.mark.parametrize(
    ("command", "races", "varies"), [("fit", True, False), ("plan", False, False), ("probe", False, True)]
)
def test_help_offers_several_precisions_where_they_are_taken(
    command: str, races: bool, varies: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("bf16,fp32: either may win" in text) is races
    assert ("--vary precision=bf16,fp32" in text) is varies


def test_a_plan_writes_its_page_where_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert Fake(forecast)(*ASKED, "--html", str(page)) == 0
    assert "Use zero2, micro batch" in page.read_text()
    assert "Use zero2, micro batch" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    def fail() -> PlanReport:
        raise AssertionError("it was forecast")

    (tmp_path / "model.py").write_text("import torch")
    for more in ([], ["gone/x.html"], ["model.py"], ["x", "--timeline", "./x"]):
        assert Fake(fail)(*ASKED, "--html", *(more or [str(tmp_path)])) == 2
    assert Fake(fail)(*ASKED, "--on", "a100-80gb", "--timeline", "gone/x") == 2


def test_a_page_that_fails_late_does_not_lose_the_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forecast_and_break() -> PlanReport:
        (tmp_path / "pages").rmdir()
        return forecast()

    for form in ("--quiet", "--json"):
        (tmp_path / "pages").mkdir()
        assert Fake(forecast_and_break)(*ASKED, form, "--html", "pages/x.html") == 2
        out, err = capsys.readouterr()
        assert "zero2" in out
        assert form != "--json" or json.loads(out)["status"] == "fits"
        assert "pages/x.html: cannot be written" in err
