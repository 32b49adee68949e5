"""The engine that the script trains, watched call by call."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from .batches import loss_of
from .session import Enough, Session


def watch(engine: Any, session: Session) -> None:
    """Tell the session of each call from here on. Optimizer steps are counted at the accumulation's boundary: a plain
    script calls `step` once a micro batch, a trainer once an optimizer step."""
    _wrap(engine, "forward", session, functools.partial(_forward, session, engine))
    _wrap(engine, "backward", session, functools.partial(_backward, session))
    _wrap(engine, "step", session, functools.partial(_step, session, engine))
    _wrap(engine, "train", session, functools.partial(_train, session))
    if hasattr(engine.optimizer, "step"):
        _wrap(engine.optimizer, "step", session, functools.partial(_step_of_optimizer, session))
    if hasattr(engine, "train_batch"):
        _wrap(engine, "train_batch", session, functools.partial(_train_batch, session))


def _wrap(engine: Any, name: str, session: Session, watched: Callable[..., Any]) -> None:
    real = getattr(engine, name)

    @functools.wraps(real)
    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        if session.busy:
            return real(*args, **kwargs)
        session.insist()
        try:
            return watched(real, *args, **kwargs)
        except Enough:
            raise
        except BaseException as error:
            session.failure = error
            raise

    setattr(engine, name, types.MethodType(call, engine))  # schedulers of torch want an optimizer's step to be one


def _forward(session: Session, engine: Any, real: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    training = torch.is_grad_enabled() and engine.training
    session.forward(args, kwargs, training=training)
    out = real(*args, **kwargs)
    if training:
        session.forwarded(loss_of(out))
    return out


def _backward(session: Session, real: Any, loss: Any = None, *args: Any, **kwargs: Any) -> Any:
    session.backward()
    session.lost(loss_of(loss))
    return real(loss, *args, **kwargs)


def _step(session: Session, engine: Any, real: Any, *args: Any, **kwargs: Any) -> Any:
    boundary = bool(engine.is_gradient_accumulation_boundary())
    session.phase("step")
    session.in_step = True
    try:
        done = real(*args, **kwargs)
    finally:
        session.in_step = False
    session.stepped(boundary=boundary)
    return done


def _step_of_optimizer(session: Session, real: Any, *args: Any, **kwargs: Any) -> Any:
    """A script, or Lightning's Fabric, may step the optimizer that the engine made, and never the engine."""
    if session.in_step:
        return real(*args, **kwargs)
    session.phase("step")
    done = real(*args, **kwargs)
    session.stepped(boundary=True)
    return done


def _train(session: Session, real: Any, mode: bool = True) -> Any:
    if not mode:
        session.other("evaluate")
    return real(mode)


def _train_batch(session: Session, real: Any, *args: Any, **kwargs: Any) -> Any:
    """A pipeline runs the whole optimizer step in one call, and its own parts inside it."""
    session.forward((), {}, training=True)
    session.busy = True
    try:
        loss = real(*args, **kwargs)
    finally:
        session.busy = False
    session.lost(loss_of(loss))
    session.stepped(boundary=True)
    return loss
