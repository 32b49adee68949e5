"""README and docs stay true: commands parse, code compiles, links lead somewhere, and generated pages are current."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from autods.cli.main import app
from autods.diagnosis import diagnose
from tests.support.documents import BLOCK, PAGES, ROOT, blocks, commands, load_script

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MOST_WORDS = 25
WRITTEN = [page for page in PAGES if page.name != "cli.md"]  # which the help texts of the options make
MESSAGES = {  # of docs/troubleshooting.md, with what diagnose has to say
    "CUDA out of memory": ("out_of_memory", "device"),
    "return code = -9": ("unknown", None),
    "Bus error": ("out_of_memory", "shm"),
    "Check batch related": ("config", None),
    "Please correct": ("config", None),
    "Unable to JIT load": ("toolchain", None),
    "does not match the version torch": ("toolchain", None),
    "loss scale already at minimum": ("user_code", None),
    "Watchdog caught": ("secondary", None),
    "server socket has failed": ("communication", None),
}


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_documented_command_is_understood(page: str, line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    group = typer.main.get_command(app)
    with group.make_context("autods", ["--help"], resilient_parsing=True) as context:
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        assert command is not None, f"{page}: {line}"
        if "--help" not in arguments:
            command.make_context(name, arguments, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_of_python_and_json_are_valid(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            compile(text, str(page), "exec")
        elif language == "json":
            json.loads(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in _LINK.findall(BLOCK.sub("", page.read_text())):
        if not target.startswith(("http://", "https://", "mailto:")):
            place, _, anchor = target.partition("#")
            file = page.parent / place if place else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in list_anchors(file), f"{page.name}: {target}"


def list_anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them on GitHub and on the site."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_no_sentence_is_long(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "code", BLOCK.sub("\n\n", page.read_text()))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for part in re.split(r"\n\s*\n|\n[|>-] |\n\d\. |\|", text):
        for sentence in re.split(r"(?<=[.!?:])\s+", part):
            words = re.findall(r"[\w'’%-]+", sentence)
            assert len(words) <= _MOST_WORDS, " ".join(sentence.split())


def test_diagnose_knows_the_messages_of_the_documents() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    rows = re.findall(r"^\| `([^`]+)` \|", page.read_text(), re.MULTILINE)
    answers = {row: diagnose(row.replace(" … ", "\n")) for row in rows}
    assert [(answer.kind, answer.tier) for answer in answers.values()] == list(MESSAGES.values())
    assert all(part in row for part, row in zip(MESSAGES, rows, strict=True))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_page_of_options_is_current() -> None:
    reference = load_script("reference")
    assert reference.PAGE.read_text() == reference.render(), "python docs/reference.py writes it"


def test_shown_outputs_are_what_is_printed_today() -> None:
    outputs = load_script("outputs")
    for path, text in outputs.render():
        assert path.read_text() == text, "python docs/outputs.py writes it"


def test_each_output_is_shown_on_a_page() -> None:
    outputs = load_script("outputs")
    shown = [name for page in PAGES for name in re.findall(r"<!-- output: (\w+)", page.read_text())]
    assert sorted(shown) == sorted(outputs.BLOCKS)
    assert any(f"]({outputs.PICTURE.relative_to(ROOT)})" in page.read_text() for page in PAGES)
