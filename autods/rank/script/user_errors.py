"""Errors of a script in the user's terms: the line in the user's file, the problem there, and its fix."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...config.trainers import SCRIPT_KINDS, ScriptKind
from ...devices import find_device
from ...errors import find_first_cause
from ...plain_text import read_text
from ...system.stacks import Frame, find_caller, find_raiser
from ...workload.protocol import WorkloadError

# Messages of torch and other libraries on a machine without CUDA.
_NO_CUDA = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|_cuda_|CUDA driver initialization|invalid device ordinal"
    r"|Attempting to deserialize object on a CUDA device|torch\.cuda is not available|CUDA is not available"
    r"|requires? (?:CUDA|an? (?:NVIDIA )?GPU)|CUDA is required|CUDA_HOME|'nvcc'"
    r"|No GPUs? (?:was |were )?(?:found|available)|No supported gpu backend|accelerator device when none is available",
    re.IGNORECASE,
)
WRITABLE = "AUTODS_WRITABLE"  # a variable with further folders in which the user lets a script write
# Messages of urllib, requests, datasets and the hub's client, also where a variable forbids the network.
_OUT_OF_REACH = re.compile(
    r"urlopen error|Max retries exceeded|Couldn't reach|couldn't connect to|OfflineMode|offline mode is enabled"
    r"|Name or service not known|Temporary failure in name resolution",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"permission denied|os error 13\b|errno[ =:]*13\b", re.IGNORECASE)
_ERROR_WORD = re.compile(r"\b(?:error|fatal|exception|unknown|invalid|missing|required)\b", re.IGNORECASE)
# A call that does not fit the function, whose qualified name comes first.
_AUTODS = __name__.partition(".")[0]
_MISCALLED = re.compile(r"(\w+)[\w.<>]*\(\) (?:got (?:an unexpected|multiple|some)|missing \d+ required|takes )")
_NOT_IN_MODULE = re.compile(r"module '?(\w+)[\w.]*'? has no attribute")
_EMPTY_BATCH = "but got batch_size=0"  # of a DataLoader
_NOT_PARSED = "not used by the HfArgumentParser"
_ITS_OWN = (None, "deepspeed")  # kinds of scripts that call DeepSpeed themselves, as far as is known
_MOST_PARENTS = 4  # folders above a script in which a package of its project may lie
_LOG_BYTES, _LOG_LINES, _QUOTED_CHARS = 4096, 12, 200  # what is read and quoted of the end of a log


def script_error(problem: str, *, hint: str, at: Frame | None = None) -> WorkloadError:
    """An error at a line of the script; without `at`, at the line that this call comes from."""
    place = at or find_caller()
    return WorkloadError(problem, place=None if place is None else str(place), hint=hint)


def cause_of_exit(error: BaseException, engine_failure: BaseException | None) -> BaseException:
    """The error behind a `sys.exit`: a failed call of the engine, or the exception that the script was handling."""
    if not isinstance(error, SystemExit):
        return error
    cause = engine_failure or error.__context__
    return cause if isinstance(cause, Exception) else error


def explain(
    error: BaseException, device: str, *, writes_confined: bool = False, kind: str | None = "deepspeed"
) -> BaseException:
    """An error in the user's terms where the exception alone does not tell enough; else the exception itself.

    `writes_confined`: the kernel refuses the script's writes outside the trial's folders. `kind` is that of the script.
    """
    place = find_raiser(error)
    code = "" if place is None else place.code
    divides_by_gpus = isinstance(error, ZeroDivisionError) and "device_count" in code
    match error:
        case Exception() if find_device(device).stands_in and (divides_by_gpus or _NO_CUDA.search(read_text(error))):
            problem = f"needs CUDA, and --device {device} has none: {(read_text(error).splitlines() or [''])[0]}"
            hint = "use engine.device or deepspeed.get_accelerator().device_name(), or run it with --device cuda"
        case Exception() if writes_confined and (line := _find_refusal(error)):
            problem = f"it may write only in the trial's own folders and in caches: {line}"
            hint = f"leave this write out of a trial, or allow folders: {WRITABLE}=FOLDER:FOLDER autods …"
        case EOFError() | ValueError() if "EOF when reading a line" in read_text(error) or "sys.stdin" in code:
            # Standard input is empty. The script reads it directly, or through a parser of JSON or YAML.
            problem = "it waits for input, and a trial has no terminal"
            hint = "give it the answer as an argument, or in a file"
        case ValueError() | AssertionError() if kind in _ITS_OWN and (trainer := _find_trainer(error)) is not None:
            lines = [line.strip(" -") for line in read_text(error).splitlines() if line.strip()]
            problem = f"{type(error).__name__}: {'; '.join(lines).replace(':; ', ': ')[: 2 * _QUOTED_CHARS]}"
            hint = f"it is {trainer.description}, which calls DeepSpeed for it: add --kind {trainer.name}"
        case ValueError() if _NOT_PARSED in read_text(error):
            problem = f"its command line is refused: {read_text(error)[:_QUOTED_CHARS]}"
            parsers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
            hint = advise_arguments(parsers[-1] if parsers else None)
        case ValueError() if _EMPTY_BATCH in read_text(error):
            problem = f"{read_text(error)}: does it divide the batch by the ranks?"
            hint = 'give it {train_batch_size}, with "gradient_accumulation_steps": 1 in --base-config'
        case AttributeError() if (match := _NOT_IN_MODULE.match(read_text(error))) and (
            versions := _format_versions([match[1]])
        ):
            problem = f"AttributeError: {read_text(error)}"
            hint = f"installed here: {versions}; the script may be written for another version"
        case TypeError() if (match := _MISCALLED.match(read_text(error))) and (
            versions := _find_versions(error, match[1])
        ):
            problem = f"TypeError: {read_text(error)}"
            hint = f"installed here: {versions}; the script may be written for another version"
        case ImportError() if (reason := _explain_import(error)) is not None:
            problem, hint = reason
        case ImportError() | RuntimeError() if (name := _find_missing(error)) and (place or error.__cause__):
            problem = f"it needs {name}, which is not installed here"
            folder = None if place is None else _find_beside(name.partition(".")[0], Path(place.file))
            hint = f"install it into the Python that autods runs in, {sys.executable}"
            if folder is not None:
                hint = f"it lies in {folder}: PYTHONPATH={folder} autods …"
        case OSError() if _OUT_OF_REACH.search(read_text(error)):
            problem = f"it loads from a network that is out of reach here: {read_text(error).splitlines()[0]}"
            hint = "load it before, into a folder or into the cache that the script reads"
        case SystemExit():
            problem = f"it left with the message: {read_text(error.code)}"
            if isinstance(error.code, int):
                line = last_log_line()
                problem = f"it left with exit code {read_text(error.code)}" + (
                    f"; the last line of its log: {line}" if line else ""
                )
            hint = "its log may show the reason, above the end"
        case _:
            return error
    return script_error(problem, hint=hint, at=place)


def advise_arguments(parser: Any) -> str:
    """The hint for a command line that this parser refused: which installed libraries define its options."""
    classes = [type(parser), *getattr(parser, "dataclass_types", ())]
    known = _format_versions(base.__module__ for each in classes for base in each.__mro__)
    options = f"; its options are those of {known}: was it written for another version?" if known else ""
    return f"check the arguments after --{options}"


def _find_versions(error: TypeError, name: str) -> str:
    """The installed libraries, as far as they are loaded, that define what a script miscalls; else the one that calls.

    A library calls the script's own methods with the arguments of its release.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    caller = frame.f_globals.get("__name__", "")
    if caller.startswith(f"{_AUTODS}."):
        return ""
    named = ((module.__name__, vars(module).get(name)) for module in list(sys.modules.values()) if module is not None)
    defining = _format_versions(module for module, value in named if getattr(value, "__module__", None) == module)
    return defining or _format_versions([caller])


def _format_versions(modules: Iterable[str]) -> str:
    """The libraries of these modules that are installed, with their versions."""
    versions = []
    for package in sorted({module.partition(".")[0] for module in modules if module}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return " and ".join(versions)


def _find_trainer(error: BaseException) -> ScriptKind | None:
    """The library that calls DeepSpeed for the script, where the error comes from within it or from DeepSpeed."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    kinds = [kind for kind in SCRIPT_KINDS.values() if kind.name not in _ITS_OWN]

    def is_in(module: str, packages: Iterable[str]) -> bool:
        return any(f"{module}.".startswith(f"{package}.") for package in packages)

    innermost = modules[-1] if modules else ""
    if not is_in(innermost, ("deepspeed", *(package for kind in kinds for package in kind.packages))):
        return None
    return next((k for k in kinds if any(is_in(m, k.config_readers or k.packages) for m in modules)), None)


def _find_refusal(error: BaseException) -> str | None:
    """The line of an error, or of the output of a program that failed, which tells that permission was denied."""
    texts = [read_text(error)]
    if isinstance(error, subprocess.CalledProcessError):
        output = error.stderr or error.output or ""
        texts += [output.decode(errors="replace") if isinstance(output, bytes) else str(output), last_log_line()]
    lines = (line.strip() for text in texts for line in text.splitlines())
    return next((line[:_QUOTED_CHARS] for line in lines if _REFUSED.search(line)), None)


def _find_beside(package: str, script: Path) -> Path | None:
    """The folder above the script, or the `src` in one, that holds this package of its project."""
    folders = (folder for parent in list(script.parents)[:_MOST_PARENTS] for folder in (parent, parent / "src"))
    return next((folder for folder in folders if (folder / package / "__init__.py").is_file()), None)


def _find_missing(error: BaseException) -> str | None:
    """The module or the package's metadata that was not found, if that is what failed."""
    cause = find_first_cause(error)
    return cause.name if isinstance(cause, ModuleNotFoundError) else None


def _explain_import(error: ImportError) -> tuple[str, str] | None:
    """Problem and hint where the package is installed; None when it is missing or the user's own."""
    cause = find_first_cause(error)
    if cause is not error and "." in (_find_missing(error) or "."):
        reason = read_text(cause).strip().partition("\n")[0]
        problem = f"{read_text(error).partition('. ')[0].rstrip('.')}, because of {type(cause).__name__}: {reason}"
        hint = f"the packages in {sys.executable} do not fit together: reinstall that one, or take another version"
        return problem, hint
    package, _, submodule = (error.name or "").partition(".")
    if package and (submodule or "cannot import name" in read_text(error)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            hint = f"{package} {version} is installed here: the script was written for another version of it"
            return read_text(error).partition(" (")[0], hint
    return None


def last_log_line() -> str:
    """The last line of this rank's log; near the end, a line that mentions an error is preferred."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            text = log.read(_LOG_BYTES).decode(errors="replace")
    except OSError:  # a terminal or a pipe
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    errors = [line for line in lines if _ERROR_WORD.search(line)]
    return (errors or lines or [""])[-1][:_QUOTED_CHARS]
