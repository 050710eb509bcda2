"""What the shell offers after <TAB>. Files are parsed, never run, and nothing heavy is imported."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from hessinit.problem_file import file_of

# As hessinit.schemes.rules and hessinit.comparing have them, which import torch; a test holds them together.
SCHEMES = (
    "forward", "backward", "compromise", "lecun", "glorot", "he", "orthogonal", "delta-orthogonal", "lsuv",
    "default",
)  # fmt: skip
STARTS = ("hessinit", *SCHEMES)
DATA = ("paper", "digits", "mnist", "fashion-mnist", "cifar-10", "wikipedia")
WARMUP = "+warmup"
HOME = "~/"  # shells pass it as it was typed while they complete, and put in what we say


def complete_problem(incomplete: str) -> list[str]:
    """Python files, and, for the only one that is left or after its colon, the functions in it.

    A folder is offered only among others: alone it is left to the shell, which knows how to go on into it.
    So is a name that the shell might take for a command, such as $(…).py: not every shell quotes what we say.
    """
    if not _is_harmless(incomplete.removeprefix(HOME).replace("/", "")):
        return []
    source, _, function = incomplete.rpartition(":")
    functions = functions_of(_found(file_of(source))) if source else []
    named = [name for name in functions if name.startswith(function)]
    if named or source.endswith(".py"):  # else the colon is part of a folder's name
        return [f"{source}:{name}" for name in named]
    folder, _, start = incomplete.rpartition("/")
    inside = sorted(_list(_found(f"{folder}/" if "/" in incomplete else ".")))
    prefix = incomplete.removesuffix(start)
    shown = [path for path in inside if path.name.startswith(start) and _is_shown(path.name, start)]
    shown = [path for path in shown if _is_harmless(path.name)]
    files = [path for path in shown if path.suffix == ".py" and path.is_file()]
    if not files:
        return []
    folders = [f"{prefix}{path.name}/" for path in shown if path.is_dir()]
    if len(files) == 1 and not folders:
        named = [f"{prefix}{files[0].name}:{name}" for name in functions_of(files[0])]
        return named or [f"{prefix}{files[0].name}"]
    return [*(f"{prefix}{path.name}" for path in files), *folders]


def complete_experiment(incomplete: str) -> list[str]:
    """What `hessinit reproduce` can make."""
    from hessinit.paper import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def complete_scheme(incomplete: str) -> list[str]:
    """The starts of `hessinit initialize`."""
    return [name for name in ("auto", "keep", *SCHEMES) if name.startswith(incomplete)]


def complete_start(incomplete: str) -> list[str]:
    """The starts of `hessinit compare`; those with a warmup once a name is there."""
    found = [name for name in STARTS if name.startswith(incomplete)]
    warmed = [f"{name}{WARMUP}" for name in STARTS if incomplete.startswith(name)]
    return found + [name for name in warmed if name.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """The data of `hessinit reproduce`."""
    return [name for name in DATA if name.startswith(incomplete)]


def complete_device(incomplete: str) -> list[str]:
    """Where torch can compute; which of them are there only torch knows."""
    return [name for name in ("cpu", "cuda", "cuda:0", "cuda:1", "mps", "xpu") if name.startswith(incomplete)]


def functions_of(file: Path) -> list[str]:
    """The functions at the top of a file that can be called without arguments; [] where it does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _is_problem(node)]


def _is_problem(function: ast.FunctionDef) -> bool:
    given = function.args
    needed = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    needed += sum(default is None for default in given.kw_defaults)
    return not needed and not function.name.startswith("_")


def _found(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_shown(name: str, start: str) -> bool:
    return start.startswith(".") or not name.startswith((".", "__"))


def _is_harmless(name: str) -> bool:
    return all(letter.isalnum() or letter in "_-.,+@%=: " for letter in name)
