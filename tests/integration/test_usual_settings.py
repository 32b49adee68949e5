"""The `usual` values of the ladder are what the installed DeepSpeed takes when a config does not name the key."""

from __future__ import annotations

from typing import Any

import pytest

from autods.config.deepspeed import get_key
from autods.config.rungs import Rung, read_rungs

pytestmark = pytest.mark.integration

TUNED = [rung for rung in read_rungs().values() if rung.tune]


@pytest.mark.parametrize("rung", TUNED, ids=lambda rung: rung.name)
def test_usual_settings_are_deepspeeds_defaults(rung: Rung) -> None:
    taken = defaults(rung)
    usual = {key: dimension.usual for key, dimension in rung.tune.items()}
    assert usual == {key: get_key(taken, key) for key in rung.tune}


def defaults(rung: Rung) -> dict[str, Any]:
    """What DeepSpeed makes of a config that says no more than the stage and where its states are."""
    from deepspeed.runtime.config import get_aio_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero: dict[str, Any] = {"stage": rung.stage}
    for offload in ("offload_param", "offload_optimizer"):
        if any(key.startswith(f"zero_optimization.{offload}.") for key in rung.tune):
            zero[offload] = {"device": "cpu"}
    return {
        "zero_optimization": DeepSpeedZeroConfig(**zero).model_dump(by_alias=True),
        "aio": get_aio_config({}),
    }
