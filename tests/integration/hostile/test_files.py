"""Files that users name: of every kind that Linux has, and of every content. None is waited for, none fills memory."""

from __future__ import annotations

import os
import shlex
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import autods
from autods.cli.main import main
from tests.support.bad_workloads import GOOD
from tests.support.hostile import ACCEPTING, Case, OtherUser, each

ON = "--gpus 2 --gpu-memory 16GiB"
CPU = "--device cpu --gpus 2 --gpu-memory 1GiB"
DEEP = 100_000
# Where a file may stand, and the command that reads it.
PLACES = {
    "workload": ("x.py", f"plan x.py {ON}"),
    "config of a model": ("x.json", f"plan x.json {ON}"),
    "base config": ("x.json", f"plan model.py {ON} --base-config x.json"),
    "machine": ("x.toml", "plan model.py --gpus 2 --on x.toml"),
    "rung": ("rungs/x.toml", f"plan model.py {ON} --strategies rungs"),
    "profile": ("x.toml", f"fit model.py {CPU} --config x.toml"),
    "experiment": ("x.toml", f"probe model.py {CPU} --experiment x.toml"),
    "log": ("x.log", "diagnose x.log"),
}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/cwd/{os.path.relpath(path)}" if len(str(path)) > 100 else str(path))


def link_to(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def make_large(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 10 * 2**30)


# Kinds of files, and what is said of them.
KINDS: dict[str, tuple[bytes | Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "pipe"),
    "socket": (make_socket, "socket"),
    "folder": (Path.mkdir, "folder"),
    "link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "link to nothing": (link_to("gone"), "No such file"),
    "/dev/zero": (link_to("/dev/zero"), "device"),
    "/dev/random": (link_to("/dev/random"), "device"),
    "/dev/tty": (link_to("/dev/tty"), "device"),
    "10 GiB": (make_large, "MiB are read"),
    "noise": (bytes(range(128, 256)) * 64, "is not"),
    "UTF-16": ("x".encode("utf-16") * 9, "is not"),
    "NUL": (b"\0" * 100, "x."),
}
# What a log may be: large, in UTF-16, and a pipe, of which test_logs has cases.
OF_LOGS = {"pipe", "10 GiB", "UTF-16", "NUL"}


def list_kinds() -> dict[str, Case]:
    rows = {}
    for place, (name, line) in PLACES.items():
        for kind, (content, message) in KINDS.items():
            if place == "log" and kind in OF_LOGS:
                continue
            rows[f"{place}: {kind}"] = Case(line, 2, message, files={name: content})
    return rows


@each(list_kinds())
def test_a_file_of_another_kind(meet, case):
    meet(case)


def text(name: str, content: str | bytes, message: str, code: int = 2) -> Case:
    place = next(line for file, line in PLACES.values() if file == name)
    return Case(place, code, message, files={name: content})


def base(content: str | bytes, message: str, code: int = 2) -> Case:
    return Case(PLACES["base config"][1], code, message, files={"x.json": content})


def rung(change: tuple[str, str], message: str) -> Case:
    content = (Path(__file__).parents[3] / "strategies" / "zero2.toml").read_text()
    assert change[0] in content
    return text("rungs/x.toml", content.replace(*change), message)


def machine(change: tuple[str, str], message: str) -> Case:
    content = (Path(__file__).parents[3] / "configs/hardware/a100-80gb.toml").read_text()
    assert change[0] in content
    return Case(PLACES["machine"][1], 2, message, files={"x.toml": content.replace(*change)})


def profile(change: tuple[str, str], message: str) -> Case:
    content = (Path(__file__).parents[3] / "configs/quick.toml").read_text()
    assert change[0] in content
    return Case(PLACES["profile"][1], 2, message, files={"x.toml": content.replace(*change)})


MODEL = '{"model_type": "gpt2", "x": %s}'
CONTENT = {
    "100,000 brackets as base config": base("[" * DEEP, "nested too deeply"),
    "objects in one another as base config": base('{"a":' * DEEP + "1" + "}" * DEEP, "nested too deeply"),
    "65 objects in one another": base('{"a":' * 70 + "1" + "}" * 70, "nested more than 64 deep"),
    "a number of 10,000 digits": base('{"x": ' + "9" * 10_000 + "}", "x.json"),
    "a number of 40 digits": base('{"x": ' + "9" * 40 + "}", "64 are the most"),
    "a number beyond a float": base('{"x": 1e999}', "inf is no finite number"),
    "NaN": base('{"x": NaN}', "contains NaN"),
    "a key twice": base('{"x": 1, "x": 2}', '"x" twice'),
    "a list": base("[1, 2]", "is JSON but not an object"),
    "nothing": base("", "is not JSON"),
    "a comment without an end": base("/*" * 200_000, "is not JSON"),
    "quotes without an end": base('"\\' * 200_000, "is not JSON"),
    "commas": base("," * 200_000, "is not JSON"),
    "spaces": base(" " * 15_000_000 + "{}", "", 0),
    "a mark of UTF-8 and CRLF": base(b'\xef\xbb\xbf{\r\n"gradient_clipping": 1.0\r\n}\r\n', "", 0),
    "one megabyte": base('{"gradient_clipping": 1.0, "x": "' + "y" * 2**20 + '"}', "", 0),
    "Latin-1": base('{"x": "é"}'.encode("latin-1"), "x.json:1: is not text in UTF-8"),
    "UTF-8 that ends within a letter": base('{"x": "é'.encode()[:-1], "is not text in UTF-8"),
    "half a surrogate in an escape": base('{"x": "\\ud800"}', "", 0),
    "brackets as a model's config": text("x.json", "[" * DEEP, "nested too deeply"),
    "digits in a model's config": text("x.json", MODEL % ("9" * 10_000), "x.json"),
    "depth in a model's config": text("x.json", MODEL % ("[" * 900 + "]" * 900), "nested"),
    "infinity in a model's config": text("x.json", MODEL % "[0.0, Infinity]", "", 0),
    "a model's config in CRLF": text("x.json", '\ufeff{\r\n"model_type": "gpt2"\r\n}\r\n', "", 0),
    "brackets as Python": text("x.py", "x = " + "(" * DEEP, "syntax error"),
    "a sum of 100,000 terms": text("x.py", f"{GOOD}\nx = " + "+".join("1" * DEEP), "nested too deeply"),
    "100,000 signs": text("x.py", f"{GOOD}\nx = " + "-" * DEEP + "1", "x.py"),
    "a config of 100,000 brackets in Python": text("x.py", f"{GOOD}\nDEEPSPEED_CONFIG = " + "[" * DEEP, "x.py"),
    "a config of sets": text("x.py", f"{GOOD}\nDEEPSPEED_CONFIG = {{'a': {{1, 2}}}}", "neither a plain dict"),
    "a config of bytes": text("x.py", f"{GOOD}\nDEEPSPEED_CONFIG = {{'a': b'x'}}", "neither a plain dict"),
    "a config beside it, with NUL": text("x.py", f"{GOOD}\nDEEPSPEED_CONFIG = 'a\\0b'", "is not the path"),
    "a config beside it, too long": text("x.py", f"{GOOD}\nDEEPSPEED_CONFIG = '{'a' * 300}'", "File name too long"),
    "Python with NUL": text("x.py", GOOD + "\n\0", "null bytes"),
    "Python in CRLF": text("x.py", GOOD.replace("\n", "\r\n"), "", 0),
    "Python with a mark": text("x.py", "\ufeff" + GOOD, "", 0),
    "Python in an encoding that there is not": text("x.py", "# coding: klingon\n" + GOOD, "is not a Python file"),
    "Python with a number of 10,000 digits": text("x.py", f"{GOOD}\nx = {'9' * 10_000}", "x.py"),
    "brackets as TOML": text("rungs/x.toml", "a = " + "[" * DEEP, "rungs/x.toml: is"),
    "a key of 400,000 parts": text("rungs/x.toml", ".".join("a" * 400_000) + " = 1", "nested more than 64 deep"),
    "10,000 digits in TOML": text("rungs/x.toml", "a = " + "9" * 10_000, "rungs/x.toml: is not TOML"),
    "TOML with NUL": text("rungs/x.toml", "a = 1\0", "is not TOML"),
    "TOML in Latin-1": text("rungs/x.toml", 'a = "é"'.encode("latin-1"), "is not text in UTF-8"),
    "TOML with a mark": text("rungs/x.toml", "\ufeffa = 1", "unknown key 'a'"),
    "a rung named ../../x": rung(('name = "zero2"', 'name = "../../x"'), "its name '../../x' is not letters"),
    "a rung without a name": rung(('name = "zero2"', 'name = ""'), "its name '' is not letters"),
    "a rung named ..": rung(('name = "zero2"', 'name = ".."'), "its name '..' is not letters"),
    "a rung named a,b": rung(('name = "zero2"', 'name = "a,b"'), "its name 'a,b' is not letters"),
    "a rung of 65 letters": rung(('name = "zero2"', f'name = "{"x" * 65}"'), "64 of them at most"),
    "a rung named with a line end": rung(('name = "zero2"', r'name = "a\nb"'), "is not letters"),
    "a table of 65 names": text("rungs/x.toml", "[" + ".".join(['"a"'] * 66) + "]", "nested more than 64 deep"),
    "a rung with a date": rung(
        ("[ds_config.zero_optimization]", "[ds_config.zero_optimization]\nx = 1979-05-27"), "which a config cannot hold"
    ),
    "a rung with NaN": rung(
        ("[ds_config.zero_optimization]", "[ds_config.zero_optimization]\nx = nan"), "nan is no finite number"
    ),
    "a rung with infinity": rung(
        ("[ds_config.zero_optimization]", "[ds_config.zero_optimization]\nx = -inf"), "-inf is no finite number"
    ),
    "a rung of 100 bits": rung(("order = 30", f"order = {2**99} #"), "a whole number of 100 bits"),
    "a machine named ../x": machine(('name = "a100-80gb"', 'name = "../x"'), "is not letters"),
    "a machine named all": machine(('name = "a100-80gb"', 'name = "all"'), "every machine"),
    "a machine of a million GPUs": machine(("gpus = 8", "gpus = 1_000_000"), "100,000 are the most"),
    "a machine of 2^62 bytes": machine(("bytes = ", f"bytes = {2**62} # "), "are the most"),
    "a profile named ../x": profile(('name = "quick"', 'name = "../x"'), "is not letters"),
    "a profile of 10^18 samples": profile(
        ("most_micro_batch = ", f"most_micro_batch = {10**18} # "), "at most 1,000,000"
    ),
    "a profile of 10^18 seconds": profile(("wall_s = ", "wall_s = 1e18 # "), "no longer than a year"),
    "an experiment named ../x": Case(
        PLACES["experiment"][1], 2, "is not letters", files={"x.toml": 'name = "../x"\n[vary]\nmicro_batch = [1]\n'}
    ),
    "an experiment of dates": Case(
        PLACES["experiment"][1], 2, "x.toml", files={"x.toml": 'name = "x"\n[vary]\nmicro_batch = [1979-05-27]\n'}
    ),
    "a name of a profile that is a path": Case(
        f"fit model.py {CPU} --config ../configs/quick", 2, "there is no config"
    ),
    "a folder of rungs that is a file": Case(
        f"plan model.py {ON} --strategies model.py", 2, "is not a folder of rungs"
    ),
    "a folder of rungs that is not there": Case(f"plan model.py {ON} --strategies gone", 2, "No such file"),
    "a home that there is not": Case(f"plan ~nobody-has-this-name/x.py {ON}", 2, "No such file"),
    "standard input as workload": Case(
        f"autods plan /dev/stdin {ON}", 2, "/dev/stdin: cannot be read: it is a", "shell"
    ),
    "a process substitution as base config": Case(
        f"autods plan model.py {ON} --base-config <(echo)", 2, "it is a pipe, not a file", "shell"
    ),
    "a table into a device": Case(
        f"probe model.py {CPU} --vary micro_batch=1 --csv x", 2, "is a device", files={"x": link_to("/dev/null")}
    ),
    "a table into a pipe": Case(
        f"probe model.py {CPU} --vary micro_batch=1 --csv x", 2, "is a pipe", files={"x": os.mkfifo}
    ),
}


@each(CONTENT)
def test_a_file_of_any_content(meet, case):
    meet(case)


# Lines that another user types about what belongs to us, and what is said.
OF_ANOTHER_USER = {
    "plan locked/model.py --gpus 2 --gpu-memory 16GiB": "Permission denied",
    "plan locked --gpus 2 --gpu-memory 16GiB": "Permission denied",
    "plan secret.py --gpus 2 --gpu-memory 16GiB": "Permission denied",
    "plan hf:./locked --gpus 2 --gpu-memory 16GiB": "hf:./locked",
    "plan model.py --gpus 2 --gpu-memory 16GiB --base-config secret.json": "Permission denied",
    "plan model.py --gpus 2 --gpu-memory 16GiB --base-config locked/x.json": "Permission denied",
    "plan model.py --gpus 2 --gpu-memory 16GiB --strategies locked": "Permission denied",
    "plan model.py --gpus 2 --on secret.toml": "Permission denied",
    "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB --config locked/x.toml": "locked/x.toml",
    "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB --nvme-path locked": "is not a folder that can be written",
    "diagnose secret.json": "Permission denied",
    "diagnose locked": "Permission denied",
    "diagnose locked/x.log": "no such file",
}


def test_another_users_files_are_refused(
    other: OtherUser, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if not all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(autods.__file__).parents):
        pytest.skip("another user cannot reach this clone, so that no command of theirs would start")
    folder = other.folder / "ours"
    (folder / "locked").mkdir(parents=True)
    (folder / "model.py").write_text(GOOD)
    for name in ("locked/model.py", "locked/x.json", "secret.py", "secret.json", "secret.toml"):
        (folder / name).write_text(GOOD)
        (folder / name).chmod(0o600)
    (folder / "locked").chmod(0o700)
    monkeypatch.chdir(folder)
    for line in OF_ANOTHER_USER:  # as root: modules are loaded that the other user may not read
        main(shlex.split(line), **ACCEPTING)
    for line, message in OF_ANOTHER_USER.items():
        capfd.readouterr()
        os.setresuid(other.uid, other.uid, 0)
        try:
            code = main(shlex.split(line), **ACCEPTING)
        finally:
            os.setresuid(0, 0, 0)
        stderr = capfd.readouterr().err
        assert (code, message in stderr) == (2, True), f"{line}: {code}: {stderr}"
