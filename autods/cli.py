"""The command line: parse, call a use case, show, exit. Nothing heavy is imported before a fit starts."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from .failures import Diagnosis
    from .report import Report
    from .settings import Settings
    from .values import Event, Listener

# Typer names only BadParameter; its base is the error of every wrong command line.
UsageError: Any = typer.BadParameter.__base__

_EPILOG = """
Examples:

autods fit model.py --gpus 8

autods fit model.py --gpus 8 --gpu-memory 16GiB --global-batch 64 --config quick

autods fit examples/gpt.py --device cpu --gpus 2 --gpu-memory 416MiB      without a GPU

Exit codes: 0 done, 1 nothing fits, 2 wrong input, 3 broken environment, 130 interrupted (the same command goes on).
"""

app = typer.Typer(
    help="Finds the fastest DeepSpeed configuration that fits, by real trials.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@dataclass(frozen=True, slots=True)
class UseCases:
    """What the commands call, `api.settle` and `api.run_fit`; tests hand in their own."""

    settle: Callable[..., Settings]
    run_fit: Callable[[Settings, Listener, bool], Report]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the program; `argv` with the program's name, to say how to resume."""

    uses: UseCases | None
    argv: Sequence[str]


def main(argv: Sequence[str] | None = None, *, uses: UseCases | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    call = _Call(uses, sys.argv if argv is None else ["autods", *argv])
    args = list(call.argv[1:]) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without × or ≥ is no reason to die
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM is a Ctrl-C
    try:
        code = typer.main.get_command(app).main(args=args, prog_name="autods", standalone_mode=False, obj=call)
        return int(code or 0)
    except UsageError as error:
        print(f"error: {error.format_message()}\n  see: autods fit --help", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"autods {version('autods')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command("fit", epilog=_EPILOG)
def fit_command(
    context: typer.Context,
    workload: options.Workload,
    gpus: options.Gpus = None,
    device: options.Device = "cuda",
    gpu_memory: options.GpuMemory = None,
    global_batch: options.GlobalBatch = None,
    precision: options.Precision = "auto",
    base_config: options.BaseConfig = None,
    config: options.Config = "default",
    ladder: options.Ladder = None,
    strategies: options.Strategies = None,
    nvme_path: options.NvmePath = None,
    out: options.Out = None,
    fresh: options.Fresh = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Find the fastest DeepSpeed config that fits WORKLOAD, and write it to ds_config.json.

    Finished trials are journaled: the same command goes on where a stopped one ended.
    """
    asked = {
        "gpus": gpus, "device": device, "gpu_memory": gpu_memory, "global_batch": global_batch,
        "precision": precision, "base_config": base_config, "config": config,
        "ladder": () if ladder is None else ladder, "strategies": tuple(strategies or ()),
        "nvme_path": nvme_path, "out": out, "seed": seed,
    }  # fmt: skip
    return _fit(context.obj, workload, asked, fresh=fresh, as_json=as_json, quiet=quiet)


_DIAGNOSE_EPILOG = """
Examples:

autods diagnose train.log

autods diagnose slurm-1234.out --exit-code 137

autods diagnose rank_0.log rank_1.log        one file a rank; a folder of logs works too

dmesg -T | cat train.log - | autods diagnose -

Exit codes: 0 answered, whatever the answer; 2 wrong input.
"""


@app.command("diagnose", epilog=_DIAGNOSE_EPILOG)
def diagnose_command(
    logs: options.Logs = None, exit_code: options.ExitCode = None, as_json: options.Json = False
) -> int:
    """Say why a run died: from its LOGs (files, folders, - for standard input) and exit code."""
    from .report import endings

    try:
        said = _diagnosed(logs or [], exit_code)
    except (Exception, KeyboardInterrupt) as error:
        endings.tell(error, out=None, argv=["autods"])
        if as_json:
            print(json.dumps(endings.as_json(error)))
        return endings.exit_code(error)
    if as_json:
        print(json.dumps(said.to_dict(), indent=2))
    else:
        from rich.console import Console

        from .report.diagnosis import show

        show(said, Console(soft_wrap=True))
    return 0


def _diagnosed(logs: Sequence[Path], exit_code: int | None) -> Diagnosis:
    from .errors import InputError
    from .failures import diagnose

    if not logs and exit_code is None:
        raise InputError("there is nothing to go by", mend="give a log, or --exit-code: autods diagnose train.log")
    if Path("-") in logs:
        return diagnose(sys.stdin.buffer.read().decode(errors="replace"), exit_code)
    said = diagnose(logs, exit_code)
    if said.kind == "unknown" and said.confidence <= 0.1:
        raise InputError(
            "is not a text log", where=", ".join(map(str, logs)), mend="give the log itself (gzip is fine)"
        )
    return said


def _fit(call: _Call, workload: str, asked: dict[str, Any], *, fresh: bool, as_json: bool, quiet: bool) -> int:
    """Run the fit and show how it ended, whatever that is."""
    from .report import endings

    out = Path(asked["out"]) if asked["out"] else None
    try:
        use = call.uses or _real()
        settings = use.settle(workload, **asked)
        out = settings.out
        with _progress(quiet) as listen:
            listen(_question(settings))
            report = use.run_fit(settings, listen, fresh)
        endings.show_result(report, as_json=as_json)
        return 0 if report.status == "fit" else 1
    except (Exception, KeyboardInterrupt) as error:
        endings.tell(error, out=out, argv=call.argv)
        if as_json:
            print(json.dumps(endings.as_json(error)))
        return endings.exit_code(error)


def _real() -> UseCases:
    from .api import run_fit, settle

    return UseCases(settle, run_fit)


def _progress(quiet: bool) -> AbstractContextManager[Listener]:
    from .report.progress import Progress

    return nullcontext(lambda event: None) if quiet else Progress()


def _question(settings: Settings) -> Event:
    """What is asked and where the answer goes, said before anything slow begins."""
    from .units import show_bytes
    from .values import Note

    what = f"{settings.gpus} {settings.device} ranks × {show_bytes(settings.device_bytes)}"
    return Note(text=f"{settings.source.name} on {what}, {settings.profile.name} config → {settings.out}")
