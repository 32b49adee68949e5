"""Fit the confidence of `autods.diagnose`: how often a verdict is right, by the grounds on which it was reached.

python tests/benchmarks/fit_confidence.py [--write]

Grounds are the weight of the rule that decided with the manner of its message ("cause raised"), or what was there
instead of a message ("exit code"). The logs are those of dev, never holdout. Rules were tuned on them, so that their
share of right verdicts would flatter. Each log is therefore diagnosed without the phrases that no log of another
source has, as if nobody had seen it. A verdict is right if kind and tier are.

A share of few cases is drawn to the share of all: (right + strength × share of all) / (cases + strength). The
strength is the one with the least log loss where each source is judged by the other ones. `--write` stores the figures
in autods/diagnosis/signatures/confidence.toml; tests/benchmarks/diagnosis_score.py shows the calibration on holdout.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

from cases import Case, load, split

import autods
from autods.diagnosis import root_cause, signatures

STRENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
CAP = 0.99  # of so few logs nothing is surer
NOT_FITTED = {"no text": 0.1, "empty": 0.2}  # no log of the corpus is like that
TARGET = Path(signatures.__file__).with_name("signatures") / "confidence.toml"
HEAD = """\
# How often a verdict is right, by its grounds: the weight of the row that decided and the manner of its message,
# or what was there instead of one. Written by tests/benchmarks/fit_confidence.py from the dev logs, each of them read
# without the phrases that only its own source has. `cases` and `right` are its counts. "other" stands for grounds
# that no log had.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One verdict on a log of dev."""

    source: str
    grounds: str
    right: bool


@contextmanager
def forget_phrases(forgotten: frozenset[str]) -> Iterator[None]:
    """Diagnose without these phrases and words. A row that had no others does not match."""
    rows = tuple(row for each in ALL if (row := _forget(each, forgotten)) is not None)
    with mock.patch.object(signatures, "read_signatures", return_value=rows):
        _clear_caches()
        yield
    _clear_caches()


def _clear_caches() -> None:
    signatures.find_signature.cache_clear()


def _forget(row: signatures.Signature, forgotten: frozenset[str]) -> signatures.Signature | None:
    phrases, words = (tuple(word for word in known if word not in forgotten) for known in (row.phrases, row.words))
    pattern = row.pattern if words or not row.words else ""
    is_left = bool(phrases or pattern or not (row.phrases or row.pattern))
    return replace(row, phrases=phrases, words=words, pattern=pattern) if is_left else None


ALL = signatures.read_signatures()


def judge(case: Case) -> Outcome:
    """Diagnose a case, and note the grounds of the verdict."""
    asked: list[str] = []

    def note(grounds: str) -> float:
        asked.append(grounds)
        return 0.5

    log = next(iter(case.files.values())) if len(case.files) == 1 else case.files
    with mock.patch.object(root_cause, "find_confidence", note):
        said = autods.diagnose(log, case.exit_code)
    return Outcome(case.source, asked[-1], (said.kind, said.tier) == (case.kind, case.tier))


def judge_unseen(cases: Sequence[Case]) -> list[Outcome]:
    """Judge each case as if nobody had seen its source."""
    phrases = frozenset(phrase for row in ALL for phrase in (*row.phrases, *row.words))
    texts = ["\n".join(case.files.values()).lower() for case in cases]
    used = [frozenset(phrase for phrase in phrases if phrase in text) for text in texts]
    outcomes = []
    for case, of_case in zip(cases, used, strict=True):
        others = (each for other, each in zip(cases, used, strict=True) if other.source != case.source)
        with forget_phrases(of_case.difference(*others)):
            outcomes.append(judge(case))
    return outcomes


def estimate(outcomes: Sequence[Outcome], grounds: str, strength: float) -> float:
    """The share of right verdicts on these grounds, drawn to the share of all."""
    share = sum(outcome.right for outcome in outcomes) / len(outcomes)
    same = [outcome.right for outcome in outcomes if outcome.grounds == grounds]
    return min(CAP, (sum(same) + strength * share) / (len(same) + strength))


def log_loss(outcomes: Sequence[Outcome], strength: float) -> float:
    """The mean loss, where each source is judged by the other ones."""
    loss = 0.0
    for source in {outcome.source for outcome in outcomes}:
        others = [outcome for outcome in outcomes if outcome.source != source]
        for outcome in outcomes:
            if outcome.source == source:
                sure = estimate(others, outcome.grounds, strength)
                loss -= math.log(sure if outcome.right else 1 - sure)
    return loss / len(outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the figures in {TARGET.name}")
    options = parser.parse_args()
    dev = split(load())["dev"]
    outcomes = judge_unseen(dev)
    losses = {strength: log_loss(outcomes, strength) for strength in STRENGTHS}
    strength = min(losses, key=lambda each: losses[each])
    right = sum(outcome.right for outcome in outcomes)
    print(f"{right} of {len(outcomes)} right without a source's own phrases; strength {strength:g}")
    print("log loss by strength: " + ", ".join(f"{each:g}: {loss:.4f}" for each, loss in losses.items()))
    tables = [HEAD]
    for grounds in (*sorted({outcome.grounds for outcome in outcomes}), "other"):
        same = [outcome.right for outcome in outcomes if outcome.grounds == grounds]
        sure = round(estimate(outcomes, grounds, strength), 2)
        print(f"{grounds:18} {sure:.2f}  {sum(same)}/{len(same)}")
        tables.append(f'"{grounds}" = {{ confidence = {sure}, cases = {len(same)}, right = {sum(same)} }}\n')
    tables += [f'"{grounds}" = {{ confidence = {sure} }}\n' for grounds, sure in NOT_FITTED.items()]
    if options.write:
        TARGET.write_text("".join(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
