"""A training script, seen without running it: its kind, its module, its imports and its arguments."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config.trainers import SCRIPT_KINDS, find_library, presume_library
from ..errors import InputError
from ..files import LARGEST_CODE, LARGEST_TEXT, read_file
from ..system.host import data_folder
from ..types import WorkloadSource
from .lora import parse_lora
from .protocol import FUNCTIONS, bound_names, parse_python

_AUTODS = __name__.partition(".")[0]
# Names that decide where the script itself uses them; its helper modules may import another library for other purposes.
_DECISIVE = re.compile("initialize|LightningCLI|TrainingArguments|HfArgumentParser|Accelerator|.*Trainer")
# What a script's arguments get from a trial where they hold {NAME}.
PLACEHOLDERS = ("ds_config", "micro_batch_size", "gradient_accumulation_steps", "train_batch_size")
_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
_CONFIG_OPTION = re.compile(r"--(?:deepspeed|[\w-]*(?:deepspeed|ds)[-_]?config[\w-]*)")
_PARSER_OF_LIBRARY = re.compile(rb"\b(?:(?:Hf|H4)Argument|Trl)Parser\b")  # they make options of TrainingArguments
_MODULE_PREFIX = "module:"


def is_script(path: Path, argv: Sequence[str]) -> bool:
    """Whether the file is a training script, not a model.py. Raises InputError when it is neither."""
    tree = parse_python(path)
    names = bound_names(tree)
    if "*" not in names and set(FUNCTIONS) <= names:
        return False
    if _infer_kind(path, local_files(path, _import_folders(path, Path.cwd(), None))) is not None:
        return True
    if argv or not set(FUNCTIONS) & names:
        raise InputError(
            "is not a workload: it defines no build_model and build_batch, and imports none of deepspeed, "
            "transformers' Trainer, accelerate or Lightning",
            place=str(path),
            hint="write them (a model.py), or let the script train with DeepSpeed: "
            "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=…), then loss = engine(batch), "
            "engine.backward(loss), engine.step(); if a package that it uses trains, name what calls DeepSpeed there: "
            f"--kind {', '.join(list(SCRIPT_KINDS)[1:])}, or script",
        )
    return False  # an incomplete model.py: `check_model_py` reports what is missing


def make_script_source(
    path: Path,
    argv: Sequence[str],
    kind: str | None,
    folder: Path,
    *,
    module: str | None = None,
    root: Path | None = None,
) -> WorkloadSource:
    """Return a reference to a script that runs in `folder`. `kind` None infers the kind from the imports.

    `module` is the name of a script that is started with `python -m`, and `root` the folder of its top package. The
    digest covers the script, the user's modules that it imports, its arguments and the files that they name.
    """
    parse_python(path)
    imported = local_files(path, _import_folders(path, folder, root))
    digest = hashlib.sha256(repr((tuple(argv), kind, *([module] if module else []))).encode())
    for file in (path, *imported, *_files_in_arguments(argv, folder)):
        digest.update(b"\0%b\0%b" % (os.fsencode(file), read_file(file)))
    return WorkloadSource(
        kind="script",
        path=str(path),
        name=module or path.stem,
        digest=digest.hexdigest()[:16],
        argv=tuple(argv),
        script_kind=kind or _infer_kind(path, imported) or _infer_kind_of_packages(path, module),
        folder=str(folder),
        module=module,
        root=None if root is None else str(root),
        takes_seq_len=False,
    )


def fill_placeholders(argv: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with `{ds_config}` and its like replaced; all other braces stay."""
    return [_PLACEHOLDER.sub(lambda match: str(values[match[1]]), word) for word in argv]


def put_config_placeholder(argv: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The arguments with `{ds_config}` in place of a JSON file that an option names as DeepSpeed's config.

    A trial hands its config over in the script, whatever file is named. A launcher has the command line alone.
    """
    words, before = [], ""
    for word in argv:
        option, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        is_config = _CONFIG_OPTION.fullmatch(option) and value.endswith(".json") and (folder / value).is_file()
        words.append(word.removesuffix(value) + "{ds_config}" if is_config else word)
        before = word
    return tuple(words)


def has_option(argv: Sequence[str], option: str) -> bool:
    """Whether the command line has the option, as `--option value` or `--option=value`."""
    return any(word.partition("=")[0] == option for word in argv)


def has_placeholder(argv: Sequence[str], name: str) -> bool:
    """Whether an argument holds `{name}`."""
    return any(f"{{{name}}}" in word for word in argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLaunch:
    """How to start an unmodified training script. `argv` still has its placeholders; -m starts a `module`.

    `takes_local_rank` matters to the `deepspeed` launcher: it passes --local_rank to every script, and a parser that
    does not know the option exits. `has_own_parser`: a trainer's arguments do not come from its library's parser, and
    the script's own knows no others than its user gave.
    """

    kind: str
    path: str
    argv: tuple[str, ...]
    takes_local_rank: bool = True
    has_own_parser: bool = False
    module: str | None = None


def describe_kind(source: WorkloadSource) -> str:
    """What the script is, for the user."""
    library = find_library(source)
    unknown = "a script; its imports do not show which library calls deepspeed.initialize"
    return unknown if library is None else library.description


def describe_launch(source: WorkloadSource) -> ScriptLaunch:
    """How to start the script, for the report."""
    path, library = Path(source.path), presume_library(source)
    text = read_file(path) if os.path.isfile(path) else b""
    has_own_parser = b"argparse" in text and _PARSER_OF_LIBRARY.search(text) is None
    # Before a file's name, which such a script takes from its first argument, the option is in the way.
    is_file = bool(source.argv) and not source.argv[0].startswith("-")
    takes_local_rank = (
        (library.takes_local_rank and not is_file and not has_own_parser)
        or re.search(rb"[\"']--local[-_]rank\b", text) is not None
        or has_local_rank_parameter(source)
    )
    return ScriptLaunch(
        kind=library.name,
        path=source.path,
        argv=put_config_placeholder(source.argv, Path(source.folder or "")),
        takes_local_rank=takes_local_rank,
        has_own_parser=has_own_parser,
        module=source.module,
    )


def describe_trainer(source: WorkloadSource, seq_len: int | None) -> ScriptLaunch | None:
    """How `examples/train.py` trains a workload that is no script; None where it cannot.

    It reads no pickle, it makes no 4-bit weights, and no arguments of the workload's functions reach it.
    `seq_len` are the tokens of a sample of a Hugging Face config.
    """
    lora = None if source.lora is None else parse_lora(source.lora)
    if not source.form.has_file or source.form.runs_as_main or source.arguments or (lora and lora.quantized):
        return None
    lengths = {
        "--seq-len": seq_len if source.form.is_model_config else source.seq_len,
        "--target-len": source.target_len,
    }
    options = {"--model": source.path, "--task": source.task, **lengths}
    if source.task == "image-classification":
        del options["--seq-len"]
    if lora is not None:
        options["--lora"] = json.dumps(lora.config)
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words += ["--zero-init"] if source.zero_init else []
    words += ["--weights"] if source.weights else []
    path = data_folder("examples") / "train.py"
    return ScriptLaunch(kind="deepspeed", path=str(path), argv=(*words, "--deepspeed_config", "{ds_config}"))


def has_local_rank_parameter(source: WorkloadSource) -> bool:
    """Whether fire or click reads the command line, and a function has a parameter `local_rank`.

    A parser of argparse is checked when it parses.
    """
    path = Path(source.path)
    if not {"fire", "click"} & {imported.package for imported in imports_in(path)}:
        return False
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    signatures = [node.args for node in ast.walk(parse_python(path)) if isinstance(node, functions)]
    return any(
        parameter.arg == "local_rank"
        for signature in signatures
        for parameter in (*signature.args, *signature.kwonlyargs)
    )


def _files_in_arguments(argv: Sequence[str], folder: Path) -> Iterator[Path]:
    """Files that the command line names, such as a DeepSpeed config. They are part of the digest."""
    for word in argv:
        file = folder / word.rpartition("=")[2]
        try:
            if file.is_file() and file.stat().st_size <= LARGEST_TEXT and os.access(file, os.R_OK):
                yield file
        except (OSError, ValueError):  # not a path, for example too long for one
            continue


def _infer_kind(path: Path, imported: Sequence[Path]) -> str | None:
    """The kind by decisive names in the script itself, else by all imports of it and of the user's modules."""
    first = imports_in(path)
    decisive = [item for item in first if _DECISIVE.fullmatch(item.name)]
    for imports in (decisive, [*first, *(item for file in imported for item in imports_in(file))]):
        for kind, names in (
            *((kind, kind.names) for kind in SCRIPT_KINDS.values()),
            *((kind, kind.last_names) for kind in SCRIPT_KINDS.values()),
        ):
            if any(item.package in kind.packages and re.fullmatch(names, item.name) for item in imports):
                return kind.name
    return None


def _infer_kind_of_packages(path: Path, module: str | None) -> str | None:
    """The kind by what the installed package of the module, or one that the script imports, requires."""
    packages = dict.fromkeys([*([module.partition(".")[0]] if module else []), *(i.package for i in imports_in(path))])
    installed = importlib.metadata.packages_distributions()
    for distribution in (name for package in packages for name in installed.get(package, ())):
        required = {
            re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("-", "_")
            for requirement in importlib.metadata.requires(distribution) or ()
            if "extra ==" not in requirement
        }
        for kind in SCRIPT_KINDS.values():
            if required & {*kind.packages}:
                return kind.name
    return None


# Modules that are started with `python -m`.


def module_name(workload: Path) -> str | None:
    """'package.module' for 'module:package.module'; None for any other path."""
    text = str(workload)
    return text.removeprefix(_MODULE_PREFIX) if text.startswith(_MODULE_PREFIX) else None


def find_module(name: str, folder: Path) -> tuple[Path, Path]:
    """The file that `python -m name` runs when started in `folder`, and the folder that holds its top package.

    No parent package is imported. Raises InputError when there is no such module.
    """
    option = f"-m {name}"
    if not all(word.isidentifier() for word in name.split(".")):
        hint = "write it as package.module, or drop -m for the path of a script"
        raise InputError("is not a module name", place=option, hint=hint)
    folders = [str(folder), *(entry for entry in sys.path if entry)]  # the order of `python -m`
    package = name.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(package, folders) is None:
        hooked = importlib.util.find_spec(package)  # an import hook may know it, such as that of an editable install
        folders = [str(Path(location).parent) for location in (hooked and hooked.submodule_search_locations) or ()]
    spec = None
    words = name.split(".")
    for end, word in enumerate(words, start=1):
        part = ".".join(words[:end])
        # By its last word alone: the finder asks the parent of a dotted name, which is not imported, for its folders.
        spec = importlib.machinery.PathFinder.find_spec(word, folders) if folders else None
        if spec is None and os.path.isfile(Path(folder, name)):
            raise InputError("is a file, and -m takes a module name", place=option, hint=f"drop -m: {name}")
        if spec is None:
            raise InputError(
                f"there is no module {part} in {folder}, PYTHONPATH or the installed packages",
                place=option,
                hint="start it from the folder that holds the package, as python -m requires, or set PYTHONPATH",
            )
        folders = list(spec.submodule_search_locations or ())
    is_package = bool(folders)
    if is_package:  # Python runs its __main__
        spec = importlib.machinery.PathFinder.find_spec("__main__", folders)
        if spec is None:
            hint = f"give a module of it, such as -m {name}.train"
            raise InputError("is a package without a __main__.py", place=option, hint=hint)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError("is not Python source", place=option, hint="give a module that is a .py file")
    file = Path(spec.origin).absolute()
    return file, file.parents[name.count(".") + is_package]


# Imports.


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a file imports.

    `name` is a name imported from it, or an attribute of it that the file uses; '' if there is none. `*` comes with the
    names that it may bind. A relative import starts from `folder`, which is None for an absolute one.
    """

    module: str
    name: str = ""
    folder: Path | None = None

    @property
    def package(self) -> str:
        """The top package."""
        return self.module.partition(".")[0]


def imports_in(file: Path) -> list[Import]:
    """The absolute imports of a file, at any depth in it; none when the file is not Python."""
    return [item for item in _read_imports(file) if item.folder is None]


def find_early_variables(source: WorkloadSource) -> dict[str, str]:
    """Return the environment variables that a script sets before it imports what trains, with the line of each.

    "" stands for those whose names only its run shows. Modules of the user's that it imports are not looked into.
    """
    library = find_library(source)
    variables: dict[str, str] = {}
    for node in _walk_top_level(parse_python(Path(source.path))):
        match node:
            case ast.Import(names=names):
                packages = [name.name.partition(".")[0] for name in names]
            case ast.ImportFrom(module=str(module), level=0):
                packages = [module.partition(".")[0]]
            case _:
                packages = []
        if library is not None and set(packages) & {*library.packages}:
            break
        for name in _list_variables_set(node):
            variables.setdefault(name, f"{Path(source.path).name}:{getattr(node, 'lineno', 0)}")
    return variables


def find_packages(source: WorkloadSource) -> set[str]:
    """Return the top packages that a script and the user's modules that it imports import, at any depth in them."""
    return {item.package for file in _list_files(source) for item in imports_in(file)}


def prepares_imports(source: WorkloadSource) -> bool:
    """Whether a script, or a module of the user's that it imports, does at any depth what a later import depends on.

    That is to set environment variables, or to use `sys.path`, `sys.modules` or `sys.meta_path`: it may bring another
    version of a library, or a stand-in. One that cannot be read may do so.
    """
    try:
        nodes = [node for file in _list_files(source) for node in ast.walk(parse_python(file))]
    except InputError:
        return True
    return any(_uses_import_system(node) or any(True for _ in _list_variables_set(node)) for node in nodes)


def _uses_import_system(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(ast.Name("sys"), "path" | "modules" | "meta_path"):
            return True
        case ast.ImportFrom(module="sys", names=names):
            return any(name.name in ("path", "modules", "meta_path") for name in names)
        case _:
            return False


def _list_files(source: WorkloadSource) -> list[Path]:
    """The script and the user's modules that it imports."""
    path, root = Path(source.path), None if source.root is None else Path(source.root)
    return [path, *local_files(path, _import_folders(path, Path(source.folder or path.parent), root))]


def _walk_top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a module is imported, in its order."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _walk_top_level(child)


def _list_variables_set(node: ast.AST) -> Iterator[str]:
    """Yield the environment variables that this node itself sets; "" for names that only its run shows."""

    def read_name(key: ast.expr | None) -> str:
        return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""

    match node:
        case ast.Subscript(ast.Attribute(attr="environ") | ast.Name("environ"), key, ast.Store()):
            yield read_name(key)
        case ast.Call(ast.Attribute(attr="putenv"), [key, *_]):
            yield read_name(key)
        case ast.Call(ast.Attribute(ast.Attribute(attr="environ") | ast.Name("environ"), "setdefault"), [key, *_]):
            yield read_name(key)
        case ast.Call(ast.Attribute(ast.Attribute(attr="environ") | ast.Name("environ"), "update"), given, named):
            yield from (keyword.arg or "" for keyword in named)
            for mapping in given:
                yield from map(read_name, mapping.keys) if isinstance(mapping, ast.Dict) else ("",)
        case ast.Call(ast.Name("load_dotenv") | ast.Attribute(attr="load_dotenv")):
            yield ""
        case _:
            pass


def local_files(path: Path, folders: Sequence[Path]) -> list[Path]:
    """The files that a script imports, directly or through others, from `folders` or by relative imports.

    An import runs the parent packages, the module, and a submodule that it names. The package autods is none of the
    user's modules, even where it runs from its source in one of the folders.
    """
    files: set[Path] = set()
    waiting = [path]
    while waiting:
        for item in _read_imports(waiting.pop()):
            if item.folder is None and item.package == _AUTODS:
                continue
            words = [*filter(None, item.module.split(".")), *([item.name] if item.name else [])]
            for folder in folders if item.folder is None else [item.folder]:
                places = [folder.joinpath(*words[:end]) for end in range(1, len(words) + 1)]
                candidates = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
                new = [file for file in candidates if file != path and file not in files and os.path.isfile(file)]
                files.update(new)
                waiting += new
    return sorted(files)


def _import_folders(path: Path, folder: Path, root: Path | None) -> list[Path]:
    """Where a script's own modules lie: beside it, and in folders of PYTHONPATH below `folder`.

    A folder with installed packages holds none of the user's modules.
    """
    entries = [Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = [root or path.parent, *(entry for entry in entries if entry == folder or folder in entry.parents)]
    return [entry for entry in folders if next(entry.glob("*.dist-info"), None) is None]


def _read_imports(file: Path) -> tuple[Import, ...]:
    """All imports of a file, each once."""
    try:
        return _parse_imports(file, file.stat().st_mtime_ns)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError, InputError):
        return ()


@functools.lru_cache(maxsize=4096)  # a package has hundreds of files, and each is read more than once
def _parse_imports(file: Path, modified_ns: int) -> tuple[Import, ...]:
    imports: dict[Import, None] = {}
    modules: dict[str, str] = {}  # by the names that the file gives them
    tree = ast.parse(read_file(file, most=LARGEST_CODE))
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                modules[item.asname or item.name.partition(".")[0]] = item.name
                imports[Import(item.name)] = None
        elif isinstance(node, ast.ImportFrom) and node.level <= len(file.parents):
            folder = file.parents[node.level - 1] if node.level else None
            imports |= {Import(node.module or "", item.name, folder): None for item in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            imports[Import(modules[node.value.id], node.attr)] = None
    if stars := [item for item in imports if item.name == "*"]:  # any of them may bind a name that the file does not
        used = {node.id: None for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        free = used.keys() - bound_names(tree)
        imports |= {Import(star.module, name, star.folder): None for star in stars for name in used if name in free}
    return tuple(imports)
