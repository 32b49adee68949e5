"""The CUDA path end to end without a card: fits and trials on simulated cards behind a stand-in driver.

`tests/support/cards/hooks.py` says what is real. Not checked is what numbers decide: losses (so parity, and whether a
loaded checkpoint evaluates to the same), times (so which config is faster), and the true sizes of NCCL and kernels.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autods.types import Fit
from autods.workload import make_source
from tests.support.cards.machine import CONTEXT_BYTES, GIB, MIB, NCCL_BYTES, Machine, build_driver, environment
from tests.support.fits import HERE

sys.path.insert(0, str(HERE.parent / "gpu"))

from gpu_ranks import Ranks

pytestmark = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("g++")), reason="needs a C and a C++ compiler")
_SEE = """
import json, sys
from dataclasses import asdict
from autods.devices.cuda import read_nvml
print(json.dumps([asdict(read_nvml(visible)) for visible in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def outcomes(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.support.cards.session` has seen on two cards, which are named by UUID, the second one first."""
    folder = tmp_path_factory.mktemp("cards")
    machine = Machine.make(folder / "cards")
    for uuid in ("GPU-8932f937", "GPU-0a11c2d0"):
        machine.add(uuid, total_bytes=8 * GIB)
    command = [sys.executable, "-m", "tests.support.cards.session", str(folder)]
    variables = environment(machine, libraries, "GPU-0a,GPU-8932f937")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    return seen


def see(machine: Machine, libraries: Path, names: Sequence[str | None]) -> list[dict[str, Any]]:
    """NVML's reading for each value of CUDA_VISIBLE_DEVICES, by the real binding in a process of its own."""
    command = [sys.executable, "-c", _SEE, json.dumps(names)]
    done = subprocess.run(command, env=environment(machine, libraries), capture_output=True, text=True, check=True)
    readings: list[dict[str, Any]] = json.loads(done.stdout)
    return readings


def test_the_real_binding_finds_cards_by_index_uuid_and_slice(libraries: Path, tmp_path: Path) -> None:
    machine = Machine.make(tmp_path / "cards")
    machine.add("GPU-8932f937", capability=(7, 0))
    sliced = machine.add("GPU-0a11c2d0", total_bytes=39 * GIB, mig=True)
    machine.add("MIG-1", total_bytes=9 * GIB, slice_of=sliced)
    machine.add("MIG-2", total_bytes=19 * GIB, slice_of=sliced)
    names = [None, "0", "1", "GPU-8932f937", "GPU-8", "MIG-2", "GPU-z", ""]
    seen = [[card["total_bytes"] // GIB for card in reading["cards"]] for reading in see(machine, libraries, names)]
    assert seen == [[16], [16], [9], [16], [16], [19], [], []]
    (first, *_) = see(machine, libraries, ["0"])
    assert (first["driver"], first["cuda"], first["cards"][0]["bf16"]) == ("580.95.05", "13.0", False)


def test_neighbours_lost_cards_and_a_broken_driver_are_seen(libraries: Path, tmp_path: Path) -> None:
    machine = Machine.make(tmp_path / "cards")
    machine.add("GPU-a")
    with subprocess.Popen(["sleep", "60"]) as neighbour:
        machine.hold(neighbour.pid, 0, 3 * GIB)
        (shared,) = see(machine, libraries, [None])
        neighbour.kill()
    (card,) = shared["cards"]
    assert (card["free_bytes"], card["others_bytes"], card["pids"]) == (13 * GIB, 3 * GIB, [neighbour.pid])
    assert see(machine, libraries, [None])[0]["cards"][0]["others_bytes"] == 0
    machine.state.card[0].lost = 1
    assert see(machine, libraries, ["0"])[0]["unusable"].startswith("NVML: GPU is lost\n")
    machine.state.problem = 18
    assert "version mismatch" in see(machine, libraries, ["0"])[0]["unusable"]


def test_a_fit_on_one_card_takes_the_first_that_is_named(outcomes: dict[str, Any]) -> None:
    seen = outcomes["one card"]
    assert seen["code"] == 0, seen["printed"]
    assert "trials run with CUDA_VISIBLE_DEVICES=1,0" in seen["printed"]
    assert seen["cards"] == [1]
    memory = seen["report"]["memory"]["device"]
    assert CONTEXT_BYTES < memory["peak_bytes"] <= memory["limit_bytes"] == 2 * GIB
    assert seen["report"]["certificate"]["passed"]


def test_a_fit_on_two_cards_counts_context_and_nccl(outcomes: dict[str, Any]) -> None:
    seen = outcomes["two cards"]
    assert seen["code"] == 0, seen["printed"]
    assert seen["cards"] == [0, 1]
    fits = [trial["outcome"] for trial in seen["report"]["trials"] if trial["outcome"]["kind"] == "fit"]
    assert fits
    for outcome in fits:
        card = outcome["card"]
        assert outcome["memory"]["device"]["peak_bytes"] == card["reserved_bytes"] + CONTEXT_BYTES + NCCL_BYTES
        assert 0 < card["allocated_bytes"] <= card["reserved_bytes"]


def test_ranks_are_forked_and_give_their_cards_back(outcomes: dict[str, Any]) -> None:
    assert not [note for note in outcomes["started"] if "new processes" in note]
    held = {name: seen["used"] for name, seen in outcomes.items() if name != "started"}
    assert {name for name, used in held.items() if any(used)} == {"beside", "shared"}  # by a neighbour


def test_an_emulated_card_runs_out_at_its_size_as_torch_does(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["emulated"]["outcome"]
    assert (outcome["kind"], outcome["tier"], outcome["action"]) == ("out_of_memory", "device", "leaner_rung")
    assert outcome["evidence"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU ")
    allowed = 2 * GIB - CONTEXT_BYTES - NCCL_BYTES
    assert f" {allowed / GIB:.2f} GiB allowed; " in outcome["evidence"]
    assert outcome["wanted_bytes"] == 40 * 32 * MIB
    assert outcome["free_bytes"] < allowed - 40 * 32 * MIB
    assert "fragmentation" not in outcome["advice"]


def test_segments_grow_in_a_forked_rank_that_asks_for_it(outcomes: dict[str, Any]) -> None:
    fixed, grown = (outcomes[name]["outcome"]["card"] for name in ("fixed", "grown"))
    assert grown["allocated_bytes"] == fixed["allocated_bytes"]
    assert grown["reserved_bytes"] < 0.6 * fixed["reserved_bytes"]


def test_a_retry_of_the_allocator_is_counted(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["wasted"]["outcome"]
    assert (outcome["kind"], outcome["alloc_retries"]) == ("fit", 1)
    assert outcome["card"]["nvml_bytes"] > 7.5 * GIB


def test_a_process_beside_a_rank_is_named_with_its_bytes(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["beside"]["outcome"]
    assert (outcome["kind"], outcome["tier"], outcome["rank"]) == ("out_of_memory", "device", 1)
    assert "other processes hold 3.0 GiB of this card" in outcome["advice"]


def test_a_process_that_comes_in_a_trial_is_told_and_not_counted(outcomes: dict[str, Any]) -> None:
    seen = outcomes["shared"]
    assert seen["outcome"]["kind"] == "fit"
    assert seen["outcome"]["memory"]["device"]["peak_bytes"] < 2 * GIB
    (note,) = seen["notes"]
    assert "GPU 1 still holds" in note


def test_a_card_lost_in_a_trial_ends_the_fit_as_broken(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["lost"]["outcome"]
    assert (outcome["kind"], outcome["failure"], outcome["rank"]) == ("failed", "infrastructure", 1)
    assert outcome["action"] == "fix_environment"
    assert outcomes["loses a card"]["code"] == 3
    assert "look at its compute mode" in outcomes["loses a card"]["printed"]  # the same error has other causes
    assert "it may be broken" in outcomes["loses a card"]["printed"]
    assert outcomes["repaired"]["outcome"]["kind"] == "fit"


def test_ranks_on_a_slice_are_forked(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine.make(tmp_path / "cards")
    card = machine.add("GPU-a", mig=True)
    machine.add("MIG-1", total_bytes=4 * GIB, slice_of=card)
    machine.add("MIG-2", total_bytes=8 * GIB, slice_of=card)
    for name, value in environment(machine, libraries, "MIG-2").items():
        monkeypatch.setenv(name, value)
    notes: list[str] = []
    source = make_source(HERE / "workloads" / "activations.py")
    with Ranks(source, "cuda", 1, tmp_path / "out", said=notes.append) as ranks:
        ranks.survey()
        outcome, peaks, _ = ranks.run(
            ds_config={"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
        )
    assert isinstance(outcome, Fit)
    assert peaks["device_beside"] == CONTEXT_BYTES
    assert notes == []
    assert [machine.state.holding[number].card for number in range(machine.state.holdings)] == [2]
