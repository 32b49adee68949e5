"""The certificate as a person reads it, and as report.json keeps it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from autods.report import from_dict, to_dict
from autods.report.answers.certificate import describe_verdict
from autods.report.answers.certificate import list_checks as lines_of
from autods.report.results.fit import Certificate, CheckpointProof, Parity
from tests.support import terminal
from tests.support.reports import fitting_report

GIB = 2**30
PARITY = Parity(reference="ddp", steps=6, tolerance=0.02, largest_difference=0.0041, within=True)
CERTIFICATE = Certificate(
    passed=True,
    batch_shape=(8, 2048),
    draws=256,
    optimizer_steps=2,
    evaluated=True,
    checkpoint=CheckpointProof(bytes=3 * GIB // 2, save_s=3.14, load_s=2.0, gathered=True, restored=True),
    alloc_retries=0,
    headroom_bytes={"host": 30 * GIB, "device": 2 * GIB},
    headroom_kept=True,
    growth_bytes=0,
    parity=PARITY,
)


def said(**changes: Any) -> dict[str, str]:
    return {name: str(text) for name, text in lines_of(replace(CERTIFICATE, **changes))}


def parity(**changes: Any) -> str:
    return said(parity=replace(PARITY, **changes))["parity"]


def shown(certificate: Certificate | None, width: int = 100) -> str:
    return terminal.shown(replace(fitting_report(), certificate=certificate), width)


def test_every_part_that_was_proven_has_its_line() -> None:
    assert said() == {
        "longest batch": "8 × 2,048, the longest of 256 draws",
        "steps": "2 optimizer steps without an allocation retry, memory does not grow",
        "evaluation": "fits",
        "checkpoint": "1.5 GiB saved in 3.1 s, loaded in 2.0 s, evaluates to the same loss, whole weights gathered",
        "headroom": "device 2.0 GiB, host 30.0 GiB",
        "parity": "losses within 0.41 % of ddp's over 6 steps, tolerance 2 %",
    }


def test_a_batch_that_the_workload_made_itself_is_called_so() -> None:
    assert said(draws=0)["longest batch"] == "8 × 2,048, by the workload's own build_longest_batch"


def test_headroom_below_the_share_that_the_search_leaves_free_is_said() -> None:
    assert "less than the share" in said(headroom_kept=False)["headroom"]


def test_skipped_steps_stand_beside_those_that_ran() -> None:
    assert said(skipped_steps=3)["steps"] == (
        "2 optimizer steps without an allocation retry, memory does not grow, 3 more skipped as fp16 overflowed"
    )


def test_losses_that_differ_are_said_with_the_knob() -> None:
    apart = parity(within=False, largest_difference=0.123, changed_by=("zero_optimization.overlap_comm",))
    assert apart == (
        "losses differ by 12.3 % from ddp's over 6 steps, tolerance 2 %; changed by zero_optimization.overlap_comm"
    )
    mended = parity(changed_by=("a", "b"), taken_back="a")
    assert mended.endswith("tolerance 2 %, since a, which changed them, was taken back")
    assert parity(largest_difference=0.0) == "losses within 0 % of ddp's over 6 steps, tolerance 2 %"


def test_updates_stand_beside_the_losses() -> None:
    sizes = {"update_difference": 0.0005, "update_tolerance": 0.03}
    assert parity(**sizes).endswith("tolerance 2 %; updates within 0.05 % of ddp's, tolerance 3 %")
    apart = parity(within=False, **{**sizes, "update_difference": 0.1})
    assert apart.endswith("; updates differ by 10 % from ddp's, tolerance 3 %")


def test_gradient_norms_stand_beside_the_updates() -> None:
    said = parity(within=False, gradient_difference=0.66, gradient_tolerance=0.05)
    assert said.endswith("; gradient norms differ by 66 % from ddp's, tolerance 5 %")


def test_a_loss_that_is_no_number_is_said() -> None:
    assert "a loss is not finite where ddp's is" in parity(within=False, largest_difference=math.inf)


@pytest.mark.parametrize(("kind", "values"), [("update", "updates"), ("gradient", "gradient norms")])
def test_what_is_no_number_beside_the_losses_is_said(kind: str, values: str) -> None:
    text = parity(within=False, **{f"{kind}_difference": math.inf, f"{kind}_tolerance": 0.03})
    assert text.endswith(f"; {values} are not finite where ddp's are, tolerance 3 %")


def test_back_offs_failures_and_unchecked_parts_have_a_line_each() -> None:
    certificate = Certificate(backed_off=("a", "b"), failures=("c",), not_checked=("d", "e"))
    pairs = [(name, str(text)) for name, text in lines_of(certificate)]
    assert pairs == [("backed off", "a"), ("", "b"), ("failed", "c"), ("not checked", "d"), ("", "e")]


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, "passed"),
        ({"passed": False, "failures": ("x",)}, "not passed"),
        ({"passed": False, "not_checked": ("x",)}, "incomplete, what was checked holds"),
    ],
)
def test_the_certificate_headline_tells_failed_from_incomplete(changes: dict[str, Any], ends: str) -> None:
    assert str(describe_verdict(replace(CERTIFICATE, **changes))).strip() == f"Certificate: {ends}"


@pytest.mark.parametrize("width", [60, 80, 140])
def test_certificate_stands_before_the_next_commands(width: int) -> None:
    text = shown(CERTIFICATE, width)
    assert text.index("Certificate: passed") < text.index("Next")
    assert "longest batch" in text
    lines = text.partition("Next")[0].splitlines()
    assert all(
        len(line) <= width for line in lines if not line.startswith(("  use it", "  or "))
    )  # whole, to be copied


def test_a_fit_without_a_certificate_says_nothing_of_one() -> None:
    assert "Certificate" not in shown(None)


def test_markup_in_a_sentence_is_not_interpreted() -> None:
    assert "[/red] [bold]KeyError" in " ".join(shown(Certificate(failures=("[/red] [bold]KeyError",))).split())


def test_a_certificate_read_back_from_the_report_shows_the_same() -> None:
    infinite = replace(CERTIFICATE, parity=replace(PARITY, largest_difference=math.inf, within=False))
    gradients = replace(PARITY, gradient_difference=math.inf, gradient_tolerance=0.05, within=False)
    for certificate in (CERTIFICATE, infinite, replace(CERTIFICATE, parity=gradients)):
        written = to_dict(replace(fitting_report(), certificate=certificate))
        read = from_dict(json.loads(json.dumps(written, allow_nan=False))).certificate
        assert shown(read) == shown(certificate)
