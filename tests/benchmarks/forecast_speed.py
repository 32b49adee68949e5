"""How long a forecast takes: wall, CPU seconds and memory of the whole process tree, and each rung's own time.

python tests/benchmarks/forecast_speed.py [--models 7b,70b,405b] [--json]

The machine may be busy: CPU seconds over the number of cores is what a quiet machine would need at best.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_COMMON = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
MODELS: dict[str, tuple[dict[str, int], list[str]]] = {
    "7b": (
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        },
        ["--gpus", "8", "--host-memory", "1TiB", "--nvme", "2TiB"],
    ),
    "70b": (
        {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        },
        ["--gpus", "64", "--nodes", "8", "--host-memory", "2TiB", "--nvme", "10TiB"],
    ),
    "405b": (
        {
            "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        },
        ["--gpus", "1024", "--nodes", "128", "--host-memory", "2TiB", "--nvme", "10TiB"],
    ),
}  # fmt: skip
_TICK = os.sysconf("SC_CLK_TCK")
_EVERY_S = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            rows.append(measured(name, Path(folder)))
            if not options.json:
                show(rows[-1])
    if options.json:
        print(json.dumps(rows, indent=2))
    return 1 if any(row["exit"] not in (0, 1) for row in rows) else 0


def measured(name: str, folder: Path) -> dict[str, Any]:
    """One plan as a whole process."""
    sizes, machine = MODELS[name]
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_COMMON | sizes))
    command = [
        sys.executable, "-m", "autods", "plan", str(path), *machine, "--gpu-memory", "80GiB", "--no-largest", "--json",
    ]  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    tree = _Tree(process.pid)
    lines: list[str] = []

    def listen() -> None:
        assert process.stderr is not None
        lines.extend(line.strip() for line in process.stderr)

    listener = threading.Thread(target=listen)
    listener.start()
    assert process.stdout is not None
    out = process.stdout.read()
    listener.join()
    code = process.wait()
    tree.stop()
    said = json.loads(out) if out.strip().startswith("{") else {}
    return {
        "model": name, "exit": code, "wall_s": time.monotonic() - began, "cpu_s": tree.cpu_s,
        "peak_bytes": tree.peak_bytes, "peak_rss_bytes": tree.peak_rss_bytes,
        "last_line": lines[-1] if lines else None,
        "rungs": [{key: rung.get(key) for key in ("rung", "verdict", "seconds")} for rung in said.get("rungs", [])],
    }  # fmt: skip


class _Tree:
    """CPU seconds and resident bytes of a process and all below it, sampled.

    Resident: the proportional set sizes, so that a page which forked processes share counts once; rss: once in each.
    """

    def __init__(self, root: int) -> None:
        self._root, self._cpu, self.peak_bytes, self.peak_rss_bytes = root, dict[int, float](), 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu.values())

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            parents, memory = {}, {}
            for entry in os.scandir("/proc"):
                if entry.name.isdigit():
                    try:
                        fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                    except OSError:
                        continue
                    pid = int(entry.name)
                    parents[pid], memory[pid] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
                    parents[pid] = int(fields[1])
                    if pid in self._cpu or self._below(pid, parents):
                        self._cpu[pid] = (int(fields[11]) + int(fields[12])) / _TICK
            self.peak_rss_bytes = max(self.peak_rss_bytes, sum(memory.get(pid, 0) for pid in self._cpu))
            self.peak_bytes = max(self.peak_bytes, sum(_own_bytes(pid) for pid in self._cpu if pid in parents))

    def _below(self, pid: int, parents: dict[int, int]) -> bool:
        return pid == self._root or parents.get(pid) in self._cpu


def _own_bytes(pid: int) -> int:
    try:
        found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def show(row: dict[str, Any]) -> None:
    resident, with_shared = (row[name] / 2**30 for name in ("peak_bytes", "peak_rss_bytes"))
    print(
        f"{row['model']}: wall {row['wall_s']:.1f} s, CPU {row['cpu_s']:.1f} s,"
        f" {resident:.2f} GiB resident ({with_shared:.2f} with shared pages in each), exit {row['exit']}"
    )
    for rung in row["rungs"]:
        print(f"  {rung['rung']:20} {rung['verdict']:12} {rung['seconds'] or 0:6.1f} s")
    if row["exit"] not in (0, 1):
        print(f"  {row['last_line']}")


if __name__ == "__main__":
    sys.exit(main())
