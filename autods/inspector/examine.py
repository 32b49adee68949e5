"""Which checks of this machine run: all for `autods doctor`, and before a fit those that concern its ladder."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.catalogue import find_measured, format_machine, measured_path
from ..config.deepspeed import compose, precision_name, required_ops
from ..config.releases import find_tolerated
from ..config.rungs import unmet_need
from ..config.settings import Settings, resolve_fit
from ..devices import DEVICES, find_device
from ..errors import EnvironmentBroken, InputError
from ..events import Listener, Note
from ..files import OutputFile, check_outputs, write_whole
from ..rank.ops import is_cached
from ..report.results.doctor import Check, Checkup
from ..requests import DoctorRequest, FitRequest
from ..runner.health import Preflight
from ..system.host import Hardware, cache_folder, installed_versions, read_hardware
from ..types import Knobs, WorkloadSource
from . import machine, toolchain
from .disk import check_nvme, find_file_system, find_memory_folder
from .measurement import Readings, describe_measured, keep_earlier, list_readings

if TYPE_CHECKING:
    from ..runner.runner import RayRunner

CPU_RANKS = 2  # where there is no card
# Beginnings of the variables that matter only between ranks, and only between nodes.
_OF_RANKS = ("NCCL_", "TORCH_DISTRIBUTED_")
_OF_NODES = ("NCCL_IB_", "NCCL_NET_")
_HEADER_FOLDERS = ("/usr/include", "/usr/local/include", f"{sys.prefix}/include")
_HEADER_PATHS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """What to check: `nvme_path` is measured, `ray` starts Ray, and `fix` builds the ops that are missing.

    `gpus` starts ranks that look at their cards and at the links between them. `measure` lets ranks measure this
    machine for the forecasts of later commands, and writes it to `machine_file`, too.
    """

    hardware: Hardware
    gpus: bool = False
    nvme_path: Path | None = None
    ray: bool = False
    fix: bool = False
    measure: bool = False
    machine_file: Path | None = None


def resolve_doctor(request: DoctorRequest) -> DoctorSettings:
    """Read this machine. Raises InputError for a file of a machine that is not measured or cannot be written."""
    machine_file = None
    if request.machine_file is not None:
        if not request.measure:
            raise InputError("--machine-file takes what is measured", hint="give --measure, too")
        if Path(request.machine_file).suffix != ".toml":
            raise InputError(f"--machine-file {request.machine_file}: --on takes a name that ends in .toml")
        machine_file = Path(request.machine_file).absolute()
        check_outputs([OutputFile("--machine-file", machine_file, (b"name = ",))])
    path = None if request.nvme_path is None else Path(request.nvme_path).absolute()
    return DoctorSettings(
        hardware=read_hardware(),
        nvme_path=path,
        ray=request.ray,
        fix=request.fix,
        gpus=request.gpus,
        measure=request.measure,
        machine_file=machine_file,
    )


def examine(settings: DoctorSettings, listen: Listener) -> Checkup:
    """Run every check, in the order in which they are shown."""
    return Checkup(checks=tuple(_run_checks(settings, listen)))


def _run_checks(settings: DoctorSettings, listen: Listener) -> Iterator[Check]:
    hardware = settings.hardware
    yield from machine.check_cards(hardware)
    if settings.gpus and hardware.unusable is None:
        listen(Note(text="starting ranks, which look at their cards and measure an all-reduce"))
        yield from machine.check_ranks(lambda: run_preflight(hardware, listen))
    yield from toolchain.check_versions()
    yield from toolchain.check_compiler()
    if settings.ray:
        from ..runner.ray_connect import measure_start

        listen(Note(text="starting Ray, as a fit does"))
        yield from toolchain.check_ray(measure_start)
    listen(Note(text="asking DeepSpeed about its ops"))
    yield from toolchain.check_ops(
        has_cards=bool(hardware.cards), build=settings.fix, note=lambda text: listen(Note(text=text))
    )
    yield from machine.check_memory(hardware)
    yield from machine.check_limits()
    yield from machine.check_folders(
        {"results": Path("autods-out"), "temporary files": Path("/tmp"), "caches": cache_folder()}
    )
    if settings.nvme_path is not None:
        listen(Note(text=f"writing and reading a file in {settings.nvme_path}"))
        yield from check_nvme(settings.nvme_path)
    if settings.measure and hardware.unusable is None:
        yield from measure_machine(settings, listen)
    yield from machine.check_environment(os.environ)
    yield from machine.check_kernel()
    yield from machine.check_names()


def run_preflight(hardware: Hardware, listen: Listener) -> Preflight:
    """Do what a fit does before its first trial, with a rank on each card, or two on the CPU where there is none.

    Raises EnvironmentBroken where training would make no sense.
    """
    with open_ranks(hardware, None, listen) as runner:
        return runner.preflight()


def measure_machine(settings: DoctorSettings, listen: Listener) -> Iterator[Check]:
    """Measure this machine on ranks, and keep it for the forecasts of later commands; a line for each kind of work."""
    hardware = settings.hardware
    listen(Note(text="measuring this machine on real ranks, at most a minute"))
    began = time.monotonic()
    try:
        with open_ranks(hardware, settings.nvme_path, listen) as runner:
            preflight, began = runner.preflight(), time.monotonic()
            result = runner.measure()
    except (EnvironmentBroken, InputError) as error:  # InputError: the folder for NVMe, or a limit of the shell
        problem, _, remedy = str(error).partition("\n")
        yield Check.broken("Measured", "ranks", problem, remedy.strip())
        return
    seconds = time.monotonic() - began
    readings = Readings(result.readings, len(hardware.cards) or CPU_RANKS)
    software = f"torch {installed_versions()['torch']}"
    machine = describe_measured(readings, hardware, has_nvlink="NVLink" in preflight.links, software=software)
    rows, card = list(list_readings(readings)), hardware.cards[0].name if hardware.cards else ""
    if (earlier := find_measured(card, hardware)) is not None:
        machine, kept = keep_earlier(machine, earlier)
        rows += kept
    notes = [*map(": ".join, rows), *(f"not measured: {reason}" for reason in result.left_out)]
    text = format_machine(machine, [*notes, *(f"although {finding.text}" for finding in preflight.findings)])
    path = measured_path(card, hardware)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    if settings.machine_file is not None:
        write_whole(settings.machine_file, text)
    for name, line in rows:
        yield Check.ok("Measured", name, line)
    for reason in result.left_out:
        yield Check.warning("Measured", *reason.split(": ", 1))
    for finding in preflight.findings:
        yield Check.warning("Measured", "although", finding.text, f"{finding.remedy}; then measure again")
    yield Check.ok("Measured", "kept", f"{path}, after {seconds:.0f} s")
    if settings.machine_file is not None:
        yield Check.ok("Measured", "machine file", f"{settings.machine_file}, for autods plan … --on")


@contextlib.contextmanager
def open_ranks(hardware: Hardware, nvme_path: Path | None, listen: Listener) -> Iterator[RayRunner]:
    """Start a rank on each card, or two on the CPU where there is none, without a workload."""
    from ..runner.runner import RayRunner

    device = next(each for each in DEVICES.values() if each.has_cards == bool(hardware.cards))
    source = WorkloadSource(kind="script", path="", name="doctor", digest="")  # nothing of it is run
    with tempfile.TemporaryDirectory(prefix="autods-doctor-") as folder:
        request = FitRequest(
            workload="-",
            device=device.name,
            gpus=len(hardware.cards) or CPU_RANKS,
            nvme_path=nvme_path,
            out=folder,
        )
        settings = replace(resolve_fit(request, source, hardware=hardware), out=Path(folder))
        with RayRunner(settings, listen) as runner:
            yield runner


# Before a fit: the checks that take no second.


def check_ladder(
    settings: Settings,
    variables: Mapping[str, str] = os.environ,
    *,
    is_built: Callable[[str], bool] = is_cached,
    which: Callable[[str], str | None] = shutil.which,
    shared: Path = Path("/dev/shm"),
    read_limit: machine.ReadLimit = resource.getrlimit,
    may_lock: Callable[[], bool] = machine.may_lock_memory,
    file_system: Callable[[Path], str] = find_file_system,
) -> Iterator[Check]:
    """Only the checks that are not ok and concern a rung of this ladder, these ranks and this device.

    The ranks of a cluster run elsewhere: of these only the variables are checked, which they get from here.
    """
    if settings.address is None:
        missing = {op: rungs for op, rungs in _list_ops(settings).items() if not is_built(op)}
        yield from _check_builds(missing, settings, variables, which)
        yield from (check for check in machine.check_shared_memory(shared) if check.status != "ok")
        if "async_io" in _list_ops(settings):
            yield from (check for check in machine.check_limits(read_limit, may_lock) if check.name == "locked memory")
            path = settings.nvme_path
            if path is not None and (in_memory := find_memory_folder(path, file_system)) is not None:
                yield in_memory
    yield from _check_release(settings)
    for check in machine.check_environment(variables):
        name = check.name
        alone = settings.gpus == 1 and name.startswith(_OF_RANKS)
        one_node = settings.nodes == 1 and name.startswith(_OF_NODES)
        idle = name.startswith(find_device(settings.device).idle_variables)
        if check.status != "ok" and not (alone or one_node or idle):
            yield check


def format_warning(check: Check) -> str:
    """'libaio: libaio.h is missing, so … (apt-get install libaio-dev)': one line with the remedy."""
    return f"{check.name}: {check.result} ({check.remedy})" if check.remedy else f"{check.name}: {check.result}"


def _list_ops(settings: Settings) -> dict[str, list[str]]:
    """The ops of DeepSpeed that rungs load → the names of these rungs. The workload may bring an optimizer instead."""
    rungs_of: dict[str, list[str]] = {}
    for rung in settings.ladder:
        if unmet_need(rung, settings.site, None) is not None:
            continue
        for op in required_ops(compose(rung, Knobs(), settings.site, None)):
            rungs_of.setdefault(op, []).append(rung.name)
    return rungs_of


def _check_builds(
    missing: Mapping[str, list[str]],
    settings: Settings,
    variables: Mapping[str, str],
    which: Callable[[str], str | None],
) -> Iterator[Check]:
    """What lacks for building the ops that no earlier run has built."""
    for check in toolchain.check_compiler(which):
        if check.status != "ok" and missing:
            yield _explain_skip(check, missing)
        elif check.status != "ok" and check.name == "compiler" and settings.forecast:
            yield check
    if "async_io" in missing and not _has_header("libaio.h", variables):
        remedy = "apt-get install libaio-dev"
        check = Check.broken("Software", "libaio", "libaio.h is missing", remedy)
        yield _explain_skip(check, {"async_io": missing["async_io"]})


def _check_release(settings: Settings) -> Iterator[Check]:
    """What the installed DeepSpeed does slowly or sometimes wrong on this ladder; rungs that are wrong are left out."""
    for fault in find_tolerated(settings.ladder, precision_name(settings.base), settings.base):
        yield toolchain.grade_fault(fault, installed_versions()["deepspeed"])


def _explain_skip(check: Check, missing: Mapping[str, list[str]]) -> Check:
    """The check with the ops that cannot be built, and the rungs that no trial can run without them."""
    problem, _, _ = check.result.partition(";")
    rungs = ", ".join(dict.fromkeys(rung for rungs in missing.values() for rung in rungs))
    return replace(check, result=f"{problem}, so {' and '.join(missing)} cannot be built for {rungs}")


def _has_header(name: str, variables: Mapping[str, str]) -> bool:
    """Whether the compiler finds a header where headers usually are, or where the environment says."""
    named = [folder for path in _HEADER_PATHS for folder in variables.get(path, "").split(os.pathsep) if folder]
    flags = [word[2:] for word in variables.get("CFLAGS", "").split() if word.startswith("-I")]
    conda = [f"{variables['CONDA_PREFIX']}/include"] if "CONDA_PREFIX" in variables else []
    return any(Path(folder, name).exists() for folder in (*_HEADER_FOLDERS, *named, *flags, *conda))
