"""The table of cases: every provocation registers itself here under the label that it is known to deserve."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.corpus.provoke.workbench import Workbench

RECORDED = Path(__file__).parent.parent / "provoked"


class Label(NamedTuple):
    kind: str
    tier: str | None
    action: str


HOST = Label("out_of_memory", "host", "less_host_memory")
PINNED = Label("out_of_memory", "pinned", "less_host_memory")
SHM = Label("out_of_memory", "shm", "fix_environment")
DISK = Label("out_of_memory", "nvme", "fix_environment")
DEVICE = Label("out_of_memory", "device", "leaner_rung")
PRESSURE = Label("memory_pressure", "device", "leaner_rung")
CONFIG = Label("config", None, "fix_config")
TOOLCHAIN = Label("toolchain", None, "fix_environment")
NETWORK = Label("communication", None, "retry")
NETWORK_SETUP = Label("communication", None, "fix_environment")
SECONDARY = Label("secondary", None, "retry")
USER_CODE = Label("user_code", None, "fix_code")
STOPPED = Label("infrastructure", None, "retry")
MACHINE = Label("infrastructure", None, "fix_environment")
HEALTHY = Label("none", None, "nothing")
UNKNOWN = Label("unknown", None, "retry")


@dataclass(frozen=True)
class Case:
    name: str
    label: Label
    provoke: Callable[[Workbench], None]
    rank: int | None
    tells_exit_code: bool

    @property
    def source(self) -> str:
        module = self.provoke.__module__.rpartition(".")[2]
        doc = (self.provoke.__doc__ or "").strip().splitlines()[0]
        return f"provoked by tests/corpus/provoke/{module}.py, {self.provoke.__name__}: {doc}"


CASES: dict[str, Case] = {}


def case(
    name: str, label: Label, *, rank: int | None = None, tells_exit_code: bool = True
) -> Callable[[Callable[[Workbench], None]], Callable[[Workbench], None]]:
    """Registers a provocation; one function may stand for several cases."""

    def register(provoke: Callable[[Workbench], None]) -> Callable[[Workbench], None]:
        assert name not in CASES, name
        CASES[name] = Case(name, label, provoke, rank, tells_exit_code)
        return provoke

    return register


def record(case: Case) -> Path:
    """Provokes one failure and writes its log and its table in `cases.toml`."""
    with Workbench() as bench:
        try:
            case.provoke(bench)
        except subprocess.TimeoutExpired:
            print(bench.latest.decode(errors="replace")[-3000:], flush=True)
            raise
        path = bench.write_logs(RECORDED / case.name)
        table: dict[str, str | int] = {"kind": case.label.kind}
        if case.label.tier is not None:
            table["tier"] = case.label.tier
        table["action"] = case.label.action
        if case.rank is not None:
            table["rank"] = case.rank
        if case.tells_exit_code and bench.exit_code is not None:
            table["exit_code"] = bench.exit_code
        table["source"] = case.source
    _write_table(case.name, table)
    return path


def _write_table(name: str, table: dict[str, str | int]) -> None:
    path = RECORDED / "cases.toml"
    tables = tomllib.loads(path.read_text()) if path.exists() else {}
    tables[name] = table
    known = [*(each for each in CASES if each in tables), *(each for each in tables if each not in CASES)]
    text = "\n".join(f"[{each}]\n{_as_toml(tables[each])}" for each in known)
    path.write_text(text)


def _as_toml(table: dict[str, str | int]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
