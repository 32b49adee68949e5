"""Nodes of a made-up cluster: their hardware, software and places."""

from __future__ import annotations

from typing import Any

from autods.config.settings import Settings
from autods.devices import Card
from autods.runner.placement import NodeDescription, NodeState
from autods.system.host import Hardware
from autods.types import WorkloadSource
from tests.support.settings import fit_settings

SOURCE = WorkloadSource(kind="file", path="/model.py", name="model", digest="1")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23"}


def a_machine(gpus: int = 4, *, gib: int = 80, name: str = "A100", host_gib: int = 512) -> Hardware:
    host = host_gib * 2**30
    cards = tuple(Card(index=n, name=name, total_bytes=gib * 2**30, free_bytes=gib * 2**30) for n in range(gpus))
    return Hardware(cpu="EPYC", cores=64, host_bytes=host, host_free_bytes=host, cards=cards)


def describe(machine: Hardware, number: int = 1, **versions: str) -> NodeDescription:
    return NodeDescription(address=f"10.0.0.{number}", hardware=machine, versions={**VERSIONS, **versions})


def settings_of(**options: Any) -> Settings:
    """Eight ranks on two nodes of a cluster."""
    return fit_settings(SOURCE, hardware=a_machine(8), **{"gpus": 8, "nodes": 2, "address": "10.0.0.1:6379", **options})


def a_node(number: int) -> NodeState:
    total = {"CPU": 64.0, "GPU": 4.0}
    return NodeState(id=f"id{number}", address=f"10.0.0.{number}", total=total, free=total)
