"""Write the outputs that README and docs show, as today's code prints them for stored runs.

python docs/outputs.py                           write what stands between the markers, and the picture
python docs/outputs.py --take autods-out/demo    store another fit first, of `make demo`
python docs/outputs.py --plan plan.json          store another plan first, of docs/plan.md's command with --json
python docs/outputs.py --check                   exit with 1 where one of them is not current

The command of docs/explain.md, with --json, writes explain.json.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from autods.config.profiles import read_profile
from autods.events import Event, SearchStarted, StageStarted, TrialFinished, TrialForecasted, TrialMoved, TrialStarted
from autods.report import FitReport, serialize
from autods.report.answers.fit import make_fit_document
from autods.report.answers.problems import make_explain_document
from autods.report.fit_progress import FitState, advance, describe_status, render_search
from autods.report.live import TrialProgress
from autods.report.render_terminal import print_document
from autods.report.results.explain import Explanation
from autods.report.trial_names import unusual_knobs
from autods.schema import read_known
from autods.tuner.fit import plan_stages
from autods.types import Knobs, Record, Skipped, TierUse, Trial
from autods.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "docs" / "demo.json"
PLAN = ROOT / "docs" / "llama-7b.json"
EXPLANATION = ROOT / "docs" / "explain.json"
PICTURE = ROOT / "docs" / "demo.svg"
PAGES = (ROOT / "README.md", *(ROOT / "docs" / name for name in ("fit.md", "plan.md", "explain.md")))
_OUT = "autods-out/demo"
_COLUMNS = 100
_BLOCK = re.compile(r"(<!-- output: (\w+), written by docs/outputs.py -->\n).*?(<!-- end -->)", re.DOTALL)


def read_run() -> FitReport:
    """The stored run."""
    return serialize.from_dict(json.loads(RUN.read_text()))


def take(folder: Path) -> None:
    """Store the finished fit in `folder`, with the paths of `make demo` instead of those of this machine."""
    report = serialize.read(folder)
    question = report.question
    if question.ops_folder:
        question = replace(question, ops_folder=question.ops_folder.replace(str(Path.home()), "/home/you"))
    text = json.dumps(serialize.to_dict(replace(report, out=_OUT, question=question)), allow_nan=False)
    RUN.write_text(text.replace(f"{ROOT}/", "") + "\n")


def take_plan(path: Path) -> None:
    """Store the memory of each rung of a plan: times and paths are those of a machine."""
    kept = ("rung", "verdict", "device", "host", "pinned", "nvme")
    rungs = [{key: rung[key] for key in kept} for rung in json.loads(path.read_text())["rungs"]]
    PLAN.write_text(json.dumps({"rungs": rungs}) + "\n")


def _label_trial(trial: Trial) -> str:
    return unusual_knobs(trial.knobs, recomputes=True)


def print_trials() -> str:
    """The lines of the walk and of the last trial, as they are printed where nothing is redrawn."""
    report = read_run()
    ladder = report.question.ladder
    first = [record for record in report.trials if record.trial.purpose == "walk"]
    walk = sorted([*report.skipped, *first], key=lambda each: ladder.index(_rung(each)))
    with TrialProgress(console := _console(), label=_label_trial) as listen:
        for each in walk:
            listen(each if isinstance(each, Skipped) else TrialFinished(record=each))
        console.print("…")
        listen(TrialFinished(record=report.trials[-1]))
    return _text(console)


def draw_progress() -> str:
    """What a terminal of 80 columns shows while the first trial after the walk runs."""
    report = read_run()
    walk = {record.trial.rung: record for record in report.trials if record.trial.purpose == "walk"}
    grown = next(record.trial for record in report.trials if record.trial.purpose != "walk")
    question = report.question
    assert question.device_bytes is not None
    limit, profile = question.device_bytes, read_profile(question.profile)
    events: list[Event] = [
        SearchStarted(
            ladder=question.ladder,
            device_bytes=limit,
            usable_bytes=limit,
            most_trials=question.budget.trials,
        )
    ]
    for forecast in report.forecast:
        rung = forecast.rung
        known = walk[rung].trial if rung in walk else Trial(rung=rung, knobs=Knobs(), purpose="walk")
        use = TierUse(peak_bytes=forecast.memory["device"].peak_bytes, limit_bytes=limit)
        events.append(TrialForecasted(trial=known, memory={"device": use}))
    events += [*report.skipped, *(TrialFinished(record=record) for record in walk.values())]
    state = FitState(since_s=0.0)
    for event in events:
        state = advance(state, event, 0.0)
    stages = plan_stages(profile, rungs=len(question.ladder), is_forecast=True, is_timed=False, recomputes=True)
    state = advance(state, StageStarted(stages=tuple(stages), place=1), 0.0)
    state = advance(state, TrialStarted(id=len(walk) + 1, trial=grown), 0.0)
    for step in range(2):
        state = advance(state, TrialMoved(id=len(walk) + 1, phase="backward", step=step), 4.0 + 3.0 * step)
    console = _console(width=80)
    console.print(render_search(state, 8.0, console))
    console.print(describe_status(state, 8.0))
    return _text(console)


def print_details() -> str:
    """The end of a fit with --verbose."""
    print_document(make_fit_document(read_run()), console := _console(), verbose=True)
    return _text(console)


def print_explained() -> str:
    """A config in words, with what its keys cost."""
    explanation = read_known(Explanation, json.loads(EXPLANATION.read_text()))
    print_document(make_explain_document(explanation), console := _console())
    return _text(console)


def tabulate_plan() -> str:
    """A plan as a Markdown table, a row a rung."""
    rungs = json.loads(PLAN.read_text())["rungs"]
    best = next(rung["rung"] for rung in rungs if rung["verdict"] == "fits")
    lines = [
        "| rung | verdict | device per rank (low to high) | deciding phase | host per node | pinned per rank "
        "| NVMe per node |",
        "|---|---|---|---|---|---|---|",
    ]
    for rung in rungs:
        device = rung["device"]
        verdict = rung["verdict"].replace("_", " ")
        peak, low, high = (format_bytes(device[key]) for key in ("peak_bytes", "low_bytes", "high_bytes"))
        sizes = (rung["host"]["node"]["peak_bytes"], rung["pinned"]["peak_bytes"], rung["nvme"]["node"]["peak_bytes"])
        cells = [
            *(f"**{text}**" if rung["rung"] == best else text for text in (rung["rung"], verdict)),
            f"{peak} ({low.partition(' ')[0]}–{high})",
            max(device["by_phase"], key=device["by_phase"].get),
            *(format_bytes(size) if size else "" for size in sizes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw() -> str:
    """The end of a fit as an SVG image, which makes no request to another place."""
    print_document(make_fit_document(read_run()), printed := _console(colour=True))
    console = _console(colour=True, record=True)
    # Lines that are printed whole, to be copied, are wrapped: a picture would cut them.
    console.print(Text.from_ansi(_text(printed)))
    svg = console.export_svg(title="autods fit", unique_id="fit")
    return re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)  # the reader's own monospace font does


def render() -> Iterator[tuple[Path, str]]:
    """Each page that shows an output, and the picture: (file, its text today)."""
    for page in PAGES:
        yield page, _BLOCK.sub(lambda block: f"{block[1]}{_fence(block[2])}{block[3]}", page.read_text())
    yield PICTURE, draw()


def _fence(name: str) -> str:
    """The output of that name as a code block; tables of Markdown stay as they are."""
    text = BLOCKS[name]()
    return text if text.startswith("|") else f"```\n{text}```\n"


def _rung(each: Record | Skipped) -> str:
    return each.rung if isinstance(each, Skipped) else each.trial.rung


def _console(*, width: int = _COLUMNS, colour: bool = False, record: bool = False) -> Console:
    """A console that keeps what is printed: plain text of a file, or with the colours of a terminal."""
    system: Literal["truecolor"] | None = "truecolor" if colour else None
    return Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system=system, record=record, _environ={}
    )


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    lines = (line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())
    return "\n".join(lines) + "\n"


BLOCKS: Mapping[str, Callable[[], str]] = {
    "plan": tabulate_plan,
    "explain": print_explained,
    "trials": print_trials,
    "details": print_details,
    "progress": draw_progress,
}

if __name__ == "__main__":
    if "--take" in sys.argv:
        take(Path(sys.argv[sys.argv.index("--take") + 1]))
    if "--plan" in sys.argv:
        take_plan(Path(sys.argv[sys.argv.index("--plan") + 1]))
    stale = [path for path, text in render() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv and stale:
        sys.exit(f"python docs/outputs.py writes {', '.join(str(path.relative_to(ROOT)) for path in stale)}")
    for path, text in render():
        path.write_text(text)
