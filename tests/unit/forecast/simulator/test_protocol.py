"""What DeepSpeed or a kernel says of an optimizer, in the words of the config."""

from __future__ import annotations

import pytest

from autods.forecast.simulator import protocol

CONFIG = {"optimizer": {"type": "sgd"}}


def said_of(error: Exception, config: dict[str, object]) -> protocol.Refused:
    with pytest.raises(protocol.Refused) as refused, protocol.of_the_optimizer(config):
        raise error
    return refused.value


def test_a_paged_optimizer_is_not_simulated() -> None:
    error = RuntimeError("Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.")
    refused = said_of(error, {})
    assert refused.kind == "unsupported"
    assert "the optimizer of build_optimizer is a paged one" in refused.what


def test_an_optimizer_for_gpus_is_refused_on_cpu_ranks_by_its_name() -> None:
    refused = said_of(ValueError("This op had not been implemented on CPU backend."), {"optimizer": {"type": "Lamb"}})
    assert refused.what == "DeepSpeed's kernel of the optimizer Lamb runs on GPUs only"


def test_a_name_that_torch_does_not_have_is_said() -> None:
    refused = said_of(AttributeError("module 'torch.optim' has no attribute 'SGDD'"), {"optimizer": {"type": "SGDD"}})
    assert "'SGDD' is neither an optimizer of DeepSpeed nor of torch.optim" in refused.what
    assert refused.hint is not None
    assert "mind the case" in refused.hint


def test_other_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError), protocol.of_the_optimizer(CONFIG):
        raise ZeroDivisionError
