from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from autods.config.catalogue import find_machines
from autods.events import Note
from autods.forecast.values import PartitionedBuild, RungFinished, RungForecast, SimulationStarted, TierForecast
from autods.planner.plan import list_assumptions
from autods.report.answers.plan import describe_site, make_plan_document
from autods.report.answers.plan_rungs import tabulate_answer, tabulate_speeds
from autods.report.answers.remedies import list_plan_remedies
from autods.report.document import MemoryStack
from autods.report.live import PlanProgress
from autods.report.render_terminal import draw_bar
from autods.report.results.plan import Alternative, AnswerSoFar, PlanReport
from autods.report.serialize import plan_to_dict as to_dict
from autods.report.text import format_predicted
from tests.support import terminal
from tests.support.plans import (
    FACTS,
    GIB,
    LAPTOP,
    LIMIT,
    RUNGS,
    SOURCE,
    comparison,
    forecast,
    hopeless,
    left_out,
    predicted,
    rung,
    speed,
    with_rungs,
)
from tests.support.settings import plan_settings

MIB = 2**20


def printed(said: PlanReport, width: int = 160, *, verbose: bool = False) -> str:
    out = terminal.printed(make_plan_document(said), width, verbose=verbose)
    assert all(len(line) <= width for line in out.splitlines())
    return out


def sentence(text: str) -> str:
    """With the line breaks of a narrow terminal undone."""
    return " ".join(text.split())


def test_the_head_says_what_was_asked() -> None:
    assert (
        "llama, 6.74B parameters, sequence 2048, checkpointing on, built whole in each rank, micro batch 1"
        " × accumulation 2 × 8 ranks = global batch 16, bf16: 8 cuda ranks on 1 node × 80.0 GiB"
        in sentence(printed(forecast()))
    )


@pytest.mark.parametrize(
    ("machine", "gpus", "links"),
    [
        ("gh200-96gb", 4, ("InfiniBand NDR between nodes (assumed)",)),
        ("gh200-96gb", 1, ()),
        ("a100-80gb", 8, ("NVLink 3",)),
    ],
)
def test_the_head_names_the_links_that_the_ranks_use(machine: str, gpus: int, links: tuple[str, ...]) -> None:
    site = plan_settings(SOURCE, hardware=LAPTOP, gpus=gpus, on=machine).sites[0]
    head = describe_site(forecast(), site)
    assert head.partition(f"({machine})")[2] == "".join(f", {link}" for link in links)


@pytest.mark.parametrize("width", [80, 100, 112, 125, 160, 200])
def test_every_rung_has_its_verdict_peak_bar_and_reason_at_any_width(width: int) -> None:
    text = printed(forecast(), width, verbose=True)
    flat = sentence(text)
    for said in RUNGS:
        assert said.rung in text
    assert "✗ cannot fit" in text
    assert "~ tight" in text
    assert "40.0 (36.0–44.0) / 80.0 GiB" in text
    assert "needs 40 GiB of 80.0 GiB" in sentence(text.replace("│", "│ ")) or width >= 150
    assert "█" in text
    assert "▒ optimizer" in flat
    assert "no NVMe was named" in flat


def test_a_narrow_terminal_loses_no_end_of_a_line() -> None:
    for width in (60, 80):
        text = printed(forecast(), width)
        assert "…" not in text
        assert all(rung.rung in text for rung in RUNGS)
        assert "zero3-nvme: no NVMe was named" in text
        assert "not applicable" in sentence(printed(forecast(), width, verbose=True))


def test_the_answer_comes_before_its_one_table() -> None:
    lines = [line.rstrip() for line in printed(forecast(OFFLOAD_FIRST), 80).splitlines()]
    answer = next(number for number, line in enumerate(lines) if line.startswith("Use zero3, micro batch 1 × "))
    table = "\n".join(lines[answer + 1 : answer + 9])
    assert "device" in table
    assert "✓ zero3  " in table
    assert "compute" in table
    assert not any("█" in line or "0.4–0.6" in line for line in lines)


def test_plan_names_the_fastest_fitting_rung_and_its_neighbours() -> None:
    text = sentence(printed(forecast()))
    assert "Use zero2, micro batch 6" in text
    assert "first in the ladder, but tight: zero1; only a real trial can tell" in text
    assert "the one before it in the ladder, zero1, needs 77.0 GiB of device memory" in text
    assert "faster" not in text
    assert "zero3-offload leaves more memory free: needs 6.0 GiB of device memory, up to micro batch 40" in text


def test_long_sequences_are_proved_by_a_probe() -> None:
    plan = forecast()
    assert "prove it on the machine itself: autods fit" in sentence(printed(plan))
    tiled = replace(plan, source=replace(plan.source, tiled_loss=True))
    assert "prove it on the machine itself: autods probe" in sentence(printed(tiled))


def test_a_faster_rung_that_cannot_fit_is_said_to_lack_so_much() -> None:
    rates = {"ddp": speed(20), "zero2": speed(10)}
    text = sentence(printed(forecast(tuple(replace(row, speed=rates[row.rung]) for row in (RUNGS[0], RUNGS[2])))))
    assert "the next faster one, ddp, needs 131.0 GiB of device memory, 51.0 GiB more than there is" in text


def test_where_only_a_tight_one_is_left_a_real_trial_is_recommended() -> None:
    text = sentence(printed(forecast((RUNGS[0], RUNGS[1]))))
    assert "Try zero1, micro batch" in text
    assert "zero1 is tight: needs 77 GiB of 80.0 GiB; the optimizer step decides" in text
    assert "only a real trial can tell" in text
    assert "exceeds" not in text


@pytest.mark.parametrize("rate", [None, 20])
def test_a_tight_answer_above_the_limit_does_not_hide_it(rate: float | None) -> None:
    plan = forecast((rung("zero3", 85, verdict="tight", speed=None if rate is None else speed(rate)),))
    assert ("the first that may fit" if rate is None else "40,960 tokens/s, bound by compute") in repr(plan)
    assert repr(plan).endswith(", though its forecast exceeds the memory>")
    assert "zero3 is tight: needs 85 GiB of 80.0 GiB" in sentence(printed(plan, 80))


def test_when_nothing_fits_the_closest_and_the_remedies_are_named() -> None:
    text = sentence(printed(hopeless()))
    assert "Nothing fits" in text
    assert "zero3-offload comes closest: it needs 96.0 GiB of device memory, 16.0 GiB more than there is" in text
    assert "--nvme 2TiB, if a node has a disk" in text
    assert "more ranks (--gpus 16)" in text
    assert "a shorter sequence (--seq-len)" in text


def lacking(name: str, **fields: object) -> RungForecast:
    """A rung that needs 96 GiB of device memory, of 80."""
    return replace(rung(name, 96, verdict="cannot_fit"), **fields)  # type: ignore[arg-type]


def with_site(said: PlanReport, **fields: object) -> PlanReport:
    """The same plan for another machine, or for another number of ranks."""
    site = replace(said.sites[0].site, **fields)  # type: ignore[arg-type]
    return replace(said, sites=(replace(said.sites[0], site=site),))


def test_seq_len_is_advised_only_where_the_workload_takes_it() -> None:
    said = hopeless()
    text = sentence(printed(replace(said, source=replace(said.source, takes_seq_len=False))))
    assert "a shorter sequence" not in text
    assert "shorter sequences than those of 2048 tokens, which the workload makes itself" in text


def test_on_is_advised_only_where_it_is_accepted() -> None:
    asked = hopeless()
    assert "--on all in place of --gpu-memory: which machine would do?" in sentence(printed(asked))
    named = with_site(asked, machine=comparison().sites[0].site.machine)
    assert "--on all: which machine would do?" in sentence(printed(named))
    assert "--on all" not in sentence(printed(replace(asked, device="cpu")))
    assert not any("--on all" in line for line in list_plan_remedies(comparison(), comparison().sites[0]))


def test_more_ranks_are_no_way_out_of_activations() -> None:
    held = {"parameters": GIB, "gradients": GIB, "optimizer": 4 * GIB, "activations": 85 * GIB}
    said = forecast((lacking("zero3", breakdown=held),))
    text = sentence(printed(replace(said, source=replace(SOURCE, task="masked-lm"))))
    assert "zero3 comes closest" in text
    assert "more ranks" not in text
    whole = {"parameters": 50 * GIB, "activations": 40 * GIB}  # of which ZeRO-1 splits nothing
    assert "more ranks" not in sentence(printed(forecast((lacking("zero1", breakdown=whole),))))
    assert "more ranks (--gpus 16)" in sentence(printed(forecast((lacking("zero3", breakdown=whole),))))


def test_a_full_host_is_relieved_by_nodes() -> None:
    text = sentence(printed(forecast((rung("zero3-offload", 20, verdict="cannot_fit", host=2048),))))
    assert "more nodes (--gpus 8 --nodes 2)" in text
    assert "more ranks" not in text


def test_one_rank_is_not_advised_to_split_the_model() -> None:
    said = forecast((lacking("ddp"),))
    split = "rungs that split the model over the ranks (--ladder zero1,zero2,zero3, or leave --ladder out)"
    assert split in sentence(printed(said))
    text = sentence(printed(with_site(said, world_size=1, ranks_per_node=1)))
    assert split not in text
    assert "rungs that hold states on the host (--ladder zero2-offload," in text
    assert "more ranks, with rungs that split the model over them (--gpus 2 --ladder zero1,zero2,zero3)" in text


def test_where_no_rung_applies_the_reasons_are_printed() -> None:
    rungs = tuple(left_out(name, "one rank: no sharding to gain") for name in ("zero1", "zero2"))
    text = sentence(printed(with_site(forecast(rungs), world_size=1, ranks_per_node=1), 80))
    assert "zero1, zero2: one rank: no sharding to gain" in text
    assert "rungs that apply here (--ladder ddp,zero2-offload," in text


SPLIT = PartitionedBuild(
    rung="zero3", verdict="fits", tier="host", ranks=8, whole_bytes=2048 * GIB, split_bytes=300 * GIB,
    limit_bytes=1024 * GIB,
)  # fmt: skip


def offer(build: PartitionedBuild) -> str:
    hopeless_plan = forecast((rung("zero3", 20, verdict="cannot_fit", host=2048),))
    sites = (replace(hopeless_plan.sites[0], partitioned=build),)
    return sentence(printed(replace(hopeless_plan, sites=sites)))


def test_the_answer_is_zero_init_where_nothing_fits_without() -> None:
    text = offer(SPLIT)
    assert "Nothing fits without --zero-init; with it zero3 fits" in text
    assert (
        "--zero-init: with it a node needs 300.0 GiB for zero3, has 1.0 TiB, and needs 2.0 TiB of host memory without"
        " it, because each of the 8 ranks of a node builds the whole model first"
    ) in text
    assert text.index("with it a node needs") < text.index("zero3 comes closest: it needs 2.0 TiB of host memory")
    assert "with it zero3 may fit" in offer(replace(SPLIT, verdict="tight"))


def test_what_the_code_has_to_do_for_a_split_build_is_said() -> None:
    text = offer(replace(SPLIT, verdict="not_applicable", split_bytes=None, obstacle="the script builds the model"))
    assert "with it" not in text
    assert "builds the whole model first: the script builds the model" in text


def test_what_was_assumed_is_told_once() -> None:
    text = sentence(printed(forecast()))
    assert "sequences of 2048 tokens, the config's longest, at most 2048 (--seq-len)" in text
    silent = list_assumptions((), replace(SOURCE, kind="file", takes_seq_len=False), FACTS, forecast().sites)
    assert "sequences of 2048 tokens, as build_batch makes them" in silent
    assert "micro batch 1 (--micro-batch)" in text
    assert text.count("the loss scale starts at 65536") == 1


def test_several_machines_name_the_smallest_that_is_enough() -> None:
    text = sentence(printed(comparison()))
    assert "l4-24gb" in text
    assert "zero3-offload" in text
    assert "a100-80gb is the smallest that is enough: zero2 on 8 cards in bf16" in text


def test_json_keeps_the_contract() -> None:
    data = json.loads(json.dumps(to_dict(forecast())))
    assert set(data) >= {"rungs", "hardware", "workload", "versions", "assumed", "status"}
    row = data["rungs"][2]
    assert (row["rung"], row["verdict"], row["largest_micro_batch"]) == ("zero2", "fits", 6)
    assert row["reason"]
    assert set(row["device"]) >= {"peak_bytes", "live_peak_bytes", "low_bytes", "high_bytes", "by_phase", "breakdown"}
    assert row["device"]["peak_bytes"] == 40 * GIB
    assert list(row["device"]["by_phase"]) == ["build", "init", "forward", "backward", "step"]
    assert row["nvme"]["peak_bytes"] == 0
    assert data["rungs"][4]["device"] is data["rungs"][4]["nvme"] is None
    assert data["hardware"]["device_bytes"] == LIMIT
    assert (data["workload"]["seq_len"], data["workload"]["parameters"]) == (2048, 6_738_415_616)
    assert [said["verdict"] for said in data["rungs"]] == ["cannot_fit", "tight", "fits", "fits", "not_applicable"]


def test_host_bytes_are_a_ranks_and_a_nodes() -> None:
    row = to_dict(forecast())["rungs"][3]
    assert row["host"]["node"]["peak_bytes"] == 320 * GIB
    assert row["host"]["node"]["limit_bytes"] == 1024 * GIB
    assert row["host"]["peak_bytes"] == 40 * GIB
    assert row["pinned"]["node"]["peak_bytes"] == 8 * row["pinned"]["peak_bytes"]


def test_several_machines_each_have_their_rungs_in_json() -> None:
    data = to_dict(comparison())
    assert [machine["hardware"]["name"] for machine in data["machines"]] == ["l4-24gb", "a100-80gb", "h200-141gb"]
    assert [machine["best"] for machine in data["machines"]] == [None, "zero2", "ddp"]
    assert data["status"] == "fits"


def test_a_bar_is_as_long_as_the_card_and_shows_what_lies_beyond() -> None:
    fits, beyond = (draw_bar(MemoryStack(forecast=RUNGS[place])).plain for place in (2, 0))
    assert len(fits) == len(beyond) == 21
    assert fits.endswith("│")
    assert beyond.endswith("▶")
    assert len(fits.rstrip("│ ")) == 10  # half of the card


def test_what_the_tensors_do_not_explain_is_outside() -> None:
    parts = MemoryStack(forecast=RUNGS[2]).sizes
    assert sum(parts.values()) == 40 * GIB
    assert parts["outside"] == 40 * GIB - sum(RUNGS[2].breakdown.values())


def test_a_limit_far_larger_than_the_peak_has_its_own_unit() -> None:
    assert format_predicted(predicted(0.25, 1024 * GIB)) == "256.0 (230.4–281.6) MiB / 1.0 TiB"
    assert format_predicted(predicted(2, None)) == "2.0 (1.8–2.2) GiB"
    assert format_predicted(predicted(12.5, 1126 * GIB)) == "12.5 (11.2–13.8) GiB / 1.1 TiB"


def test_a_peak_has_the_unit_of_its_high_bound_and_of_the_limit() -> None:
    peak = TierForecast(
        peak_bytes=int(988.2 * MIB), low_bytes=int(40.1 * MIB), high_bytes=int(1795.7 * MIB), limit_bytes=24 * GIB
    )
    assert format_predicted(peak) == "1.0 (< 0.1–1.8) / 24.0 GiB"


def test_no_peak_of_a_rung_is_broken_into_lines_at_80_columns() -> None:
    rungs = (
        replace(rung("zero3-offload-optimizer", 131, verdict="cannot_fit", host=900), reason="needs too much"),
        rung("zero3-offload-param", 0.9, verdict="fits", largest=4096, host=320),
        rung("ddp", 40, verdict="fits", largest=4096),
    )
    lines = [sentence(line) for line in printed(forecast(rungs), 80, verbose=True).splitlines()]
    table = next(number for number, line in enumerate(lines) if "peak (low to high) / limit" in line)
    assert lines[table + 2 : table + 9] == [
        "zero3-offload-optimizer device 131.0 (117.9–144.1) / 80.0 GiB",
        "host 900.0 (810.0–990.0) GiB / 1.0 TiB",
        "pinned 56.2 (50.6–61.9) GiB",
        "zero3-offload-param device 921.6 (829.4–1,013.8) MiB / 80.0 GiB 4096",
        "host 320.0 (288.0–352.0) GiB / 1.0 TiB",
        "pinned 20.0 (18.0–22.0) GiB",
        "ddp device 40.0 (36.0–44.0) / 80.0 GiB 4096",
    ]
    assert any(line.startswith("zero3-offload-optimizer ████") and "✗ cannot fit needs" in line for line in lines)


def test_an_empty_line_stands_before_the_legend() -> None:
    lines = printed(forecast(), 80, verbose=True).splitlines()
    legend = next(number for number, line in enumerate(lines) if line.startswith("█ weights"))
    assert not lines[legend - 1].strip()


def test_progress_without_a_terminal_is_a_line_for_each_rung() -> None:
    console = Console(file=io.StringIO(), width=100)
    with PlanProgress(console) as listen:
        for event in events():
            listen(event)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "preparing the simulated device",
        "✓ zero2: fits: needs 40 GiB of 80.0 GiB; the optimizer step decides",
        "zero2: up to micro batch 6",
        "– zero3-nvme: not applicable: no NVMe was named (--nvme 2TiB)",
    ]


def draw_progress(width: int, *, on: int) -> str:
    """What the progress of a plan draws on a terminal of this width, printed on one of another."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with PlanProgress(console) as listen:
        for event in events():
            listen(event)
        shown = Console(file=io.StringIO(), width=on)
        shown.print(listen._current())
    return shown.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_plan_progress_shows_rows_and_leaves_nothing_behind() -> None:
    text = draw_progress(100, on=130)
    assert "zero2" in text
    assert "2 of at most 5" in text


def test_on_a_narrow_terminal_plan_progress_cuts_no_row() -> None:
    text = draw_progress(20, on=20)
    assert "──" not in text
    assert "2 of at most 5" in " ".join(text.split())


def test_the_answer_so_far_stays_above_what_is_redrawn() -> None:
    for redraws in (True, False):
        console = Console(file=io.StringIO(), width=200, force_terminal=redraws)
        with PlanProgress(console) as listen:
            listen(AnswerSoFar(report=forecast(OFFLOAD_FIRST[:2]), left=1))
        assert (
            "so far: use zero3, micro batch 1 × accumulation 2 × 8 ranks = global batch 16: 40,960 tokens/s, bound by"
            " compute  (1 more rung to simulate)" in console.file.getvalue()  # type: ignore[attr-defined]
        )


def events() -> Iterator[Note | SimulationStarted | RungFinished]:
    without = rung("zero2", 40, verdict="fits")
    yield Note(text="preparing the simulated device")
    yield SimulationStarted(rung="zero2", micro_batch=1)
    yield RungFinished(machine="asked", forecast=without, done=1, total=5)
    yield RungFinished(machine="asked", forecast=RUNGS[2], done=1, total=5)
    yield RungFinished(machine="asked", forecast=RUNGS[4], done=2, total=5)


OFFLOAD_FIRST = (
    rung("zero2-offload", 14, verdict="fits", speed=speed(8, bound="host")),
    rung("zero3", 20, verdict="fits", speed=speed(20)),
    rung("zero3-nvme", 5, verdict="fits"),
)


def test_the_rung_with_the_least_time_is_recommended() -> None:
    text = sentence(printed(forecast(OFFLOAD_FIRST)))
    assert (
        "Use zero3, micro batch 1 × accumulation 2 × 8 ranks = global batch 16: 40,960 tokens/s, bound by compute"
        in text
    )
    assert "zero2-offload comes first in the ladder, but zero3 is forecast 2.5 times as fast" in text
    assert "a step of zero2-offload is spent on host 80 %, launch 20 %" in text


def test_rungs_of_equal_speed_keep_the_ladder_s_order() -> None:
    rungs = (rung("zero2", 30, verdict="fits", speed=speed(20)), rung("zero3", 20, verdict="fits", speed=speed(20.2)))
    assert forecast(rungs).sites[0].best_rung == "zero2"


def test_without_prices_the_ladder_s_order_decides() -> None:
    rungs = (rung("zero2", 30, verdict="fits"), rung("zero3", 20, verdict="fits", speed=speed(20)))
    assert forecast(rungs).sites[0].best_rung == "zero2"
    assert "step time: –" in sentence(printed(forecast()))


@pytest.mark.parametrize("width", [80, 112, 160])
def test_each_rung_shows_its_step_time(width: int) -> None:
    text = printed(forecast(OFFLOAD_FIRST), width, verbose=True)
    assert "0.5 (0.4–0.6) s" in text
    assert "compute 80 %" in sentence(text)


def test_json_has_the_step_of_each_rung() -> None:
    rows = to_dict(forecast(OFFLOAD_FIRST))["rungs"]
    assert rows[0]["step"]["breakdown"] == {"host": 0.4, "launch": 0.1}
    assert (rows[1]["step"]["seconds"], rows[1]["step"]["bound"]) == (0.5, "compute")
    assert rows[1]["step"]["tokens_per_second"] == 40_960
    assert rows[2]["step"] is None


def training(price: float | None = 2.0) -> PlanReport:
    """zero3 at 40,960 tokens/s on 8 cards; a training of 300B tokens."""
    plan = forecast(OFFLOAD_FIRST)
    (site_forecast,) = plan.sites
    site = replace(site_forecast.site, price_per_gpu_hour=price)
    others = (
        Alternative(forecast=rung("zero3", 15, verdict="fits", speed=speed(18)), checkpointing=True),
        Alternative(
            forecast=rung("zero3", 90, verdict="cannot_fit", speed=speed(26)), checkpointing=False, switched=True
        ),
    )
    return replace(plan, tokens=3e11, sites=(replace(site_forecast, site=site, alternatives=others),))


@pytest.mark.parametrize("width", [80, 112, 160])
def test_a_training_has_its_days_and_its_cost(width: int) -> None:
    text = sentence(printed(training(), width))
    days = 3e11 / 40_960 / 86_400
    assert f"300B tokens take {days:.3g} ({0.8 * days:.3g}–{1.2 * days:.0f}) days with zero3" in text
    cost = days * 24 * 8 * 2
    assert f"and cost {float(f'{cost:.3g}'):,.0f}" in text


@pytest.mark.parametrize("width", [80, 110, 130, 160])
def test_no_cell_of_a_training_s_table_is_cut_off(width: int) -> None:
    table = printed(training(), width, verbose=True).partition("tokens/s")[2].partition("Assumed")[0]
    assert "compute" in table
    assert "…" not in table


def test_a_training_in_json_has_its_bounds() -> None:
    row = to_dict(training())["rungs"][1]["training"]
    assert row["days"] == pytest.approx(3e11 / 40_960 / 86_400)
    assert (row["low_days"], row["high_days"]) == (pytest.approx(0.8 * row["days"]), pytest.approx(1.2 * row["days"]))
    assert row["cost"] == pytest.approx(2 * row["gpu_hours"]) == pytest.approx(row["days"] * 24 * 8 * 2)
    assert to_dict(training(None))["rungs"][1]["training"]["cost"] is None
    assert to_dict(forecast(OFFLOAD_FIRST))["rungs"][1]["training"] is None


def test_what_other_settings_give_is_said_of_the_best_rung() -> None:
    text = sentence(printed(training(), verbose=True))
    assert "micro batch 1 instead of 1: 0.90 × the tokens/s" in text
    assert "without activation checkpointing, micro batch 1: 1.30 × the tokens/s, but needs 90.0 GiB of device" in text
    assert "more than there is (--checkpointing off)" in text
    assert "the other rungs beside zero3, each at its micro batch: zero2-offload 0.40 ×" in text


@pytest.mark.parametrize(("rate", "said"), [(20.2, False), (24.0, True)])
def test_a_gain_of_one_percent_is_no_advice(rate: float, said: bool) -> None:
    plan = forecast(OFFLOAD_FIRST)
    (site,) = plan.sites
    larger = Alternative(forecast=rung("zero3", 79, verdict="tight", speed=speed(rate)), checkpointing=True)
    plan = replace(plan, sites=(replace(site, alternatives=(larger,)),))
    assert ("instead of" in sentence(printed(plan))) is said
    assert "instead of" in sentence(printed(plan, verbose=True))


@pytest.mark.parametrize(("lost_s", "said"), [(0.08, True), (0.01, False)])
def test_a_step_slowed_by_unaligned_rows_is_told_how_to_mend(lost_s: float, said: bool) -> None:
    plan = forecast(OFFLOAD_FIRST)
    (site,) = plan.sites
    rungs = tuple(
        each
        if each.speed is None
        else replace(each, speed=replace(each.speed, step=replace(each.speed.step, unaligned_seconds=lost_s)))
        for each in site.rungs
    )
    text = sentence(printed(replace(plan, sites=(with_rungs(site, rungs),))))
    assert ("16% of the step goes to matmuls whose rows do not begin at multiples of 16 bytes" in text) is said


def test_machines_are_ranked_by_their_rate() -> None:
    plan = comparison()
    rates = {"a100-80gb": 20.0, "h200-141gb": 50.0}
    sites = tuple(
        with_rungs(each, (replace(row, speed=speed(rates[name])) if name in rates else row for row in each.rungs))
        for each in plan.sites
        for name in [each.site.machine.name]
    )
    plan = replace(plan, sites=sites, tokens=1e12)
    text = sentence(printed(plan))
    assert text.index("h200-141gb") < text.index("a100-80gb") < text.index("l4-24gb")
    assert "h200-141gb is the fastest: 102,400 tokens/s with ddp" in text
    assert "1T tokens take" in text
    data = to_dict(plan)
    assert data["ranking"] == ["h200-141gb", "a100-80gb", "l4-24gb"]
    assert data["smallest_enough"] == "a100-80gb"


def test_a_machine_without_a_time_says_why() -> None:
    assert "no time of a100-80gb, h200-141gb, because" in sentence(printed(comparison()))


def test_full_lora_weights_are_offered_in_four_bits() -> None:
    plan = hopeless()
    text = sentence(printed(replace(plan, source=replace(plan.source, lora="16"))))
    assert "--lora 4bit:16: QLoRA holds the frozen weights in 4 bits" in text
    for lora in (None, "4bit:16"):
        assert "QLoRA" not in sentence(printed(replace(plan, source=replace(plan.source, lora=lora))))


def test_no_shorter_sequence_where_the_engine_start_decides() -> None:
    full = replace(rung("zero3", 90, verdict="cannot_fit"), by_phase={"init": 90 * GIB, "backward": 20 * GIB})
    assert "a shorter sequence" not in sentence(printed(forecast((full,))))
    assert "a shorter sequence" in sentence(printed(hopeless()))


def test_a_row_says_at_which_batch_its_figures_are() -> None:
    said = "memory: at micro batch 1; step and rate: at the largest batch"
    larger = rung("zero3", 20, verdict="fits", speed=replace(speed(20), micro_batch=4))
    assert said in sentence(printed(forecast((larger,))))
    assert said not in sentence(printed(forecast((rung("zero3", 20, verdict="fits"),))))


def test_progress_after_the_last_rung_says_what_goes_on() -> None:
    with PlanProgress(Console(file=io.StringIO(), width=100, force_terminal=True)) as listen:
        listen(RungFinished(machine="asked", forecast=RUNGS[4], done=1, total=1))
        listen(SimulationStarted(rung="zero2", micro_batch=2))
        shown = Console(file=io.StringIO(), width=130)
        shown.print(listen._current())
    assert "every rung is done; simulating what else would help" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_a_file_without_rates_is_named_with_all_that_it_lacks() -> None:
    plan = forecast()
    machine = replace(plan.sites[0].site.machine, name="box3", file="box3.toml")
    site = replace(plan.sites[0], site=replace(plan.sites[0].site, machine=machine))
    text = sentence(printed(replace(plan, sites=(site,))))
    assert "× 80.0 GiB (box3)" in text
    assert "step time: –, because the file of the machine lacks rates, links, dram_gb_per_s" in text


def test_a_step_of_many_samples_has_no_exponent() -> None:
    slow = rung("zero3", 40, verdict="fits", speed=speed(0.8, seconds=1234.5))
    text = printed(forecast((slow,)), verbose=True)
    assert "1,234 (988–1,481) s" in text
    assert "e+03" not in text


def test_a_rung_that_cannot_fit_has_no_days_of_training() -> None:
    rungs = (
        rung("ddp", 131, verdict="cannot_fit", speed=speed(40)),
        rung("zero2", 40, verdict="fits", speed=speed(20)),
    )
    plan = replace(forecast(rungs), tokens=3e11)
    table = tabulate_answer(plan, plan.sites[0])
    names = [column.name for column in table.columns]
    days = [str(row.cells[names.index("days")]) for row in table.items]
    assert days == ["–", f"{3e11 / 40_960 / 86_400:.3g}"]


@pytest.mark.parametrize("width", [80, 160])
def test_a_training_shorter_than_a_day_is_in_hours_or_minutes(width: int) -> None:
    plan = replace(training(), tokens=70e6)
    text = printed(plan, width, verbose=True)
    assert "70M tokens take 28.5 (22.8–34.2) minutes with zero3: 3.8 GPU-hours" in sentence(text)
    assert " days" not in text


def test_a_training_s_columns_have_the_unit_of_the_sentence() -> None:
    plan = replace(training(), tokens=70e6)
    (site,) = plan.sites
    for table in (tabulate_answer(plan, site), tabulate_speeds(plan, site)):
        names = [column.name for column in table.columns]
        times = [str(row.cells[names.index("minutes")]) for row in table.items]
        assert times[:2] in (["71.2", "28.5"], ["71.2 (57–85.4)", "28.5 (22.8–34.2)"])


def test_no_figure_of_a_plan_has_an_exponent() -> None:
    text = printed(replace(training(0.0001), tokens=5e4), verbose=True)
    assert "e-0" not in text
    assert "1.22 (0.977–1.46) seconds" in text


@pytest.mark.parametrize("verbose", [False, True])
def test_a_rung_without_a_time_beside_others_says_why(verbose: bool) -> None:
    timed = rung("zero2", 40, verdict="fits", speed=speed(20))
    untimed = rung("zero3-nvme", 6, verdict="fits", host=320)
    untimed = replace(untimed, memory={**untimed.memory, "nvme": predicted(2)})
    plan = forecast((timed, untimed))
    (site,) = plan.sites
    (machine,) = find_machines("rtx4090-24gb")
    for nvme_gb_per_s, said in ((None, True), (3.0, False)):
        known = replace(site.site, machine=replace(machine, nvme_gb_per_s=nvme_gb_per_s))
        text = sentence(printed(replace(plan, sites=(replace(site, site=known),)), 80, verbose=verbose))
        reason = "step time of zero3-nvme: –, because the file of the machine lacks nvme_gb_per_s"
        assert text.count(reason) == said
        assert text.count("step time of") == 1


def test_a_rung_with_a_time_or_that_cannot_fit_needs_no_reason() -> None:
    rungs = (rung("ddp", 131, verdict="cannot_fit"), rung("zero2", 40, verdict="fits", speed=speed(20)), RUNGS[4])
    assert "step time of" not in sentence(printed(forecast(rungs)))
