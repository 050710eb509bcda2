"""The documents: their code runs and prints what they show; links lead somewhere; every name is described."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import hessinit
import hessinit.paper
from running_documents import FENCE, blocks_of, run_blocks

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [*GUIDES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]

INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
LINKS = (
    re.compile(r"\]\(<?(?P<target>[^)\s>]+)>?(?:\s+[\"'][^)]*)?\)"),
    re.compile(r"^ {0,3}\[[^\]^]+\]:\s+<?(?P<target>[^\s>]+)", re.M),
    re.compile(r"<[^>]*\b(?:href|src)\s*=\s*[\"'](?P<target>[^\"']+)[\"']"),
)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<text>.+?)[ \t#]*$", re.M)
INDENTED_COMMAND = re.compile(r"^ {4,}(?:\$ )?(?:hessinit|python|pytest|pip|torchrun) .*", re.M)
HTML_ANCHOR = re.compile(r"<[^>]*\b(?:id|name)\s*=\s*[\"']([^\"']+)[\"']")


def anchors(text: str) -> set[str]:
    """The anchors that a hosting site gives the headings of `text`, and those set by hand.

    Lower case, punctuation dropped, blanks to hyphens; the second heading of a name gets `-1`.
    """
    text = COMMENT.sub("", FENCE.sub("", text))
    found = set(HTML_ANCHOR.findall(text))
    for heading in HEADING.finditer(text):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"])
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = 0
        while (name := f"{slug}-{count}" if count else slug) in found:
            count += 1
        found.add(name)
    return found


def broken_links(document: Path) -> list[str]:
    """The relative links and anchors of `document` that lead nowhere; links to the web are not followed."""
    text = INLINE_CODE.sub("", COMMENT.sub("", FENCE.sub("", document.read_text(encoding="utf-8"))))
    broken = []
    for target in (link["target"] for pattern in LINKS for link in pattern.finditer(text)):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.I):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def relative_name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, from which a document's own files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # as without a terminal
    monkeypatch.setenv("MPLBACKEND", "Agg")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("document", GUIDES, ids=relative_name)
def test_the_code_of_a_document_runs_and_prints_what_it_shows(document: Path, folder: Path) -> None:
    if document.name == "command-line.md" and tuple(map(int, version("typer").split(".")[:2])) < (0, 29):
        pytest.skip("it shows help as typer lays it out since 0.29")
    count = run_blocks(document)
    assert count > 0 or document != README, "README.md shows no example"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_name)
def test_links_lead_somewhere_and_commands_are_in_blocks(document: Path) -> None:
    assert broken_links(document) == []
    if document in GUIDES:
        text = FENCE.sub("", document.read_text(encoding="utf-8"))
        assert INDENTED_COMMAND.findall(text) == [], "put it in a block marked console (run) or text (shown)"


def test_every_public_name_option_and_command_is_described() -> None:
    from hessinit.cli.app import app

    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert [name for name in hessinit.__all__ if f"`{name}" not in text and f".{name}" not in text] == []
    verbs = [name for name in hessinit.__all__ if inspect.isfunction(getattr(hessinit, name))]
    assert len(verbs) >= 14
    options = {
        name
        for verb in verbs
        for name, parameter in inspect.signature(getattr(hessinit, verb)).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert {name for name in options if f"`{name}" not in text and f" {name}=" not in text} == set()
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    commands = [command.callback.__name__ for command in app.registered_commands]
    assert [name for name in commands if f"$ hessinit {name} --help\n" not in text] == []
    assert len(commands) >= 9


@pytest.mark.parametrize("package", [hessinit, hessinit.paper], ids=lambda package: package.__name__)
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    """Once the module is imported, its package would return it in place of the function."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules & set(package.__all__) == set()


# The checks above pass on good documents; these show that they fail on bad ones.


def write_document(folder: Path, *lines: str) -> Path:
    document = folder / "sample.md"
    document.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return document


def test_blocks_share_one_namespace_and_other_languages_are_not_run(tmp_path: Path) -> None:
    first = ["```python", "x = 1", "```", "```text", "not python", "```"]
    second = ["- item", "  ```python", "  assert x == 1", "  ```"]
    assert run_blocks(write_document(tmp_path, *first, *second)) == 2


def test_a_failing_block_is_reported_with_its_line_and_a_warning_fails(tmp_path: Path) -> None:
    document = write_document(tmp_path, "# Title", "", "```python", "x = 1", "assert x == 2", "```")
    with pytest.raises(AssertionError) as failure:
        run_blocks(document)
    assert failure.traceback[-1].lineno + 1 == 5
    warning = ["```python", "import warnings", "warnings.warn('stale example')", "```"]
    with pytest.raises(UserWarning, match="stale example"):
        run_blocks(write_document(tmp_path, *warning))


def test_a_stale_output_is_found_but_not_the_last_figure_or_the_seconds(tmp_path: Path) -> None:
    code = ["```python", "print('fc1  10.52 ───── ok')", "print('1 layer in 0.2 s')", "```", "", "```output"]
    assert run_blocks(write_document(tmp_path, *code, "fc1 10.5 ── ok", "1 layer in 7 s", "```")) == 1
    for stale in ("fc1 11.5 ─ ok", "fc2 10.5 ─ ok", "fc1 10.5 ─ sharp", "fc1 10.5 ─"):
        document = write_document(tmp_path, *code, stale, "1 layer in 7 s", "```")
        with pytest.raises(AssertionError, match="sample.md, line 2, prints"):
            run_blocks(document)
    first, second = "```python\n1\n```\n", "```python\n2\n```\n  ```output\n  two\n  ```\n"
    text = first + second + "```text\n```\n```output\nof nothing\n```\n"
    assert [block.output for block in blocks_of(text)] == [None, "two\n"]


def test_files_are_written_and_commands_run(folder: Path) -> None:
    file = ['```python title="greeting.py"', "import sys", "print('hello', *sys.argv[1:])", "```"]
    commands = ["```console", "$ python greeting.py you  # and you", "hello you", "$ pip install .", "```"]
    both = ["```bash", "python greeting.py \\", "  a 1.00", "```", "```output", "hello a 1.001", "```"]
    assert run_blocks(write_document(folder, *file, *commands, *both)) == 3
    for stale in (["$ python greeting.py", "hello you"], ["$ python greeting.py you", "hello"]):
        with pytest.raises(AssertionError, match="sample.md, line 6, python greeting.py"):
            run_blocks(write_document(folder, *file, "```console", *stale, "```"))
    with pytest.raises(AssertionError, match="sample.md, line 2: nothing uses net.py"):
        run_blocks(write_document(folder, '```python title="net.py"', "x = 1", "```"))


def test_a_command_that_no_test_runs_or_with_another_exit_status_is_found(folder: Path) -> None:
    for command in ("curl example.org", "hessinit demo | head", "python net.py > out"):
        with pytest.raises(AssertionError, match="sample.md, line 2: .* is a command that no test runs"):
            run_blocks(write_document(folder, "```bash", command, "```"))
    failing = 'python -c "raise SystemExit(3)"'
    run_blocks(write_document(folder, "```bash", f"{failing}  # exit status 3", "```"))
    with pytest.raises(AssertionError, match="exits with 3, not 0"):
        run_blocks(write_document(folder, "```bash", failing, "```"))


def test_links_to_missing_files_and_headings_are_found(tmp_path: Path) -> None:
    document = write_document(
        tmp_path,
        "# What it costs: ‖H‖ & `time`",
        "[good](#what-it-costs-h--time) [web](https://example.org/x#y) [bad](#what-it-cost)",
        "[gone](gone.md#top) `[code](no.md)`",
        "```",
        "[fenced](no.md)",
        "```",
        '<img src="no.png"> <a href="sample.md">here</a>',
        "[ref]: other.md 'title'",
    )
    assert sorted(broken_links(document)) == ["#what-it-cost", "gone.md#top", "no.png", "other.md"]
    assert anchors("# Cost\n## Cost\n<a id='by-hand'></a>") == {"cost", "cost-1", "by-hand"}
