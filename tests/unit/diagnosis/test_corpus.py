"""The corpus says clearly what is wrong with it: a case without a log, a log without a case, a label that is none."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "corpus"))

from cases import SPLIT, CorpusError, checksum, load, split

CASE = '[one]\nkind = "out_of_memory"\ntier = "device"\naction = "leaner_rung"\nsource = "provoked"\nrank = 3\n'


@pytest.fixture
def group(tmp_path: Path) -> Path:
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "cases.toml").write_text(CASE)
    (folder / "one.log").write_bytes(b"step 1\rstep 2\nCUDA out of memory\n")
    return folder


def test_a_case_has_its_log_and_labels_and_keeps_carriage_returns(group: Path) -> None:
    (case,) = load(group.parent)
    assert (case.name, case.group, case.kind, case.tier, case.rank) == ("one", "group", "out_of_memory", "device", 3)
    assert case.files == {"one.log": "step 1\rstep 2\nCUDA out of memory\n"}


def test_a_run_with_several_files_keeps_their_names(group: Path) -> None:
    (group / "one.log").unlink()
    (group / "one" / "attempt_0").mkdir(parents=True)
    (group / "one" / "attempt_0" / "stderr.log").write_text("a")
    (group / "one" / "slurm.out").write_text("b")
    (case,) = load(group.parent)
    assert case.files == {"attempt_0/stderr.log": "a", "slurm.out": "b"}


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (CASE.replace("one", "two"), "no case for the log one"),
        (CASE + "[two]\n" + CASE.partition("\n")[2], "neither two.log nor files"),
        (CASE.replace('action = "leaner_rung"\n', ""), "lacks action"),
        (CASE.replace("leaner_rung", "pray"), "'pray' is none of"),
        (CASE.replace("rank = 3", 'rank = "3"'), "is not of type int"),
        (CASE + "mood = 1\n", "which means nothing here"),
        (CASE.replace('tier = "device"\n', ""), "a tier belongs to"),
        (CASE.replace("[one]", "[one"), "cases.toml"),
    ],
)
def test_each_mistake_in_a_case_is_named(group: Path, said: str, complaint: str) -> None:
    (group / "cases.toml").write_text(said)
    with pytest.raises(CorpusError, match=r"cases\.toml") as error:
        load(group.parent)
    assert complaint in str(error.value)


def test_a_folder_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no \*/cases\.toml"):
        load(tmp_path)


def test_case_names_are_unique_and_every_case_has_a_source() -> None:
    cases = load()
    assert len(cases) >= 150
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    assert all(case.source.strip() for case in cases)


def test_the_held_out_and_the_unseen_cases_are_unchanged() -> None:
    manifest = tomllib.loads(SPLIT.read_text(encoding="utf-8"))
    parts = split(load())
    assert len(parts["holdout"]) == len(manifest["holdout"])
    assert checksum(parts["holdout"]) == manifest["sha256"]
    assert {group: checksum(parts[group]) for group in manifest["unseen"]} == manifest["unseen"]


def test_one_source_is_in_one_part_only() -> None:
    sources = [{case.source for case in cases} for cases in split(load()).values()]
    assert sum(map(len, sources)) == len(set.union(*sources))


def test_a_changed_label_or_log_changes_the_checksum(group: Path) -> None:
    before = checksum(load(group.parent))
    assert checksum(load(group.parent)) == before
    (group / "one.log").write_bytes(b"step 1\n")
    assert checksum(load(group.parent)) != before
