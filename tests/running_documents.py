"""Run the code blocks of a document and compare what they print with what it shows.

    ```python                     is run; all blocks of a document share one namespace
    ```python title="net.py"      is written to that file, before anything runs
    ```console, bash              are commands: lines after `$ `, or every line where none has it
    ```output                     right after one of these is compared with what it prints

A command may state its seconds (`# 8 s`); slow ones are left out unless asked for. Everything runs in the
current folder. Blocks in other languages are not run.
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
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^ *(?P=ticks) *$", re.M | re.S
)
KINDS = ("python", "console", "bash")
# The programs of this environment, not the first ones on the path; others install, fetch or build.
PROGRAMS = {
    "hessinit": ["-m", "hessinit"],
    "python": [],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
    "torchrun": ["-m", "torch.distributed.run"],
}
NOT_RUN = ("pip", "git", "make", "cd")
PATIENCE = 600  # seconds
STATED_SECONDS = re.compile(r"#.*?\b([\d.]+) s$")
SLOW = 6.0  # seconds
# Torch 2.13 with gloo prints this once in ten times when ranks end, also without hessinit.
ABORTS_AT_EXIT = "terminate called without an active exception"

# A number, but not the digits of a name such as fc1; rules of a table; the seconds that a run took.
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
RULE = re.compile("─+")
SECONDS = re.compile(
    r"(?<=in )[\d.,]+(?: min)?(?= ?s\b)|(?<=took )(?:\S+ % of )?[\d.,]+(?= s\b)"
    r"|(?<=About )\S+(?= gradients, or )|(?<=gradients, or )\S+(?= s\b)|[\d.]+(?=\s+gradients(?:\)| each))"
)
AGREEMENT = 0.02  # the last figure may differ between machines; the second must not


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, file, first line of code, and what the next block says it prints."""

    kind: str
    title: str | None
    line: int
    code: str
    output: str | None = None


def blocks_of(text: str) -> list[Block]:
    """The blocks to run."""
    blocks: list[Block] = []
    for fence in FENCE.finditer(text):
        kind = fence["info"].strip().lower().split(" ")[0]
        title = re.search(r"\btitle=\"([^\"]+)\"", fence["info"])
        line = text.count("\n", 0, fence.start("code")) + 1
        code = re.sub(rf"^{fence['indent']}", "", fence["code"], flags=re.M)
        if kind == "output" and blocks and blocks[-1].kind in KINDS:
            blocks[-1] = replace(blocks[-1], output=code)
        blocks.append(Block(kind, title and title[1], line, code))
    return [block for block in blocks if block.kind in KINDS]


def run_blocks(document: Path, *, slow: bool = False) -> int:
    """Run the blocks of `document` in order, in the current folder, and return how many there were."""
    # Not "__main__": process pools would look for the names of a block in pytest itself.
    namespace: dict[str, object] = {"__name__": document.stem}
    blocks = blocks_of(document.read_text(encoding="utf-8"))
    write_files(blocks)
    for block in blocks:
        where = f"{document.name}, line {block.line}"
        if block.title is not None:
            others = "\n".join(other.code for other in blocks if other is not block)
            assert Path(block.title).stem in others, f"{where}: nothing uses {block.title}"
            Path(block.title).write_text(block.code, encoding="utf-8")
        elif block.kind == "python":
            printed = io.StringIO()
            with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
                warnings.simplefilter("error")
                # The blank lines make a traceback point at the line of the document.
                exec(compile("\n" * (block.line - 1) + block.code, str(document), "exec"), namespace)
            compare(block.output, printed.getvalue(), where)
        else:
            compare(block.output, run_commands(block, where, slow=slow), where)
    return len(blocks)


def write_files(blocks: list[Block]) -> None:
    """Write the files of all blocks, the first of each name: a command may come before the file it reads."""
    for block in reversed(blocks):
        if block.title is not None:
            Path(block.title).write_text(block.code, encoding="utf-8")


def compare(shown: str | None, printed: str, where: str) -> None:
    assert shown is None or differences(shown, printed) == [], f"{where}, prints:\n{printed}"


def run_commands(block: Block, where: str, *, slow: bool) -> str:
    """Run the commands of a block and compare what is shown after a `$ ` command; return the other output."""
    lines = [line for line in block.code.replace("\\\n", " ").splitlines() if line.strip()]
    has_prompts = any(line.startswith("$ ") for line in lines)
    commands: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ ") or not has_prompts:
            commands.append((line.removeprefix("$ "), []))
        else:
            commands[-1][1].append(line)
    printed = []
    for command, shown in commands:
        if not slow and is_slow(command):
            continue
        text = run_command(command, where)
        compare("\n".join(shown) if shown else None, text, f"{where}, {command}")
        printed += [] if shown else [text]
    return "".join(printed)


def is_slow(command: str) -> bool:
    stated = STATED_SECONDS.search(command)
    return stated is not None and float(stated[1]) > SLOW


def run_command(command: str, where: str) -> str:
    """What `command` prints on stdout; it must exit with 0, or as its comment says: `# exit status 1`."""
    words = shlex.split(command, comments=True)
    if not words or words[0] in NOT_RUN:
        return ""
    runs = words[0] in PROGRAMS and not {"|", ">", "&&", ";"} & set(words)
    assert runs, f"{where}: {command!r} is a command that no test runs"
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    settings = {"COLUMNS": "100", "MPLBACKEND": "Agg", "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    for _ in range(4):
        program, options = [sys.executable, *PROGRAMS[words[0]], *words[1:]], {"timeout": PATIENCE}
        environment = {**os.environ, **settings}
        done = subprocess.run(program, env=environment, capture_output=True, encoding="utf-8", **options)
        if not (words[0] == "torchrun" and ABORTS_AT_EXIT in done.stderr):
            break
    status = re.search(r"#.*\bexit status (\d+)", command)
    expected = int(status[1]) if status else 0
    said = f"{where}: {command!r} exits with {done.returncode}, not {expected}:\n{done.stdout}\n{done.stderr}"
    assert done.returncode == expected, said
    return done.stdout


def differences(shown: str, printed: str) -> list[str]:
    """Where `shown` and `printed` differ: in words, or in numbers by more than 2 %; costs do not count.

    >>> differences("fc1  0.311 in 2 s", "fc1 0.312 in 9 s"), differences("fc1 0.31", "fc2 0.33")
    ([], ["'fc1' is 'fc2'", "'0.31' is '0.33'"])
    """

    def alike(one: str, other: str) -> bool:
        if NUMBER.sub("#", one) != NUMBER.sub("#", other):
            return False
        numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(word)] for word in (one, other)]
        return all(math.isclose(a, b, rel_tol=AGREEMENT) for a, b in zip(*numbers, strict=True))

    texts = (" ".join(text.split()) for text in (shown, printed))  # lines may break elsewhere
    words = [RULE.sub("─", SECONDS.sub("…", text)).split() for text in texts]
    pairs = zip_longest(*words, fillvalue="")
    return [f"{one!r} is {other!r}" for one, other in pairs if not alike(one, other)]
