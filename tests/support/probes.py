"""Made-up questions and machines for the tests of probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from autods.config.settings import Settings
from autods.devices import Card
from autods.events import Listener
from autods.prober.probe_settings import ProbeSettings, resolve_probe
from autods.prober.run import probe
from autods.report.results.probe import ProbeReport
from autods.requests import ProbeRequest
from autods.runner.testing import Answer, ScriptedRunner
from autods.system.host import Hardware
from autods.types import ModelFacts, Record, Scalar, Trial, WorkloadSource

MIB = 2**20
LIMIT = 416 * MIB
HERE = Hardware(cpu="EPYC", cores=2, host_bytes=2**36, host_free_bytes=2**35, cards=())
CARD = Card(index=0, name="A100", total_bytes=80 * 2**30, free_bytes=80 * 2**30)
FACTS = ModelFacts(
    parameters=10**6, largest_parameter=10**4, checkpointing=True, tokens_per_sample=64, has_optimizer=False
)
MODEL = """
def build_model(n_layer=2): ...
def build_batch(micro_batch_size, seq_len=64, width=8): ...
"""


def ask(folder: Path, *vary: str, text: str = MODEL, hardware: Hardware = HERE, **asked: Any) -> ProbeSettings:
    """A question about a model.py in this folder, on 2 CPU ranks unless something else is said."""
    path = folder / "model.py"
    path.write_text(text)
    source = WorkloadSource(kind="file", path=str(path), name="model", digest="1")
    said = {"gpus": 2, "device": "cpu", "gpu_memory": "416MiB", "out": folder / "out", **asked}
    return resolve_probe(ProbeRequest(path, vary=vary, **said), source, hardware=hardware)


@dataclass(slots=True)
class Bench:
    """Answers by a function, surveys by another; `asked` lists what ran, `killed_at` stops it as Ctrl-C would.

    room: what a second bench is, where there is room for one.
    """

    answer: Answer
    facts: Callable[[Mapping[str, Scalar]], ModelFacts] = lambda conditions: FACTS
    problems: Mapping[str, str] = field(default_factory=dict)
    killed_at: int | None = None
    asked: list[Trial] = field(default_factory=list)
    surveyed: list[Mapping[str, Scalar]] = field(default_factory=list)
    room: Callable[[], AbstractContextManager[Any]] = lambda: pytest.fail("nobody asked for trials side by side")
    stopped: Event = field(default_factory=Event)

    def survey(self, conditions: Mapping[str, Scalar]) -> tuple[ModelFacts, Mapping[str, str]]:
        self.surveyed.append(conditions)
        return self.facts(conditions), self.problems

    def run(self, trial: Trial, *, id: int) -> Record:
        if self.killed_at is not None and len(self.asked) + 1 == self.killed_at:
            raise KeyboardInterrupt
        self.asked.append(trial)
        return replace(ScriptedRunner(self.answer).run(trial), id=id)

    def order(self, trials: Sequence[Trial]) -> Sequence[Trial]:
        return trials

    def another(self, conditions: Mapping[str, Scalar]) -> AbstractContextManager[Bench]:
        return self.room()

    def stop(self) -> None:
        self.stopped.set()


def probed(question: ProbeSettings, bench: Bench, listen: Listener = lambda event: None, **said: Any) -> ProbeReport:
    """The probe on that bench."""

    @contextmanager
    def start(settings: Settings, listen: Listener) -> Iterator[Bench]:
        yield bench

    return probe(question, listen=listen, start=start, **said)
