from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.deepspeed import get_key
from autods.config.rungs import Rung, list_ladder, read_rungs, select_rungs, unmet_need
from autods.errors import InputError
from autods.forecast.predict.step_time import BOUNDS
from autods.system.host import data_folder
from autods.types import ModelFacts
from tests.support.composed import make_site
from tests.support.reports import LADDER

SHARES = tuple(f"zero3-partial-offload-{share}" for share in (20, 40, 60, 80))
FACTS = ModelFacts(
    parameters=32_638_976, largest_parameter=1_048_576, checkpointing=True, tokens_per_sample=64, has_optimizer=False
)
MIB = 2**20


@pytest.fixture(scope="module")
def rungs() -> Mapping[str, Rung]:
    return read_rungs()


def rung_file(folder: Path, *, name: str = "mine", old: str = "", new: str = "") -> Path:
    """zero3 under another name, with one piece of its text replaced."""
    text = (data_folder("strategies") / "zero3.toml").read_text().replace('name = "zero3"', f'name = "{name}"')
    assert old in text
    path = folder / f"{name}.toml"
    path.write_text(text.replace(old, new))
    return path


def test_the_ladder_is_the_nine_rungs_fastest_first(rungs: Mapping[str, Rung]) -> None:
    assert list_ladder(rungs) == LADDER


def test_each_step_down_the_shipped_ladder_shards_or_moves_more(rungs: Mapping[str, Rung]) -> None:
    def leanness(rung: Rung) -> tuple[int, int]:
        away = {"device": 0, "host": 1, "nvme": 2}
        return len(rung.shards), sum(away[tier] for tier in rung.places.values())

    # Parameters on the host move in each micro batch, the optimizer's states in each step alone: so they come later.
    steps = [leanness(rungs[name]) for name in LADDER if name != "zero3-offload-param"]
    assert steps == sorted(steps)
    assert LADDER.index("zero3-offload-optimizer") < LADDER.index("zero3-offload-param")


def test_at_416_mib_buckets_start_at_a_million_elements(rungs: Mapping[str, Rung]) -> None:
    key = "zero_optimization.reduce_bucket_size"
    sizes = [rung.start[key].size(device_bytes=416 * MIB, facts=FACTS) for rung in rungs.values() if key in rung.start]
    assert len(sizes) == 16
    assert all(1.0e6 <= size <= 1.2e6 for size in sizes)


def test_no_bucket_starts_above_deepspeeds_default(rungs: Mapping[str, Rung]) -> None:
    sizing = rungs["zero2"].start["zero_optimization.reduce_bucket_size"]
    assert sizing.size(device_bytes=10**15, facts=FACTS) == 500_000_000


def test_start_sizes_are_even_and_never_nothing(rungs: Mapping[str, Rung]) -> None:
    for rung in rungs.values():
        for sizing in (
            sizing for sizing in rung.start.values() if sizing.switch is None and sizing.frozen_in_layer is None
        ):
            for device_bytes in (1, 999_999, 64 * MIB, 80 * 2**30 + 1):
                size = sizing.size(device_bytes=device_bytes, facts=FACTS)
                assert size >= 2
                assert size % 2 == 0


def test_keys_that_stage_3_ignores_are_not_tuned_there(rungs: Mapping[str, Rung]) -> None:
    for rung in rungs.values():
        if rung.stage == 3:
            tuned = {key.rpartition(".")[2] for key in (*rung.tune, *rung.start)}
            assert not {key for key in tuned if key.startswith("allgather") or key == "reduce_scatter"}


def test_no_rung_tunes_the_allgather_bucket(rungs: Mapping[str, Rung]) -> None:
    assert not [key for rung in rungs.values() for key in rung.tune if "allgather" in key]


def test_every_range_that_is_tuned_has_a_start_value(rungs: Mapping[str, Rung]) -> None:
    for rung in rungs.values():
        assert all(key in rung.start for key, dimension in rung.tune.items() if not dimension.choices)


def test_pinned_memory_is_tuned_where_a_rung_offloads(rungs: Mapping[str, Rung]) -> None:
    pinned = {name for name, rung in rungs.items() if any("pin_memory" in key for key in rung.tune)}
    assert pinned == {name for name, rung in rungs.items() if "host" in rung.places.values()}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("zero2-offload", {"zero2"}),
        ("zero3-offload-param", {"zero3"}),
        ("zero3-offload", {"zero3", "zero3-offload-param", "zero3-offload-optimizer"}),
        ("zero3-offload-bf16-states", {"zero3-bf16-states"}),
        ("zero3", set()),
        ("zero3-nvme", set()),  # it gathers parameters more often
    ],
)
def test_offload_copies_beside_the_same_work(rungs: Mapping[str, Rung], name: str, others: set[str]) -> None:
    beside = {other for other, rung in rungs.items() if rungs[name].copies_beside(rung)}
    assert {other for other in beside if "partial" not in other} == others


def test_rungs_outside_the_ladder_say_why(rungs: Mapping[str, Rung]) -> None:
    apart = {name: rung.opt_in for name, rung in rungs.items() if name not in list_ladder(rungs)}
    lossy = {name for name in apart if rungs[name].lossy}
    assert lossy == {"zero3-bf16-states", "zero3-offload-bf16-states", "zero3-quantized-weights"}
    assert set(apart) == {"zero1-offload", *SHARES, *lossy}
    assert {rung.eases for rung in rungs.values()} == {"", "communication", "host"} <= {"", *BOUNDS}
    assert apart["zero3-bf16-states"].startswith("masters, gradients and moments in bf16 change the numbers")


def test_a_family_has_a_rung_for_each_variant(rungs: Mapping[str, Rung]) -> None:
    shares = select_rungs(("zero3-offload-optimizer", "zero3-partial-offload", "zero3"), rungs)
    assert [rung.name for rung in shares] == ["zero3", *SHARES, "zero3-offload-optimizer"]
    offloads = [get_key(rung.ds_config, "zero_optimization.offload_optimizer") for rung in shares]
    assert [offload and offload.get("ratio") for offload in offloads] == [None, 0.2, 0.4, 0.6, 0.8, None]
    assert shares[1].title == "ZeRO-3 with 20 % of the optimizer on the CPU"
    assert (shares[1].family, shares[1].variants) == ("zero3-partial-offload", {})
    assert [rung.name for rung in select_rungs((SHARES[2],), rungs)] == [SHARES[2]]
    with pytest.raises(InputError, match="there is no rung ''"):  # most rungs are of no family
        select_rungs(("zero3", ""), rungs)


def test_states_in_bf16_need_a_config_that_trains_in_bf16(rungs: Mapping[str, Rung]) -> None:
    rung = rungs["zero3-bf16-states"]
    assert unmet_need(rung, make_site(1), FACTS) is None
    assert unmet_need(rung, make_site(2, precision="fp16"), FACTS) == "the config trains in fp16: it needs bf16"


def test_quantized_weights_are_for_cards_of_several_nodes(rungs: Mapping[str, Rung]) -> None:
    rung = rungs["zero3-quantized-weights"]
    assert unmet_need(rung, make_site(16, ranks_per_node=8), FACTS) is None
    assert unmet_need(rung, make_site(8), FACTS) == "1 node: it saves traffic between nodes, so it needs 2 or more"
    on_cpu = make_site(4, ranks_per_node=2, device="cpu")
    assert unmet_need(rung, on_cpu, FACTS) == "cpu ranks: its op is for cards"


def test_selected_rungs_come_fastest_first(rungs: Mapping[str, Rung]) -> None:
    assert [rung.name for rung in select_rungs(("zero3", "ddp", "zero3"), rungs)] == ["ddp", "zero3"]


def test_an_unknown_rung_is_refused_with_the_names_there_are(rungs: Mapping[str, Rung]) -> None:
    with pytest.raises(InputError, match=r"no rung 'zero4'[\s\S]*zero3-nvme"):
        select_rungs(("ddp", "zero4"), rungs)


def test_an_empty_ladder_is_refused(rungs: Mapping[str, Rung]) -> None:
    with pytest.raises(InputError, match="the ladder is empty"):
        select_rungs((), rungs)


def test_a_users_rung_joins_the_ladder_at_its_place(tmp_path: Path) -> None:
    rung_file(tmp_path, old="order = 50", new="order = 52")
    names = list_ladder(read_rungs((tmp_path,)))
    assert names[names.index("zero3") + 1] == "mine"


def test_a_users_rung_replaces_a_shipped_one_of_the_same_name(tmp_path: Path) -> None:
    rung_file(tmp_path, name="zero3", old="order = 50", new="order = 5")
    assert next(iter(read_rungs((tmp_path,)))) == "zero3"


def test_a_users_rung_replaces_the_family_of_its_name(tmp_path: Path) -> None:
    rung_file(tmp_path, name="zero3-partial-offload", old="order = 50", new="order = 50")
    mine = read_rungs((tmp_path,))
    assert [name for name in mine if name.startswith("zero3-partial-offload")] == ["zero3-partial-offload"]
    assert [rung.name for rung in select_rungs(["zero3-partial-offload"], mine)] == ["zero3-partial-offload"]


def test_a_users_family_replaces_the_shipped_one(tmp_path: Path) -> None:
    text = (data_folder("strategies") / "zero3-partial-offload.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("variants"))
    (tmp_path / "mine.toml").write_text(text.replace(line, "variants = { half = 0.5 }"))
    members = select_rungs(["zero3-partial-offload"], read_rungs((tmp_path,)))
    assert [rung.name for rung in members] == ["zero3-partial-offload-half"]


def test_an_edited_rung_is_read_again(tmp_path: Path) -> None:
    rung_file(tmp_path, old="order = 50", new="order = 55")
    assert read_rungs((tmp_path,))["mine"].order == 55
    rung_file(tmp_path, old="order = 50", new="order = 65")
    assert read_rungs((tmp_path,))["mine"].order == 65


def test_a_strategies_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder of rungs"):
        read_rungs((tmp_path / "nowhere",))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("order = 50", "order = ", "is not TOML"),
        ("order = 50", "", "lacks 'order'"),
        ("order = 50", 'order = "fast"', "order is 'fast', not a whole number"),
        ("stage = 3\nshards", "stage = 4\nshards", "stage is 4, not one of 0, 1, 2, 3"),
        ("order = 50", "order = 50\nsorder = 1", "unknown key 'sorder'"),
        ('optimizer = "device"', 'optimizer = "moon"', "places.optimizer is 'moon'"),
        ('optimizer = "device"', "", "places lacks 'optimizer'"),
        ("world_size = 2", "", "needs lacks 'world_size'"),
        ("world_size = 2", "world_size = 2\nprecision = 16", "needs.precision is 16, not text"),
        ("order = 50", "order = 50\nopt_in = true", "opt_in is True"),
        ("order = 50", "order = 50\nlossy = true", "lossy needs opt_in"),
        ("order = 50", "order = 50\nvariants = { half = 0.5 }", "variants needs a key of ds_config that is"),
        ("order = 50", 'order = 50\nvariants = { "a/b" = 0.5 }', "mine-a/b"),
        (
            "device_share = 0.005, bytes_each",
            "bytes_each",
            "needs one of device_share, frozen_in_layer and switch",
        ),
        ("low = 0.5, high = 20.0", "low = 0.5, high = 0.1", "0 < low < high"),
        ("choices = [true, false]", "choices = []", "needs a start value"),
        ("choices = [true, false]", "choices = true", "not a list"),
    ],
)
def test_a_bad_rung_file_is_refused_with_the_file_and_what_is_wrong(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = rung_file(tmp_path, old=old, new=new)
    with pytest.raises(InputError) as caught:
        read_rungs((tmp_path,))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "_File" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_rung_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        read_rungs((tmp_path,))


def test_every_rung_file_is_named_after_its_rung() -> None:
    files = {path.stem for path in data_folder("strategies").glob("*.toml")}
    assert files == {rung.family or rung.name for rung in read_rungs().values()}


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("choices = [true, false], usual = true", "choices = [true], usual = false", "one of the choices"),
        ("most = 500_000_000, usual = 50_000_000", 'most = 500_000_000, usual = "50M"', "a number of elements"),
        ("most = 500_000_000, usual = 50_000_000", "most = 500_000_000, usual = 1", "a number of elements"),
        ("most = 500_000_000, usual = 50_000_000", "most = 500_000_000, usual = true", "a number of elements"),
    ],
)
def test_a_usual_value_that_the_key_cannot_take_is_an_error(tmp_path: Path, old: str, new: str, wanted: str) -> None:
    rung_file(tmp_path, old=old, new=new)
    with pytest.raises(InputError, match=rf"usual is .*, not {wanted}"):
        read_rungs((tmp_path,))


def test_a_rung_need_not_say_what_is_usual(tmp_path: Path) -> None:
    rung_file(tmp_path, old=", usual = 50_000_000", new="")
    assert read_rungs((tmp_path,))["mine"].tune["zero_optimization.stage3_prefetch_bucket_size"].usual is None


def test_a_site_can_speak_against_a_rung_before_the_model_does(rungs: Mapping[str, Rung]) -> None:
    assert unmet_need(rungs["zero1"], make_site(1), None) == "one rank: no sharding to gain"
    assert unmet_need(rungs["zero3-nvme"], make_site(1), None) == "no --nvme-path was given"
    assert unmet_need(rungs["zero3-nvme"], make_site(1, nvme_path=Path("/fast")), None) is None


@pytest.mark.parametrize(
    ("base", "refused", "reason"),
    [
        (
            {"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 0},
            {"ddp", "zero3", "zero2-offload", "zero3-offload", "zero3-bf16-states"},
            "compute_grad_norm is false",
        ),
        (
            {"zero_optimization": {"compute_grad_norm": False}},
            {"ddp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "zero3-bf16-states"},
            "compute_grad_norm is false",
        ),
        (
            {
                "zero_optimization": {"compute_grad_norm": False},
                "gradient_clipping": 0,
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            {"ddp", "zero1", "zero3", "zero2-offload", "zero3-offload", "zero3-bf16-states"},
            "compute_grad_norm is false",
        ),
        ({"data_types": {"grad_accum_dtype": "torch.float32"}}, {"ddp"}, "data_types.grad_accum_dtype"),
        ({"data_types": {"grad_accum_dtype": "bfloat16"}}, set(), ""),
        (
            {"gradient_allreduce_op": "Sum", "prescale_gradients": True},
            {"zero3", "zero3-offload", "zero3-bf16-states"},
            "gradient_allreduce_op is sum",
        ),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, {"ddp", "zero1", "zero2", "zero3"}, "master weights"),
        (
            {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"ddp"},
            "master weights in half precision: DeepSpeed refuses them without ZeRO",
        ),
        (
            {"fp16": {"fp16_master_weights_and_grads": True}},
            {"ddp", "zero1", "zero2", "zero3", "zero3-bf16-states"},
            "master weights",
        ),
        (
            {"gradient_predivide_factor": 2.0},
            {"zero2", "zero3", "zero2-offload", "zero3-offload", "zero3-bf16-states"},
            "prescale_gradients or gradient_predivide_factor",
        ),
        ({"prescale_gradients": True, "zero_optimization": {"reduce_scatter": False}}, set(), ""),
        ({"optimizer": {"type": "Muon"}}, {"zero3", "zero3-offload", "zero3-bf16-states"}, "Muon with reduce_scatter"),
    ],
)
def test_rungs_whose_keys_deepspeed_refuses_do_not_apply(
    rungs: Mapping[str, Rung], base: Mapping[str, Any], refused: set[str], reason: str
) -> None:
    """Source: DeepSpeed 0.19.8, runtime/config.py, engine.py, zero/config.py, stage_1_and_2.py and stage3.py."""
    names = ("ddp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "zero3-bf16-states")
    reasons = {name: unmet_need(rungs[name], make_site(2, base=base), FACTS) for name in names}
    assert {name for name, why in reasons.items() if why is not None} == refused
    assert all(why.startswith(reason) for why in reasons.values() if why is not None)


def test_a_models_own_optimizer_replaces_the_refused_muon(rungs: Mapping[str, Rung]) -> None:
    site = make_site(2, base={"optimizer": {"type": "Muon"}})
    assert unmet_need(rungs["zero3"], site, replace(FACTS, has_optimizer=True)) is None


def test_more_ranks_than_there_are_is_a_reason(rungs: Mapping[str, Rung]) -> None:
    rung = replace(rungs["zero1"], needs={"world_size": 4, "nvme_path": False})
    assert unmet_need(rung, make_site(2), FACTS) == "2 ranks: it needs 4 or more"


def test_frozen_layers_on_nvme_have_buffers_and_no_prefetch() -> None:
    """DeepSpeed keeps a recomputed layer's frozen weights to its backward, and would read one of them twice ahead."""
    frozen = replace(FACTS, trained_parameters=10, frozen_in_layer=7)
    start = read_rungs()["zero3-nvme"].start
    buffers, prefetch = (
        [start[f"zero_optimization.{key}"].size(device_bytes=2**34, facts=facts) for facts in (FACTS, frozen)]
        for key in ("offload_param.buffer_count", "stage3_prefetch_bucket_size")
    )
    assert buffers == [5, 12]
    assert prefetch == [42_949_672, 0]
