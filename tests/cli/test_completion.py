from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from hessinit.cli import completing
from hessinit.cli.bash_words import join_colons
from hessinit.cli.completing import complete_problem, functions_of

from .conftest import SOURCE

FILE = """
import sys
raise SystemExit("this file must not be run")

def problem(): pass
def prepared(width=3, *, depth=2): pass
def needs(width): pass
def needs_too(*, depth): pass
def _helper(): pass
async def later(): pass
class Net:
    def method(self): pass
other = problem
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "broken.py").write_text("def problem(:\n")
    (tmp_path / ".hidden.py").write_text(FILE)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "deep.py").write_text("def deep(): pass\ndef deeper(): pass\n")
    (tmp_path / "models" / "__init__.py").write_text("def whole(): pass\n")
    (tmp_path / "c:d").mkdir()
    (tmp_path / "c:d" / "only.py").write_text("def only(): pass\n")
    (tmp_path / "my net.py").write_text("def mine(): pass\n")
    (tmp_path / "my dir").mkdir()
    (tmp_path / "my dir" / "net.py").write_text(FILE)
    (tmp_path / "$(x)").mkdir()
    (tmp_path / "$(x)" / "net.py").write_text(FILE)
    for name in ("$(touch PWNED)", "`touch PWNED`", ";touch PWNED", "\n$(touch PWNED)", "*", "'"):
        (tmp_path / f"evil{name}.py").write_text("def problem(): pass\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(folder, shell: str, *words: str, **variables: str) -> str:
    """What the shell is answered for these words, the last unfinished, as the installed script asks."""
    line = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    if shell != "bash":
        line = {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "_HESSINIT_COMPLETE": f"complete_{shell}"}
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hessinit"],
        cwd=folder, env={**environment, **line, **variables}, capture_output=True, encoding="utf-8",
        timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    loaded = set(re.findall(r"\| +([\w.]+)$", result.stderr, flags=re.MULTILINE))
    assert "hessinit.cli.completing" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "matplotlib", "jinja2"})
    assert "must not be run" not in result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("n", ["net.py:problem", "net.py:prepared"]),
        ("net.py", ["net.py:problem", "net.py:prepared"]),
        ("net.py:", ["net.py:problem", "net.py:prepared"]),
        ("net.py:pro", ["net.py:problem"]),
        ("./net.py:pro", ["./net.py:problem"]),
        ("net.py:nosuch", []),
        ("nosuch.py:", []),
        ("", ["broken.py", "my net.py", "net.py", "c:d/", "models/", "my dir/"]),
        ("mo", []),  # a folder alone is the shell's
        ("models/", ["models/deep.py:deep", "models/deep.py:deeper"]),
        ("models/d", ["models/deep.py:deep", "models/deep.py:deeper"]),
        ("models.deep:deepe", ["models.deep:deeper"]),
        ("models:", ["models:whole"]),
        ("broken.py", ["broken.py"]),
        ("broken.py:", []),
        (".h", [".hidden.py:problem", ".hidden.py:prepared"]),
        ("nowhere/", []),
        ("c:d/", ["c:d/only.py:only"]),
        ("c:d/only.py:", ["c:d/only.py:only"]),
        ("my n", ["my net.py:mine"]),
        ("evil", []),  # names that a shell might run are the shell's to quote
        ("$(x)/", []),
    ],
)
def test_a_problem_is_completed_from_files_that_are_not_run(folder, typed, offered):
    assert complete_problem(typed) == offered


def test_functions_are_those_that_need_no_argument(folder):
    assert functions_of(folder / "net.py") == ["problem", "prepared"]
    assert functions_of(folder) == []


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["hessinit", "measure", "net.py"], "net.py:problem\nnet.py:prepared\n"),
        # As bash splits it: the colon ends a word, and only what follows it is put in.
        (["hessinit", "measure", "net.py", ":"], "problem\nprepared\n"),
        (["hessinit", "measure", "net.py", ":", "pre"], "prepared\n"),
        (["hessinit", "initialize", "--lr", "0.1", "net.py", ":", "pre"], "prepared\n"),
        (["hessinit", "track", "net.py", ":", "problem", "--opt"], "--optimizer\n"),
        (["hessinit", "measure", "c", ":", "d/"], "d/only.py:only\n"),
        (["hessinit", "measure", "c", ":", "d/only.py", ":"], "only\n"),
        (["hessinit", "measure", "c\\:d/o"], "c:d/only.py:only\n"),
        (["hessinit", "measure", "my\\ dir/"], "my\\ dir/net.py:problem\nmy\\ dir/net.py:prepared\n"),
        (["hessinit", "measure", "my\\ dir/net.py", ":", "pre"], "prepared\n"),
        (["hessinit", "measure", '"my dir/net.py:pre'], "my dir/net.py:prepared\n"),
        (["hessinit", "measure", "'my dir/net.py:pre"], "my dir/net.py:prepared\n"),
        (["hessinit", "measure", "my\\ n"], "my\\ net.py:mine\n"),
        (["hessinit", "measure", "evil"], "\n"),
        (["hessinit", "in"], "initialize\n"),
        (["hessinit", "measure", "net.py", ":", "problem", "--curvature", "h"], "hessian\n"),
        (["hessinit", "initialize", "net.py", ":", "problem", "--scheme", "or"], "orthogonal\n"),
        (["hessinit", "compare", "--start", "lsuv+"], "lsuv+warmup\n"),
        (["hessinit", "reproduce", "table-4", "w"], "word2vec\n"),
        (["hessinit", "reproduce", "--data", "d"], "digits\n"),
        (["hessinit", "show", "no"], "\n"),  # the shell completes files
    ],
)
def test_bash_is_answered(folder, words, answer):
    assert ask(folder, "bash", *words) == answer


def test_zsh_is_answered_with_colons_escaped(folder):
    answer = ask(folder, "zsh", "hessinit", "measure", "net.py:pre")
    assert answer == "_arguments '*: :((\"net.py\\\\:prepared\"))'\n"
    assert ask(folder, "zsh", "hessinit", "show", "no") == "_files\n"
    assert '"initialize":"Find weights' in ask(folder, "zsh", "hessinit", "in")


def test_fish_is_answered(folder):
    assert ask(folder, "fish", "hessinit", "measure", "net.py:p") == "net.py:problem\nnet.py:prepared\n"


def type_in_bash(folder, *keys: str) -> str:
    """What a real bash on a terminal makes of these keys; `hessinit` only shows its arguments there."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    environment = {
        **os.environ, "PYTHONPATH": str(SOURCE), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        "PS1": "ready>", "TERM": "dumb", "INPUTRC": "/dev/null",
    }  # fmt: skip
    command = [sys.executable, "-m", "hessinit", "--show-completion", "bash"]
    shown = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=True)
    place = folder.with_name(f"{folder.name}-shell")
    place.mkdir()
    (place / "hessinit").write_text(
        '#!/bin/sh\n[ -n "$_HESSINIT_COMPLETE" ] || { for each; do echo "<$each>"; done; exit; }\n'
        f'exec "{sys.executable}" -m hessinit "$@"\n'
    )
    (place / "hessinit").chmod(0o755)
    (place / "script").write_text(shown.stdout)
    environment["PATH"] = f"{place}{os.pathsep}{environment['PATH']}"
    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    seen = ""
    # Bash reads on while a completion runs, so that the next key may be typed at once.
    typed = f'. "{place}/script"\n', *keys, "\necho 'that is' all\n", "exit\n"
    os.write(reader, "".join(typed).encode())
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        seen += part.decode(errors="replace")
    os.close(reader)
    process.wait(timeout=60)
    return seen.replace("\r", "")


@pytest.mark.parametrize(
    ("keys", "arguments"),
    [
        ("hessinit measure net.py:pre\t", ["measure", "net.py:prepared"]),
        ("hessinit measure my\\ dir/net.py:pre\t", ["measure", "my dir/net.py:prepared"]),
        ("hessinit measure my\\ n\t", ["measure", "my net.py:mine"]),
        ("hessinit measure 'my dir/net.py:pre\t", ["measure", "my dir/net.py:prepared"]),
        ("hessinit measure c:d/\t", ["measure", "c:d/only.py:only"]),
    ],
)
def test_a_real_bash_completes_what_was_typed(folder, keys, arguments):
    seen = type_in_bash(folder, keys)
    assert "".join(f"<{each}>\n" for each in arguments) in seen, seen


@pytest.mark.parametrize("name", ["$(touch PWNED).py", "`touch PWNED`.py", "\n$(touch PWNED)[1].py"])
def test_a_real_bash_runs_no_name(tmp_path, name):
    (tmp_path / name).write_text("def problem(): pass\n")
    seen = type_in_bash(tmp_path, "hessinit measure \t")
    assert "<measure>\n" in seen, seen
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_word_without_a_colon_stays_as_it_is():
    assert join_colons(["hessinit", "measure", "net.py:pro"], 2) == (
        ["hessinit", "measure", "net.py:pro"],
        2,
        0,
    )
    assert join_colons(["hessinit", "measure"], 2) == (["hessinit", "measure"], 2, 0)


def test_the_lists_without_torch_are_the_library_s():
    from hessinit.comparing.starts import KNOWN
    from hessinit.schemes.rules import SCHEMES

    assert list(completing.SCHEMES) == SCHEMES
    assert set(completing.STARTS) == set(KNOWN)
    assert completing.complete_start("h") == ["hessinit", "he"]
    assert completing.complete_start("he") == ["hessinit", "he", "he+warmup"]
    assert completing.complete_scheme("k") == ["keep"]
    assert completing.complete_device("m") == ["mps"]
