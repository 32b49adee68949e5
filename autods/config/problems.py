"""A problem of a DeepSpeed config, the question about the config, and how rules answer it.

A rule is a function of the question that yields problems. They stand in `key_rules` (is it read at all?), `batch_rules`
(do sizes and ranks go together?) and `effect_rules` (does it do what its user wants?); `validator` says who asks which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from .deepspeed import get_key

Severity = Literal["error", "warning", "note"]
ZERO = "zero_optimization"
PARTS = ("param", "optimizer")
_SHORTEST_VALUE = 3  # characters: "cpu" may be part of any message
_STAGES: Mapping[str, Literal[0, 1, 2, 3]] = {"0": 0, "1": 1, "2": 2, "3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something about a key. `error`: DeepSpeed refuses it, or trains something else. `hint` is the way out."""

    severity: Severity
    key: str
    problem: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledKeys:
    """What the installed DeepSpeed, of this version, says about a config.

    `defaults` has every dotted key that it reads, such as 'zero_optimization.stage'; its value is None where nothing is
    set, or where DeepSpeed does not say. `strict` are the sections in which it refuses unknown keys. `replaced` maps
    deprecated keys to their successors. `complaints` are pairs of a dotted key and what DeepSpeed says against it.
    `schedule_arguments` are those of the config's learning-rate schedule; None where neither DeepSpeed nor
    torch has one of that name. `has_optimizer` is False where neither has the config's optimizer. `optimizers` and
    `schedules` are the names of DeepSpeed's own.
    """

    version: str
    defaults: Mapping[str, Any]
    strict: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    complaints: tuple[tuple[str, str], ...] = ()
    schedule_arguments: tuple[str, ...] | None = None
    has_optimizer: bool = True
    optimizers: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()


_NOT_ASKED = InstalledKeys(version="", defaults={})  # a search does not wait for the import of DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The config to judge. `ranks` is None where the number of GPUs is not known; `on_cpu`: CPU ranks train."""

    config: Mapping[str, Any]
    ranks: int | None = None
    installed: InstalledKeys = _NOT_ASKED
    on_cpu: bool = False

    def get(self, dotted: str) -> Any:
        """The value at a dotted key; None where there is none."""
        return get_key(self.config, dotted)

    def has(self, dotted: str) -> bool:
        """Whether the config has the dotted key, whatever its value."""
        section, _, name = dotted.rpartition(".")
        holder = self.get(section) if section else self.config
        return isinstance(holder, Mapping) and name in holder

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section of ZeRO."""
        section = self.config.get(ZERO)
        return section if isinstance(section, Mapping) else {"stage": 1} if section is True else {}  # an old spelling

    @property
    def stage(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage; 0 where none or no valid one is given. DeepSpeed reads text as a number."""
        return read_stage(self.zero.get("stage")) or 0

    @property
    def is_stage_open(self) -> bool:
        """Whether a library fills in the stage, so that nothing is known of it."""
        return self.zero.get("stage") == "auto"

    def offload_device(self, part: str) -> str:
        """Where 'param' or 'optimizer' is offloaded to: 'none', 'cpu' or 'nvme'."""
        return str(self.get(f"{ZERO}.offload_{part}.device") or "none")


def read_stage(value: Any) -> Literal[0, 1, 2, 3] | None:
    """The stage as DeepSpeed reads it; None where it refuses the value."""
    return _STAGES.get(str(int(value) if isinstance(value, bool | float) and value in range(4) else value))


Rule = Callable[[Question], Iterator[Problem]]


def find_problems(question: Question, rules: Iterable[Rule]) -> tuple[Problem, ...]:
    """Return all problems, errors first. The first error about a key hides everything else about it."""
    problems = [problem for rule in rules for problem in rule(question)]
    errors = {each.key: each for each in reversed(problems) if each.severity == "error"}
    kept = [each for each in problems if errors.get(each.key, each) is each]
    return tuple(sorted(kept, key=lambda problem: ("error", "warning", "note").index(problem.severity)))


def walk_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each (dotted key, value) that is no section, in order. An empty section counts as a value."""
    return ((name, value) for name, value in walk_sections(config) if not (isinstance(value, Mapping) and value))


def walk_sections(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each (dotted key, value), those of sections too."""
    for key, value in config.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from walk_sections(value, f"{prefix}{key}.")


def find_named_keys(config: Mapping[str, Any], message: str) -> Iterator[str]:
    """Yield the keys of the config that the message is about: of several words by their place, of one, then by value.

    A word such as "enabled" or "type" says nothing without its section, or quotation marks. Nor does a short value.
    """
    squeezed, places, words, values = _squeeze(message), dict[str, int](), list[str](), list[str]()
    for name, value in walk_keys(config):
        section, _, last = name.rpartition(".")
        parent = section.rpartition(".")[2]
        if "_" in last:
            if (place := squeezed.find(_squeeze(last))) >= 0:
                places[name] = place
        elif f"'{last}'" in message or (_names(message, last) and _names(message, parent or last)):
            words.append(name)
        is_telling = len(str(value)) > _SHORTEST_VALUE or (parent and _names(message.lower(), parent))
        if isinstance(value, str) and is_telling and _names(message, value):
            values.append(name)
    yield from (*sorted(places, key=places.__getitem__), *words, *values)


def _names(message: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", message) is not None


def _squeeze(text: str) -> str:
    """'Pre-scale gradients' and 'prescale_gradients' are the same."""
    return re.sub(r"[\W_]", "", text).lower()


def error(key: str, problem: str, hint: str = "") -> Problem:
    """Return what DeepSpeed refuses, or trains otherwise."""
    return Problem(severity="error", key=key, problem=problem, hint=hint)


def warning(key: str, problem: str, hint: str = "") -> Problem:
    """Return what DeepSpeed takes, and its user can hardly want."""
    return Problem(severity="warning", key=key, problem=problem, hint=hint)


def note(key: str, problem: str, hint: str = "") -> Problem:
    """Return what its user may want to know."""
    return Problem(severity="note", key=key, problem=problem, hint=hint)


def shorten(value: Any) -> str:
    """A value in a message: as JSON writes it, and not too long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:59]}…"


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether JSON would call it a number; true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def name_first(names: Sequence[str]) -> str:
    """'overlap_comm and 2 more'."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
