"""What torch and DeepSpeed do at every call or for every parameter, and which allocates nothing: left out."""

from __future__ import annotations

import contextlib
from typing import Any


def install() -> None:
    """In this process, after DeepSpeed is imported and before the first operator runs."""
    _remember_dispatch_rules()
    _no_ranges()
    _duplicates_by_set()
    _no_compile_passes()
    _no_checked_distributions()


def _remember_dispatch_rules() -> None:
    """torch asks at every operator whether a rule is registered for it: it is looked up once for each."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._library import simple_registry

        find = simple_registry.find_torch_dispatch_rule
        known: dict[Any, Any] = {}

        def remembered(op: Any, kind: type) -> Any:
            try:
                return known[op, kind]
            except KeyError:
                rule = known[op, kind] = find(op, kind)
                return rule

        simple_registry.find_torch_dispatch_rule = remembered  # type: ignore[assignment]


def _no_ranges() -> None:
    """DeepSpeed opens a range for the profiler around each of its functions."""
    from deepspeed.utils import nvtx

    nvtx.enable_nvtx = False


def _duplicates_by_set() -> None:
    """DeepSpeed looks for each parameter in lists of all of them, which takes minutes of a large model."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = getattr(DeepSpeedEngine, "_check_for_duplicates", None)
    if own is None:
        return

    def check(self: Any, optimizer: Any) -> None:
        listed = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if len(set(listed)) != len(listed):
            own(self, optimizer)

    DeepSpeedEngine._check_for_duplicates = check


def _no_compile_passes() -> None:
    """DeepSpeed imports torch's compiler to register passes that only `engine.compile` would use."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if hasattr(DeepSpeedEngine, "register_compile_pass"):
        DeepSpeedEngine.register_compile_pass = lambda *args, **kwargs: None


def _no_checked_distributions() -> None:
    """torch looks at the values of a distribution's arguments, which nothing here has; experts draw from one."""
    from torch.distributions import Distribution

    Distribution.set_default_validate_args(False)
