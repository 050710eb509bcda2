"""Write into pages what their commands and code print: python docs/building/outputs.py docs/how-to/*.md

A page runs as in the tests, in an empty folder, with its slow commands. Output is replaced where it differs
by more than the tests allow, and below a command that states its seconds (`# 8 s`), which are measured.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from running_documents import FENCE, STATED_SECONDS, blocks_of, differences, run_command, write_files


def refreshed(text: str, name: str) -> str:
    """`text` with what its blocks print now; it runs in the current folder."""
    namespace: dict[str, object] = {"__name__": name}
    printed = ""

    def rewrite(fence: re.Match[str]) -> str:
        nonlocal printed
        kind = fence["info"].strip().lower().split(" ")[0]
        code = re.sub(rf"^{fence['indent']}", "", fence["code"], flags=re.M)
        title = re.search(r"\btitle=\"([^\"]+)\"", fence["info"])
        if title:
            Path(title[1]).write_text(code, encoding="utf-8")
        elif kind == "python":
            caught = io.StringIO()
            with contextlib.redirect_stdout(caught):
                exec(compile(code, name, "exec"), namespace)
            printed = caught.getvalue()
        elif kind in ("console", "bash"):
            code, printed = run_console(code, name)
        elif kind == "output" and differences(code, printed):
            code = tidy(printed)
        code = re.sub(r"^(?=.)", fence["indent"], code, flags=re.M)
        start, end = fence.start("code") - fence.start(), fence.end("code") - fence.start()
        return fence[0][:start] + code + fence[0][end:]

    write_files(blocks_of(text))
    return FENCE.sub(rewrite, text)


def run_console(code: str, name: str) -> tuple[str, str]:
    """The block with new output below the commands that show some, and the output of the others."""
    has_prompts, lines, rest = "$ " in code, [], ""
    for part in re.split(r"^(?=\$ )" if has_prompts else r"(?<=\n)", code, flags=re.M):
        command, _, shown = part.partition("\n")
        while command.endswith("\\"):
            more, _, shown = shown.partition("\n")
            command += "\n" + more
        if not command:
            continue
        start = seconds_of_children()
        printed = run_command(command.removeprefix("$ ").replace("\\\n", " "), name)
        seconds = seconds_of_children() - start
        stated = STATED_SECONDS.search(command)
        if stated:
            command = command[: stated.start(1)] + f"{seconds:.{0 if seconds > 10 else 1}f} s"
        if shown.strip() and (stated or differences(shown, printed)):
            shown = tidy(printed)
        rest += "" if shown.strip() else printed
        lines += [command + "\n" + shown]
    return "".join(lines), rest


def seconds_of_children() -> float:
    """Of the processor: on one idle core they are those of the clock, and on a busy one they are the same."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tidy(printed: str) -> str:
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page in [Path(argument).resolve() for argument in sys.argv[1:]]:
        here = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            sys.path.insert(0, folder)
            os.environ.update(COLUMNS="100", MPLBACKEND="Agg")
            page.write_text(refreshed(page.read_text(encoding="utf-8"), page.stem), encoding="utf-8")
            sys.path.remove(folder)
            os.chdir(here)
