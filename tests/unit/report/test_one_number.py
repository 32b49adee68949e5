"""Of 200 made-up fits every place that shows a config's rate, memory or verdict shows the same one."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from autods.events import SearchStarted, TrialFinished
from autods.report import serialize
from autods.report.answers.fit import make_fit_document
from autods.report.answers.ladder import find_fastest, find_usable, list_ladder
from autods.report.document import Chart, Document, Paragraph
from autods.report.fit_progress import FitState, advance, find_best, list_rows
from autods.report.render_html import to_page
from autods.report.render_markdown import to_markdown
from autods.report.render_terminal import print_document
from autods.report.results.fit import Certificate, FitQuestion, FitReport, Throughput
from autods.report.results.measured import find_measured, measure_configs
from autods.report.text import format_rate, format_use
from autods.report.trial_names import config_name
from autods.runner.testing import fit, out_of_memory
from autods.types import CardUse, Knobs, Purpose, Record, TierUse, Trial

GIB = 2**30
LIMIT = 80 * GIB
RUNGS = ("ddp", "zero1", "zero2", "zero3", "zero3-offload")
CERTIFICATES = (
    Certificate(passed=True, optimizer_steps=8),
    Certificate(optimizer_steps=8, failures=("it leaks",)),
    Certificate(optimizer_steps=8, not_checked=("the model has no eval()",)),
)
PURPOSES: tuple[Purpose, ...] = ("walk", "grow", "grow", "grow", "race", "race", "tune", "verify")


def invent_trials(draw: random.Random) -> Iterator[Record]:
    """Several trials of few configs, each with noise; some run out, exams among them."""
    number = 0
    for rung in draw.sample(RUNGS, draw.randint(1, len(RUNGS))):
        for _ in range(draw.randint(1, 4)):
            settings = {"zero_optimization.reduce_bucket_size": draw.choice((10**6, 10**7))}
            knobs = Knobs(micro_batch=draw.choice((1, 2, 8, 30)), checkpointing=draw.random() < 0.5, settings=settings)
            rate, peak = 10 ** draw.uniform(-1, 4), draw.randint(GIB, LIMIT)
            in_use = draw.choice((None, 0.6, 0.9, 1.0))  # of the peak; None: a CPU rank
            for repeat in range(draw.randint(1, 5)):
                number += 1
                purpose = draw.choice(PURPOSES)
                trial = Trial(rung=rung, knobs=knobs, purpose=purpose, repeat=repeat)
                if draw.random() < 0.1:
                    yield Record(id=number, trial=trial, outcome=out_of_memory(missing_bytes=GIB), seconds=1.0)
                    continue
                if draw.random() < 0.1:
                    trial = replace(trial, purpose="certify", exam="worst_case")
                outcome = fit(
                    peak_bytes=int(peak * draw.uniform(0.97, 1.0)),
                    limit_bytes=LIMIT,
                    samples_per_second=rate * draw.uniform(0.7, 1.3),
                )
                if in_use is not None:
                    peak_bytes = outcome.memory["device"].peak_bytes
                    card = CardUse(allocated_bytes=0, reserved_bytes=0, in_use_bytes=int(in_use * peak_bytes))
                    outcome = replace(outcome, card=card)
                yield Record(id=number, trial=trial, outcome=outcome, seconds=1.0)


def explain(trials: tuple[Record, ...]) -> dict[str, str]:
    """Why each config was left, as a race says it: a rung that was tried as a variant alone was not tried itself."""
    recomputes = any(record.trial.knobs.checkpointing for record in trials)
    tried = {config_name(each.trial.rung, each.trial.knobs, recomputes=recomputes) for each in trials}
    return dict.fromkeys(RUNGS, "not tried: the forecast finds ddp faster") | dict.fromkeys(tried, "raced to the end")


def invent_report(seed: int) -> FitReport:
    draw = random.Random(seed)
    trials = tuple(invent_trials(draw))
    report = FitReport(
        status="nothing_fits",
        trials=trials,
        reasons=explain(trials),
        question=FitQuestion(
            workload="made-up",
            gpus=8,
            device_bytes=LIMIT,
            usable_bytes=draw.choice((0, int(0.95 * LIMIT))),
            ladder=RUNGS,
            stop="fastest",
        ),
        out="autods-out/made-up",
    )
    configs = measure_configs(trials)
    if not configs:
        return report
    best = draw.choice(configs)  # the search decides by more than the median
    return replace(
        report,
        status="fit",
        rung=best.trial.rung,
        knobs=best.trial.knobs,
        ds_config={"train_batch_size": best.trial.knobs.train_batch(8)},
        throughput=Throughput(samples_per_second=best.samples_per_second, tokens_per_second=best.tokens_per_second),
        memory=best.memory,
        certificate=draw.choice(CERTIFICATES),
    )


def print_at(document: Document, width: int, *, verbose: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_document(document, console, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row_of(text: str, rung: str) -> str:
    """The ladder's row of a rung, whose outcome comes second."""
    return next(row for row in text.splitlines() if re.match(rf"[|\s]*{re.escape(rung)}[|\s]+\\?[✓✗~!·]", row))


def lines_of_page(page: str) -> str:
    """A row of a table a line, without its tags."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"\s+", " ", page).replace("</tr>", "\n").replace("<tr", "\n<tr"))


@pytest.mark.parametrize("seed", range(200))
def test_every_place_shows_the_same_of_a_config(seed: int) -> None:
    report = invent_report(seed)
    document = make_fit_document(report)
    narrow = [print_at(document, 80, verbose=verbose) for verbose in (False, True)]
    texts = [print_at(document, 200), *narrow, to_markdown(document), lines_of_page(to_page(document))]
    charts = [part for part in document.parts if isinstance(part, Chart) and part.title.startswith("samples/s by")]
    points = {format_rate(value) for chart in charts for line in chart.lines.values() for value in line.values()}
    for row in list_ladder(report):
        config = find_fastest(report, row.rung)
        if config is None:
            assert row.rate is None
            continue
        rate = format_rate(config.samples_per_second)
        # What was in use comes first: it decides.
        use = format_use(TierUse(peak_bytes=config.device_peak_bytes, limit_bytes=LIMIT))
        verdict = "fits" if config.leaves_headroom(find_usable(report)) else "no headroom"
        for text in texts:
            assert rate in row_of(text, row.rung).split()
            assert use in " ".join(row_of(text, row.rung).split())
            assert verdict in row_of(text, row.rung)
        assert not charts or rate in points  # one micro batch makes no chart
    assert not [row.reason for row in list_ladder(report) if "not tried" in row.reason]
    asides = [str(part.words) for part in document.parts if isinstance(part, Paragraph)]
    untried = {name for aside in asides if "not tried" in aside for name in aside.rpartition("): ")[2].split(", ")}
    assert untried.isdisjoint(row.rung for row in list_ladder(report))
    assert untried.union(row.rung for row in list_ladder(report)) == set(RUNGS)
    data = json.loads(serialize.as_json(serialize.to_dict(report)))
    if report.throughput is not None:
        answer = format_rate(report.throughput.samples_per_second)
        assert format_rate(data["throughput"]["samples_per_second"]) == answer
        assert report.certificate is not None
        assert data["certificate"]["passed"] is report.certificate.passed
        word = "passed" if report.certificate.passed else "not passed" if report.certificate.failures else "incomplete"
        trust = "Certified." if report.certificate.passed else f"Certificate {word}."
        for text in texts:
            assert re.search(rf"speed\W+{re.escape(answer)} samples/s", text)
            assert re.search(rf"Use\W+{report.rung}, .*{re.escape(answer)} samples/s\W+{trust}", " ".join(text.split()))
            assert row_of(text, report.rung or "").split().count(answer) >= 1
            verdicts = re.findall(r"certificate:?\s+(not passed|passed|incomplete)", text, flags=re.IGNORECASE)
            assert set(verdicts) <= {word}


@pytest.mark.parametrize("seed", range(40))
def test_the_live_view_shows_what_the_answer_shows(seed: int) -> None:
    report = invent_report(seed)
    usable_bytes = report.question.usable_bytes or LIMIT
    search = SearchStarted(ladder=RUNGS, device_bytes=LIMIT, usable_bytes=usable_bytes)
    state = advance(FitState(since_s=0.0), search, 0.0)
    for record in report.trials:
        state = advance(state, TrialFinished(record=record), 1.0)
    best = find_best(state)
    if best is None:
        return
    so_far = replace(report, rung=best.trial.rung, knobs=best.trial.knobs, throughput=None)
    assert {row.rung: row.rate for row in list_rows(state) if row.rate} == {
        row.rung: row.rate for row in list_ladder(so_far) if row.rate
    }
    assert best.samples_per_second in {row.rate for row in list_rows(state)}


def test_expandable_segments_make_another_config() -> None:
    records = tuple(invent_trials(random.Random(0)))
    knobs = records[0].trial.knobs
    assert find_measured(records, records[0].trial.rung, replace(knobs, expandable=not knobs.expandable)) is None
