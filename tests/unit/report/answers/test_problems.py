"""A diagnosis on the terminal and as a file."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import autods
from autods.diagnosis import Diagnosis
from autods.report.answers.problems import make_diagnosis_document, make_explain_document
from autods.report.document import Paragraph
from autods.report.render_terminal import print_document
from autods.report.results.explain import ExplainedKey, Explanation

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {0} has a total capacity of 79.15 GiB"
)
EIGHT = "".join(f"[rank{rank}]: {OOM.format(rank)}. Process {4000 + rank} uses it.\n" for rank in range(8))


def shown(diagnosis: Diagnosis, *, terminal: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, no_color=True, highlight=False)
    print_document(make_diagnosis_document(diagnosis, whole=not terminal), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_advice_comes_second_after_what_died() -> None:
    said = autods.diagnose(EIGHT)
    lines = shown(said)
    assert lines[0] == f"Out of device memory on rank 0  (sure, {said.confidence:.2f})"
    assert lines[1].startswith("What to do: the GPU is full")


def test_alike_lines_of_eight_ranks_are_shown_once() -> None:
    said = autods.diagnose(EIGHT)
    assert said.ranks == tuple(range(8))
    assert said.evidence == (f"{OOM.format(0)}. Process 4000 uses it.",)
    assert shown(said)[2] == f"  {said.evidence[0]}  ×8 ranks"


def test_the_evidence_begins_with_the_line_of_the_named_place() -> None:
    logs = {"rank_0.log": "12:00:09 " + OOM.format(0), "rank_1.log": "12:00:01 " + OOM.format(1)}
    said = autods.diagnose(logs)
    assert (said.rank, said.places, said.ranks) == (1, ("rank_1.log:1",), (0, 1))
    assert said.evidence == (OOM.format(1),)


@pytest.mark.parametrize("log", ["step 1\n==========\n", f"==========\n{OOM.format(0)}\n==========\n"])
def test_a_rule_is_no_evidence(log: str) -> None:
    said = autods.diagnose(log, 1)
    assert said.evidence
    assert not [line for line in said.evidence if "==" in line]


def test_a_note_that_the_advice_has_is_not_shown_again() -> None:
    said = autods.diagnose(
        f"{OOM.format(0)} of which 1.00 GiB is free. 2.50 GiB is reserved by PyTorch but unallocated"
    )
    assert "Fragmentation: 2.5 GiB" in said.advice
    assert sum("ragmentation" in line for line in shown(said)) == len(said.notes) == 1


def test_a_full_disk_is_not_called_nvme() -> None:
    assert shown(autods.diagnose("OSError: [Errno 28] No space left on device"))[0].startswith("Out of disk space  (")


def test_a_loss_that_is_no_number_did_not_fail_in_the_code() -> None:
    first, advice, *_ = shown(autods.diagnose("step 1 loss: 2.3\nstep 2 loss: nan\n"))
    assert first.startswith("The training diverged  (")
    assert advice.startswith("What to do: try a smaller learning rate")


def test_advice_is_wrapped_on_a_terminal_and_log_lines_are_not() -> None:
    said = autods.diagnose(EIGHT)
    at_file, at_terminal = shown(said), shown(said, terminal=True)
    assert len(at_file[1]) > 80
    assert len(at_terminal) == len(at_file) + 1
    assert any(said.evidence[0] in line for line in at_terminal)


def test_the_documented_keys_are_those_of_the_json() -> None:
    document = (Path(__file__).parents[4] / "docs" / "diagnose.md").read_text()
    _, _, table = document.partition("| key | value |")
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(autods.diagnose(EIGHT).to_dict())


def test_control_characters_of_a_log_are_shown_and_not_obeyed() -> None:
    assert "\x07" not in "".join(shown(autods.diagnose(f"\x07{OOM.format(0)}\n")))


def test_a_large_value_keeps_its_fraction() -> None:
    keys = tuple(ExplainedKey(key="size", value=value) for value in (12345.5, 5e8, 10**6))
    document = make_explain_document(Explanation(config="ds.json", deepspeed="0.19.8", keys=keys, findings=()))
    shown = [str(part.words) for part in document.parts if isinstance(part, Paragraph) and part.indent == 2]
    assert shown == ["size = 12345.5", "size = 500,000,000", "size = 1,000,000"]
