"""The same plain training loop for several answers, in turn: A B C A B C …; it knows nothing of who gave them.

python loop.py --model gpt2_4x256.py --turns 3 --seconds 6 < answers.json

Standard input: [{"name": …, "ds_config": {…}, "checkpointing": false}, …]. Each turn runs in a process forked from this
one, which has the imports done and has run no operator: nothing of an engine is left for the next. Prints one JSON line
a turn: name, samples_per_second, samples_per_cpu_second (which a busy machine changes less), steps, or error.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import pathlib
import signal
import socket
import sys
import time
import traceback

import deepspeed
import pynvml
import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  loaded once

PR_SET_PDEATHSIG = 1  # of prctl: the signal that follows the parent's end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed steps a turn, at least two steps")
    asked = parser.parse_args()
    answers = json.load(sys.stdin)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    close_nvml()
    for _ in range(asked.turns):
        for answer in answers:
            print(json.dumps({"name": answer["name"], **forked(asked, answer)}), flush=True)


def forked(asked: argparse.Namespace, answer: dict) -> dict:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(2, 1)  # standard output is for our lines alone
            open_nvml()
            said = measured(asked, answer)
        except BaseException:
            said = {"error": traceback.format_exc().strip().splitlines()[-1]}
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(said) if said else {"error": f"ended with {os.waitstatus_to_exitcode(status)}"}


def close_nvml() -> None:
    """DeepSpeed opened it when it was imported on a machine with cards; it does not survive a fork."""
    while True:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return


def open_nvml() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return


def measured(asked: argparse.Namespace, answer: dict) -> dict:
    """Optimizer steps of one answer, the first two not timed."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location("workload", asked.model)
    workload = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workload)
    model = workload.build_model()
    if answer["checkpointing"]:
        model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=answer["ds_config"])
    for _ in range(2):
        step(engine, workload)
    accelerator = deepspeed.get_accelerator()
    accelerator.synchronize()
    began, used, steps = time.perf_counter(), time.process_time(), 0
    while steps < 2 or time.perf_counter() - began < asked.seconds:
        step(engine, workload)
        steps += 1
        accelerator.synchronize()
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - used
    samples = engine.train_batch_size() * steps
    return {"samples_per_second": samples / seconds, "samples_per_cpu_second": samples / cpu_s, "steps": steps}


def step(engine, workload) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        batch = workload.build_batch(engine.train_micro_batch_size_per_gpu())
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    main()
