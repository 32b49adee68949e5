"""Models of images and text, whose shapes follow from integers of the batch: sizes of images, and tokens for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autods.forecast.simulate import ProcessSimulator
from autods.forecast.values import EngineSpec
from autods.workload import make_source
from tests.support import golden_cases as golden

# The model itself checks what it reads. PATCHES lie in one dimension, as Qwen-VL has them.
READS = """
import torch
PATCHES, TOKENS, IMAGE = 16, 12, 9
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.text = torch.nn.Linear(8, 4), torch.nn.Embedding(10, 4)
    def forward(self, ids, grid, pixels):
        samples = len(ids)
        assert grid.tolist() == [[2, 8]] * samples
        assert [grid[0, 1].item(), int(grid.prod(dim=1).sum())] == [8, PATCHES * samples]
        images = self.patch(pixels).split(grid.prod(dim=1).tolist())
        assert len(images) == samples
        mask = ids == IMAGE
        assert ids[mask].shape == (4 * samples,)
        assert mask.nonzero().shape == (4 * samples, 2)
        assert ids.masked_select(mask.unsqueeze(-1).expand(-1, -1, 4)[..., 0]).shape == (4 * samples,)
        assert self.text(ids)[mask.unsqueeze(-1).expand(-1, -1, 4)].shape == (16 * samples,)
        assert torch.repeat_interleave(grid[:, 0]).shape == (2 * samples,)
        ends = torch.tensor([0, 4, 4, PATCHES], device=ids.device)
        assert torch.unique_consecutive(ends).diff().tolist() == [4, 12]
        places = torch.arange(TOKENS, device=ids.device).expand(samples, -1).clone()
        places[:, 0] += 20  # through a view
        assert places.max().item() == 20
        places[:, 0] = self.text(ids).argmax(dim=-1)[:, 0]  # a value of the device
        assert places[0, 1].item() == 0  # as all that is not known
        hidden = self.text(ids).masked_scatter(mask.unsqueeze(-1), torch.cat(images)[:: PATCHES // 4])
        return hidden.pow(2).mean()
def build_model():
    return Model()
def build_batch(n):
    ids = torch.zeros(n, TOKENS, dtype=torch.long)
    ids[:, :4] = IMAGE
    return {"ids": ids, "grid": torch.tensor([[2, 8]] * n), "pixels": torch.rand(n * PATCHES, 8)}
"""
QWEN = """
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
SMALL = {"hidden_size": 32, "intermediate_size": 64}
CONFIG = Qwen2_5_VLConfig(
    text_config={
        "model_type": "qwen2_5_vl_text", **SMALL, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 99,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    },
    vision_config={
        "model_type": "qwen2_5_vl", **SMALL, "depth": 2, "out_hidden_size": 32, "num_heads": 2,
        "fullatt_block_indexes": [1],
    },
    image_token_id=98, video_token_id=97, vision_start_token_id=96,
)
def build_model():
    return Qwen2_5_VLForConditionalGeneration(CONFIG)
def build_batch(n):
    ids = torch.randint(90, (n, 24))
    ids[:, :16] = CONFIG.image_token_id
    patch = 3 * CONFIG.vision_config.temporal_patch_size * CONFIG.vision_config.patch_size**2
    return {
        "input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": (ids == CONFIG.image_token_id).int(),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * n), "pixel_values": torch.rand(n * 64, patch),
    }
"""
MODELS = {"reads": READS, "qwen2_5_vl": QWEN}


@pytest.fixture(params=MODELS)
def simulator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessSimulator]:
    (tmp_path / "model.py").write_text(MODELS[request.param])
    with ProcessSimulator(make_source(tmp_path / "model.py"), processes=1) as simulator:
        yield simulator


def test_shapes_by_values_of_the_batch_are_exact(simulator: ProcessSimulator) -> None:
    config = golden.config_of("zero2", accumulation=1, world=golden.WORLD)
    spec = EngineSpec(
        rung="zero2", ds_config=config, world_size=golden.WORLD, ranks_per_node=8, device_bytes=16 << 30,
        checkpointing=False,
    )  # fmt: skip
    with simulator.engine(spec) as engine:
        one, three = engine.measure(1), engine.measure(3)
    assert not one.is_upper_bound
    assert one.live_bytes["forward"]["device"] < three.live_bytes["forward"]["device"]
