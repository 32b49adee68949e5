"""Cases of hostile input as rows of data: what is typed, and how it has to end. See `Case`."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from autods import api
from autods.api import UseCase
from autods.cli.main import main
from autods.config.settings import Settings
from autods.errors import AutodsError
from autods.events import Listener
from autods.prober.probe_settings import ProbeSettings
from autods.report.results.fit import FitReport
from autods.report.results.probe import CellResult, ProbeQuestion, ProbeReport
from autods.runner.runner import RayRunner
from autods.tuner.fit import fit
from autods.types import ModelFacts, Record, Steps, Trial
from tests.support.bad_workloads import GOOD
from tests.support.plans import forecast
from tests.support.reports import fitting_report
from tests.support.surfaces import Surface

# Where a case runs: "here", in this process, with fits, plans and probes that end as soon as their input was accepted;
# "real", the same with the real commands; "ranks", the same with fits on one shared zygote and without a forecast;
# "made up", with real fits on ranks that are a formula; "shell", as a line of bash, in processes of its own; "api", as
# Python.
Way = Literal["here", "real", "ranks", "made up", "shell", "api"]
_USUAL_STALL_S = 60.0  # of the profiles that come with autods
_FORBIDDEN = ("Traceback", "internal error", "RayTaskError", "Fatal Python error")


@dataclass(frozen=True, slots=True)
class Case:
    """What is typed in a folder of its own, and how it has to end.

    `line` is the command line without the program: `fit model.py --gpus 0`. By the way "shell" it is a line of bash, in
    which `autods` is this program: `autods diagnose x.log | head -1`; its exit code is that of the first part of the
    pipe. By the way "api" it is an expression of Python in which `autods` is the package: `autods.diagnose(5)`.
    `message` has to be in what is printed to standard error (or to standard output where the exit code is 0 or 1).

    The folder holds `model.py`, a good workload, and `files` by name; a callable makes the file at its path. `env` is
    added to the environment; None removes. `leaves` are names in the folder that may be there afterwards. `lines` is
    the most on standard error, 0 where it goes elsewhere; `seconds` is when it counts as hung. `needs` names what the
    machine must have.
    """

    line: str
    exit_code: int
    message: str = ""
    way: Way = "here"
    files: Mapping[str, str | bytes | Callable[[Path], object]] = field(default_factory=dict)
    stdin: str | bytes = b""
    env: Mapping[str, str | None] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    lines: int = 3
    seconds: float = 60
    needs: str = ""

    def write_files(self, folder: Path) -> None:
        for name, content in {"model.py": GOOD, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())


# What a case may need, with the reason why it is skipped elsewhere.
NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "root": (lambda: os.geteuid() == 0, "only root can make this"),
    "user": (lambda: os.geteuid() != 0, "root may do everything"),
    "full device": (lambda: Path("/dev/full").exists(), "there is no /dev/full"),
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a case ended. `hung` has the stacks of a process that did not end in time."""

    code: int
    stdout: str
    stderr: str
    left: tuple[str, ...] = ()  # new names in the folder
    hung: str = ""


def each(rows: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Parametrize a test by rows: it gets `case`."""
    params = []
    for name, case in rows.items():
        marks = [] if case.way == "shell" else [pytest.mark.timeout(case.seconds)]  # it prints the stacks
        if case.needs and not NEEDS[case.needs][0]():
            marks.append(pytest.mark.skip(reason=NEEDS[case.needs][1]))
        params.append(pytest.param(case, id=name, marks=marks))
    return pytest.mark.parametrize("case", params)


def check(case: Case, ending: Ending) -> None:
    """Fail unless the case ended as its row says, in the manner in which every command has to end."""
    report = f"{case.line}\nexit code {ending.code}\n{ending.stderr[-3000:]}\n{ending.stdout[-3000:]}"
    assert not ending.hung, f"hung for {case.seconds} s: {report}\n{ending.hung}"
    assert ending.code == case.exit_code, report
    for text in (ending.stdout, ending.stderr):
        assert not [word for word in _FORBIDDEN if word in text], report
        assert not [mark for mark in text if unicodedata.category(mark) == "Cc" and mark != "\n"], report
    assert len(ending.stderr.splitlines()) <= case.lines, report
    assert set(ending.left) <= set(case.leaves), report
    said = ending.stderr if case.exit_code not in (0, 1) else ending.stdout + ending.stderr
    assert case.message in said or case.message in " ".join(said.split()), report
    if case.exit_code in (2, 3) and case.lines:
        starts = [at for at, line in enumerate(ending.stderr.splitlines()) if line.startswith("error: ")]
        assert len(starts) == 1, report
        assert len(ending.stderr.splitlines()) - starts[0] <= 3, report
    if is_json(case.line):
        _check_json(case, ending, report)
    elif case.exit_code in (2, 3):
        assert ending.stdout == "", report


def is_json(line: str) -> bool:
    """Whether a command line asks for JSON: a script's own --json comes after `--`."""
    return "--json" in line.partition(" -- ")[0].split()


def _check_json(case: Case, ending: Ending, report: str) -> None:
    data = json.loads(ending.stdout)
    if case.exit_code not in (0, 1):
        error = data["error"]
        kinds = {2: "input", 3: "environment", 130: "interrupted"}
        assert (data["status"], error["exit_code"]) == ("error", case.exit_code), report
        assert error["kind"] == kinds[case.exit_code], report
        assert error["message"], report


def with_json(case: Case) -> Case:
    """The same case with --json: its error has to be JSON as well."""
    command, _, rest = case.line.partition(" ")
    return replace(case, line=f"{command} --json {rest}")


def end_in_process(
    case: Case, folder: Path, capture: pytest.CaptureFixture[str], **commands: UseCase[Any, Any, Any, Any]
) -> Ending:
    """Run a case in this process, in that folder, with these commands in place of the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in case.env.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        stdin = case.stdin.encode() if isinstance(case.stdin, str) else case.stdin
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        before = _names(folder)
        capture.readouterr()
        code = _call(case.line) if case.way == "api" else main(shlex.split(case.line), **commands)
        out, err = capture.readouterr()
    return Ending(code, out, err, tuple(sorted(_names(folder) - before)))


def _call(expression: str) -> int:
    """Evaluate Python, and end as a command with the same error would."""
    import autods

    try:
        eval(expression, {"autods": autods, "Path": Path})
    except AutodsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


# The commands with the real checks of their input. What is accepted is not run.
ACCEPTING: Mapping[str, UseCase[Any, Any, Any, Any]] = {
    "fit": UseCase(api.FIT.resolve, lambda settings, listen: fitting_report()),
    "plan": UseCase(api.PLAN.resolve, lambda settings, listen: forecast()),
    "probe": UseCase(api.PROBE.resolve, lambda asked, listen: _measure_nothing(asked)),
}


def on_ranks(runner: RayRunner) -> UseCase[Any, Any, Any, Any]:
    """Real fits on ranks of this one zygote, without a forecast, which costs seconds and decides no message."""

    def run(settings: Settings, listen: Listener) -> FitReport:
        def start(settings: Settings, listen: Listener) -> AbstractContextManager[RayRunner]:
            runner.settings, runner.listen = settings, listen
            return nullcontext(runner)

        profile = settings.profile
        if profile.limits.stall_s >= _USUAL_STALL_S:  # not a case that is about such limits: give a loaded machine time
            profile = replace(profile, limits=replace(profile.limits, stall_s=100.0, init_s=200.0))
        return fit(replace(settings, profile=profile, forecast=False), listen=listen, start=start)

    return UseCase(api.FIT.resolve, run)


class MadeUpRanks:
    """Answers trials by a formula, so that a whole fit takes a second."""

    surface = Surface(3)

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        return self.surface.survey()

    def run(self, trial: Trial, *, id: int) -> Record:
        return self.surface.run(trial, id=id)

    def final_config(self, trial: Trial) -> dict[str, Any]:
        return {"train_batch_size": trial.knobs.train_batch(self.surface.world_size)}


def _fit_on_made_up_ranks(settings: Settings, listen: Listener) -> FitReport:
    certify = replace(settings.profile.certify, most_trials=0)
    settings = replace(settings, profile=replace(settings.profile, certify=certify), forecast=False)
    return fit(settings, listen=listen, start=lambda *_: nullcontext(MadeUpRanks()))


ON_MADE_UP_RANKS: Mapping[str, UseCase[Any, Any, Any, Any]] = {"fit": UseCase(api.FIT.resolve, _fit_on_made_up_ranks)}


def _measure_nothing(asked: ProbeSettings) -> ProbeReport:
    question = ProbeQuestion(
        workload=asked.settings.source.path, gpus=2, nodes=1, device="cpu", device_bytes=2**30, global_batch=None,
        precision="bf16", repeats=1, steps=Steps(), capacity=False, parallel_trials=1, forecast_only=False,
        machine=None,
    )  # fmt: skip
    cell = CellResult(number=1, values={"rung": "ddp"}, status="fit", samples_per_second=1.0, repeats=1)
    return ProbeReport(
        status="done", axes={"rung": ("ddp",)}, cells=(cell,), compared=(1, "samples"), question=question
    )


def _names(folder: Path) -> set[str]:
    """All that is in a folder. What Python caches does not count."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}
    return {name.partition("/")[0] for name in found}


class Lines:
    """Runs lines of bash side by side: each is started as soon as there is room, and waited for when its test comes."""

    def __init__(self, folder: Path, *, at_once: int = 3) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(at_once)
        self.endings: dict[int, Future[Ending]] = {}
        program = folder / "bin" / "autods"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m autods "$@"\n')
        program.chmod(0o755)

    def start(self, case: Case) -> None:
        if id(case) not in self.endings:
            folder = self.folder / f"{len(self.endings):03}"
            folder.mkdir()
            # Read here: pytest writes PYTEST_CURRENT_TEST on this thread, and a copy made on another one trips over it.
            self.endings[id(case)] = self.pool.submit(self._run, case, folder, dict(os.environ))

    def end(self, case: Case) -> Ending:
        self.start(case)
        return self.endings[id(case)].result()

    def _run(self, case: Case, folder: Path, environ: Mapping[str, str]) -> Ending:
        case.write_files(folder)
        before = _names(folder)
        root = str(Path(__file__).parents[2])
        mark = f"AUTODS_TEST_CASE={uuid.uuid4()}"
        env = {**environ, "PATH": f"{self.folder / 'bin'}:{environ['PATH']}", "PYTHONPATH": root}
        env |= {"PYTHONFAULTHANDLER": "1", "NO_COLOR": "1", **dict([mark.split("=")])}
        env |= {name: value for name, value in case.env.items() if value is not None}
        env = {name: value for name, value in env.items() if case.env.get(name, "") is not None}
        script = f"{case.line}\nexit ${{PIPESTATUS[0]}}"
        stdin = case.stdin.encode() if isinstance(case.stdin, str) else case.stdin
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(["bash", "-c", script], cwd=folder, env=env, start_new_session=True, **streams)
        hung = ""
        try:
            out, err = process.communicate(stdin, timeout=case.seconds)
        except subprocess.TimeoutExpired:
            _signal_case(mark, signal.SIGABRT)  # faulthandler prints the stacks
            time.sleep(1)
            _signal_case(mark, signal.SIGKILL)
            out, err = process.communicate()
            hung = _decode(err)[-6000:] or "no process printed a stack"
        left = sorted(_names(folder) - before)
        left += [f"process {pid}: {command}" for pid, command in _wait_for_processes(mark)]
        code = 128 - process.returncode if process.returncode < 0 else process.returncode
        return Ending(code, _decode(out), _decode(err), tuple(left), hung)


def _decode(output: bytes) -> str:
    return output.decode(errors="replace")


def case_processes(mark: str) -> list[tuple[int, str]]:
    """Pid and command of the processes with this NAME=VALUE in their environment, zombies aside."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and mark.encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(entry), command))
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def _wait_for_processes(mark: str, seconds: float = 10) -> list[tuple[int, str]]:
    """The processes of a case that are still there when all of them should be gone; they are ended then."""
    end = time.monotonic() + seconds
    while (left := case_processes(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    _signal_case(mark, signal.SIGKILL)
    return left


def _signal_case(mark: str, number: int) -> None:
    for pid, command in case_processes(mark):
        if number == signal.SIGKILL or "python" in command:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


@dataclass(frozen=True, slots=True)
class OtherUser:
    """Another user of this machine, without a name and without rights; `folder` is theirs."""

    uid: int
    folder: Path

    def python(
        self, code: str, *args: object, stdin: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code as that user, `args` in sys.argv[1:]. Its imports are made before the rights are dropped.

        The interpreter may lie where other users cannot read, so modules are imported by lines at the beginning.
        """
        imports = re.findall(r"^(?:import|from) .*$", code, re.MULTILINE)
        drop = f"os.setgroups([]); os.setgid({self.uid}); os.setuid({self.uid}); os.chdir({str(self.folder)!r})"
        text = "\n".join([*imports, "import os, encodings.idna", drop, code])
        command = [sys.executable, "-c", text, *map(str, args)]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)


@contextmanager
def other_user() -> Iterator[OtherUser]:
    """Another user, where we are root; the test is skipped elsewhere."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    uid = 2_000_000_000 + os.getpid() % 1_000_000
    folder = Path(tempfile.mkdtemp(prefix="autods-other-"))
    os.chown(folder, uid, uid)
    try:
        yield OtherUser(uid, folder)
    finally:
        shutil.rmtree(folder)
