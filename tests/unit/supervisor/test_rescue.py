from __future__ import annotations

from dataclasses import replace

import pytest

from autods.config.checkpointing import find_state, set_state
from autods.runner.testing import failed, fit, out_of_memory
from autods.supervisor.known_rungs import KnownRung
from autods.supervisor.rescue import (
    MOST_REPEATS,
    NextConfig,
    RunFailure,
    Situation,
    decide,
)
from autods.supervisor.run_journal import RunConfig
from autods.types import Knobs, TierUse

MIB = 2**20
CONFIG = RunConfig(rung="zero2", knobs=Knobs(micro_batch=4, accumulation=2), world_size=2)
PINNED = "zero_optimization.offload_optimizer.pin_memory"


def trial(micro_batch, peak_bytes=100, rate=1.0, host_bytes=None):
    outcome = fit(peak_bytes=peak_bytes, samples_per_second=rate)
    if host_bytes is not None:
        outcome = replace(outcome, memory={**outcome.memory, "host": TierUse(peak_bytes=host_bytes)})
    return Knobs(micro_batch=micro_batch), outcome


def situation(*known, **more):
    return Situation(**{"config": CONFIG, "known_rungs": known, "device_bytes": 1000, **more})


LADDER = (KnownRung(rung="ddp"), KnownRung(rung="zero2"), KnownRung(rung="zero3"))


def test_device_memory_halves_the_micro_batch_first():
    chosen = decide(out_of_memory(), situation(*LADDER))
    assert chosen.config.rung == "zero2"
    assert (chosen.config.knobs.micro_batch, chosen.config.knobs.accumulation) == (2, 4)


def test_every_choice_keeps_the_global_batch():
    now, seen = situation(*LADDER, can_recompute=True), []
    while isinstance(chosen := decide(out_of_memory(), now), NextConfig):
        seen.append(chosen.config)
        now = replace(now, config=chosen.config, failed=(*now.failed, now.config), rescues=now.rescues + 1)
    assert {config.global_batch for config in seen} == {CONFIG.global_batch}
    assert len(set(map(repr, seen))) == len(seen)  # no loop
    assert seen[-1].rung == "zero3"
    assert seen[-1].knobs.micro_batch == 1
    assert chosen.exit_code == 1


def test_a_faster_leaner_rung_comes_before_a_second_halving():
    config = CONFIG.with_micro_batch(2)
    zero2 = KnownRung(rung="zero2", trials=(trial(1, rate=1.0), trial(2, rate=2.0)))
    zero3 = KnownRung(rung="zero3", trials=(trial(2, rate=5.0),))
    now = situation(zero2, zero3, config=config, failed=(CONFIG,))
    assert decide(out_of_memory(), now).config.rung == "zero3"
    slower = replace(zero3, trials=(trial(2, rate=0.5),))
    assert decide(out_of_memory(), replace(now, known_rungs=(zero2, slower))).config.rung == "zero2"


def test_growth_beyond_the_trial_rules_out_what_it_fills():
    zero2 = KnownRung(rung="zero2", trials=(trial(4, 900), trial(2, 800), trial(1, 500)))
    cause = replace(out_of_memory(missing_bytes=700), limit_bytes=1000)  # 1,700 of 900: 200 more a sample
    chosen = decide(cause, situation(zero2))
    assert chosen.config.knobs.micro_batch == 1
    assert chosen.growth_bytes == 200


def test_a_config_that_ran_out_is_not_tried_again():
    now = situation(*LADDER, failed=(CONFIG.with_micro_batch(2),))
    assert decide(out_of_memory(), now).config.knobs.micro_batch == 1


def test_fragments_change_the_allocator_once():
    cause = replace(out_of_memory(), fragmented=True)
    chosen = decide(cause, situation(*LADDER))
    assert chosen.config == replace(CONFIG, knobs=replace(CONFIG.knobs, expandable=True))
    assert decide(cause, situation(*LADDER, config=chosen.config)).config.knobs.micro_batch == 2
    assert decide(cause, situation(*LADDER, may_expand=False)).config.knobs.expandable is False


def test_the_headroom_is_used_before_a_smaller_batch():
    kept = replace(CONFIG, knobs=replace(CONFIG.knobs, keeps_headroom=True))
    chosen = decide(out_of_memory(), situation(*LADDER, config=kept))
    assert chosen.config == CONFIG
    assert chosen.changed == "the allocator may reserve the headroom, too"


def test_activations_are_recomputed_before_a_leaner_rung():
    knobs = Knobs(micro_batch=1, accumulation=8, checkpointing=False)
    now = situation(*LADDER, config=replace(CONFIG, knobs=knobs), can_recompute=True)
    chosen = decide(out_of_memory(), now)
    assert chosen.config.knobs.checkpointing
    assert chosen.config.rung == "zero2"


@pytest.mark.parametrize(
    ("trials", "micro_batch", "state"),
    [((), 4, "on"), (((4, 900),), 4, "on"), (((4, 1100),), 2, "every-2")],
    ids=["untried", "it holds", "it holds not"],
)
def test_all_layers_are_recomputed_before_a_smaller_batch(trials, micro_batch, state):
    config = replace(CONFIG, knobs=set_state(CONFIG.knobs, "every-2"))
    known = KnownRung(rung="zero2", trials=tuple(trial(*each) for each in trials))
    chosen = decide(out_of_memory(), situation(known, LADDER[2], config=config, can_recompute=True)).config
    assert (chosen.rung, chosen.knobs.micro_batch, find_state(chosen.knobs)) == ("zero2", micro_batch, state)


def test_an_untried_leaner_rung_recomputes_all_layers():
    config = replace(CONFIG.with_micro_batch(1), knobs=set_state(CONFIG.with_micro_batch(1).knobs, "every-2"))
    failed = (replace(config, knobs=set_state(config.knobs, "on")),)
    chosen = decide(out_of_memory(), situation(*LADDER, config=config, failed=failed, can_recompute=True)).config
    assert (chosen.rung, find_state(chosen.knobs)) == ("zero3", "on")


def test_the_fastest_proven_rung_goes_before_an_untried_one():
    least = CONFIG.with_micro_batch(1)
    proven = KnownRung(rung="zero3-offload", trials=(trial(1, rate=0.5),))
    now = situation(KnownRung(rung="zero2"), KnownRung(rung="zero3"), proven, config=least)
    assert decide(out_of_memory(), now).config.rung == "zero3-offload"


@pytest.mark.parametrize("bad", [{"refused": "no --nvme-path"}, {"forecast": "cannot_fit"}])
def test_rungs_that_cannot_run_are_passed_over(bad):
    now = situation(
        KnownRung(rung="zero2"),
        KnownRung(rung="zero3", **bad),
        KnownRung(rung="zero3-offload"),
        config=CONFIG.with_micro_batch(1),
    )
    assert decide(out_of_memory(), now).config.rung == "zero3-offload"


def test_the_end_names_the_rungs_that_were_passed_over():
    refused = KnownRung(rung="zero3-nvme", refused="needs --nvme-path")
    stop = decide(out_of_memory(), situation(KnownRung(rung="zero2"), refused, config=CONFIG.with_micro_batch(1)))
    assert (stop.exit_code, "not tried: zero3-nvme (needs --nvme-path)" in stop.reason) == (1, True)


def test_a_checkpoint_that_cannot_be_converted_rules_a_rung_out():
    now = situation(
        *LADDER,
        config=CONFIG.with_micro_batch(1),
        find_obstacle=lambda config: "on NVMe" if config.rung == "zero3" else None,
    )
    assert decide(out_of_memory(), now).exit_code == 1


def test_another_rung_keeps_the_precision_and_unpinned_memory():
    settings = {"bf16.enabled": False, PINNED: False}
    config = replace(CONFIG, knobs=Knobs(micro_batch=1, accumulation=8, settings=settings))
    now = situation(
        KnownRung(rung="zero2", pinned=(PINNED,)),
        KnownRung(rung="zero3", pinned=(PINNED,), start={"bf16.enabled": True, "zero_optimization.x": 5}),
        config=config,
    )
    assert decide(out_of_memory(), now).config.knobs.settings == {**settings, "zero_optimization.x": 5}


def test_pinned_memory_is_given_up_before_the_rung():
    now = situation(KnownRung(rung="zero2", pinned=(PINNED,)), KnownRung(rung="zero3"))
    for tier in ("pinned", "host"):
        chosen = decide(out_of_memory(tier=tier), now)
        assert chosen.config.knobs.settings == {PINNED: False}
        assert chosen.config.rung == "zero2"


def test_shared_memory_is_left_to_the_ranks_before_pinning():
    now = situation(KnownRung(rung="zero2", pinned=(PINNED,)))
    chosen = decide(out_of_memory(tier="shm"), now)
    assert chosen.config == replace(CONFIG, loads_in_ranks=True)
    then = decide(out_of_memory(tier="shm"), replace(now, config=chosen.config))
    assert (then.config.loads_in_ranks, then.config.knobs.settings) == (True, {PINNED: False})
    end = decide(out_of_memory(tier="shm"), replace(now, config=then.config))
    assert isinstance(end, RunFailure)
    assert "--shm-size" in end.advice


def test_host_memory_goes_to_the_rung_that_needs_less_of_it():
    now = situation(
        KnownRung(rung="zero1", trials=(trial(4, host_bytes=50),)),
        KnownRung(rung="zero2", trials=(trial(4, host_bytes=90),)),
        KnownRung(rung="zero3", trials=(trial(4, host_bytes=120),)),
    )
    assert decide(out_of_memory(tier="host"), now).config.rung == "zero1"


def test_host_memory_goes_to_an_untried_rung_by_its_forecast():
    offload = KnownRung(rung="zero2", trials=(trial(4, host_bytes=90),), host_forecast_bytes=80)
    full = KnownRung(rung="zero1", forecast="cannot_fit", host_forecast_bytes=10)
    as_much = KnownRung(rung="zero3-offload", forecast="fits", host_forecast_bytes=80)
    less = KnownRung(rung="zero3", forecast="fits", host_forecast_bytes=20)
    nvme = KnownRung(rung="zero3-nvme", needs_nvme=True)
    rungs = (full, offload, as_much, less, nvme)
    assert decide(out_of_memory(tier="host"), situation(*rungs)).config.rung == "zero3"
    without = situation(full, offload, as_much)
    assert decide(out_of_memory(tier="host"), replace(without, repeats=MOST_REPEATS)).exit_code == 1


@pytest.mark.parametrize("uses_nvme", [True, False])
def test_a_run_without_host_memory_hears_of_nvme_once(uses_nvme):
    rung = KnownRung(rung=CONFIG.rung, needs_nvme=uses_nvme)
    stop = decide(out_of_memory(tier="host"), situation(rung, repeats=MOST_REPEATS))
    assert ("--nvme-path" in stop.advice) != uses_nvme


def test_host_memory_goes_to_nvme_where_nothing_else_is_known():
    now = situation(KnownRung(rung="zero2"), KnownRung(rung="zero3"), KnownRung(rung="zero3-nvme", needs_nvme=True))
    assert decide(out_of_memory(tier="host"), now).config.rung == "zero3-nvme"


def test_a_full_nvme_goes_back_to_memory_or_ends_the_run():
    nvme = replace(CONFIG, rung="zero3-nvme")
    known = KnownRung(rung="zero3", trials=(trial(4),))
    now = situation(known, KnownRung(rung="zero3-nvme", needs_nvme=True), config=nvme)
    assert decide(out_of_memory(tier="nvme"), now).config.rung == "zero3"
    assert decide(out_of_memory(tier="nvme"), replace(now, known_rungs=now.known_rungs[1:])).exit_code == 1


@pytest.mark.parametrize("rung", ["zero2", "zero3-nvme"])
def test_a_disk_that_fills_in_a_save_changes_no_config(rung):
    known = (KnownRung(rung="zero2", trials=(trial(1), trial(4))), KnownRung(rung="zero3-nvme", needs_nvme=True))
    config = replace(CONFIG, rung=rung)
    cause = replace(out_of_memory(tier="nvme"), phase="save")
    assert decide(cause, situation(*known, config=config)).config == config


def test_a_full_disk_changes_no_config_that_needs_none():
    known = (KnownRung(rung="zero2", trials=(trial(1), trial(4))), KnownRung(rung="zero3", trials=(trial(4),)))
    assert decide(out_of_memory(tier="nvme"), situation(*known)).config == CONFIG


def test_a_full_tier_without_remedy_is_tried_again_after_progress():
    config = replace(CONFIG, loads_in_ranks=True)
    now = situation(KnownRung(rung="zero2"), config=config, progressed=True)
    assert decide(out_of_memory(tier="shm"), now).config == config
    assert isinstance(decide(out_of_memory(tier="shm"), replace(now, progressed=False)), RunFailure)


def test_fewer_ranks_divide_the_global_batch():
    config = RunConfig(rung="zero2", knobs=Knobs(micro_batch=4, accumulation=2), world_size=8)  # 64 samples
    chosen = decide(failed(failure="infrastructure"), situation(*LADDER, config=config, ranks_left=7))
    assert chosen.config.world_size == 4
    assert chosen.config.global_batch == 64
    assert chosen.config.knobs.micro_batch == 4


def test_the_ranks_of_a_replica_stay_together():
    knobs = Knobs(micro_batch=2, accumulation=2)
    config = RunConfig(rung="ddp", knobs=knobs, world_size=8, replica_ranks=2)  # 4 replicas, 16 samples
    chosen = decide(failed(failure="infrastructure"), situation(config=config, ranks_left=7))
    assert chosen.config.world_size == 4
    assert chosen.config.global_batch == 16


def test_a_smaller_world_that_cannot_load_the_checkpoint_ends_the_run():
    now = situation(*LADDER, ranks_left=1, find_obstacle=lambda config: "its optimizer was on NVMe")
    stop = decide(failed(), now)
    assert isinstance(stop, RunFailure)
    assert (stop.reason, stop.exit_code) == ("its optimizer was on NVMe", 3)


@pytest.mark.parametrize(("ranks_left", "world_size"), [(8, 8), (6, 4), (4, 4), (2, 2)])  # 2 on each node
def test_fewer_nodes_share_the_ranks_evenly(ranks_left, world_size):
    config = RunConfig(rung="zero2", knobs=Knobs(micro_batch=4, accumulation=2), world_size=16)  # 128 samples
    now = situation(*LADDER, config=config, ranks_left=ranks_left, ranks_per_node=2)
    chosen = decide(failed(failure="infrastructure"), now).config
    assert (chosen.world_size, chosen.global_batch) == (world_size, config.global_batch)


def test_fewer_ranks_on_each_node_may_divide_the_batch():
    config = RunConfig(rung="zero2", knobs=Knobs(micro_batch=2, accumulation=1), world_size=9)  # 18 samples, 3 nodes
    chosen = decide(failed(), situation(*LADDER, config=config, ranks_left=6, ranks_per_node=3)).config
    assert (chosen.world_size, chosen.knobs) == (6, Knobs(micro_batch=1, accumulation=3))
    config = RunConfig(rung="zero2", knobs=Knobs(micro_batch=2, accumulation=1), world_size=10)  # 20 samples, 2 nodes
    chosen = decide(failed(), situation(*LADDER, config=config, ranks_left=5, ranks_per_node=5)).config
    assert chosen.world_size == 5


@pytest.mark.parametrize(("ranks_left", "keeps"), [(12, False), (16, True)])
def test_fewer_ranks_drop_a_copy_of_parameters_they_cannot_split(ranks_left, keeps):
    key = "zero_optimization.zero_hpz_partition_size"
    knobs = Knobs(micro_batch=1, accumulation=2, settings={key: 8})
    config = RunConfig(rung="zero3", knobs=knobs, world_size=24)  # 48 samples
    chosen = decide(failed(failure="infrastructure"), situation(*LADDER, config=config, ranks_left=ranks_left)).config
    assert chosen.world_size == ranks_left
    assert (key in chosen.knobs.settings) is keeps


def test_no_node_that_is_left_ends_the_run_with_the_reason():
    stop = decide(failed(failure="infrastructure"), situation(*LADDER, ranks_left=0, ranks_per_node=1))
    assert stop == RunFailure(
        reason="the machines hold 0 ranks now, and a replica of the model takes 1",
        exit_code=3,
        advice="give the same command again once they are back",
    )


def test_an_accident_repeats_the_config_twice_without_progress():
    for repeats in range(MOST_REPEATS):
        chosen = decide(failed(), situation(*LADDER, repeats=repeats))
        assert chosen.config == CONFIG
        assert not chosen.is_leaner
    lost_card = replace(failed(evidence="8 ranks need a card each, and 7 are there"), advice="see nvidia-smi")
    stop = decide(lost_card, situation(*LADDER, repeats=MOST_REPEATS))
    assert (stop.exit_code, stop.advice) == (3, "see nvidia-smi")
    assert "8 ranks need a card each" in stop.reason
    assert isinstance(decide(failed(), situation(*LADDER, repeats=MOST_REPEATS, progressed=True)), NextConfig)


@pytest.mark.parametrize(
    ("action", "code"), [("fix_code", 2), ("fix_config", 2), ("nothing", 2), ("fix_environment", 3)]
)
def test_what_somebody_has_to_mend_stops_at_once(action, code):
    stop = decide(failed(failure="user_code", action=action, evidence="no"), situation(*LADDER, progressed=True))
    assert stop == RunFailure(reason="no", exit_code=code)


def test_a_disk_that_fills_up_while_saving_is_no_end():
    cause = replace(failed(failure="infrastructure", action="fix_environment"), phase="save")
    assert decide(cause, situation(*LADDER)).config == CONFIG


def test_a_second_hang_at_the_same_line_is_the_users():
    cause = replace(failed(failure="communication"), hung_at="model.py:7")
    assert isinstance(decide(cause, situation(*LADDER)), NextConfig)
    assert decide(cause, situation(*LADDER, last_hang="model.py:7")).exit_code == 2


def test_the_number_of_rescues_is_bounded():
    now = situation(*LADDER, rescues=3, most_rescues=3, progressed=True)
    assert decide(out_of_memory(), now).exit_code == 1
    assert decide(failed(), now).exit_code == 1
