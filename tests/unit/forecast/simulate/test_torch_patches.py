"""Signatures of autograd functions as `apply` asks them: shared where one `def` makes many functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from autods.forecast.simulate.torch_patches import read_signature


def make_forward(module: str) -> Callable[..., str]:
    def forward(ctx: object, *outputs: Any) -> str:
        return module

    return forward


def make_forward_with_default(default: int) -> Callable[..., int]:
    def forward(ctx: object, scale: int = default) -> int:
        return scale

    return forward


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def test_functions_of_one_def_share_a_signature() -> None:
    first, second = read_signature(make_forward("mlp")), read_signature(make_forward("attention"))
    assert first is second
    assert first.bind("ctx", 1, 2).args == ("ctx", 1, 2)


def test_a_default_of_its_own_is_kept() -> None:
    for default in (1, 2):
        bound = read_signature(make_forward_with_default(default)).bind("ctx")
        bound.apply_defaults()
        assert bound.args == ("ctx", default)


def test_decorated_functions_keep_their_parameters() -> None:
    one, two = decorated(lambda ctx, weight: weight), decorated(lambda ctx, weight, bias: bias)
    assert read_signature(one).bind("ctx", 1).args == ("ctx", 1)
    assert read_signature(two).bind("ctx", 1, 2).args == ("ctx", 1, 2)
    with pytest.raises(TypeError):
        read_signature(one).bind("ctx", 1, 2)
