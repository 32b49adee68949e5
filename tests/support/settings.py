"""Settings of a fit or a plan for a workload that is identified already."""

from __future__ import annotations

from typing import Any

from autods.config.plan_settings import PlanSettings, resolve_plan
from autods.config.settings import Settings, resolve_fit
from autods.requests import FitRequest, PlanRequest
from autods.system.host import Hardware
from autods.types import WorkloadSource


def fit_settings(source: WorkloadSource, *, hardware: Hardware, **options: Any) -> Settings:
    """The settings of a fit with these options."""
    return resolve_fit(FitRequest(source.path, **options), source, hardware=hardware)


def plan_settings(source: WorkloadSource, *, hardware: Hardware, **options: Any) -> PlanSettings:
    """The settings of a plan with these options."""
    return resolve_plan(PlanRequest(source.path, **options), source, hardware=hardware)
