from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import BufferedWriter, TextIOWrapper
from pathlib import Path

import pytest

from autods.api import UseCase
from autods.cli import ending
from autods.cli.main import main
from autods.cli.startup import Output
from autods.config.settings import Settings, resolve_fit
from autods.errors import EnvironmentBroken, InputError, Interrupted
from autods.events import Listener, Note, TrialFinished
from autods.report import FitReport
from autods.requests import FitRequest
from autods.system.host import Hardware
from autods.types import WorkloadSource
from tests.support.reports import fit, fitting_report, hopeless_report, record

MACHINE = Hardware(cpu="EPYC", cores=2, host_bytes=2**36, host_free_bytes=2**35, cards=())


class Fake:
    """The use case without a machine: what it was asked is kept, how the fit ends is given."""

    def __init__(self, end: Callable[[], FitReport]) -> None:
        self.end = end
        self.request: FitRequest | None = None
        self.out: Path | None = None

    def resolve(self, request: FitRequest) -> Settings:
        self.request = request
        source = WorkloadSource(kind="file", path=f"/{request.workload}", name="gpt", digest="1")
        known = replace(request, ladder=(), with_rungs=(), strategies=(), base_config=None, nvme_path=None)
        return resolve_fit(known, source, hardware=MACHINE)

    def run_fit(self, settings: Settings, listen: Listener) -> FitReport:
        self.out = settings.out
        settings.out.mkdir(parents=True, exist_ok=True)
        (settings.out / "journal.jsonl").write_text('{"kind": "finished"}\n')
        listen(Note(text="starting Ray"))
        listen(TrialFinished(record=record(1, "ddp", fit())))
        report = self.end()
        for text in report.warnings:
            listen(Note(text=text, warns=True))
        return report

    def __call__(self, *argv: str) -> int:
        return main(argv, fit=UseCase(self.resolve, self.run_fit))


def raising(error: BaseException) -> Fake:
    def end() -> FitReport:
        raise error

    return Fake(end)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


CPU = ("fit", "model.py", "--device", "cpu", "--gpus", "2", "--gpu-memory", "416MiB")


def test_a_fit_prints_its_result_to_stdout_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(fitting_report)(*CPU) == 0
    out, err = capsys.readouterr()
    assert "Use zero3, micro batch 4" in out
    assert "starting Ray" not in out
    assert "gpt on 2 cpu ranks × 416.0 MiB, default config" in err
    assert "trial 1: ddp" in err


def test_nothing_fits_exits_1_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(hopeless_report)(*CPU) == 1
    out, err = capsys.readouterr()
    assert "64.0 MiB of device memory are missing" in out
    assert "error" not in err


def test_json_prints_the_report_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(fitting_report)(*CPU, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rung"] == "zero3"


def test_quiet_shows_the_result_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(fitting_report)(*CPU, "--quiet") == 0
    out, err = capsys.readouterr()
    assert "Use zero3, micro batch 4" in out
    assert err == ""


@pytest.mark.parametrize("verbose", [False, True])
def test_a_command_shows_progress_as_its_use_case_does(verbose: bool) -> None:
    fake, told, asked = Fake(fitting_report), list[object](), list[bool]()

    def show(settings: Settings, console: object, verbose: bool) -> AbstractContextManager[Callable[[object], None]]:
        asked.append(verbose)
        return nullcontext(told.append)

    assert main([*CPU, *(["-v"] if verbose else [])], fit=UseCase(fake.resolve, fake.run_fit, show)) == 0
    assert asked == [verbose]
    assert any("gpt on 2 cpu ranks" in str(event) for event in told)


@pytest.mark.parametrize(("options", "stream"), [((), "err"), (("--quiet",), "out")])
def test_a_warning_is_printed_once(options: Sequence[str], stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    warned = replace(fitting_report(), warnings=("the card is throttled",))
    assert Fake(lambda: warned)(*CPU, *options) == 0
    printed = capsys.readouterr()
    assert getattr(printed, stream).count("warning: the card is throttled\n") == 1
    assert (printed.out + printed.err).count("throttled") == 1


def test_every_option_reaches_the_fit() -> None:
    fake = Fake(fitting_report)
    more = ("--global-batch", "64", "--precision", "fp16", "--deepspeed-config", "base.json", "--config", "quick")
    rest = ("--ladder", "zero1,zero2", "--strategies", "a", "--strategies", "b", "--nvme-path", "/n", "--seed", "7")
    last = (
        "--task",
        "seq2seq",
        "--seq-len",
        "512",
        "--target-len",
        "64",
        "--lora",
        "8",
        "--out",
        "here",
        "--fresh",
        "--no-forecast",
    )
    search = ("--objective", "memory", "--stop", "first-fit", "--max-trials", "9", "--max-time", "20m")
    place = ("--nodes", "2", "--address", "10.0.0.1:6379", "--export", "DATA,WANDB_*", "--stall-limit", "10m")
    script = ("--kind", "script", "--with", "c,d", "--", "--epochs", "3", "{ds_config}")
    assert fake(*CPU, *more, *rest, *last, *search, *place, *script) == 0
    assert fake.request == FitRequest(
        "model.py", gpus=2, device="cpu", gpu_memory="416MiB", global_batch=64, precision="fp16",
        base_config="base.json", config="quick", ladder="zero1,zero2", strategies=("a", "b"), nvme_path="/n",
        task="seq2seq", seq_len=512, target_len=64, out="here", seed=7, forecast=False, objective="memory",
        lora="8", stop="first-fit", max_trials=9, max_time="20m", kind="script",
        script_args=("--epochs", "3", "{ds_config}"), with_rungs="c,d",
        nodes=2, address="10.0.0.1:6379", export="DATA,WANDB_*", stall_limit="10m", fresh=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("fit", "model.py"), "no CUDA GPU is visible"),
        (("fit", "model.py", "--device", "cpu", "--gpus", "0"), "at least one rank"),
        (("fit", "model.py", "--device", "cpu", "--gpus", "2", "--gpu-memory", "banana"), "'banana' is not a size"),
        ((*CPU, "--global-batch", "7"), "cannot be split over 2 ranks"),
        ((*CPU, "--config", "nonsense"), "there is no config 'nonsense'"),
        ((*CPU, "--objective", "fun"), "there is no objective 'fun'"),
        ((*CPU, "--stop", "never"), "neither first-fit nor fastest"),
        ((*CPU, "--max-trials", "0"), "at least one trial"),
        ((*CPU, "--nodes", "2"), "--nodes 2 needs a Ray cluster"),
        ((*CPU, "--nodes", "0", "--address", "auto"), "at least one node"),
        ((*CPU, "--gpus", "3", "--nodes", "2", "--address", "auto"), "cannot be split evenly over 2 nodes"),
        ((*CPU, "--max-time", "soon"), "--max-time 'soon' is not a time"),
        ((*CPU, "--stall-limit", "0"), "--stall-limit '0' is not a time"),
        ((*CPU, "--precision", "bf16,int4"), "there is no precision 'int4'"),
        (("fit",), "Missing argument 'WORKLOAD'"),
        ((*CPU, "--colour"), "No such option: --colour"),
        (("fit", "model.py", "--gpus", "many"), "Invalid value for '--gpus'"),
        (("fti",), "No such command 'fti'"),
    ],
)
def test_wrong_input_exits_2_with_two_lines_and_no_traceback(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert Fake(fitting_report)(*argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err
    assert out == ""


def test_an_error_of_many_lines_is_told_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    wordy = InputError("build_model raised ValueError:\n  a\n  b" + "x" * 900, place="model.py:3", hint="look\nthere")
    assert raising(wordy)(*CPU) == 2
    lines = capsys.readouterr().err.splitlines()
    told = lines[lines.index("starting Ray") + 2 :]
    assert told[0].startswith("error: model.py:3: build_model raised ValueError: a bxxx")
    assert told[0].endswith("…")
    assert told[1:] == ["  look there"]


def test_a_broken_environment_exits_3_with_the_command_that_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(EnvironmentBroken("no C++ compiler\napt-get install g++"))(*CPU) == 3
    assert capsys.readouterr().err.endswith("error: no C++ compiler\n  apt-get install g++\n")


@pytest.mark.parametrize("error", [Interrupted("stopped"), KeyboardInterrupt()])
def test_an_interrupt_exits_130_and_prints_the_command_that_goes_on(
    capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    assert raising(error)("fit", "my model.py", *CPU[2:], "--fresh") == 130
    err = capsys.readouterr().err
    assert "finished trials are kept in" in err
    assert err.splitlines()[-1].strip() == (
        "go on with: autods fit 'my model.py' --device cpu --gpus 2 --gpu-memory 416MiB"
    )


def interrupt(out: Path) -> None:
    call = ending.Call(["autods", "fit", "model.py"], out=out)
    assert ending.end_with_error(Interrupted("stopped"), call, as_json=False, resumes=True) == 130


def test_an_interrupt_before_any_trial_claims_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"kind": "header"}\n{"kind": "started"}\n')
    interrupt(tmp_path)
    assert capsys.readouterr().err.startswith("interrupted: every rank is gone, no trial had finished yet\n")


def test_an_interrupt_names_the_best_config_that_was_found_so_far(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    interrupt(tmp_path)
    assert "so far" not in capsys.readouterr().err
    (tmp_path / "ds_config_so_far.json").write_text("{}")
    interrupt(tmp_path)
    assert f"the best config so far, not certified: {tmp_path}/ds_config_so_far.json\n" in capsys.readouterr().err


def signalled(number: signal.Signals) -> Fake:
    def end() -> FitReport:
        os.kill(os.getpid(), number)
        return fitting_report()

    return Fake(end)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_to_end_is_a_ctrl_c(name: str) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_DFL)  # pytest may have been started by nohup
    try:
        assert signalled(number)(*CPU) == 130
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hangup_that_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert signalled(signal.SIGHUP)(*CPU) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_internal_error_exits_3_and_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    fake = raising(ZeroDivisionError("oops"))
    assert fake(*CPU) == 3
    err = capsys.readouterr().err
    assert fake.out is not None
    log = fake.out / "logs" / "internal-error.txt"
    assert f"internal error: ZeroDivisionError: oops\n  the traceback is in {log}; please report it\n" in err
    assert "Traceback" not in err
    assert "in run_fit" in log.read_text()


def test_a_traceback_is_kept_where_the_folder_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = ending.keep_traceback(RuntimeError("bug"), tmp_path / "file")
    assert kept.read_text() == "RuntimeError: bug\n"
    kept.unlink()


def test_a_traceback_with_half_a_character_is_kept(tmp_path: Path) -> None:
    kept = ending.keep_traceback(RuntimeError("no such file: \udcff.py"), tmp_path)
    assert kept is not None
    assert kept.read_text() == "RuntimeError: no such file: \\udcff.py\n"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InputError("wrong", hint="hint"), "input", 2),
        (EnvironmentBroken("broken"), "environment", 3),
        (KeyboardInterrupt(), "interrupted", 130),
        (RuntimeError("bug"), "internal", 3),
    ],
)
def test_with_json_an_error_is_json_too(
    capsys: pytest.CaptureFixture[str], error: BaseException, kind: str, code: int
) -> None:
    assert raising(error)(*CPU, "--json") == code
    data = json.loads(capsys.readouterr().out)
    assert data["status"] == "error"
    assert (data["error"]["kind"], data["error"]["exit_code"]) == (kind, code)
    assert data["error"]["message"]


@pytest.mark.parametrize(
    "argv", [("fit", "--json"), (*CPU, "--colour", "--json"), ("plan", "a", "--gpus", "x", "--json")]
)
def test_a_wrong_command_line_is_json_too(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    assert Fake(fitting_report)(*argv) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["kind"] == "input"
    assert err.endswith(f"see: autods {argv[0]} --help\n")


def test_a_scripts_own_json_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(fitting_report)(*CPU, "--colour", "--", "--json") == 2
    assert capsys.readouterr().out == ""


def test_a_scripts_own_fresh_is_kept_in_the_command_that_goes_on() -> None:
    argv = ["autods", "fit", "train.py", "--fresh", "--", "--fresh"]
    assert ending.resuming_command(argv) == "autods fit train.py -- --fresh"


def test_python_dash_m_is_resumed_as_such() -> None:
    argv = ["/site-packages/autods/__main__.py", "fit", "model.py", "--fresh"]
    assert ending.resuming_command(argv) == "python -m autods fit model.py"


def test_version_and_help_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("autods ")
    assert main([]) == 0
    assert "fit" in capsys.readouterr().out


def test_help_names_every_option_with_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["fit", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--gpus", "--gpu-memory", "--deepspeed-config", "--nvme-path", "--fresh", "--json", "130"):
        assert option in text
    assert "autods fit model.py --gpus 8" in text


def test_a_result_that_cannot_be_written_says_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TextIOWrapper(BufferedWriter(Output("/dev/full", "w"))) as full:
        monkeypatch.setattr("sys.stdout", full)
        assert Fake(fitting_report)(*CPU) == 3
    message = "error: standard output cannot be written: No space left on device\n  the results are in "
    assert message in capsys.readouterr().err
