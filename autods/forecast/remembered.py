"""Simulations kept on disk: what was asked before is answered at once, without torch.

Only for Hugging Face configs, whose digest says all there is to the model; a model.py may use files that nobody sees.
AUTODS_FORECAST_CACHE=off simulates again. What cannot be read or written is as if it were not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..system.host import cache_folder, versions
from ..types import Device, ModelFacts, WorkloadSource
from .simulator import gpu_library
from .values import Ask, Engine, Simulated, Simulator, Trace

_MOST = 2000  # files; each has some 50 KB
SAID = "what was simulated before is taken from the cache (AUTODS_FORECAST_CACHE=off simulates again)"


@dataclass(slots=True)
class Remembered(Simulator):
    """A `protocol.Simulator` that asks another one only for what it does not know. Calls raise SimulationFailed."""

    simulator: Simulator
    source: WorkloadSource
    _made_of: str = field(init=False)

    def __post_init__(self) -> None:
        own = {name: value for name, value in asdict(self.source).items() if name not in ("path", "name")}
        self._made_of = json.dumps([own, versions(), _code()], sort_keys=True, default=str)

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts:
        """Of the workload's model."""
        key = {"facts": device, **({"ranks": ranks} if ranks > 1 else {})}
        usable = device == "cpu" or gpu_library.library_path().exists()  # else the simulator says why it cannot
        if usable and (known := self._read(key)) is not None:
            with contextlib.suppress(TypeError):
                return ModelFacts(**known)
        found = self.simulator.facts(device, ranks=ranks)
        self._write(key, asdict(found))
        return found

    @contextlib.contextmanager
    def engine(self, ask: Ask) -> Iterator[Engine]:
        """One that is started when something new is asked."""
        with contextlib.ExitStack() as stack:
            yield _Lazy(self, ask, stack)

    def _read(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            found = json.loads(zlib.decompress(self._path(key).read_bytes()))
        except (OSError, ValueError, zlib.error):
            return None
        return found if isinstance(found, dict) else None

    def _write(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        path = self._path(key)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(zlib.compress(json.dumps(value).encode(), 1))
            os.replace(temporary, path)
            _prune(path.parent)

    def _path(self, key: Mapping[str, Any]) -> Path:
        said = json.dumps([self._made_of, key], sort_keys=True, default=str)
        return cache_folder() / "forecasts" / hashlib.sha256(said.encode()).hexdigest()[:32]


@dataclass(slots=True)
class _Lazy:
    remembered: Remembered
    ask: Ask
    stack: contextlib.ExitStack
    engine: Engine | None = None

    def measure(self, micro_batch: int) -> Simulated:
        key = {"engine": asdict(self.ask), "micro_batch": micro_batch}
        known = self.remembered._read(key)
        if known is not None:
            with contextlib.suppress(TypeError, KeyError, ValueError):
                return _unpacked(known)
        if self.engine is None:
            self.engine = self.stack.enter_context(self.remembered.simulator.engine(self.ask))
        found = self.engine.measure(micro_batch)
        self.remembered._write(key, _packed(found))
        return found


def remembered(simulator: Simulator, source: WorkloadSource) -> Simulator:
    """With a memory, where the source allows one and nobody turned it off."""
    off = os.environ.get("AUTODS_FORECAST_CACHE", "").lower() in ("off", "0", "no")
    return simulator if off or source.kind != "hf_config" else Remembered(simulator, source)


def _packed(simulated: Simulated) -> dict[str, Any]:
    traces = {
        tier: {
            "events": list(trace.events), "marks": trace.marks, "unrounded": sorted(trace.unrounded),
            "emptied": trace.emptied, "copied": trace.copied,
        }
        for tier, trace in simulated.traces.items()
    }  # fmt: skip
    own = {name: getattr(simulated, name) for name in Simulated.__dataclass_fields__ if name != "traces"}
    return {**own, "traces": traces}


def _unpacked(said: dict[str, Any]) -> Simulated:
    traces = {
        tier: Trace(
            events=array("q", packed["events"]),
            marks=tuple((count, phase) for count, phase in packed["marks"]),
            unrounded=frozenset(packed["unrounded"]),
            emptied=tuple(packed["emptied"]),
            copied=tuple((count, size) for count, size in packed["copied"]),
        )
        for tier, packed in said["traces"].items()
    }
    own = {name: value for name, value in said.items() if name not in ("traces", "assumed")}
    found = Simulated(**own, traces=traces, assumed=(*said["assumed"], SAID))
    return replace(found, seconds=0.0)


def _code() -> str:
    """Of the whole package: another version may simulate otherwise."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _prune(folder: Path) -> None:
    """Keep the newest."""
    files = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(folder)]
    for _, path in sorted(files)[: max(0, len(files) - _MOST)]:
        Path(path).unlink(missing_ok=True)
