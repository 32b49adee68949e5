"""Every causal language model of transformers, small: does it plan, and does a real trial agree with the forecast?

python tests/benchmarks/causal_lms.py plan [--types llama,mamba2] [--again] [--out FILE]
python tests/benchmarks/causal_lms.py measure [--types llama,mamba2] [--again] [--out FILE] [--lock FILE]
python tests/benchmarks/causal_lms.py table [--out FILE]
… --multimodal

The types are those of transformers' MODEL_FOR_CAUSAL_LM_MAPPING_NAMES. With --multimodal they are the language models
that read images or sounds, too, and have no row there: autods trains these on text alone. Each gets its default config,
made small by the rules of causal_lms.toml: 256 wide, at most 4 layers and 8 experts, 8,192 tokens, the widths in their
proportions.

plan: `autods plan` of zero2 and zero3 on 8 A100s, with samples of 128 tokens.
measure: zero2 on two CPU ranks with micro batch 4, two optimizer steps, by the runner that a fit uses; beside it the
forecast of the same config. An error is forecast / measured − 1.

Results are written after each type, and a type that has one is left out unless --again is given. --lock: this file is
locked while a trial runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import forecast_verdicts as verdicts

from autods.errors import AutodsError
from autods.files import write_whole
from autods.forecast.simulate import ProcessSimulator
from autods.system.host import read_hardware
from autods.types import WorkloadSource
from autods.workload import make_source
from tests.support.settings import plan_settings

RESULTS = Path(__file__).parent / "results" / "causal_lms.json"
RESULTS_MULTIMODAL = RESULTS.with_name("multimodal_lms.json")
RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
WORKLOAD = Path(__file__).parent / "workloads" / "causal_lm.py"
RANKS, SEQ_LEN, MICRO_BATCH, RUNGS = 2, 128, 4, ("zero2", "zero3")  # a trial takes the first rung
MULTIPLE = 32  # of every width


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "measure", "table"))
    parser.add_argument("--types", help="model types, separated by commas; all if not given")
    parser.add_argument("--multimodal", action="store_true", help="language models that read more than text instead")
    parser.add_argument("--again", action="store_true", help="types that have a result, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lock", type=Path, help="a file to lock for each trial")
    options = parser.parse_args()
    options.out = options.out or (RESULTS_MULTIMODAL if options.multimodal else RESULTS)
    rows: dict[str, dict[str, Any]] = json.loads(options.out.read_text())["types"] if options.out.exists() else {}
    known = list_types(options.multimodal)
    wanted = options.types.split(",") if options.types else known
    if options.command != "table":
        rows = {model_type: rows.get(model_type, {}) for model_type in known}
        left = [name for name in wanted if options.again or options.command not in rows[name]]
        for model_type, said in plans(left) if options.command == "plan" else trials(left, options.lock):
            rows[model_type][options.command] = said
            print(model_type, json.dumps(said), file=sys.stderr, flush=True)
            write_whole(options.out, json.dumps({"versions": verdicts.versions(), "types": rows}, indent=1) + "\n")
    print(table({name: rows[name] for name in wanted}))
    return 0


# ---- the models


def list_types(multimodal: bool) -> tuple[str, ...]:
    """All model types with a causal language model, or those that are multimodal alone."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return tuple(sorted(set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - causal if multimodal else causal))


def make_config(model_type: str) -> Any:
    """The small config of a type. Raises whatever its class does where it has no defaults."""
    from transformers import CONFIG_MAPPING

    own: Mapping[str, Any] = RULES.get(model_type, {})
    return CONFIG_MAPPING[model_type](**shrink(CONFIG_MAPPING[model_type]().to_dict(), own))


def shrink(default: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that become smaller, with nested configs; the class derives others from them."""
    rules = RULES["rules"]
    wide = max((default[name] for name in rules["width"] if isinstance(default.get(name), int)), default=None)
    small: dict[str, Any] = {}
    for name, value in default.items():
        if is_config(value):
            small[name] = {"model_type": value["model_type"]} | shrink(value, own.get(name, {}))
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name in rules["width"]:
            small[name] = min(value, rules["hidden"])
        elif name in rules["widths"] and wide:
            share = value * min(1, rules["hidden"] / wide)
            small[name] = max(MULTIPLE, round(share / MULTIPLE) * MULTIPLE)
        elif name in rules["at_most"]:
            small[name] = min(value, rules["at_most"][name])
        elif name.endswith("_token_id"):
            small[name] = min(value, rules["at_most"]["vocab_size"] - 1)
    heads = [name for name in ("num_attention_heads", "num_heads", "n_head") if name in small]
    for name in ("num_key_value_heads", "num_kv_heads"):  # without groups there are none in the small model
        if name in small and heads and default[name] == default[heads[0]]:
            small[name] = small[heads[0]]
    return small | {name: value for name, value in own.items() if not is_config(default.get(name))}


def is_config(value: Any) -> bool:
    """Whether a field's value is a nested config."""
    return isinstance(value, Mapping) and "model_type" in value


# ---- does it plan


def plans(model_types: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a plan says of each type: the verdicts, or the reason why there is none."""
    from autods.planner.plan import plan

    with tempfile.TemporaryDirectory() as scratch, ProcessSimulator(workload_in(Path(scratch)), processes=1) as shared:
        for model_type in model_types:
            began = time.perf_counter()
            try:
                source = write_config(model_type, Path(scratch))
            except Exception as error:  # each class has its own checks
                yield model_type, {"problem": f"no small config: {' '.join(str(error).split()):.200}"}
                continue
            settings = plan_settings(
                source, hardware=read_hardware(), on="a100-80gb", gpus=8, ladder=RUNGS, largest=False
            )
            try:
                site = plan(settings, listen=lambda event: None, start=lambda source: nullcontext(shared)).sites[0]
                said: dict[str, Any] = {rung.rung: rung.verdict for rung in site.rungs}
                if reasons := [rung.reason for rung in site.rungs if not rung.memory]:
                    said["problem"] = reasons[0]
            except AutodsError as error:
                said = {"problem": str(error)}
            yield model_type, said | {"seconds": round(time.perf_counter() - began, 1)}


def workload_in(scratch: Path) -> WorkloadSource:
    """A workload that builds whatever `write_config` wrote into the folder last."""
    return make_source(Path(shutil.copy(WORKLOAD, scratch / "model.py")))


def write_config(model_type: str, scratch: Path) -> WorkloadSource:
    """The small config of the type, saved as transformers does. Raises what `make_config` raises."""
    make_config(model_type).save_pretrained(scratch)
    return make_source(scratch / "config.json", task="causal-lm", seq_len=SEQ_LEN)


# ---- does a trial agree


def trials(model_types: list[str], lock: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a trial of each type measured, and what was forecast for it."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_config("llama", scratch)  # for the survey
        source = workload_in(scratch)
        simulator = stack.enter_context(ProcessSimulator(source, processes=1))
        runner = stack.enter_context(verdicts.runner_of(source, RANKS, scratch / "fit", None))
        for model_type in model_types:
            try:
                write_config(model_type, scratch)
                facts = runner.facts = simulator.facts("cpu")
                # By this name the node knows that the model which it has built for all ranks is another type's.
                runner.settings = replace(runner.settings, source=replace(source, name=model_type))
                setup = verdicts.Setup(
                    name=model_type, workload=model_type, world_size=RANKS, micro_batches=(MICRO_BATCH,),
                    checkpointing=facts.checkpointing, rungs=RUNGS[:1],
                )  # fmt: skip
                with locked(lock):
                    (row,) = verdicts.measured(setup, runner)
                (row,) = verdicts.forecast(setup, [row], simulator)
            except Exception as error:  # each class has its own checks
                yield model_type, {"problem": f"{' '.join(str(error).split()):.200}"}
                continue
            if row.measured_bytes is None or row.before is None:
                yield model_type, {"problem": row.problem or "no forecast"}
                continue
            error = round(row.before.peak_bytes / row.measured_bytes - 1, 4)
            yield model_type, {"measured_bytes": row.measured_bytes, "error": error, **asdict(row.before)}


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold the lock of this file; none without a path."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- what came of it


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """For people: the shares and errors, types without an answer, and the error of each type."""
    planned = {name: row["plan"] for name, row in rows.items() if "plan" in row}
    lines = describe("planned", planned)
    measured = {name: row["measure"] for name, row in rows.items() if "measure" in row}
    lines += describe("measured", measured)
    errors = {name: said["error"] for name, said in measured.items() if "error" in said}
    if errors:
        sizes = sorted(abs(error) for error in errors.values())
        within = sum(size <= 0.1 for size in sizes)
        inside = sum(
            said["low_bytes"] <= said["measured_bytes"] <= said["high_bytes"]
            for said in measured.values()
            if "error" in said
        )
        lines.append(
            f"error: median {statistics.median(sizes):.1%}, worst {max(errors.values(), key=abs):+.1%}, within 10 %"
            f" {within} of {len(errors)}, inside the interval {inside}"
        )
        lines += [f"{name:32}{error:+8.1%}" for name, error in sorted(errors.items(), key=lambda pair: pair[1])]
    return "\n".join(lines)


def describe(done: str, answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many types have an answer, in how many seconds, and why the others have none."""
    problems = {name: said["problem"] for name, said in answers.items() if "problem" in said}
    seconds = sorted(said["seconds"] for said in answers.values() if "seconds" in said)
    took = f"; median {statistics.median(seconds):.0f} s, most {seconds[-1]:.0f} s" if seconds else ""
    lines = [f"{done}: {len(answers) - len(problems)} of {len(answers)}{took}"]
    return lines + [f"  {name}: {' '.join(problem.split()):.150}" for name, problem in problems.items()]


if __name__ == "__main__":
    sys.exit(main())
