from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from hessinit.cli import completing
from hessinit.cli.bash_words import join_words
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
    (tmp_path / "net@2.py").write_text("def second(): pass\n")
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
        ("net.", ["net.py:problem", "net.py:prepared"]),
        ("net.py", ["net.py:problem", "net.py:prepared"]),
        ("net.py:", ["net.py:problem", "net.py:prepared"]),
        ("net.py:pro", ["net.py:problem"]),
        ("./net.py:pro", ["./net.py:problem"]),
        ("net.py:nosuch", []),
        ("nosuch.py:", []),
        ("", ["broken.py", "my net.py", "net.py", "net@2.py", "c:d/", "models/", "my dir/"]),
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


@pytest.mark.parametrize("typed", ["~/", "~/ho", "~/home.py", "~/home.py:", "~/home.py:at"])
def test_a_problem_at_home_is_completed_as_it_was_typed(folder, monkeypatch, typed):
    home = folder / "models" / "home"
    home.mkdir()
    (home / "home.py").write_text("def at_home(): pass\n")
    monkeypatch.setenv("HOME", str(home))
    assert complete_problem(typed) == ["~/home.py:at_home"]


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
        (["hessinit", "measure", "--curvature", "=", "h"], "hessian\n"),
        (["hessinit", "measure", "--curvature", "="], "gauss-newton\nhessian\nboth\n"),
        (["hessinit", "measure", "--html", "=", "a.html", "net.py", ":", "pre"], "prepared\n"),
        (["hessinit", "measure", "net", "@", "2.py", ":"], "second\n"),
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


def test_a_word_without_a_colon_stays_as_it_is():
    assert join_words(["hessinit", "measure", "net.py:pro"], 2) == (
        ["hessinit", "measure", "net.py:pro"],
        2,
        0,
    )
    assert join_words(["hessinit", "measure"], 2) == (["hessinit", "measure"], 2, 0)


def test_the_lists_without_torch_are_the_library_s():
    from hessinit.init.apply_scheme import SCHEMES
    from hessinit.training.initializers import KNOWN

    assert list(completing.SCHEMES) == SCHEMES
    assert set(completing.STARTS) == set(KNOWN)
    assert completing.complete_start("h") == ["hessinit", "he"]
    assert completing.complete_start("he") == ["hessinit", "he", "he+warmup"]
    assert completing.complete_scheme("k") == ["keep"]
    assert completing.complete_device("m") == ["mps"]
