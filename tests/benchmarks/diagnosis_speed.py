"""How long `autods diagnose` takes for logs of 100 MB, and how much memory.

python tests/benchmarks/diagnosis_speed.py [--mb 100]

The logs: steps of training; lines that all have the word error; lines with words of many rules, each one different.
Each is diagnosed by the command in a process of its own. The bar: 2 s of processor time and 64 MB; the last kind of
log, which no program writes, is shown without one.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autods.diagnosis.signatures import read_signatures

MOST_SECONDS, MOST_MB = 2.0, 64


def write_steps() -> Iterator[str]:
    step = 0
    while True:
        step += 1
        yield f"[rank0]: step {step} | loss {2 + 1 / step:.4f} | grad norm 0.83 | 3.1 s | 41,200 tokens per second\n"


def write_errors() -> Iterator[str]:
    step = 0
    while True:
        step += 1
        yield f"[rank0]: step {step} error rate 0.{step % 1000:03d}: the retries of the loader did not help this time\n"


def write_words() -> Iterator[str]:
    choice = random.Random(5)
    phrases = [phrase for row in read_signatures() for phrase in (*row.phrases, *row.words)]
    while True:
        first, second = choice.choices(phrases, k=2)
        yield f"{choice.randrange(10**9):x} {first} {choice.randbytes(12).hex()} {second}\n"


LOGS: dict[str, Callable[[], Iterator[str]]] = {"steps": write_steps, "errors": write_errors, "words": write_words}


def measure(log: Path) -> tuple[float, float, float]:
    """Wall seconds, processor seconds, and resident MB at the peak, of one command."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "autods", "diagnose", str(log), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used, after.ru_maxrss / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100)
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="autods_speed_") as folder:
        for name, lines in LOGS.items():
            log = Path(folder, f"{name}.log")
            with log.open("w") as file:
                written = 0
                for line in lines():
                    written += file.write(line)
                    if written >= options.mb * 10**6:
                        break
            wall_s, used_s, peak_mb = min(measure(log) for _ in range(2))
            good = good and (name == "words" or used_s <= MOST_SECONDS) and (name == "words" or peak_mb <= MOST_MB)
            print(
                f"{name:8} {wall_s:5.2f} s wall  {used_s:5.2f} s processor  {peak_mb:5.0f} MB (largest so far)",
                flush=True,
            )
            log.unlink()
    sys.exit(not good)


if __name__ == "__main__":
    main()
