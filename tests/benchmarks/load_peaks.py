"""The host memory of ranks that load a checkpoint by `from_pretrained`, by /proc, beside the plan's phase `build`.

python tests/benchmarks/load_peaks.py [--only NAME]

Two CPU ranks of one training script load a checkpoint of 334 million parameters in bf16, dense or with experts, that is
written here with random weights. Every 5 ms they are looked at from outside. A row has the largest RssAnon of each rank
until it has loaded, above what it held when transformers was imported, and the largest RssFile: pages of the
checkpoint, which the kernel takes back. Beside them stands what `autods plan` of the same script on two cards says of a
rank's host in `build`, above what it says of the forward pass. With HfDeepSpeedConfig a CPU rank's part of the model
lies in RssAnon, too; on cards it does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.fits import free_port
from tests.support.launchers import cpu_env

RANKS, MIB = 2, 2**20
CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}  # fmt: skip
WRITE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

dense = LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16, vocab_size=32000)
experts = MixtralConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=12,
    num_local_experts=8, vocab_size=8192)
for name, config, size in (("file", dense, "9GB"), ("shards", dense, "200MB"), ("experts", experts, "200MB")):
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(name, max_shard_size=size)
"""
TRAIN = """
import json, sys
import deepspeed, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM
from transformers.integrations import HfDeepSpeedConfig

folder, dtype, told, low, config = sys.argv[1:6]
config = json.load(open(config))
deepspeed.init_distributed()
print("loading", flush=True)
if told == "early":
    kept = HfDeepSpeedConfig(config)
if told == "dropped":
    HfDeepSpeedConfig(config)
more = {"low_cpu_mem_usage": True} if low == "low" else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **more)
if told == "late":
    kept = HfDeepSpeedConfig(config)
print("loaded", flush=True)
if len(sys.argv) == 6:
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    for _ in range(4):
        tokens = torch.randint(0, 8000, (1, 64), device=engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
"""
CASES = {
    "one file, bf16": "file bfloat16 never -",
    "shards, bf16": "shards bfloat16 never -",
    "shards, fp32": "shards float32 never -",
    "shards, fp32, low_cpu_mem_usage": "shards float32 never low",
    "shards, fp32, HfDeepSpeedConfig before": "shards float32 early -",
    "shards, fp32, HfDeepSpeedConfig after": "shards float32 late -",
    "shards, fp32, HfDeepSpeedConfig not kept": "shards float32 dropped -",
    "experts, bf16": "experts bfloat16 never -",
}


def measure(folder: Path, words: list[str]) -> list[tuple[int, int]]:
    """Return the largest rise of RssAnon and of RssFile of each rank while it loads. Raises SystemExit."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", *words, "ds.json", "only load"], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**cpu_env(), **address, "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    rises: list[list[tuple[int, int]]] = [[] for _ in ranks]

    def watch(rank: subprocess.Popen[str], sizes: list[tuple[int, int]]) -> None:
        assert rank.stdout is not None
        while (line := rank.stdout.readline()) and line != "loading\n":
            pass
        ended = threading.Thread(target=rank.stdout.read, args=(len("loaded\n"),))
        ended.start()
        while ended.is_alive():
            text = Path(f"/proc/{rank.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in text.splitlines())
            if "RssAnon" in fields:
                sizes.append(tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")))  # type: ignore[arg-type]
            time.sleep(0.005)

    watchers = [threading.Thread(target=watch, args=pair) for pair in zip(ranks, rises, strict=True)]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    if any(rank.wait() for rank in ranks):
        raise SystemExit(f"{' '.join(words)}: a rank failed")
    return [tuple(max(column) - column[0] for column in zip(*sizes, strict=True)) for sizes in rises]  # type: ignore[misc]


def forecast(folder: Path, words: list[str]) -> int:
    """Return the bytes of a rank's host in `build` above those of the forward pass. Raises CalledProcessError."""
    options = ["--gpus", str(RANKS), "--gpu-memory", "24GiB", "--host-memory", "64GiB", "--ladder", "zero3"]
    command = ["plan", "train.py", *options, "--precision", "bf16", "--no-largest", "--json", "--quiet"]
    program = [sys.executable, "-m", "autods", *command, "--", *words, "{ds_config}"]
    answer = subprocess.run(program, cwd=folder, env=cpu_env(), capture_output=True, text=True, check=True)
    by_phase = json.loads(answer.stdout)["rungs"][0]["host"]["node"]["by_phase"]
    return (by_phase["build"] - by_phase["forward"]) // RANKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(TRAIN)
        (folder / "ds.json").write_text(json.dumps(CONFIG))
        subprocess.run([sys.executable, "-c", WRITE], cwd=folder, env=cpu_env(), check=True, capture_output=True)
        print(f"{'MiB a rank':<42}{'RssAnon':>14}{'RssFile':>14}{'plan':>8}")
        for name, words in CASES.items():
            if only in name:
                sizes = measure(folder, words.split())
                columns = (" ".join(f"{size / MIB:.0f}" for size in column) for column in zip(*sizes, strict=True))
                said = forecast(folder, words.split()) / MIB
                print(f"{name:<42}{''.join(f'{column:>14}' for column in columns)}{said:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
