"""How well `autods.diagnose` names causes: on the parts of the corpus side by side.

python tests/benchmarks/diagnosis_score.py [--wrong] [--json] [--seeds 11 12 13]

`dev` is what rules are written and tuned on. `holdout` judges them: tests/corpus/split.toml lists it, and only its
totals are printed. The rules of the first version had seen all logs, so that their score on holdout is optimistic.
`unseen-…` are logs whose wording neither the rules nor the other logs had when they were written.

"kind and tier" counts the cases in which both are right; "rank" those with a known rank. A false device-memory verdict
says that a GPU's memory ran out where it did not. Calibration compares the stated confidence, in bins, with the share
of right answers (kind and tier).

The exceptions of users' own code are generated (tests/support/user_errors.py), 200 a seed: phrases of the rules in
sentences that a user's file raises. Right is user_code at the line that names the exception. Seeds 1 to 9 were looked
at while rules were written; others judge.

The bar: no false device-memory verdict on dev and holdout, 95 % on holdout, and 97 % of the users' exceptions of each
seed. The unseen logs are shown without a bar.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

from cases import KINDS, MEMORY, Case, load, split

import autods
from tests.support.user_errors import generate_user_errors

BINS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 1.01)
LEAST = 0.95  # of holdout's cases
USER_ERRORS = 200
LEAST_USER_ERRORS = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was said of one case."""

    case: Case
    diagnosis: autods.Diagnosis

    @property
    def right(self) -> bool:
        return (self.diagnosis.kind, self.diagnosis.tier) == (self.case.kind, self.case.tier)

    @property
    def false_device_memory(self) -> bool:
        is_said = (self.diagnosis.kind, self.diagnosis.tier) == ("out_of_memory", "device")
        return is_said and (self.case.kind not in MEMORY or self.case.tier != "device")


@dataclass(slots=True, kw_only=True)
class Score:
    """Totals over the cases of one part. `confused` maps "right kind → stated kind" to the number of cases."""

    cases: int
    right: int
    action: int
    rank: int
    ranked: int
    false_device_memory: int
    calibration_error: float
    bins: list[tuple[str, int, float, float]] = field(default_factory=list)  # name, cases, mean confidence, right
    confused: dict[str, int] = field(default_factory=dict)


def answer(case: Case) -> Answer:
    """Ask `autods.diagnose` as a user would: with the run's logs and its exit code, where that is known."""
    log = next(iter(case.files.values())) if len(case.files) == 1 else case.files
    return Answer(case=case, diagnosis=autods.diagnose(log, case.exit_code))


def score(answers: Sequence[Answer]) -> Score:
    """Add up the answers on one part."""
    ranked = [each for each in answers if each.case.rank is not None]
    bins = []
    error = 0.0
    for low, high in pairwise(BINS):
        inside = [each for each in answers if low <= each.diagnosis.confidence < high]
        if inside:
            stated = sum(each.diagnosis.confidence for each in inside) / len(inside)
            right = sum(each.right for each in inside) / len(inside)
            bins.append((f"{low:.1f} to {min(high, 1.0):.1f}", len(inside), round(stated, 3), round(right, 3)))
            error += abs(stated - right) * len(inside) / len(answers)
    pairs = Counter((each.case.kind, each.diagnosis.kind) for each in answers)
    return Score(
        cases=len(answers),
        right=sum(each.right for each in answers),
        action=sum(each.diagnosis.action == each.case.action for each in answers),
        rank=sum(each.diagnosis.rank == each.case.rank for each in ranked),
        ranked=len(ranked),
        false_device_memory=sum(each.false_device_memory for each in answers),
        calibration_error=round(error, 4),
        bins=bins,
        confused={f"{right} → {said}": count for (right, said), count in sorted(pairs.items())},
    )


def count_right_user_errors(seed: int) -> int:
    """How many of the generated exceptions are diagnosed as user code, at their line."""
    right = 0
    for error in generate_user_errors(USER_ERRORS, seed):
        said = autods.diagnose(error.log, 1)
        right += said.kind == "user_code" and said.places == (f"line {error.line}",)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", action="store_true", help="list dev's cases that are diagnosed wrong")
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13], help="of the generated exceptions")
    options = parser.parse_args()
    answers = {name: [answer(case) for case in cases] for name, cases in split(load()).items()}
    scores = {name: score(given) for name, given in answers.items()}
    of_users = {seed: count_right_user_errors(seed) for seed in options.seeds}
    if options.json:
        totals = {name: asdict(each) for name, each in scores.items()}
        print(json.dumps(totals | {"user_errors": {"of": USER_ERRORS, "right": of_users}}, indent=2))
    else:
        show(scores)
        shown = ", ".join(f"{right}/{USER_ERRORS} (seed {seed})" for seed, right in of_users.items())
        print(f"\nexceptions of users' own code: {shown}")
    if options.wrong:
        show_wrong(answers["dev"])
    passed = scores["holdout"].right >= LEAST * scores["holdout"].cases
    passed = passed and min(of_users.values()) >= LEAST_USER_ERRORS * USER_ERRORS
    sys.exit(not passed or any(scores[part].false_device_memory for part in ("dev", "holdout")))


def show(scores: dict[str, Score]) -> None:
    """Print the totals, the calibration and the confusion tables."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table("part", box=None, header_style="bold")
    for title in ("cases", "kind and tier", "action", "rank", "false device memory", "calibration error"):
        table.add_column(title, justify="right")
    for name, each in scores.items():
        shares = (f"{hits}/{of} {hits / of:.1%}" for hits, of in ((each.right, each.cases), (each.action, each.cases)))
        rank = f"{each.rank}/{each.ranked}"
        false = str(each.false_device_memory)
        table.add_row(name, str(each.cases), *shares, rank, false, f"{each.calibration_error:.3f}")
    console.print(table)
    bins = Table("confidence", box=None, header_style="bold")
    for name in scores:
        for title in ("cases", "stated", "right"):
            bins.add_column(f"{name} {title}", justify="right")
    names = dict.fromkeys(name for each in scores.values() for name, *_ in each.bins)
    for name in sorted(names):
        cells: list[str] = []
        for each in scores.values():
            row = next((row for row in each.bins if row[0] == name), None)
            cells += ["", "", ""] if row is None else [str(row[1]), f"{row[2]:.2f}", f"{row[3]:.2f}"]
        bins.add_row(name, *cells)
    console.print("\n", bins)
    for name, each in scores.items():
        confusion = Table(f"{name}: right kind", box=None, header_style="bold")
        for kind in KINDS:
            confusion.add_column(kind.replace("_", "\n"), justify="right")
        for right in KINDS:
            confusion.add_row(right, *(str(each.confused.get(f"{right} → {said}", "·")) for said in KINDS))
        console.print("\n", confusion)


def show_wrong(answers: Sequence[Answer]) -> None:
    for each in answers:
        case, said = each.case, each.diagnosis
        if not each.right or (case.rank is not None and said.rank != case.rank):
            right = f"{case.kind}/{case.tier} rank {case.rank}"
            print(
                f"{case.group}/{case.name}: {right}; said {said.kind}/{said.tier} rank {said.rank} ({said.signature})"
            )


if __name__ == "__main__":
    main()
