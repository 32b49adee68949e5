"""The commands. Each shows its result and returns its exit code. `ending` shows their errors.

`main` loads this module when a command runs: help and completion do not wait for its imports. `synopsis` has a row for
each function, with its request and flags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from .. import requests
from ..api import DOCTOR, EXPLAIN, FIT, PLAN, PROBE, RUN, Progress, UseCase
from ..config.settings import Settings
from ..diagnosis.logs import find_logs
from ..diagnosis.root_cause import Diagnosis, diagnose_logs
from ..errors import AutodsError, InputError
from ..events import Note
from ..files import OutputFile, check_outputs
from ..forecast.values import PartitionedBuild
from ..journal import JOURNAL, RESULTS
from ..planner.timeline import name_timeline
from ..prober.probe_settings import ProbeSettings
from ..report.answers.fit import make_comparison, make_fit_document
from ..report.answers.plan import make_plan_document
from ..report.answers.probe import make_probe_document
from ..report.answers.problems import make_diagnosis_document, make_doctor_document, make_explain_document
from ..report.answers.run import make_run_document
from ..report.document import Document
from ..report.live import CheckProgress, TrialProgress
from ..report.render_html import PAGE, PAGE_BEGINS, RUN_PAGE, write_page
from ..report.render_markdown import to_markdown
from ..report.render_terminal import print_document
from ..report.results.doctor import Checkup
from ..report.results.run import RunReport
from ..report.serialize import (
    CSV_BEGINS,
    PROBE_CSV,
    has_probe,
    has_run,
    plan_to_dict,
    probe_to_dict,
    read_probe,
    read_run,
    to_csv,
    to_dict,
    write_csv,
)
from ..report.serialize import as_json as format_json
from ..report.serialize import read as read_report
from ..report.text import format_number_of, format_ranks
from ..supervisor.run_settings import RunSettings
from ..units import format_bytes
from .ending import Call, end_with_error, resuming_command
from .synopsis import REQUIRED

Request = TypeVar("Request")
Resolved = TypeVar("Resolved")
Result = TypeVar("Result")


def _warn_once(
    command: UseCase[Any, Any, Any, Any], make: Callable[[Any], Document]
) -> tuple[UseCase[Any, Any, Any, Any], Callable[[Any], Document]]:
    """The command, and its answer without the warnings that were printed while it was found."""
    progress: list[object] = []

    def show(settings: Any, console: Console | None, verbose: bool) -> Progress[Any]:
        progress.append(shown := command.show(settings, console, verbose))
        return shown

    def make_without_printed(report: Any) -> Document:
        warned = {text for each in progress if isinstance(each, TrialProgress) for text in each.warned}
        return make(replace(report, warnings=tuple(text for text in report.warnings if text not in warned)))

    return replace(command, show=show), make_without_printed


def run_fit(
    call: Call, request: requests.FitRequest, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
) -> int:
    """Find the fastest config."""
    command, make = _warn_once(call.use_cases.get("fit", FIT), make_fit_document)

    def begin(settings: Settings) -> str:
        call.out = settings.out
        nodes = f" on {settings.nodes} nodes" if settings.nodes > 1 else ""
        return f"{_describe_subject(settings)}{nodes}, {settings.profile.name} config → {settings.out}"

    report = _work(command, request, quiet, begin, verbose=verbose)
    _show(report, as_json, to_dict, make, verbose=verbose)
    _offer_split_build(call, report.partitioned, as_json, "--fresh")  # its folder is that of another fit
    return 0 if report.status == "fit" else 1


def run_run(call: Call, request: requests.RunRequest, *, as_json: bool = False, quiet: bool = False) -> int:
    """Train for real, and keep the run alive."""

    def begin(settings: RunSettings) -> str:
        call.out = settings.out
        return f"{_describe_subject(settings.fit)} → {settings.out}"

    report: RunReport = _work(call.use_cases.get("run", RUN), request, quiet, begin)
    _show(report, as_json, RunReport.to_dict, make_run_document)
    return report.exit_code


def run_report(
    call: Call,
    request: requests.ReportRequest,
    *,
    markdown: bool = False,
    as_json: bool = False,
    verbose: bool = False,
) -> int:
    """Show a finished fit, probe or run again."""
    folder = Path(request.folder)
    other = "probe" if has_probe(folder) else "run" if has_run(folder) else None
    if other is not None and (markdown or request.compare is not None):
        option = "--markdown" if markdown else "--compare"
        raise InputError(f"{option} is for fits", place=str(folder), hint=f"this is the folder of a {other}")
    page = folder / (RUN_PAGE if other == "run" else PAGE)
    if other == "probe":
        probe = read_probe(folder)
        document = make_probe_document(probe, folder)
        _show(probe, as_json, probe_to_dict, make_probe_document)
    elif other == "run":
        run = read_run(folder)
        document = make_run_document(run, folder)
        _show(run, as_json, RunReport.to_dict, make_run_document)
    else:
        reports = [read_report(Path(each)) for each in (request.folder, request.compare) if each is not None]
        document = make_fit_document(reports[0], folder)
        if as_json:
            print(format_json([to_dict(report) for report in reports]), end="")
        elif markdown or len(reports) > 1:
            print(to_markdown(make_comparison(reports)))
        else:
            _show(reports[0], False, to_dict, make_fit_document, verbose=verbose)
    try:
        print(f"page: {write_page(document, page)}", file=sys.stderr)
    except AutodsError as error:  # a folder of somebody else's, or an archive: the result is shown
        print(f"no page: {str(error).splitlines()[0]}", file=sys.stderr)
    return 0


def run_plan(
    call: Call,
    request: requests.PlanRequest,
    *,
    html: str | None = None,
    require: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> int:
    """Forecast every rung. A page of it is also written to the file `html`."""
    if require not in (None, REQUIRED):
        raise InputError(f"--require {require} is unknown", hint=f"give --require {REQUIRED}, or none")
    outputs = [] if html is None else [OutputFile("--html", html, PAGE_BEGINS)]
    check_outputs(outputs + ([] if request.timeline is None else [name_timeline(request.timeline)]))
    forecast = _work(call.use_cases.get("plan", PLAN), request, quiet)
    _show(forecast, as_json, plan_to_dict, make_plan_document, verbose=verbose)
    site = forecast.sites[0]
    builds = len(forecast.sites) == 1 and site.partitioned is None and bool(site.built_whole)
    _offer_split_build(call, site.partitioned, as_json, asks=builds)
    failed = 0 if html is None else _write(call, lambda: write_page(make_plan_document(forecast), Path(html)))
    is_missed = forecast.status != REQUIRED if require else forecast.status == "nothing_fits"
    return failed or int(is_missed)


def run_probe(
    call: Call, request: requests.ProbeRequest, *, csv: str | None = None, as_json: bool = False, quiet: bool = False
) -> int:
    """Measure every cell. The table is also written to the file `csv`, or printed where that is -."""
    if csv == "-" and as_json:
        raise InputError("--csv - and --json both print to standard output", hint="give a file: --csv table.csv")
    table = None if csv == "-" else csv
    outputs = [] if table is None else [OutputFile("--csv", table, CSV_BEGINS)]
    check_outputs(outputs)

    def begin(probe: ProbeSettings) -> str:
        call.out = probe.settings.out
        check_outputs(outputs, (call.out / name for name in (JOURNAL, *RESULTS) if name != PROBE_CSV))
        cells = format_number_of(sum(1 for _ in probe.cells()), "cell")
        subject = f"{'the largest micro batch of ' if probe.capacity else ''}{cells}"
        manner = f"each {probe.repeats} times, in turns" if probe.repeats > 1 else "each once"
        if probe.capacity:
            manner = "by the forecast" if probe.machine is not None else "by the forecast and by trials"
        return f"{probe.settings.source.name}: {subject}, {manner} → {probe.settings.out}"

    command, make = _warn_once(call.use_cases.get("probe", PROBE), make_probe_document)
    report = _work(command, request, quiet, begin)
    if csv == "-":
        print(to_csv(report), end="")
    else:
        _show(report, as_json, probe_to_dict, make)
    failed = 0 if table is None else _write(call, lambda: write_csv(report, Path(table)))
    return failed or (0 if report.status == "done" else 1)


def run_explain(call: Call, request: requests.ExplainRequest, *, as_json: bool = False, quiet: bool = False) -> int:
    """Explain a DeepSpeed config."""
    explanation = _work(EXPLAIN, request, quiet, lambda _: "asking the installed DeepSpeed about the config")
    _show(explanation, as_json, asdict, make_explain_document)
    return 1 if explanation.has_errors else 0


def run_doctor(call: Call, request: requests.DoctorRequest, *, as_json: bool = False, quiet: bool = False) -> int:
    """Check this machine."""
    checkup = _work(DOCTOR, request, quiet)
    _show(checkup, as_json, Checkup.to_dict, make_doctor_document)
    return 3 if checkup.is_broken else 0


def run_diagnose(call: Call, request: requests.DiagnoseRequest, *, as_json: bool = False) -> int:
    """Say why a run died."""
    if not request.logs and request.exit_code is None:
        raise InputError("neither a log nor an exit code is given", hint="give one: autods diagnose train.log")
    logs = find_logs(request.logs, stdin=True)
    diagnosis = diagnose_logs(logs, request.exit_code, lambda line: print(line, file=sys.stderr, flush=True))
    _show(diagnosis, as_json, Diagnosis.to_dict, partial(make_diagnosis_document, whole=not Console().is_terminal))
    return 0


def _work(
    command: UseCase[Request, Resolved, Any, Result],
    request: Request,
    quiet: bool,
    begin: Callable[[Resolved], str] | None = None,
    *,
    verbose: bool = False,
) -> Result:
    """Check the request, which may take long, and do the work while the progress is shown. `begin` says what begins."""
    address = getattr(request, "address", None)
    machine = "this machine" if address is None else f"the Ray cluster at {address}"
    workload = "the workload, " if getattr(request, "workload", None) is not None else ""
    with nullcontext() if quiet else CheckProgress(f"checking {workload}the options and {machine}"):
        settings = command.resolve(request)
    sentence = None if begin is None else begin(settings)
    with nullcontext(lambda event: None) if quiet else command.show(settings, None, verbose) as listen:
        if sentence is not None:
            listen(Note(text=sentence))
        return command.run(settings, listen)


def _describe_subject(settings: Settings) -> str:
    """'gpt on 2 cpu ranks × 416.0 MiB'."""
    ranks = format_ranks(settings.gpus, settings.device)
    return f"{settings.source.name} on {ranks} × {format_bytes(settings.device_bytes)}"


def _write(call: Call, write: Callable[[], object]) -> int:
    """Write a file of a result that has been shown, and return 0, or the exit code of what hinders it."""
    try:
        write()
    except AutodsError as error:  # not as JSON, which is on standard output already
        return end_with_error(error, call, as_json=False, resumes=False)
    return 0


def _offer_split_build(
    call: Call, build: PartitionedBuild | None, as_json: bool, *options: str, asks: bool = False
) -> None:
    """Print the line with which the model is built in parts, where that makes a rung fit or eases what is full."""
    if asks or (build is not None and build.split_bytes is not None):
        line = resuming_command(call.argv, "--zero-init", *options)
        print(f"with --zero-init: {line}", file=sys.stderr if as_json else sys.stdout)


def _show(
    result: Result,
    as_json: bool,
    to_json: Callable[[Result], Mapping[str, Any]],
    make: Callable[[Result], Document],
    *,
    verbose: bool = False,
) -> None:
    """Print a result to standard output, as JSON or as the document that is made of it."""
    if as_json:
        print(format_json(to_json(result)), end="")
    else:
        print_document(make(result), Console(), verbose=verbose)
