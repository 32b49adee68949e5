"""The Python API: the commands as functions, with the same checks, errors and results as the command line."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, get_type_hints

from .arguments import PathText, check_call, describe_arguments
from .config.base_config import check_ranks
from .config.plan_settings import PlanSettings, resolve_plan, resolve_rehearsal
from .config.settings import Settings, check_exported, check_nodes, refuse_shared_sequences, resolve_fit
from .errors import AutodsError, InputError
from .events import Event, Listener, Note, RunEvent, RunListener
from .explainer.explain import ExplainSettings, resolve_explain
from .explainer.explain import explain as explain_config
from .forecast.values import ForecastEvent
from .inspector.examine import DoctorSettings, check_ladder, examine, format_warning, resolve_doctor
from .planner.plan import plan as forecast_rungs
from .prober.probe_settings import ProbeSettings, count_most_ranks, resolve_probe
from .report.results.doctor import Checkup
from .report.results.explain import Explanation
from .report.results.fit import FitReport
from .report.results.plan import PlanEvent, PlanReport
from .report.results.probe import ProbeReport
from .report.results.run import RunReport
from .requests import (
    DoctorRequest,
    ExplainRequest,
    FitRequest,
    PlanRequest,
    ProbeRequest,
    RunRequest,
    SearchRequest,
    TrialRequest,
    WorkloadRequest,
)
from .supervisor.run_settings import RunSettings, resolve_run
from .system.host import Hardware, read_hardware
from .types import WorkloadSource
from .workload.load import keep_own_checkpointing, make_source
from .workload.protocol import Workload

if TYPE_CHECKING:
    from rich.console import Console

    from .report.live import PlanProgress, RunProgress, TrialProgress

P = ParamSpec("P")
Request = TypeVar("Request")
Resolved = TypeVar("Resolved")
AnyEvent = TypeVar("AnyEvent")
Result = TypeVar("Result")


Progress = AbstractContextManager[Callable[[AnyEvent], None]]
Show = Callable[[Resolved, "Console | None", bool], Progress[AnyEvent]]


def _show_trials(settings: Any, console: Console | None, verbose: bool) -> Progress[Any]:
    from .report.live import TrialProgress

    return TrialProgress(console)


@dataclass(frozen=True, slots=True)
class UseCase(Generic[Request, Resolved, AnyEvent, Result]):
    """A command: `resolve` checks a request against this machine, `run` does the work, `show` is its progress.

    `resolve` raises InputError or EnvironmentBroken, and nothing is running when it does. `run` tells its listener
    what happens meanwhile. `show` makes a listener and context manager that prints that to a console, or to standard
    error where it is None. Its third argument says whether it prints what the ranks print, too. `needs_ray` says
    whether it runs in Ray, of which a process has one.
    """

    resolve: Callable[[Request], Resolved]
    run: Callable[[Resolved, Callable[[AnyEvent], None]], Result]
    show: Show[Resolved, AnyEvent] = _show_trials
    needs_ray: Callable[[Resolved], bool] = lambda settings: False


def _resolve_fit(request: FitRequest) -> Settings:
    if request.rehearse:
        return refuse_shared_sequences(resolve_rehearsal(request, _make_trial_source(request)))
    if request.on is not None:
        raise InputError(f"--on {request.on} is for a rehearsal: a fit runs here", hint="add --rehearse, or drop --on")
    hardware = _find_hardware(request, request.gpus)
    source = _make_trial_source(request)
    return refuse_shared_sequences(resolve_fit(request, source, hardware=hardware))


def _run_fit(settings: Settings, listen: Listener) -> FitReport:
    if settings.rehearsed:
        from .tuner.rehearsal import rehearse

        return rehearse(settings, listen=listen)
    from .tuner.fit import fit  # it brings Ray

    _warn(settings, listen)
    return fit(settings, listen=listen)


def _warn(settings: Settings, listen: Listener) -> None:
    """Say before the first trial what of this machine breaks or slows its rungs."""
    for check in check_ladder(settings):
        listen(Note(text=format_warning(check)))


def _resolve_run(request: RunRequest) -> RunSettings:
    hardware = _find_hardware(request, request.gpus)
    source = _make_trial_source(request)
    return resolve_run(request, source, hardware=hardware)


def _run_run(settings: RunSettings, listen: RunListener) -> RunReport:
    from .supervisor.run import run as supervise  # it brings Ray

    return supervise(settings, listen=listen)


def _resolve_plan(request: PlanRequest) -> PlanSettings:
    source = _make_source(request, keep_checkpointing=request.keep_checkpointing, **_list_long_options(request))
    return resolve_plan(request, source, hardware=read_hardware())


def _resolve_probe(request: ProbeRequest) -> ProbeSettings:
    ranks = count_most_ranks(request) if request.address else None
    source = _make_trial_source(request, **_list_long_options(request))
    return resolve_probe(request, source, hardware=_find_hardware(request, ranks))


def _run_probe(settings: ProbeSettings, listen: Listener) -> ProbeReport:
    from .prober.run import probe  # it brings Ray

    if settings.machine is None:
        _warn(settings.settings, listen)
    return probe(settings, listen=listen, fresh=settings.settings.fresh)


def _resolve_explain(request: ExplainRequest) -> ExplainSettings:
    def make_source_as_it_is(question: PlanRequest) -> WorkloadSource:
        source = _make_source(question)
        return keep_own_checkpointing(source) if source.form.runs_as_main else source

    return resolve_explain(request, make_source_as_it_is, hardware=read_hardware())


def _find_hardware(request: SearchRequest | ProbeRequest, ranks: int | None) -> Hardware:
    """This machine, or the weakest node that may be used in the cluster at `address`."""
    if request.address is None or getattr(request, "forecast_only", False):
        return read_hardware()
    from .runner.placement import weakest_of

    nodes = check_nodes(request.nodes, request.address)
    check_exported(request.export, request.address)  # what is wrong is said before the cluster is asked
    if ranks is not None and isinstance(request, SearchRequest):
        check_ranks(ranks, nodes)
    return weakest_of(request.address, gpus=ranks, nodes=nodes, device=request.device)


def _list_long_options(request: PlanRequest | ProbeRequest) -> dict[str, Any]:
    return {"sequence_parallel": request.sequence_parallel, "tiled_loss": request.tiled_loss}


def _make_trial_source(request: TrialRequest, **options: Any) -> WorkloadSource:
    options |= {"zero_init": request.zero_init, "keep_checkpointing": request.keep_checkpointing}
    return _make_source(request, out=request.out, **options)


def _make_source(request: WorkloadRequest, *, out: PathText | None = None, **options: Any) -> WorkloadSource:
    """The workload of a request; a pickled one goes into the output folder."""
    workload = request.workload
    return make_source(
        Path(workload) if isinstance(workload, str | os.PathLike) else workload,
        folder=Path(out or "autods-out"),
        task=request.task,
        seq_len=request.seq_len,
        target_len=request.target_len,
        lora=request.lora,
        weights=request.weights,
        kind=request.kind,
        argv=request.script_args,
        **options,
    )


def _show_fit(settings: Settings, console: Console | None, verbose: bool) -> TrialProgress:
    from .report.live import TrialProgress

    return TrialProgress(console, logs=settings.out / "logs" if verbose else None)


def _show_run(settings: RunSettings, console: Console | None, verbose: bool) -> RunProgress:
    from .report.live import RunProgress

    return RunProgress(console)


def _show_forecasts(settings: Any, console: Console | None, verbose: bool) -> PlanProgress:
    from .report.live import PlanProgress

    return PlanProgress(console)


def _show_probe(probe: ProbeSettings, console: Console | None, verbose: bool) -> TrialProgress:
    from .report.live import TrialProgress
    from .report.trial_names import name_conditions

    axes = {axis.name: axis.values for axis in probe.axes}
    return TrialProgress(console, label=lambda trial: name_conditions(axes, trial))


FIT: UseCase[FitRequest, Settings, Event, FitReport] = UseCase(
    _resolve_fit, _run_fit, _show_fit, lambda settings: not settings.rehearsed
)
RUN: UseCase[RunRequest, RunSettings, RunEvent, RunReport] = UseCase(
    _resolve_run, _run_run, _show_run, lambda settings: True
)
PLAN: UseCase[PlanRequest, PlanSettings, PlanEvent, PlanReport] = UseCase(
    _resolve_plan, lambda settings, listen: forecast_rungs(settings, listen=listen), _show_forecasts
)
DOCTOR: UseCase[DoctorRequest, DoctorSettings, Event, Checkup] = UseCase(
    resolve_doctor, examine, needs_ray=lambda settings: settings.ray or settings.gpus or settings.measure
)
EXPLAIN: UseCase[ExplainRequest, ExplainSettings, ForecastEvent, Explanation] = UseCase(
    _resolve_explain, explain_config, _show_forecasts
)
PROBE: UseCase[ProbeRequest, ProbeSettings, Event, ProbeReport] = UseCase(
    _resolve_probe, _run_probe, _show_probe, lambda probe: probe.machine is None
)


def _make_function(
    name: str,
    request: Callable[P, Request],
    command: UseCase[Request, Any, Any, Result],
    result: type[Result],
    about: str,
) -> Callable[P, Result]:
    """A function whose arguments are the fields of the request, with their help as its docstring.

    Type checkers and editors have its signature from `P` and `Result`, `help` and notebooks from `__signature__`.
    """
    signature = _sign(request, result)

    def function(*args: P.args, **kwargs: P.kwargs) -> Result:
        check_call(name, signature, args, kwargs, request)
        checked = request(*args, **kwargs)
        listener = getattr(checked, "on_event", None)
        try:
            resolved = command.resolve(checked)
            show = _show_in_notebook(command, resolved) if listener is None else nullcontext(listener)
            with _take_ray(name) if command.needs_ray(resolved) else nullcontext(), show as hear:
                return command.run(resolved, hear)
        except AutodsError as error:
            error.keep_options([f"--{name.replace('_', '-')}" for name in signature.parameters])
            raise

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{describe_arguments(request)}\n\nReturns the {result.__name__}{about}{_RAISES}"
    function.__dict__["__signature__"] = signature
    return function


_ray = threading.Lock()  # held by the function that runs in this process's Ray


@contextmanager
def _take_ray(name: str) -> Iterator[None]:
    """Hold this process's Ray. Raises InputError where a function in another thread does."""
    if not _ray.acquire(blocking=False):
        raise InputError(
            f"autods.{name} cannot begin: another function of autods runs ranks in this process",
            hint="call one after the other, or in a process for each: a process has one Ray",
        )
    try:
        yield
    finally:
        _ray.release()


@contextmanager
def _show_in_notebook(command: UseCase[Any, Resolved, Any, Any], resolved: Resolved) -> Iterator[Callable[[Any], None]]:
    """What a function tells where nobody listens: lines of progress in a notebook, nothing elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ != "ZMQInteractiveShell":  # a notebook's kernel
        yield lambda event: None
        return
    from rich.console import Console

    # Lines of text: what rich redraws in a notebook needs widgets.
    console = Console(file=sys.stdout, force_jupyter=False, force_terminal=False)
    with command.show(resolved, console, False) as listen:
        yield listen


def _sign(request: Callable[..., Any], result: type) -> inspect.Signature:
    """The signature of a function with the fields of the request, their types without what checks them."""
    hints = get_type_hints(request, localns={"Listener": Listener, "Workload": Workload})
    signature = inspect.signature(request)
    arguments = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
    return signature.replace(parameters=arguments, return_annotation=result)


_RAISES = """

Raises InputError for wrong input, EnvironmentBroken when the machine lacks something, Interrupted on Ctrl-C.
"""
find_best_config = _make_function(
    "find_best_config",
    FitRequest,
    FIT,
    FitReport,
    ", which is also written to `out`. That nothing fits is a result, too: see its `status`.",
)
run = _make_function(
    "run",
    RunRequest,
    RUN,
    RunReport,
    ", which run.json in `out` holds, too. A run that failed is a result: its exit_code is not 0.",
)
plan = _make_function(
    "plan",
    PlanRequest,
    PLAN,
    PlanReport,
    ": `best`, and for every rung of each machine a verdict and the bytes on each tier.",
)
doctor = _make_function(
    "doctor",
    DoctorRequest,
    DOCTOR,
    Checkup,
    ": what was checked, and what mends it. A broken machine is a result, no error.",
)
explain = _make_function(
    "explain",
    ExplainRequest,
    EXPLAIN,
    Explanation,
    ": each key in words with its cost, and the findings. A wrong config is a result, no error.",
)
probe = _make_function(
    "probe",
    ProbeRequest,
    PROBE,
    ProbeReport,
    ". That no cell fits is a result: its status is 'nothing_fits'.",
)
