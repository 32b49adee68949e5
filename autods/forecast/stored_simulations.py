"""Simulations of earlier commands: they answer again while nothing that they depend on has changed.

They lie in the cache of this user. Each is named by its question: the workload, the engine and the process's
environment. It counts as long as each file that it has read, from torch's modules to the user's data, is as it was then
(`simulate.files_read`). Scripts are simulated each time: what they read, and when, is theirs alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from ..config.catalogue import Machine
from ..devices.cpu import read_processor_field
from ..errors import AutodsError
from ..system import private
from ..system.host import cache_folder
from ..types import ModelFacts, WorkloadSource
from .simulate.client import ProcessSimulator, list_module_folders
from .simulate.files_read import Stamp, read_change_ns, read_stamp
from .simulation_cache import memory_key
from .values import Engine, EngineSpec, Simulation, Simulator

_MOST_BYTES = 512 * 2**20  # of the store; the answers that were not used for the longest time go first
_QUICK = 1  # zlib's level: traces are long lists of small numbers
# Variables that differ between terminals, tests and fits (Ray sets some), and that no model is built by.
_PASSING = re.compile(
    r"_|AUTODS_(?:CACHE|KEEP_SIMULATIONS|RUN|SESSION|WRITABLE)|COLUMNS|DBUS_.*|DISPLAY|LINES|LS_COLORS|OLDPWD|PWD"
    r"|PYTEST_.*|PYTHONBREAKPOINT|RAY_.*|SHLVL|SSH_.*|STY|TERM.*|TMPDIR|TMUX.*|VSCODE_.*|WINDOWID"
    r"|XDG_(?:RUNTIME|SESSION|VTNR|SEAT).*"
)
ANSWERS_AGAIN = (
    "simulations of an earlier command answer again: no file that they read has changed (plan --fresh simulates anew)"
)
KEEPS = "AUTODS_KEEP_SIMULATIONS"  # 0: no simulation of another command counts, and none is kept
_Answer = TypeVar("_Answer", ModelFacts, Simulation)


@dataclass(slots=True)
class AnswerStore:
    """Answers in a folder, each in a file that is named by its question and names the list of what it has read.

    Answers share lists. What is listed is looked at once: a command takes minutes at most. A file of the store that
    cannot be read or written, or that others can write, is as good as none.
    """

    folder: Path
    _began_ns: int = field(default_factory=time.time_ns)
    _same: dict[str, bool] = field(default_factory=dict)  # lists, by name: whether all in it is as it was
    _stamps: dict[str, Stamp | None] = field(default_factory=dict)  # as they are now; lists have most files in common
    _written: tuple[Mapping[str, Stamp | None], str] = field(default_factory=lambda: ({}, ""))  # the last list

    def read(self, question: str) -> object:
        """Return the answer; None where there is none, or something that it has read is not as it was."""
        place = self._find_place(question)
        with contextlib.suppress(Exception):  # a pickle of other classes raises anything
            files, packed = _unpack(place)
            if self._are_same(place.with_name(files)):
                answer: object = pickle.loads(packed)  # by the classes that wrote it: their files are the same
                _note_use(place)
                return answer
        return None

    def write(self, question: str, answer: object, stamps: Mapping[str, Stamp | None]) -> None:
        """Store an answer with what it has read, unless that changed since this command began."""
        if not stamps or max(map(read_change_ns, stamps.values())) >= self._began_ns:
            return
        with contextlib.suppress(OSError, AutodsError):
            files = self._write_list(stamps)
            private.write(self._find_place(question), _pack((files, pickle.dumps(answer))))

    def _find_place(self, question: str) -> Path:
        return self.folder / f"{_digest(question.encode())}.answer"

    def _are_same(self, files: Path) -> bool:
        if files.name not in self._same:
            stamps: Mapping[str, Stamp | None] = _unpack(files)
            _note_use(files)
            self._same[files.name] = all(self._look_at(path) == stamp for path, stamp in stamps.items())
        return self._same[files.name]

    def _look_at(self, path: str) -> Stamp | None:
        if path not in self._stamps:
            self._stamps[path] = read_stamp(path)
        return self._stamps[path]

    def _write_list(self, stamps: Mapping[str, Stamp | None]) -> str:
        """Write the list, unless the last answer had the same, and return its name."""
        known, name = self._written
        if stamps != known or not (self.folder / name).exists():
            packed = _pack(dict(sorted(stamps.items())))
            name = f"{_digest(packed)}.files"
            make_room(self.folder)
            if not (self.folder / name).exists():
                private.write(self.folder / name, packed)
            self._written = stamps, name
        return name


@dataclass(slots=True)
class StoredSimulator(Simulator):
    """The simulator of a workload that asks its processes only what no earlier command has asked. Thread-safe.

    `anew` asks them everything, and replaces what is stored. `note_use` is called at the first stored answer.
    """

    processes: ProcessSimulator
    source: WorkloadSource
    store: AnswerStore
    anew: bool = False
    note_use: Callable[[], None] = lambda: None
    _surroundings: str = field(default_factory=lambda: _describe_surroundings())
    _is_used: bool = False

    def __enter__(self) -> StoredSimulator:
        self.processes.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.processes.__exit__(*raised)

    def facts(self, device: str = "cuda", *, ranks: int = 1, machine: Machine | None = None) -> ModelFacts:
        question = f"{device} facts {ranks} {machine and machine.capability}"
        return self.answer(question, device, lambda: self.processes.facts(device, ranks=ranks, machine=machine))

    @contextlib.contextmanager
    def engine(self, spec: EngineSpec) -> Iterator[StoredEngine]:
        with contextlib.ExitStack() as stack:
            yield StoredEngine(self, spec, stack)

    def answer(self, question: str, device: str, ask: Callable[[], _Answer]) -> _Answer:
        """Return what is stored, or else what the processes answer, which is stored."""
        source = self.source
        if source.kind == "pickle":  # its digest says what is in it; each output folder has its own
            source = replace(source, path="")
        whole = json.dumps([asdict(source), self._surroundings, question], sort_keys=True, default=str)
        stored = None if self.anew else self.store.read(whole)
        if stored is None:
            answer = ask()
            self.store.write(whole, answer, self.processes.list_files(device))
            return answer
        if not self._is_used:
            self._is_used = True
            self.note_use()
        return cast("_Answer", stored)


@dataclass(slots=True)
class StoredEngine(Engine):
    """An engine whose process starts with the first micro batch that no earlier command has asked for."""

    simulator: StoredSimulator
    spec: EngineSpec
    _stack: contextlib.ExitStack
    _engine: Engine | None = None

    def measure(self, micro_batch: int) -> Simulation:
        """Return the stored simulation, or else simulate it. Raises SimulationFailed."""
        # Cards of one family choose the same kernels, but the model may ask for more of the card.
        question = f"{memory_key(self.spec)} {self.spec.capability} {micro_batch}"
        return self.simulator.answer(question, self.spec.device, lambda: self._start().measure(micro_batch))

    def _start(self) -> Engine:
        if self._engine is None:
            self._engine = self._stack.enter_context(self.simulator.processes.engine(self.spec))
        return self._engine


def store_answers(
    processes: ProcessSimulator,
    source: WorkloadSource,
    *,
    anew: bool = False,
    note_use: Callable[[], None] = lambda: None,
) -> ProcessSimulator | StoredSimulator:
    """Return a simulator that stores what these processes answer; the processes themselves for a script."""
    if source.form.runs_as_main or os.environ.get(KEEPS) == "0":
        return processes
    store = AnswerStore(cache_folder() / "simulations")
    return StoredSimulator(processes, source, store, anew=anew, note_use=note_use)


def make_room(folder: Path, most_bytes: int = _MOST_BYTES) -> None:
    """Remove the files that were not used for the longest time, until the others have no more than these bytes."""
    states = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # another command has removed it meanwhile
            states.append((path.stat(), path))
    kept_bytes = 0
    for state, path in sorted(states, key=lambda each: each[0].st_mtime, reverse=True):
        kept_bytes += state.st_size
        if kept_bytes > most_bytes:
            path.unlink(missing_ok=True)


def _describe_surroundings() -> str:
    """What else decides how a model is built: Python, where it looks for modules, the processor and the environment."""
    environment = {name: value for name, value in os.environ.items() if not _PASSING.fullmatch(name)}
    processor = read_processor_field("model name")
    return json.dumps([sys.version, list_module_folders(), processor, environment], sort_keys=True)


def _note_use(path: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that we may read, not write
        os.utime(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _pack(content: object) -> bytes:
    return zlib.compress(pickle.dumps(content), _QUICK)


def _unpack(path: Path) -> Any:
    return pickle.loads(zlib.decompress(private.read(path)))
