"""What ranks are told: from the settings and a trial to a job and its DeepSpeed config. Values alone, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..ds_config import compose, ops_of, without_monitors
from ..ladder import Rung
from ..settings import Settings
from ..trial.ops import BUILDERS
from ..trial.spec import Job, RankJob
from ..values import Knobs, ModelFacts, Trial, WorkloadSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The jobs of a runner. facts: None before the survey. loaded: the workload that the zygotes hold.

    mark: of this driver, beside others that swap into one folder. own: of this runner, beside others that write logs.
    """

    settings: Settings
    facts: ModelFacts | None
    loaded: WorkloadSource
    mark: str
    own: str = ""

    def survey(self) -> RankJob:
        """What the workload is, and which of the ladder's ops cannot be had; on one rank."""
        settings = self.settings
        rungs = [rung for rung in settings.ladder if not rung.needs_nvme_path or settings.nvme_path]
        ops = tuple(dict.fromkeys(op for rung in rungs for op in ops_of(self._native_config(rung))))
        if settings.source.kind == "script":
            ops = tuple(BUILDERS)  # its config is not known yet
        return self._job(
            "survey",
            f"survey{self.own}",
            ops=ops,
            ds_config=self._native_config(settings.ladder[0]),
            stall_s=settings.profile.limits.init_s,
        )

    def on_all_ranks(self, job: RankJob) -> RankJob:
        """The same for as many ranks as there are."""
        return replace(job, world_size=self.settings.gpus, local_ranks=tuple(range(self.settings.gpus)))

    def training(self, trial: Trial, id: int) -> RankJob:
        """The trial itself."""
        assert self.facts is not None, "survey first"
        settings, config = self.settings, without_monitors(self._config(trial, self._swap()))
        return self._job(
            "train",
            f"{id:03d}-{trial.rung}",
            ds_config=config,
            world_size=settings.gpus,
            replica_ranks=self.facts.replica_ranks,
            local_ranks=tuple(range(settings.gpus)),
            micro_batch=trial.knobs.micro_batch,
            accumulation=trial.knobs.accumulation,
            checkpointing=trial.knobs.checkpointing,
            steps=trial.steps,
            exam=trial.exam,
            examined_from_s=trial.examined_from_s,
            limit_bytes=settings.device_bytes if trial.limited and settings.device_bytes_asked else None,
            seed=settings.seed,
            swap=str(self._swap()) if "async_io" in ops_of(config) else None,
        )

    def building(self, op: str) -> RankJob:
        """Build and load one of DeepSpeed's ops."""
        limit = self.settings.profile.limits.build_s
        return self._job("ops", f"build-{op}{self.own}", ops=(op,), init_s=limit, wall_s=limit)

    def loading(self) -> RankJob:
        """What a zygote does before any job, for what is said of its failure."""
        return self._job("survey", "survey")

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""
        return self._config(trial, self.settings.nvme_path)

    def _job(self, kind: Job, name: str, **said: Any) -> RankJob:
        limits = self.settings.profile.limits
        folder = self.settings.out / "logs" / name
        return RankJob(
            job=kind,
            source=self.settings.source,
            rebind=self.settings.source != self.loaded,
            device=self.settings.device,
            threads=self.settings.threads,
            folder=str(folder),
            scratch=str(folder / "scratch"),
            **{"stall_s": limits.stall_s, "init_s": limits.init_s, "wall_s": limits.wall_s, **said},
        )

    def _swap(self) -> Path | None:
        path = self.settings.nvme_path
        return path / f"autods-{self.mark}" if path else None

    def _config(self, trial: Trial, nvme_path: Path | None) -> dict[str, Any]:
        assert self.facts is not None, "survey first"
        return compose(
            next(rung for rung in self.settings.ladder if rung.name == trial.rung),
            trial.knobs,
            base=self.settings.base,
            world_size=self.facts.replicas(self.settings.gpus),
            own_optimizer=self.facts.has_optimizer,
            native_optimizer=trial.native_optimizer,
            nvme_path=nvme_path,
        )

    def _native_config(self, rung: Rung) -> dict[str, Any]:
        return compose(
            rung, Knobs(), base=self.settings.base, world_size=self.settings.gpus, own_optimizer=False, nvme_path=Path()
        )
