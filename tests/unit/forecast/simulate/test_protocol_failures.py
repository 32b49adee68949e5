"""Errors of DeepSpeed and of kernels are explained in the terms of the user's config."""

from __future__ import annotations

import pytest

from autods.forecast.simulate.protocol import SimulationFailed, explain_optimizer_errors, failure_of
from autods.rank.patching import Patch, SymbolMissing
from autods.types import WorkloadSource

MODEL = WorkloadSource(kind="file", path="model.py", name="model", digest="")
CONFIG = WorkloadSource(kind="hf_config", path="config.json", name="model", digest="")


def explained(error: Exception, config: dict[str, object]) -> SimulationFailed:
    with pytest.raises(SimulationFailed) as refused, explain_optimizer_errors(config):
        raise error
    return refused.value


def test_a_paged_optimizer_is_not_simulated() -> None:
    error = RuntimeError("Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.")
    refused = explained(error, {})
    assert refused.kind == "unsupported"
    assert "the optimizer of build_optimizer is a paged one" in refused.problem


def test_an_optimizer_for_gpus_is_refused_on_cpu_ranks() -> None:
    error = ValueError("This op had not been implemented on CPU backend.")
    refused = explained(error, {"optimizer": {"type": "Lamb"}})
    assert refused.problem == "DeepSpeed's kernel of the optimizer Lamb runs on GPUs only"


def test_an_unknown_optimizer_is_named() -> None:
    error = AttributeError("module 'torch.optim' has no attribute 'SGDD'")
    refused = explained(error, {"optimizer": {"type": "SGDD"}})
    assert "'SGDD' is neither an optimizer of DeepSpeed nor of torch.optim" in refused.problem
    assert refused.hint is not None
    assert "mind the case" in refused.hint


def test_other_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError), explain_optimizer_errors({"optimizer": {"type": "sgd"}}):
        raise ZeroDivisionError


def test_a_refusal_keeps_its_words() -> None:
    failure = failure_of(SimulationFailed("unsupported", "no such kernel", "use another"), MODEL)
    assert (failure.kind, failure.problem, failure.hint) == ("unsupported", "no such kernel", "use another")


def test_a_moved_symbol_of_a_library_is_named_with_a_hint() -> None:
    patch = Patch(symbol="pytest.nothing", why="it is a test")
    with pytest.raises(SymbolMissing) as missing:
        patch.original()
    failure = failure_of(missing.value, MODEL)
    assert failure.problem == f"pytest {pytest.__version__} has no pytest.nothing, which autods replaces: it is a test"
    assert failure.hint is not None
    assert "constraints.txt" in failure.hint


@pytest.mark.parametrize(
    "message",
    [
        "Could not run 'aten::_local_scalar_dense' with arguments from the 'CUDA' backend.",
        "The tensor has a non-zero number of elements, but its data is not allocated yet.",
    ],
)
def test_a_library_that_reads_values_is_told_without_its_terms(message: str) -> None:
    failure = failure_of(RuntimeError(message), MODEL)
    assert (failure.kind, failure.problem[:37]) == ("data_dependent", "a library reads values of tensors, wh")


def test_an_error_of_the_users_file_names_its_line() -> None:
    code = compile("\nraise ValueError('no')", "model.py", "exec")
    try:
        exec(code)
    except ValueError as error:
        failure = failure_of(error, MODEL)
    assert (failure.kind, failure.problem, failure.place) == ("user_code", "ValueError: no", "model.py:2")


def test_an_error_of_a_library_is_the_engines() -> None:
    assert failure_of(RuntimeError("x"), MODEL).kind == "engine"


def test_an_operator_without_a_kernel_is_told_in_one_line() -> None:
    first = "Could not run 'aten::empty_strided' with arguments from the 'CUDA' backend."
    error = NotImplementedError(
        f"{first} This could be because the operator doesn't exist. CPU: {'registered at ' * 99}"
    )
    assert str(failure_of(error, MODEL)) == f"NotImplementedError: {first}"


def test_an_error_of_the_models_library_names_its_line() -> None:
    file = "/env/site-packages/transformers/models/llama/modeling_llama.py"
    try:
        exec(compile("\nraise RuntimeError('no')", file, "exec"))
    except RuntimeError as error:
        failure = failure_of(error, CONFIG)
    assert (failure.kind, failure.problem, failure.place) == ("engine", "RuntimeError: no", f"{file}:2")
    assert failure.hint is not None
    assert "the model of config.json raises it" in failure.hint


def test_a_known_refusal_has_the_advice_of_diagnose() -> None:
    refused = AssertionError("Not able to determine model policy automatically. Please provide policy.")
    failure = failure_of(refused, MODEL)
    assert failure.kind == "engine"
    assert failure.hint is not None
    assert "tensor_parallel.partition_config" in failure.hint
