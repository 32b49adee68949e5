import pytest

from autods.forecast.allocator import AllocConf, alloc_conf


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_read_by_the_new_name_and_the_old(name: str) -> None:
    assert alloc_conf({name: "expandable_segments:True"}) == AllocConf(name=name, expandable=True)
    assert not alloc_conf({name: "expandable_segments:False"}).expandable


def test_the_new_name_wins() -> None:
    both = {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert not alloc_conf(both).expandable


def test_settings_that_no_forecast_knows_are_said() -> None:
    settings = "max_split_size_mb:128, roundup_power2_divisions:[256:1,>:8],expandable_segments: True"
    found = alloc_conf({"PYTORCH_CUDA_ALLOC_CONF": settings})
    assert found.expandable
    assert found.unmodelled == ("max_split_size_mb", "roundup_power2_divisions")
    assert found.said is not None
    assert "max_split_size_mb, roundup_power2_divisions" in found.said


def test_nothing_set_is_the_allocator_as_it_is() -> None:
    assert alloc_conf({"PYTORCH_ALLOC_CONF": ""}) == AllocConf()
    assert AllocConf().said is None


def test_another_allocator_altogether_is_said() -> None:
    assert "backend" in str(alloc_conf({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}).said)
