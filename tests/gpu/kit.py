"""Carries autods to a machine with a card and without a network, and asks there what only a card can answer.

python tests/gpu/kit.py pack [--python 3.12] [--folder kit] [--part-mib 60]
    On a machine with package registries: all that a bare CUDA machine with torch lacks, as wheels of the versions of
    this environment, in parts of at most so many MiB. DeepSpeed is built as a wheel without ops. torch is not packed.
python3.12 tests/gpu/kit.py run [--folder kit] [--out FILE.json] [--minutes 25] [--device cuda] [--only NAME,…]
    There, in the repository: makes `.venv-kit`, which sees the machine's torch, installs the parts, and does these, in
    this order, as far as the minutes reach. What has ended is in the file at once, and is not done again. `install`
    makes the environment alone.

  fit         a whole `autods fit` of GPT-2 774M with Ray on the card, emulated at 24 GiB: ladder, race, certificate
  plain       examples/train.py with its ds_config.json: seconds a step, beside the report's
  rescue      `autods run` of a model whose samples become four times as long: a real out-of-memory, and how it ends
  questions   the open questions of tests/gpu/measure.py
  mixtral     a Mixtral of 8 small experts: each rung's forecast beside its trial
  lora        Qwen2-0.5B with LoRA of rank 16: the same
  autotuner   DeepSpeed Autotuning beside `autods fit` (tests/benchmarks/autotuner.py)

--device cpu walks the same path on two CPU ranks with small models, from the same parts: what it measures says nothing
of a card. Exit code 0: all was done; 1: something failed, and the file says what; 4: the minutes were spent.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-kit"
MANIFEST = "manifest.json"
# Wanted besides what autods itself needs; their own needs are packed, too.
EXTRAS = ("peft", "accelerate", "pytest", "pytest-timeout", "tabulate", "setuptools", "wheel", "ninja")
# What no wheel brings. torch's own commands are those of another environment, so they run as modules.
_COMMANDS = {
    "autods": "#!{python}\nimport sys\n\nfrom autods.__main__ import start\n\nsys.exit(start())\n",
    # DeepSpeed Autotuning calls `pdsh -w localhost pkill -f NAME`: one host needs no remote shell.
    "pdsh": '#!/bin/sh\nshift 2\nexec "$@"\n',
}
_TIME_IS_UP = 4  # exit code of measure.py, which keeps what it has measured
_MOST_LOG = 3000  # characters of a step that failed
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "vocab_size": 32000,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "install", "run"))
    parser.add_argument("--folder", type=Path, default=Path("kit"))
    parser.add_argument("--python", default="3.12", help="of the machine with the card")
    parser.add_argument("--part-mib", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("kit-results.json"))
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="names of what to do, with commas")
    asked = parser.parse_args()
    if asked.what == "pack":
        pack(asked.folder, asked.python, asked.part_mib * 2**20)
        return 0
    install(asked.folder)
    if asked.what == "install":
        return 0
    names = [name for name in asked.only.split(",") if name] or list(STEPS)
    if unknown := set(names) - set(STEPS):
        parser.error(f"--only {', '.join(unknown)}: give names of {', '.join(STEPS)}")
    return run(Day(device=asked.device, out=asked.out, ends_at=time.monotonic() + 60 * asked.minutes), names)


# On a machine with registries.


def pack(folder: Path, python: str, part_bytes: int) -> None:
    """Download or build each wheel, and cut those that are larger than a part."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    names = sorted(list_needed())
    print(f"{len(names)} packages for Python {python}")
    built = [name for name in names if name.startswith("deepspeed==")]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), *built], check=True, env=environment)
    usual = [name for name in names if name not in built]
    download = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--python-version", python, "-d", str(wheels)]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64", "any"]
    for platform in platforms:
        download += ["--platform", platform]
    subprocess.run([*download, *usual], check=True)
    manifest = {}
    for wheel in sorted(wheels.iterdir()):
        data = wheel.read_bytes()
        parts = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
        for number, part in enumerate(parts):
            (folder / f"{wheel.name}.{number:02d}").write_bytes(part)
        manifest[wheel.name] = {"parts": len(parts), "sha256": hashlib.sha256(data).hexdigest()}
        wheel.unlink()
    wheels.rmdir()
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    sizes = [path.stat().st_size for path in folder.iterdir()]
    print(f"{len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB, the largest {max(sizes) / 2**20:.1f} MiB: {folder}")


def list_needed() -> set[str]:
    """'name==version' of each package that autods and `EXTRAS` need; nothing of torch.

    The version is that which is installed here, else that of constraints.txt.
    """
    import tomllib
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text()))
    waiting, needed = [*project["dependencies"], *EXTRAS], {}
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        is_torchs = name in ("torch", "triton") or (name.startswith("nvidia-") and name != "nvidia-ml-py")
        if is_torchs or name in needed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            needed[name] = version(name)
            waiting += requires(name) or []
        except PackageNotFoundError:
            if name in pinned:
                needed[name] = pinned[name]
            else:
                print(f"left out: {name} is not installed here")
    return {f"{name}=={number}" for name, number in needed.items()}


# On the machine with the card.


def install(folder: Path) -> None:
    """Join the parts, and install them into an environment that sees the machine's torch. Raises SystemExit."""
    if (VENV / MANIFEST).exists():
        return
    manifest, wheels = json.loads((folder / MANIFEST).read_text()), VENV / "wheels"
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit(f"{sys.executable} has no torch: run this with the Python that has the machine's")
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(VENV)], check=True)
    for packages in VENV.glob("lib/python3*/site-packages"):  # where torch is in another environment
        (packages / "kit.pth").write_text(f"{ROOT}\n{Path(torch.origin).parents[1]}\n")
    wheels.mkdir(exist_ok=True)
    for name, said in manifest.items():
        data = b"".join((folder / f"{name}.{number:02d}").read_bytes() for number in range(said["parts"]))
        if hashlib.sha256(data).hexdigest() != said["sha256"]:
            raise SystemExit(f"{name}: its parts are not what was packed")
        (wheels / name).write_bytes(data)
    pip = [str(VENV / "bin/python"), "-m", "pip", "-q", "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, *map(str, sorted(wheels.iterdir()))], check=True)
    for name, text in _COMMANDS.items():
        command = VENV / "bin" / name
        command.write_text(text.format(python=VENV / "bin/python"))
        command.chmod(0o755)
    (VENV / MANIFEST).write_text(json.dumps(manifest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """What is asked of one machine: the device, the file of results, and when (`time.monotonic`) the minutes end."""

    device: str
    out: Path
    ends_at: float

    @property
    def folder(self) -> Path:
        return self.out.with_suffix("")

    @property
    def on(self) -> list[str]:
        """The options of a fit of one card, or of two CPU ranks."""
        if self.device == "cuda":
            return ["--gpus", "1", "--gpu-memory", "24GiB"]
        return ["--gpus", "2", "--device", "cpu", "--gpu-memory", "600MiB"]

    def call(self, name: str, command: list[str], *, ends: tuple[int, ...] = (0,), **environment: str) -> str:
        """Run a command of the kit's environment, and return what it printed. Raises RuntimeError with its end.

        `ends` are the exit codes of a good end.
        """
        log = self.folder / f"{name}.log"
        print(f"{name}: {' '.join(command)}", flush=True)
        variables = {**os.environ, **environment, "PATH": f"{VENV}/bin:{os.environ['PATH']}"}
        left_s = max(1.0, self.ends_at - time.monotonic())
        with log.open("w") as errors:
            ended = subprocess.run(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=left_s
            )
        if ended.returncode not in ends:
            raise RuntimeError(f"exit code {ended.returncode}: {(ended.stdout + log.read_text())[-_MOST_LOG:]}")
        return ended.stdout

    def fit(self, name: str, *workload: str, **environment: str) -> dict[str, Any]:
        """The report of a fit, without its trials' losses."""
        out = str(self.folder / name)
        text = self.call(name, ["autods", "fit", *workload, *self.on, "--out", out, "--json"], **environment)
        return json.loads(text)


def run(day: Day, names: list[str]) -> int:
    """Do each step that is not in the file yet, and write the file after each."""
    day.folder.mkdir(parents=True, exist_ok=True)
    results = json.loads(day.out.read_text()) if day.out.exists() else {}
    for name in names:
        if name in results and "failed" not in results[name]:
            continue
        if time.monotonic() >= day.ends_at:
            print(f"the minutes are spent; left: {', '.join(names[names.index(name) :])}")
            return 4
        began = time.monotonic()
        try:
            results[name] = STEPS[name](day)
        except subprocess.TimeoutExpired:
            results[name] = {"failed": "the minutes were spent"}
        except Exception as error:  # the next step may do all the same
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.monotonic() - began, 1)
        day.out.write_text(json.dumps(results, indent=1))
        print(f"{name}: {results[name].get('failed', 'done')} [{results[name]['seconds']} s]", flush=True)
    return 1 if any("failed" in results[name] for name in names) else 0


def _size(day: Day) -> dict[str, str]:
    small = {"AUTODS_KIT_WIDTH": "128", "AUTODS_KIT_LAYERS": "2", "AUTODS_KIT_WORDS": "4096"}
    return {} if day.device == "cuda" else small


def fit_whole(day: Day) -> dict[str, Any]:
    report = day.fit("fit", "tests/gpu/longer_samples.py", **_size(day))
    kept = ("rung", "knobs", "throughput", "memory", "certificate", "seconds", "versions", "hardware", "reasons")
    return {name: report[name] for name in kept} | {"trials": len(report["trials"])}


def train_plain(day: Day) -> dict[str, Any]:
    report = json.loads((day.folder / "fit/report.json").read_text())
    command = [
        "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "1" if day.device == "cuda" else "2",
    ]
    command += ["examples/train.py", "--model", "tests/gpu/longer_samples.py", "--steps", "30"]
    command += ["--deepspeed_config", str(day.folder / "fit/ds_config.json")]
    command += [] if day.device == "cuda" else ["--memory-budget", "600MiB"]
    text = day.call("plain", command, **_size(day))
    rates = [float(rate) for rate in re.findall(r"([\d.]+) samples/s", text)]
    return {"printed": text[-1000:], "samples_per_second": rates[-1:], "report": report["throughput"]}


def rescue(day: Day) -> dict[str, Any]:
    out = day.folder / "rescue"
    command = ["autods", "run", "tests/gpu/longer_samples.py", *day.on, "--fit", str(day.folder / "fit")]
    command += ["--steps", "12", "--checkpoint-every", "2", "--out", str(out), "--json"]
    text = day.call("rescue", command, **_size(day))
    ended = json.loads(text)
    return {name: ended.get(name) for name in ("status", "attempts", "steps", "samples_per_second")}


def ask_questions(day: Day) -> dict[str, Any]:
    if day.device == "cpu":
        command = ["tests/gpu/measure.py", "tiny", "--device", "cpu", "--seconds", "120"]
    else:
        command = ["tests/gpu/measure.py", "context", "questions", "rates", "--seconds", "400"]
    out = day.folder / "questions.json"
    day.call("questions", ["python", *command, "--out", str(out)], ends=(0, _TIME_IS_UP))
    return {"results": json.loads(out.read_text())}


def compare_forecasts(day: Day, name: str, *workload: str) -> dict[str, Any]:
    """Each rung's device peak by forecast and by its first trial that fitted, in bytes."""
    report = day.fit(name, *workload, "--config", "quick")
    rows = {}
    for forecast in report["forecast"]:
        for trial in report["trials"]:
            knobs = trial["knobs"]
            same = (trial["rung"], knobs["micro_batch"]) == (forecast["rung"], forecast["micro_batch"])
            if same and trial["outcome"]["kind"] == "fit":
                measured = trial["outcome"]["memory"]["device"]["peak_bytes"]
                rows[forecast["rung"]] = {"forecast": forecast["device"], "measured_bytes": measured}
                break
    return {"rungs": rows, "rung": report["rung"], "throughput": report["throughput"]}


def fit_mixtral(day: Day) -> dict[str, Any]:
    config = day.folder / "mixtral/config.json"
    config.parent.mkdir(exist_ok=True)
    small = {} if day.device == "cuda" else {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config.write_text(json.dumps({**MIXTRAL, **small}))
    return compare_forecasts(day, "mixtral-fit", str(config), "--seq-len", "512" if day.device == "cuda" else "32")


def fit_lora(day: Day) -> dict[str, Any]:
    model = "examples/geometries/qwen2-0.5b" if day.device == "cuda" else "examples/geometries/qwen2-tiny"
    return compare_forecasts(day, "lora", model, "--seq-len", "512" if day.device == "cuda" else "32", "--lora", "16")


def tune_beside(day: Day) -> dict[str, Any]:
    command = ["python", "tests/benchmarks/autotuner.py", "--profiles", "quick", "--json", "--device", day.device]
    return {"rows": json.loads(day.call("autotuner", command))}


STEPS: dict[str, Callable[[Day], dict[str, Any]]] = {
    "fit": fit_whole,
    "plain": train_plain,
    "rescue": rescue,
    "questions": ask_questions,
    "mixtral": fit_mixtral,
    "lora": fit_lora,
    "autotuner": tune_beside,
}


if __name__ == "__main__":
    sys.exit(main())
