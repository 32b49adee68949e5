"""What the workload is with each choice of its arguments; asked once of each, over all runs of a probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from ..journal import Journal, Past
from ..typed import read_as
from ..values import ModelFacts, Scalar, WorkloadSource
from ..workload.conditions import source_under

# DeepSpeed op → why it cannot be built here, beside the facts.
Surveyed = tuple[ModelFacts, Mapping[str, str]]


@dataclass(slots=True, kw_only=True)
class Surveys:
    """look: what finds it, where no earlier run of the probe has. known: what was found, by the source's digest."""

    source: WorkloadSource
    journal: Journal
    past: Past
    look: Callable[[Mapping[str, Scalar]], Surveyed]
    known: dict[str, Surveyed] = field(default_factory=dict)

    def of(self, conditions: Mapping[str, Scalar]) -> Surveyed:
        """See `cells.Survey`."""
        digest = source_under(self.source, conditions).digest
        if digest not in self.known:
            before = self.past.surveys.get(digest)
            if before is not None:
                self.known[digest] = read_as(ModelFacts, before["facts"]), before["op_problems"]
            else:
                facts, problems = self.known[digest] = self.look(conditions)
                self.journal.surveyed(digest, {"facts": asdict(facts), "op_problems": dict(problems)})
        return self.known[digest]

    def facts(self, conditions: Mapping[str, Scalar]) -> ModelFacts:
        """Without the ops."""
        return self.of(conditions)[0]
