from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from autods.config.profiles import Budget
from autods.devices import Card
from autods.events import Event, Note, TrialFinished, TrialMoved, TrialStarted
from autods.report import FitReport, text
from autods.report.answers.fit import describe_effort, describe_question, list_answer, make_fit_document
from autods.report.answers.ladder import find_telling_trials, list_ladder
from autods.report.answers.remedies import describe_shortage, list_remedies
from autods.report.answers.trials import chart_tuning
from autods.report.live import TrialProgress
from autods.report.render_html import to_page
from autods.report.render_markdown import to_markdown
from autods.report.results.fit import Certificate, ClosestRung, Spread
from autods.report.results.measured import measure_configs
from autods.types import CardUse, Examined, Failed, Knobs, Record, Skipped, TierUse, Trial
from autods.workload.script_source import ScriptLaunch
from tests.support.plans import rung as forecast_rung
from tests.support.reports import HARDWARE, WINNING, fit, fitting_report, hopeless_report, memory, oom, record
from tests.support.reports import failed as failure
from tests.support.terminal import printed, shown

EVENTS: tuple[Event, ...] = (
    Note(text="starting Ray"),
    TrialStarted(id=1, trial=record(1, "ddp", oom()).trial),
    TrialMoved(id=1, phase="backward", step=2),
    TrialFinished(record=record(1, "ddp", oom())),
    TrialFinished(record=record(2, "zero3", fit()), replayed=True),
    Skipped(rung="zero3-nvme", reason="no --nvme-path was given"),
)


def heard(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, legacy_windows=False, _environ={"TERM": "xterm"})
    with TrialProgress(console) as listen:
        for event in EVENTS:
            listen(event)
            if terminal:
                assert listen._live is not None
                listen._live.refresh()
    return out.getvalue()


def test_out_of_memory_shows_tier_rank_phase_wanted_and_free() -> None:
    assert text.format_outcome(oom()) == (
        "out of memory on device, rank 1, init: wanted 124.5 MiB, 35.1 MiB free of 416.0 MiB"
    )


def test_an_examined_trial_is_marked() -> None:
    did = Examined(batch_shape=(4, 128), draws=16, evaluated=True)
    assert text.format_outcome(replace(fit(), examined=did)).endswith("samples/s, examined")
    assert text.format_outcome(fit()).endswith("samples/s")


def test_an_out_of_memory_without_numbers_shows_its_evidence() -> None:
    bare = replace(oom(wanted=None), free_bytes=None, limit_bytes=None, step=3, phase="step")
    assert text.format_outcome(bare).startswith("out of memory on device, rank 1, step, step 3: DefaultCPUAllocator")


def test_a_failure_shows_its_kind_and_first_line_of_evidence() -> None:
    said = text.format_outcome(failure())
    assert said == "failed (toolchain), node, init: Unable to JIT load the async_io op: libaio headers are missing"


@pytest.mark.parametrize(
    ("peak", "limit", "said"),
    [
        (380 * 2**20, 416 * 2**20, "380.0 / 416.0 MiB"),
        (3 * 2**20, 64 * 2**30, "3.0 MiB / 64.0 GiB"),
        (3 * 2**20, None, "3.0 MiB"),
        (0, 416 * 2**20, "0 B / 416.0 MiB"),
    ],
)
def test_peak_and_limit_share_a_unit_where_readable(peak: int, limit: int | None, said: str) -> None:
    assert text.format_use(TierUse(peak_bytes=peak, limit_bytes=limit)) == said


@pytest.mark.parametrize(
    ("rate", "said"),
    [(0.0000084, "0.0000084"), (0.000012, "0.000012"), (0.0412, "0.0412"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_a_rate_has_three_significant_digits_and_no_exponent(rate: float, said: str) -> None:
    assert text.format_rate(rate) == said


@pytest.mark.parametrize(
    ("seconds", "name"), [(200_000, "days"), (80_000, "hours"), (1740, "minutes"), (12, "seconds"), (0.2, "seconds")]
)
def test_a_time_has_the_largest_unit_that_it_fills(seconds: float, name: str) -> None:
    assert text.choose_time_unit(seconds).name == name


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_names_every_rung_its_outcome_and_why_it_was_left(width: int) -> None:
    text = shown(fitting_report(), width)
    for rung in ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-nvme"):
        assert rung in text
    for said in ("out of memory", "failed", "✓ fits", "skipped", "393.4 / 416.0 MiB", "≥505.4 / 416.0 MiB", "41.7"):
        assert said in text
    assert "35.1 MiB free" in " ".join(text.split())
    assert "no --nvme-path was given" in " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_but_those_to_be_copied(width: int) -> None:
    lines = (shown(fitting_report(), width) + shown(hopeless_report(), width)).splitlines()
    long = [line for line in lines if len(line) > width]
    assert all("ds_config" in line or "accelerate.yaml" in line for line in long)


def test_rungs_that_were_not_needed_are_named_in_one_line() -> None:
    text = shown(fitting_report(), 100)
    assert "not tried (not needed: a faster rung fits): zero3-offload-param, zero3-offload" in text


def test_the_winner_shows_its_batch_and_what_to_type_next() -> None:
    text = shown(fitting_report(), 100)
    assert "micro batch 4 × accumulation 2 × 2 ranks = global batch 16" in text
    assert "gradient_checkpointing_enable()" in text
    assert "--deepspeed_config autods-out/gpt-2xcpu-1a2b3c/ds_config.json" in text


@pytest.mark.parametrize(("asked_s", "is_longer"), [(0, False), (60, True), (99.5, False), (3600, False)])
def test_a_fit_that_took_longer_than_asked_says_why(asked_s: float, is_longer: bool) -> None:
    report = fitting_report()
    report = replace(report, seconds=100, question=replace(report.question, budget=Budget(seconds=asked_s)))
    assert ("60.0 s were asked, and the least that gives an answer takes longer" in shown(report, 200)) == is_longer


def test_checkpointing_is_not_suggested_when_it_is_off() -> None:
    report = replace(fitting_report(), knobs=Knobs(checkpointing=False))
    assert "gradient_checkpointing_enable" not in shown(report, 100)


def test_the_winning_trial_stands_for_its_rung() -> None:
    row = find_telling_trials(fitting_report())["zero3"]
    assert isinstance(row, Record)
    assert row.id == 6


def test_the_fastest_trial_stands_for_a_losing_rung() -> None:
    trials = (
        record(1, "ddp", fit(300.0, 1.8)),
        record(2, "ddp", fit(320.0, 6.9), purpose="grow", knobs=Knobs(micro_batch=14)),
        record(3, "ddp", fit(340.0, 6.1), purpose="grow", knobs=Knobs(micro_batch=31)),
        record(4, "ddp", oom("backward"), purpose="grow", knobs=Knobs(micro_batch=64)),
        *fitting_report().trials,
    )
    row = find_telling_trials(replace(fitting_report(), trials=trials))["ddp"]
    assert isinstance(row, Record)
    assert row.id == 2


def test_a_trial_without_the_limit_does_not_count_as_a_fit() -> None:
    row = find_telling_trials(hopeless_report())["zero3"]
    assert isinstance(row, Record)
    assert row.outcome.kind == "out_of_memory"


def test_rungs_stand_in_the_order_of_the_ladder() -> None:
    report = replace(hopeless_report(), skipped=(Skipped(rung="zero1", reason="one rank"),))
    assert list(find_telling_trials(report)) == ["ddp", "zero1", "zero3"]


def test_nothing_fits_names_closest_rung_and_missing_bytes() -> None:
    assert describe_shortage(hopeless_report()) == "zero3 comes closest, 64.0 MiB of device memory are missing"
    assert "at least 64.0 MiB" in describe_shortage(hopeless_report(exact=False))
    disk = ClosestRung(rung="zero3-nvme", missing_bytes=2**30, tier="nvme")
    on_disk = replace(hopeless_report(), closest=disk)
    assert describe_shortage(on_disk).endswith("at least 1.0 GiB of disk space (NVMe) are missing")
    assert "1.0 GiB more disk space (NVMe), or more: the shortage is a lower bound" in [*list_remedies(on_disk)]


def test_when_nothing_fits_every_way_out_is_offered() -> None:
    advice = list(list_remedies(hopeless_report()))
    assert advice[0] == "--gpu-memory 512MiB"  # 416 + 64 and a little room
    assert any("--nvme-path" in line for line in advice)
    assert any("--gpus 4" in line for line in advice)
    assert not any("QLoRA" in line for line in advice)
    adapters = replace(hopeless_report(), question=replace(hopeless_report().question, lora="16"))
    assert any(line.startswith("--lora 4bit:16: QLoRA") for line in list_remedies(adapters))


def test_when_every_rung_failed_the_advice_of_the_failures_is_given() -> None:
    report = FitReport(status="nothing_fits", trials=(record(1, "ddp", failure()), record(2, "ddp", failure())))
    assert describe_shortage(report) == "no rung could be run to its end"
    assert next(iter(list_remedies(report))) == "ddp: apt-get install libaio-dev"
    assert "libaio-dev" in shown(report, 80)


def test_less_memory_is_no_way_out_where_none_was_lacking() -> None:
    skipped = FitReport(status="nothing_fits", skipped=(Skipped(rung="zero2", reason="one rank: no sharding to gain"),))
    assert [line.partition(" (")[0] for line in list_remedies(skipped)] == ["other rungs", "more ranks"]
    question = replace(hopeless_report().question, lacks_nvme=())
    failed = FitReport(status="nothing_fits", trials=(record(1, "ddp", failure()),), question=question)
    assert list(list_remedies(failed)) == ["ddp: apt-get install libaio-dev"]


def test_more_ranks_are_advised_where_a_rung_splits_the_model() -> None:
    report = hopeless_report()
    narrow = replace(report, question=replace(report.question, ladder=("ddp",)))
    assert any("--ladder zero1,zero2,zero3" in line for line in list_remedies(narrow))
    assert not any("more ranks" in line for line in list_remedies(narrow))
    alone = [*list_remedies(replace(report, question=replace(narrow.question, gpus=1)))]
    assert any("--gpus 2 --ladder zero1,zero2,zero3" in line for line in alone)
    assert any("rungs that hold states on the host" in line for line in alone)
    wide = replace(report, question=replace(report.question, ladder=("ddp", "zero2")))
    assert any("more ranks" in line for line in list_remedies(wide))


def test_a_rung_whose_variant_failed_alone_was_not_tried() -> None:
    report = fitting_report()
    bare = record(9, "zero3-offload", oom(), purpose="race", knobs=Knobs(micro_batch=1, checkpointing=False))
    left = {"zero3-offload": "not tried: zero3 is faster", "zero3-offload without checkpointing": "ran out"}
    ladder = (*report.question.ladder, "zero3-offload")
    report = replace(
        report,
        trials=(*report.trials, bare),
        reasons={**report.reasons, **left},
        question=replace(report.question, ladder=ladder),
    )
    assert "zero3-offload" not in [row.rung for row in list_ladder(report)]
    text = " ".join(printed(make_fit_document(report), 100, verbose=True).split())
    assert "not tried (zero3 is faster): zero3-offload" in text
    assert "zero3-offload without checkpointing ran out" in text


def test_a_row_of_a_variant_has_the_variant_s_reason() -> None:
    report = fitting_report()
    bare = record(9, "zero3-offload", fit(rate=9.0), knobs=Knobs(micro_batch=1, checkpointing=False))
    left = {"zero3-offload": "not tried: see the other", "zero3-offload without checkpointing": "raced to the end"}
    report = replace(report, trials=(*report.trials, bare), reasons={**report.reasons, **left})
    row = next(row for row in list_ladder(report) if row.rung == "zero3-offload")
    assert row.reason.endswith("times as fast as zero3; without checkpointing: raced to the end")


def test_a_winner_without_checkpointing_has_its_own_reason() -> None:
    winning = Knobs(micro_batch=4, checkpointing=False)  # as is every trial: the forecast finds recomputing slower
    left = {"zero3": "not tried: the forecast finds the other faster", "zero3 without checkpointing": "the fastest"}
    trials = (record(1, "zero3", fit(), purpose="grow", knobs=winning),)
    report = replace(fitting_report(), knobs=winning, trials=trials, reasons=left)
    row = next(row for row in list_ladder(report) if row.wins)
    assert row.reason == "the fastest"


def test_a_variant_with_expandable_segments_has_its_reason() -> None:
    left = {"zero3": "not tried: the forecast finds the other faster", "zero3 without checkpointing": "the fastest"}
    winning = Knobs(micro_batch=4, checkpointing=False, expandable=True)  # the forecast of a trial chooses segments
    trials = (record(1, "zero3", fit()), record(2, "zero3", fit(), purpose="grow", knobs=winning))
    report = replace(fitting_report(), knobs=winning, trials=trials, reasons=left)
    assert next(row for row in list_ladder(report) if row.wins).reason == "the fastest"


def test_what_only_a_large_batch_cannot_fit_is_not_tried() -> None:
    report = fitting_report()
    unfit = forecast_rung("zero3-offload", 246, verdict="cannot_fit")  # of the micro batch to enter with
    left = {**report.reasons, "zero3-offload": "not tried: the budget is spent"}
    report = replace(report, reasons=left, forecast=(unfit,))
    assert "zero3-offload" not in [row.rung for row in list_ladder(report)]
    text = " ".join(printed(make_fit_document(report), 100).split())
    assert "not tried (the budget is spent): zero3-offload" in text


def test_what_cannot_fit_by_the_forecast_has_a_row_in_each_stage() -> None:
    report = fitting_report()
    unfit = forecast_rung("ddp", 246, verdict="cannot_fit")
    left = {**report.reasons, "ddp": "cannot fit by the forecast: needs 246 GiB"}
    report = replace(report, trials=(record(5, "zero3", fit()),), reasons=left, forecast=(unfit,), skipped=())
    row = next(row for row in list_ladder(report) if row.rung == "ddp")
    assert row.mark.word == "cannot fit"


def test_an_empty_report_can_be_shown() -> None:
    assert "nothing fits" in shown(FitReport(status="nothing_fits"), 80)


def test_all_four_tiers_are_shown_when_they_were_measured() -> None:
    tiers = {**memory(380), "pinned": TierUse(peak_bytes=2**20), "nvme": TierUse(peak_bytes=2**30)}
    text = shown(replace(fitting_report(), memory=tiers), 100)
    assert all(tier in text for tier in ("device", "host", "pinned", "nvme"))


def test_progress_elsewhere_is_one_plain_line_for_each_event() -> None:
    text = heard(terminal=False)
    assert "\x1b" not in text
    assert text.splitlines() == [
        "starting Ray",
        "trial 1: ddp, micro batch 1 (walk): out of memory on device, rank 1, init: wanted 124.5 MiB, "
        "35.1 MiB free of 416.0 MiB [2.9 s]",
        "trial 2: zero3, micro batch 1 (walk): fits: 380.0 / 416.0 MiB, 12.3 samples/s [from the journal]",
        "skipped zero3-nvme: no --nvme-path was given",
    ]


def test_terminal_progress_shows_phase_and_step_of_running_trial() -> None:
    text = heard(terminal=True)
    assert "backward, 2 steps done" in text
    assert "walk 1×1" in text


def test_markup_in_messages_is_not_interpreted() -> None:
    nasty = replace(failure(), evidence="[/red] [bold]KeyError: [0]")
    report = replace(hopeless_report(), trials=(record(1, "ddp", nasty),))
    for width in (80, 120):
        assert "[/red] [bold]KeyError: [0]" in " ".join(shown(report, width).split())
    for terminal in (True, False):
        out = io.StringIO()
        with TrialProgress(Console(file=out, width=120, force_terminal=terminal)) as listen:
            listen(TrialFinished(record=record(1, "ddp", nasty)))
        assert "[/red] [bold]KeyError" in out.getvalue()


def test_trials_that_run_side_by_side_have_a_line_each() -> None:
    listen = TrialProgress(Console(file=io.StringIO()))

    def now() -> list[str]:
        out = io.StringIO()
        Console(file=out, width=120).print(listen._current())
        return out.getvalue().splitlines()

    for id, rung in ((1, "ddp"), (2, "zero2")):
        listen(TrialStarted(id=id, trial=record(id, rung, fit()).trial))
    listen(TrialMoved(id=1, phase="backward", step=3))
    first, second = now()
    assert "ddp" in first
    assert "backward, 3 steps done" in first
    assert "zero2" in second
    listen(TrialFinished(record=record(1, "ddp", failure())))
    (left,) = now()
    assert "zero2" in left


@pytest.mark.parametrize(
    ("visible", "option"),
    [((0, 1), "deepspeed --num_gpus 2 YOUR_SCRIPT.py"), ((2, 5), "deepspeed --include localhost:2,5 YOUR_SCRIPT.py")],
)
def test_the_launcher_takes_the_cards_that_were_measured(visible: tuple[int, ...], option: str) -> None:
    report = fitting_report()
    cards = tuple(Card(index=index, name="H100", total_bytes=1, free_bytes=1) for index in visible)
    on_cards = replace(
        report, question=replace(report.question, device="cuda"), hardware=replace(HARDWARE, cards=cards)
    )
    assert option in shown(on_cards, 120)


def test_the_answer_comes_first_in_four_lines() -> None:
    lines = shown(fitting_report(), 80, verbose=False).split("\n\n")[0].splitlines()
    assert lines[2].startswith("Use zero3, micro batch 4, gradient checkpointing: 41.7 samples/s. ")
    answer = " ".join(" ".join(lines[2:]).split())
    for words in (
        "Not certified.",
        "why the first rung that fits; --stop fastest measures the others too; 3.4 times as fast as the first that",
        "speed 41.7 samples/s, 2,669 tokens/s",
        "batch micro batch 4 × accumulation 2 × 2 ranks = global batch 16",
        "memory device memory 393.4 / 416.0 MiB, host memory 1.3 / 64.0 GiB",
        "use it DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 2 YOUR_SCRIPT.py",
        "or DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 YOUR_SCRIPT.py",
    ):
        assert words in answer


@pytest.mark.parametrize("argv", [(), ("--deepspeed_config", "{ds_config}")])
def test_a_script_is_told_where_its_config_goes(argv: tuple[str, ...]) -> None:
    report = fitting_report()
    script = ScriptLaunch(path="train.py", argv=argv, kind="deepspeed", takes_local_rank=True)
    text = shown(replace(report, question=replace(report.question, script=script)), 120, verbose=False)
    assert ("deepspeed.initialize(…, config=" in text) is (not argv)


def test_without_v_only_failures_are_explained() -> None:
    text = shown(fitting_report(), 80, verbose=False)
    assert "Certificate" not in text
    assert "ommunication of a rank" not in text
    assert f"autods report {fitting_report().out} -v shows the reasons" in text
    outcome = next(record.outcome for record in fitting_report().trials if isinstance(record.outcome, Failed))
    assert " ".join(outcome.evidence.split())[:30] in " ".join(text.split())


def test_a_certificate_that_fails_is_told_without_v() -> None:
    certificate = Certificate(passed=False, failures=("the loaded checkpoint evaluates to another loss",))
    text = shown(replace(fitting_report(), certificate=certificate), 120, verbose=False)
    assert "Certificate not passed. " in text
    assert "certificate not passed: the loaded checkpoint evaluates to another loss" in text


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        (Certificate(passed=True), "samples/s. Certified."),
        (Certificate(not_checked=("no eval()",)), "samples/s. Certificate incomplete."),
        (Certificate(failures=("it leaks",)), "samples/s. Certificate not passed."),
        (None, "samples/s. Not certified."),
    ],
)
def test_the_first_line_says_whether_it_is_certified(certificate: Certificate | None, said: str) -> None:
    report = replace(fitting_report(), certificate=certificate)
    assert said in shown(report, 120, verbose=False).splitlines()[2]


def test_a_machine_that_is_not_steady_is_named_in_the_answer() -> None:
    def speed(low: float, high: float) -> str:
        report = replace(fitting_report(), spread=Spread(low=low, high=high, trials=6))
        return next(line for line in shown(report, 120, verbose=False).splitlines() if line.startswith("  speed"))

    assert "(40–42 in 6 trials), 2,669 tokens/s" in speed(40.0, 42.0)
    assert "(25–42 in 6 trials: this machine is busy or not steady)" in speed(25.0, 42.0)


@pytest.mark.parametrize(
    ("rate", "said"),
    [(30.0, "next is zero2 with 30 samples/s"), (45.0, "zero2 is as fast, within noise: 45 samples/s")],
)
def test_a_rung_that_looks_faster_is_not_called_the_next(rate: float, said: str) -> None:
    report = fitting_report()
    trials = tuple(each for each in report.trials if each.trial.rung not in ("ddp", "zero2"))
    report = replace(report, trials=(*trials, record(8, "zero2", fit(300.0, rate))))
    assert said in " ".join(printed(make_fit_document(report), 100).split())


def test_a_rung_that_the_certificate_left_is_not_called_noise() -> None:
    certificate = Certificate(passed=True, backed_off=("from zero2 to zero3: its losses differ",))
    report = replace(fitting_report(), certificate=certificate)
    report = replace(report, trials=(*report.trials[3:], record(8, "zero2", fit(300.0, 83.4))))
    text = " ".join(printed(make_fit_document(report), 100).split())
    assert "zero2 was faster, but is not proven: 83.4 samples/s" in text
    reason = next(row.reason for row in list_ladder(report) if row.rung == "zero2")
    assert "times as fast as zero3, but not proven" in reason


def test_a_rung_that_failed_its_exam_is_not_said_to_have_won() -> None:
    certificate = Certificate(passed=True, backed_off=("from zero2 to zero3: the longest batch ran out",))
    report = replace(fitting_report(), certificate=certificate, reasons={"zero2": "fastest of 2 that fit: won in turn"})
    exam = replace(
        record(9, "zero2", oom()), trial=Trial(rung="zero2", knobs=Knobs(), purpose="certify", exam="worst_case")
    )
    report = replace(report, trials=(*report.trials[3:], record(8, "zero2", fit(300.0, 83.4)), exam))
    ran_out = "ran out of device memory in the certificate's exam"
    reason = next(row.reason for row in list_ladder(report) if row.rung == "zero2")
    assert reason == f"2.0 times as fast as zero3, but {ran_out}"
    text = " ".join(printed(make_fit_document(report), 100).split())
    assert "the fastest that fits" not in text
    assert text.count(f"zero2 was faster, but {ran_out}: 83.4 samples/s") == 1


@pytest.mark.parametrize(
    ("first", "named"),
    [
        (replace(WINNING, checkpointing=False), "(zero3, micro batch 4, no gradient checkpointing)"),
        (replace(WINNING, settings={}), "(zero3, micro batch 4, before tuning)"),
        (replace(WINNING, accumulation=1), "(zero3, micro batch 4 × accumulation 1)"),
        (replace(WINNING, keeps_headroom=True), ""),
    ],
)
def test_the_first_that_fitted_is_named_by_what_differs(first: Knobs, named: str) -> None:
    report = fitting_report()
    own = record(2, "zero3", fit(300.0, 41.7), purpose="grow", knobs=WINNING)
    question = replace(report.question, stop="fastest")
    trials = (record(1, "zero3", fit(300.0, 20.0), knobs=first), own)
    report = replace(report, trials=trials, question=question, skipped=())
    (why,) = [words for name, words in list_answer(report) if name == "why"]
    assert why == f"the fastest that fits{named and f'; 2.1 times as fast as the first that fitted {named}'}"


def test_a_winner_without_headroom_says_so_in_every_place() -> None:
    report = fitting_report()
    report = replace(report, question=replace(report.question, usable_bytes=380 * 2**20))
    text = printed(make_fit_document(report), 120)
    assert "it leaves no headroom" in text
    assert "~ no headroom" in next(line for line in text.splitlines() if line.startswith(" zero3 "))


def test_a_cards_cache_is_told_from_what_was_in_use() -> None:
    card = CardUse(allocated_bytes=0, reserved_bytes=0, in_use_bytes=350 * 2**20)
    trial = record(1, "zero3", replace(fit(400.0, 41.7), card=card), knobs=WINNING)
    report = fitting_report()
    report = replace(report, trials=(trial,), skipped=())
    report = report.answer_with(measure_configs(report.trials)[0], WINNING)
    lines = printed(make_fit_document(report), 120).splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith(" zero3 "))
    assert "in use  350.0 / 416.0 MiB" in lines[place]
    assert "device  400.0 / 416.0 MiB" in lines[place + 1]
    assert any("device memory 400.0 / 416.0 MiB (350.0 in use)" in line for line in lines)
    assert "fits: 400.0 / 416.0 MiB (350.0 in use)" in text.format_outcome(trial.outcome)


def test_what_left_no_headroom_is_not_the_best_of_tuning() -> None:
    report = fitting_report()
    tuned = (
        record(n, "zero3", fit(mib, 50.0 - n), purpose="tune", knobs=WINNING) for n, mib in ((20, 410.0), (21, 300.0))
    )
    report = replace(report, trials=tuple(tuned), question=replace(report.question, usable_bytes=400 * 2**20))
    assert list(chart_tuning(report).lines["best so far"]) == [21]


def test_the_answer_says_that_the_model_has_its_own_weights() -> None:
    report = fitting_report()
    question = replace(report.question, parameters=10**9, weights=True)
    assert "1B parameters, from its weights, on 2 cpu ranks" in shown(replace(report, question=question), 120)


def test_warnings_of_the_machine_stand_in_every_answer() -> None:
    warning = "card 1 (H100) is throttled: too hot (look at the fans)"
    for report in (fitting_report(), hopeless_report()):
        document = make_fit_document(replace(report, warnings=(warning,)))
        for answer in (printed(document, 120), to_markdown(document), to_page(document)):
            assert f"warning: {warning}" in " ".join(answer.split())


def test_a_winner_that_is_held_below_its_card_says_so() -> None:
    report = fitting_report()
    assert report.knobs is not None
    held = replace(report, knobs=replace(report.knobs, keeps_headroom=True))
    (limit,) = re.findall(
        r"of the card's (.*) its allocator may take no more", printed(make_fit_document(held), width=200)
    )
    assert limit == "416.0 MiB"
    assert "may take no more" not in printed(make_fit_document(report), width=200)


def test_the_question_names_the_nodes() -> None:
    report = fitting_report()
    assert describe_question(report) == "gpt, 32.6M parameters, on 2 cpu ranks × 416.0 MiB"
    question = replace(report.question, gpus=16, nodes=2)
    assert "on 16 cpu ranks of 2 nodes × 416.0 MiB" in describe_question(replace(report, question=question))


def test_a_single_trial_and_a_single_retry_are_singular() -> None:
    report = fitting_report()
    assert describe_effort(replace(report, trials=report.trials[:1])).startswith("1 trial, ")
    once = replace(fit(380.0, 12.34), alloc_retries=1)
    assert "its allocator ran full 1 time" in text.format_outcome(once)
    assert "1 times" not in text.format_outcome(once)


def test_a_faster_rung_without_headroom_is_not_called_noise() -> None:
    report = fitting_report()
    question = replace(report.question, usable_bytes=400 * 2**20)
    report = replace(report, question=question, trials=(*report.trials, record(8, "zero1", fit(410.0, 99.0))))
    text, page = printed(make_fit_document(report), 160), to_page(make_fit_document(report))
    row = next(line for line in text.splitlines() if line.startswith(" zero1 "))
    assert "~ no headroom" in row
    assert "2.4 times as fast as zero3" in row
    assert "within noise" not in text
    assert "no headroom: 410.0 / 416.0" in page.replace("\N{NO-BREAK SPACE}", " ")
