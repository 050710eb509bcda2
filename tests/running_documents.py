"""Run what a document shows: its Python, the files it names, its commands; and compare what they print.

    ```python                     is run, all blocks of a document in one namespace
    ```python title="net.py"      is written to that file
    ```console, bash, sh, shell   is run, a command a line: after `$ `, or each line where none has it
    ```output                     right after one of these is compared with what it prints

All in the current folder, which the caller has made for it. Blocks in other languages are only shown.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^ *(?P=ticks) *$", re.M | re.S
)
TITLE = re.compile(r"\btitle=\"(?P<name>[^\"]+)\"")
PYTHON, SHELL = ("python", "py"), ("console", "bash", "sh", "shell")

# What a command is here; the environment's own programs, not whichever come first on the path.
PROGRAMS = {
    "hessinit": ["-m", "hessinit"],
    "python": [],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
    "torchrun": ["-m", "torch.distributed.run"],
}
# These install, fetch or build: too slow for a test of a document, or tested elsewhere.
NOT_RUN = ("pip", "git", "make", "mkdocs", "cd", "apt-get", ".venv/bin/hessinit")
EXIT_STATUS = re.compile(r"#.*\bexit status (?P<number>\d+)")
PATIENCE = 600  # seconds
# Torch 2.13 with gloo says so when ranks end, once in ten times on a busy machine, also without hessinit.
ABORTS_AT_EXIT = "terminate called without an active exception"

# A number, but not the digits of a name such as fc1; rules of a table; the seconds that a run took.
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
RULE = re.compile("─+")
SECONDS = re.compile(r"(?<=in )[\d.,]+(?: min)?(?= ?s\b)|(?<=took )\S+ % of \S+(?= s\b)")
AGREEMENT = 0.02  # the last figure may differ between machines; the second must not


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line its code starts on, and what the next block says it prints."""

    kind: str
    title: str | None
    line: int
    code: str
    output: str | None


def blocks_of(text: str) -> list[Block]:
    """The blocks to run; one marked `output` right after holds what a block prints."""
    blocks: list[Block] = []
    fences = [(fence, fence["info"].strip().lower().split(" ")[0]) for fence in FENCE.finditer(text)]
    for (fence, kind), (after, after_kind) in zip_longest(fences, fences[1:], fillvalue=(None, "")):
        if fence is not None and kind in PYTHON + SHELL:
            shown = dedented(after) if after is not None and after_kind == "output" else None
            title = TITLE.search(fence["info"])
            line = text.count("\n", 0, fence.start("code")) + 1
            blocks.append(Block(kind, title and title["name"], line, dedented(fence), shown))
    return blocks


def dedented(fence: re.Match[str]) -> str:
    return re.sub(rf"^{fence['indent']}", "", fence["code"], flags=re.M)


def run_blocks(document: Path) -> int:
    """Run the blocks of `document` in order, in the current folder, and return how many there were."""
    # Not "__main__": process pools would look for the names of a block in pytest itself.
    namespace: dict[str, object] = {"__name__": document.stem}
    blocks = blocks_of(document.read_text(encoding="utf-8"))
    for position, block in enumerate(blocks):
        if block.title is not None:
            later = "\n".join(other.code for other in blocks[position + 1 :])
            assert Path(block.title).stem in later, (
                f"{document.name}, line {block.line}: nothing uses {block.title}"
            )
            Path(block.title).write_text(block.code, encoding="utf-8")
            continue
        where = f"{document.name}, line {block.line}"
        printed = (
            run_python(block, document, namespace) if block.kind in PYTHON else run_commands(block, where)
        )
        if block.output is not None:
            assert differences(block.output, printed) == [], f"{where}, prints:\n{printed}"
    return len(blocks)


def run_python(block: Block, document: Path, namespace: dict[str, object]) -> str:
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("error")
        # The blank lines make a traceback point at the line of the document.
        exec(compile("\n" * (block.line - 1) + block.code, str(document), "exec"), namespace)
    return printed.getvalue()


def run_commands(block: Block, where: str) -> str:
    """Run the commands of a block; what it shows after a `$ ` command is compared, the rest is returned."""
    printed = []
    for command, shown in commands_of(block.code):
        text = run_command(command, where)
        if shown is None:
            printed.append(text)
        else:
            assert differences(shown, text) == [], f"{where}, {command} prints:\n{text}"
    return "".join(printed)


def commands_of(code: str) -> list[tuple[str, str | None]]:
    """The commands, each with the output shown below it, if any.

    >>> commands_of("$ hessinit demo\\nfine\\n"), commands_of("pip install .\\nhessinit \\\\\\n  demo\\n")
    ([('hessinit demo', 'fine\\n')], [('pip install .', None), ('hessinit    demo', None)])
    """
    lines = [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    if not any(line.startswith("$ ") for line in lines):
        return [(line, None) for line in lines]
    found: list[tuple[str, str | None]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:], None))
        else:
            assert found, f"{line!r} is shown before any command"
            found[-1] = (found[-1][0], (found[-1][1] or "") + line + "\n")
    return found


def run_command(command: str, where: str) -> str:
    """What `command` prints on stdout; it must exit with 0, or as its comment says: `# exit status 1`."""
    words = shlex.split(command, comments=True)
    if not words or words[0] in NOT_RUN:
        return ""
    known = f"known are {', '.join(PROGRAMS)} (run) and {', '.join(NOT_RUN)} (not run)"
    runs = words[0] in PROGRAMS and not {"|", ">", "&&", ";"} & set(words)
    assert runs, f"{where}: {command!r} is a command that no test runs; {known}"
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    settings = {"COLUMNS": "100", "MPLBACKEND": "Agg", "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, *PROGRAMS[words[0]], *words[1:]],
            env={**os.environ, **settings},
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE,
        )
        if not (words[0] == "torchrun" and ABORTS_AT_EXIT in done.stderr):
            break
    status = EXIT_STATUS.search(command)
    expected = int(status["number"]) if status else 0
    assert done.returncode == expected, (
        f"{where}: {command!r} exits with {done.returncode}, not {expected}:\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def differences(shown: str, printed: str) -> list[str]:
    """What a document shows and its code does not print: words exactly, numbers to two figures, no seconds.

    >>> differences("fc1  0.311 in 2 s", "fc1 0.312 in 9 s"), differences("fc1 0.31", "fc2 0.33")
    ([], ["'fc1' is 'fc2'", "'0.31' is '0.33'"])
    """
    words = [RULE.sub("─", SECONDS.sub("…", text)).split() for text in (shown, printed)]
    pairs = zip_longest(*words, fillvalue="")
    return [f"{one!r} is {other!r}" for one, other in pairs if not _alike(one, other)]


def _alike(one: str, other: str) -> bool:
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(word)] for word in (one, other)]
    return all(math.isclose(a, b, rel_tol=AGREEMENT) for a, b in zip(*numbers, strict=True))
