"""Compilers, extensions, libraries and packages that are missing or do not fit each other."""

from __future__ import annotations

import shutil

from tests.corpus.provoke.cases import TOOLCHAIN, case
from tests.corpus.provoke.scripts import engine, plain, trainer, zero
from tests.corpus.provoke.workbench import OPS, PACKAGES, PYTHON, Workbench


def _offload(bench: Workbench, built: tuple[str, ...] = (), **env: str) -> None:
    """A run that needs DeepSpeed's cpu_adam, of whose ops only these are built already."""
    ops = bench.root / "ext"
    ops.mkdir()
    for each in built:
        shutil.copytree(OPS / each, ops / each)
    config = zero(2, zero={"offload_optimizer": {"device": "cpu"}})
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4}}
    bench.json("ds_config.json", **config)
    bench.script("train.py", engine())
    bench.deepspeed(
        "train.py",
        "--deepspeed",
        "--deepspeed_config",
        "ds_config.json",
        ranks=1,
        env={"TORCH_EXTENSIONS_DIR": str(ops), "MAX_JOBS": "1"} | env,
    )


def _compiler(bench: Workbench, text: str) -> str:
    folder = bench.root / "bin"
    folder.mkdir()
    path = folder / "g++"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


@case("cpu-adam-build-compiler-fails", TOOLCHAIN)
def compiler_fails(bench: Workbench) -> None:
    """The compiler is /bin/false: ninja says FAILED and no more"""
    _offload(bench, ("deepspeed_shm_comm",), CXX="/bin/false")


@case("cpu-adam-build-without-standard-headers", TOOLCHAIN)
def compiler_without_headers(bench: Workbench) -> None:
    """A g++ without libstdc++'s headers"""
    _offload(bench, ("deepspeed_shm_comm",), CXX=_compiler(bench, 'exec /usr/bin/g++ -nostdinc++ "$@"'))


@case("shm-comm-build-cc1plus-missing", TOOLCHAIN)
def compiler_without_cc1plus(bench: Workbench) -> None:
    """A g++ whose cc1plus is not installed"""
    _offload(
        bench,
        (),
        CXX=_compiler(bench, 'exec /usr/bin/g++ -B /nowhere -no-canonical-prefixes -wrapper /nowhere/cc1plus "$@"'),
    )


@case("cpu-adam-link-fails-missing-library", TOOLCHAIN)
def link_fails(bench: Workbench) -> None:
    """The linker does not find a library"""
    _offload(
        bench,
        ("deepspeed_shm_comm",),
        CXX=_compiler(bench, 'case "$*" in *-shared*) set -- "$@" -lcurand;; esac; exec /usr/bin/g++ "$@"'),
    )


@case("cpu-adam-compiler-killed-internal-error", TOOLCHAIN)
def compiler_crashes(bench: Workbench) -> None:
    """The compiler itself crashes: internal compiler error"""
    crash = 'case "$*" in *cpu_adam*) exec /usr/bin/g++ -fdump-tree-all -wrapper /bin/bash,-c,"kill -SEGV \\$\\$" "$@";; esac; exec /usr/bin/g++ "$@"'
    _offload(bench, ("deepspeed_shm_comm",), CXX=_compiler(bench, crash))


@case("ninja-is-not-on-the-path", TOOLCHAIN)
def no_ninja(bench: Workbench) -> None:
    """torch refuses to build an extension without ninja"""
    tools = bench.root / "tools"
    tools.mkdir()
    for name in ("g++", "bash", "unshare", "mount", "mkdir", "gcc", "as", "ld"):
        (tools / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
    body = """
    from torch.utils.cpp_extension import load_inline
    rope = load_inline("fused_rope", "torch::Tensor rope(torch::Tensor x) { return x.sin(); }", functions=["rope"])
    print(rope.rope(torch.ones(3)))
    """
    bench.script("train_rope.py", plain(body))
    bench.run(PYTHON, "train_rope.py", env={"PATH": str(tools), "TORCH_EXTENSIONS_DIR": str(bench.root / "ext")})


NO_CUDA = {"/usr/local": "1m"}
CUDA_SOURCE = """
#include <torch/extension.h>
__global__ void scale(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
"""


@case("cuda-home-is-not-set", TOOLCHAIN)
def no_cuda_home(bench: Workbench) -> None:
    """A CUDA extension where no CUDA toolkit is found"""
    bench.script("kernels/scale.cu", CUDA_SOURCE)
    body = """
    from torch.utils.cpp_extension import load
    kernels = load(name="scale", sources=["kernels/scale.cu"], verbose=True)
    """
    bench.script("train_kernels.py", plain(body))
    paths = f"{PACKAGES}/bin:/usr/bin:/bin"
    bench.run(
        PYTHON, "train_kernels.py", env={"PATH": paths, "TORCH_EXTENSIONS_DIR": str(bench.root / "ext")}, small=NO_CUDA
    )


@case("deepspeed-fused-adam-not-compatible", TOOLCHAIN)
def fused_adam(bench: Workbench) -> None:
    """DeepSpeed's fused_adam cannot be built for this torch and this machine"""
    body = """
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
    from deepspeed.ops.adam import FusedAdam
    net = nn.Linear(64, 64)
    kernels = FusedAdamBuilder().load()
    optimizer = FusedAdam(net.parameters(), lr=1e-3)
    """
    bench.script("train_fused.py", plain(body))
    paths = f"{PACKAGES}/bin:/usr/bin:/bin"
    bench.run(
        PYTHON, "train_fused.py", env={"PATH": paths, "TORCH_EXTENSIONS_DIR": str(bench.root / "ext")}, small=NO_CUDA
    )


def _library(bench: Workbench, name: str, source: str, *options: str) -> None:
    bench.script(f"{name}.c", source)
    bench.run("gcc", "-shared", "-fPIC", "-o", name, f"{name}.c", *options)


@case("extension-undefined-symbol", TOOLCHAIN)
def undefined_symbol(bench: Workbench) -> None:
    """A prebuilt extension for another torch: undefined symbol"""
    symbol = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
    _library(
        bench,
        "flash_attn_2_cuda.so",
        f"extern int {symbol}(void);\nint PyInit_flash_attn_2_cuda(void) {{ return {symbol}(); }}\n",
    )
    bench.script("train.py", plain("import flash_attn_2_cuda"))
    bench.python("train.py", env={"LD_BIND_NOW": "1"})


@case("shared-library-cannot-be-opened", TOOLCHAIN)
def missing_library(bench: Workbench) -> None:
    """An extension whose library is not installed"""
    _library(bench, "libcudart.so.11.0", "int cudaFree(void *p) { return 0; }\n", "-Wl,-soname,libcudart.so.11.0")
    source = "int cudaFree(void *);\nvoid *PyInit_apex_C(void) { return (void *)(long)cudaFree(0); }\n"
    _library(bench, "apex_C.so", source, "-L.", "-l:libcudart.so.11.0")
    (bench.project / "libcudart.so.11.0").unlink()
    bench.script("pretrain.py", plain("import apex_C"))
    bench.shell("python pretrain.py --fp16 --use-apex")


@case("library-version-not-found", TOOLCHAIN)
def wrong_library_version(bench: Workbench) -> None:
    """An extension linked with a newer library than the one that is there"""
    bench.script("versions.map", "CODEC_2.1 { global: decode; };\n")
    _library(
        bench,
        "libcodec.so.2",
        "int decode(void) { return 1; }\n",
        "-Wl,-soname,libcodec.so.2,--version-script=versions.map",
    )
    source = "int decode(void);\nvoid *PyInit__decoder(void) { return (void *)(long)decode(); }\n"
    _library(bench, "_decoder.so", source, "-L.", "-l:libcodec.so.2", "-Wl,-rpath,$ORIGIN")
    bench.script("versions.map", "CODEC_2.0 { global: decode; };\n")
    _library(
        bench,
        "libcodec.so.2",
        "int decode(void) { return 1; }\n",
        "-Wl,-soname,libcodec.so.2,--version-script=versions.map",
    )
    bench.output = b""
    bench.script("train_video.py", plain("import _decoder"))
    bench.python("train_video.py")


@case("extension-file-too-short", TOOLCHAIN)
def truncated_library(bench: Workbench) -> None:
    """An extension whose installation was cut off"""
    (bench.project / "causal_conv1d_cuda.so").write_bytes(b"\x7fELF\x02\x01")
    bench.script("train_mamba.py", plain("import causal_conv1d_cuda"))
    bench.python("train_mamba.py")


@case("module-flash-attn-is-not-installed", TOOLCHAIN)
def missing_package(bench: Workbench) -> None:
    """A package is not installed, on every rank"""
    bench.script("finetune.py", "import torch\nfrom flash_attn import flash_attn_func\n\nprint(flash_attn_func)\n")
    bench.torchrun("finetune.py")


@case("cannot-import-name-adamw-from-transformers", TOOLCHAIN)
def mismatched_package(bench: Workbench) -> None:
    """A package is of another version than the script's"""
    bench.script("run_glue.py", "import torch\nfrom transformers import AdamW, get_linear_schedule_with_warmup\n")
    bench.python("run_glue.py", "--task_name", "mrpc")


@case("trainer-requires-accelerate", TOOLCHAIN)
def no_accelerate(bench: Workbench) -> None:
    """Trainer in an environment without accelerate"""
    bench.script("run_clm.py", trainer("use_cpu=True,"))
    bench.run(PACKAGES / "bin/python", "run_clm.py")


@case("flash-attention-2-toggled-on-but-missing", TOOLCHAIN)
def flash_attention(bench: Workbench) -> None:
    """transformers is asked for a kernel whose package is missing"""
    body = """
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=256)
    config._attn_implementation = "flash_attention_2"
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    """
    bench.script("sft.py", plain(body))
    bench.python("sft.py")


@case("torch-compile-no-working-compiler", TOOLCHAIN)
def inductor(bench: Workbench) -> None:
    """Inductor's C++ code cannot be compiled"""
    body = """
    net = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)))
    for step in range(3):
        loss = net(torch.randn(8, 64)).square().mean()
        loss.backward()
        print(f"step {step} loss {loss.item():.4f}")
    """
    bench.script("train_compiled.py", plain(body))
    bench.python(
        "train_compiled.py", env={"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(bench.root / "tmp/inductor")}
    )


@case("torch-compile-assembler-breaks", TOOLCHAIN)
def inductor_compile_error(bench: Workbench) -> None:
    """Inductor finds a compiler, which then refuses the kernel"""
    refuse = 'for each in "$@"; do case "$each" in *.main.cpp|*kernel*.cpp|*/c*.cpp) echo "$each:2:10: fatal error: torch/csrc/inductor/cpp_prefix.h: No such file or directory" >&2; exit 1;; esac; done; exec /usr/bin/g++ "$@"'
    body = """
    net = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)))
    loss = net(torch.randn(8, 64)).square().mean()
    loss.backward()
    """
    bench.script("train_compiled.py", plain(body))
    cache = str(bench.root / "tmp/inductor")
    bench.python("train_compiled.py", env={"CXX": _compiler(bench, refuse), "TORCHINDUCTOR_CACHE_DIR": cache})


@case("module-triton-is-not-installed", TOOLCHAIN)
def no_triton(bench: Workbench) -> None:
    """A kernel file imports triton, which this torch does not bring"""
    bench.script("kernels/rmsnorm.py", "import triton\nimport triton.language as tl\n")
    bench.script("train_liger.py", plain("from kernels import rmsnorm"))
    bench.python("train_liger.py")
