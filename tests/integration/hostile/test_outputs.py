"""Files that options name, and folders of results: nothing of the user's is lost, and what is wrong is said at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autods.report import serialize
from tests.support.hostile import Case, each
from tests.support.reports import fitting_report

PLAN = "plan model.py --gpus 2 --on a100-80gb"
PROBE = "probe model.py --gpus 2 --device cpu --gpu-memory 1GiB --vary micro_batch=1"
RUN = "run model.py --gpus 2 --device cpu --gpu-memory 1GiB --global-batch 8 --steps 5"
LOST = "it holds something else, which would be lost"
NO_FOLDER = "make its folder first: mkdir -p"


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def hard_link(path: Path) -> None:
    os.link(path.parent / "model.py", path)


def finished(path: Path) -> None:
    path.mkdir()
    serialize.write(fitting_report(str(path)), path)


OUTPUTS = {
    "the model as page": Case(f"{PLAN} --html model.py", 2, LOST),
    "the model as page by dots": Case(f"{PLAN} --html d/.././model.py", 2, LOST, files={"d": Path.mkdir}),
    "the model as page by a link": Case(f"{PLAN} --html x", 2, LOST, files={"x": link("model.py")}),
    "the model as page by a hard link": Case(f"{PLAN} --html x", 2, LOST, files={"x": hard_link}),
    "the config as trace": Case(f"{PLAN} --base-config c --timeline c", 2, LOST, files={"c": "{}"}),
    "a machine as trace": Case(f"{PLAN} --timeline m.toml", 2, LOST, files={"m.toml": "title = 1"}),
    "a trace as page": Case(f"{PLAN} --html x", 2, LOST, files={"x": '{"traceEvents": []}'}),
    "the experiment as table": Case(f"{PROBE} --csv x.toml", 2, LOST, files={"x.toml": "[vary]"}),
    "a journal as page": Case(f"{PLAN} --html o/journal.jsonl", 2, LOST, files={"o/journal.jsonl": '{"kind": 1}'}),
    "the journal to come as table": Case(
        f"{PROBE} --out o --csv o/journal.jsonl", 2, "--csv and the results are one file", files={"o": Path.mkdir}
    ),
    "the page to come as table": Case(
        f"{PROBE} --out o --csv l", 2, "one file", files={"o": Path.mkdir, "l": link("o/report.html")}
    ),
    "page and trace": Case(f"{PLAN} --html x --timeline x", 2, "--timeline and --html are one file"),
    "page and trace by dots": Case(f"{PLAN} --html ./x --timeline d/../x", 2, "one file", files={"d": Path.mkdir}),
    "page and trace by a link": Case(f"{PLAN} --html l --timeline x", 2, "one file", files={"l": link("x")}),
    "a page in no folder": Case(f"{PLAN} --html a/b/x", 2, NO_FOLDER),
    "a trace in no folder": Case(f"{PLAN} --timeline a/x", 2, NO_FOLDER),
    "a table in no folder": Case(f"{PROBE} --csv a/x", 2, NO_FOLDER),
    "a table in the folder to come": Case(f"{PROBE} --out o --csv o/x", 2, NO_FOLDER),
    "a page by a link into no folder": Case(f"{PLAN} --html l", 2, NO_FOLDER, files={"l": link("a/x")}),
    "a page by a link to itself": Case(f"{PLAN} --html l", 2, "Too many levels", files={"l": link("l")}),
    "a page in a file": Case(f"{PLAN} --html model.py/x", 2, "Not a directory"),
    "a page as folder": Case(f"{PLAN} --html .", 2, "is a folder"),
    "a page as folder to come": Case(f"{PLAN} --html x/", 2, "the name of a folder"),
    "a page to standard output": Case(f"{PLAN} --html -", 2, "standard output shows the result"),
    "a page to a device": Case(f"{PLAN} --html /dev/null", 2, "is a device"),
    "a page in a home": Case(f"{PLAN} --html ~/x", 2, NO_FOLDER),
    "a page in /proc": Case(f"{PLAN} --html /proc/x", 2, "cannot be written"),
    "a page of 255 characters": Case(f"{PLAN} --html {'n' * 255}", 0, "zero", leaves=("n" * 255,), lines=9),
    "a page by a link": Case(f"{PLAN} --html l", 0, "zero", files={"l": link("x")}, leaves=("x",), lines=9),
    "the earlier page": Case(f"{PLAN} --html x", 0, "zero", files={"x": "<!doctype html>"}, lines=9),
    "a page over nothing": Case(f"{PLAN} --html x", 0, "zero", files={"x": ""}, lines=9),
    "a report whose page is a folder": Case(
        "report d", 0, "no page: d/report.html: cannot be written", files={"d": finished, "d/report.html": Path.mkdir}
    ),
    "a report whose page is a device": Case(
        "report d --json", 0, "no page: d/report.html", files={"d": finished, "d/report.html": link("/dev/full")}
    ),
    "a report whose page leads nowhere": Case(
        "report d", 0, "no page: d/report.html", files={"d": finished, "d/report.html": link("a/x")}
    ),
    "a run among others' results": Case(f"{RUN} --out d", 2, "holds run.json and no journal", files={"d/run.json": ""}),
    "a run among others' checkpoints": Case(
        f"{RUN} --out d --fresh", 2, "holds checkpoints and no journal", files={"d/checkpoints/x": "mine"}
    ),
    "data that are not there": Case(f"{RUN} --data gone", 2, "defines no build_dataset, so --data has no effect"),
}


@each(OUTPUTS)
def test_what_the_user_has_is_not_lost(meet, case, tmp_path):
    meet(case)
    for name, content in case.files.items():
        if isinstance(content, str) and case.exit_code == 2:
            assert (tmp_path / name).read_text() == content
    assert "def build_model" in (tmp_path / "model.py").read_text()


HINTS = {
    "explain": ("explain c model.py --gpus 1 --gpu-memory 1GiB", "assign one of these in one place"),
    "plan": ("plan model.py --gpus 1 --gpu-memory 1GiB", "give the config with --base-config"),
}


@pytest.mark.parametrize(("line", "hint"), HINTS.values(), ids=list(HINTS))
def test_a_hint_suits_its_command(meet, line, hint):
    model = "def build_model(): ...\ndef build_batch(n): ...\nDEEPSPEED_CONFIG = make()\n"
    ending = meet(Case(line, 2, hint, files={"c": "{}", "model.py": model}))
    assert ("--base-config" in ending.stderr) == line.startswith("plan")
