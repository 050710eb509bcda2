"""Write the options of every command into docs/command-line.md: python docs/building/command_line.py

The page has a block for each command, filled from its `--help`: what it does, its first examples, and the
options of its own. Options that mean the same in several commands stand in one list, by commands. The
tests compare the page with the real `--help`, so run this when an option changes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from typer.testing import CliRunner

from hessinit.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "command-line.md"
BLOCK = re.compile(r"(?<=<!--command )(?P<name>[\w ]+)-->\n.*?(?=<!--end-->)", re.S)
COMMANDS = [command.callback.__name__ for command in app.registered_commands]
SHARED = "shared options"
EXAMPLES = 2  # of each command; the help has more
RANGE = re.compile(r" \[(?:\d+<=)?x[<>]=\d+\]|; (?:\d+<=)?x[<>]=\d+")


@dataclass(frozen=True)
class Help:
    """The parts of the help of a command; an argument or option is a pair of its form and its meaning."""

    summary: str
    examples: list[str]
    arguments: list[tuple[str, str]]
    options: list[tuple[str, str]]


@cache
def help_of(command: str) -> Help:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"}).stdout
    head, *parts = re.split(r"^(Arguments|Options):\n", text, flags=re.M)
    pairs = dict(zip(parts[::2], map(pairs_of, parts[1::2]), strict=True))
    _usage, summary, *paragraphs = re.split(r"\n\s*\n", re.sub(r"^  ", "", head, flags=re.M).strip())
    examples = next(paragraph for paragraph in paragraphs if paragraph.startswith("Examples:"))
    return Help(
        summary=re.sub(r"\s+", " ", summary),
        examples=[line.strip() for line in examples.splitlines()[1:]],
        arguments=pairs.get("Arguments", []),
        options=[(form, meaning) for form, meaning in pairs["Options"] if "--help" not in form],
    )


def pairs_of(text: str) -> list[tuple[str, str]]:
    """The form and the meaning of each option; a meaning continues in lines that begin far to the right."""
    pairs: list[tuple[str, str]] = []
    for line in filter(str.strip, text.splitlines()):
        if re.match(r"  \S", line):
            form, _, meaning = line.strip().partition("  ")
        else:
            form, meaning = pairs.pop()
            glue = "" if re.search(r"\w-$", meaning) else " "  # broken at a hyphen
            meaning += glue + line.strip()
        pairs.append((form, RANGE.sub("", re.sub(r"\s+", " ", meaning)).strip()))
    return pairs


def shared() -> dict[tuple[str, str], list[str]]:
    """The options that several commands have with the same meaning, and those commands."""
    commands = defaultdict(list)
    for command in COMMANDS:
        for pair in help_of(command).options:
            commands[pair].append(command)
    return {pair: names for pair, names in commands.items() if len(names) > 1}


def block_of(name: str) -> str:
    """The text between the marks of a command, or of the options that several share."""
    if name == SHARED:
        by_commands = defaultdict(list)
        for (form, meaning), names in shared().items():
            by_commands[", ".join(names)].append(f"- `{form}`: {meaning}")
        return "\n\n".join(f"{names}:\n\n" + "\n".join(lines) for names, lines in by_commands.items())
    command = help_of(name)
    arguments = [(form.split(" <")[0], meaning) for form, meaning in command.arguments]
    own = [pair for pair in arguments if pair[0] != "FILE.py:FUNCTION"]
    own += [pair for pair in command.options if pair not in shared()]
    examples = "\n".join(command.examples[:EXAMPLES])
    parts = [command.summary, f"```text\n{examples}\n```"]
    parts += ["\n".join(f"- `{form}`: {meaning}" for form, meaning in own)] if own else []
    return "\n\n".join(parts)


def refreshed(text: str) -> str:
    """`text` with the present options between the marks."""
    return BLOCK.sub(lambda mark: f"{mark['name']}-->\n\n{block_of(mark['name'])}\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
