"""The documents keep their word: what they show runs and prints what they say; their links lead somewhere."""

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
DOCUMENTS = [*GUIDES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]

INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
INLINE_LINK = re.compile(r"\]\(<?(?P<target>[^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
REFERENCE_LINK = re.compile(r"^ {0,3}\[[^\]^]+\]:\s+<?(?P<target>[^\s>]+)", re.M)
HTML_LINK = re.compile(r"<[^>]*\b(?:href|src)\s*=\s*[\"'](?P<target>[^\"']+)[\"']")
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<text>.+?)[ \t#]*$", re.M)
INDENTED_COMMAND = re.compile(r"^ {4,}(?:\$ )?(?:hessinit|python|pytest|pip|torchrun) .*", re.M)
HTML_ANCHOR = re.compile(r"<[^>]*\b(?:id|name)\s*=\s*[\"']([^\"']+)[\"']")


def prose(text: str) -> str:
    return INLINE_CODE.sub("", COMMENT.sub("", FENCE.sub("", text)))


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
    text = prose(document.read_text(encoding="utf-8"))
    broken = []
    for pattern in (INLINE_LINK, REFERENCE_LINK, HTML_LINK):
        for link in pattern.finditer(text):
            target = link["target"]
            if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.I):
                continue
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
                broken.append(target)
    return broken


def present(document: Path) -> Path:
    if not document.exists():
        pytest.skip(f"{document.relative_to(ROOT)} is not written yet")
    return document


def relative_name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, from which a document's own files can be imported, and are forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # as without a terminal
    monkeypatch.setenv("MPLBACKEND", "Agg")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("document", GUIDES, ids=relative_name)
def test_the_code_of_a_document_runs_without_a_warning(document: Path, folder: Path) -> None:
    if document.name == "command-line.md" and tuple(map(int, version("typer").split(".")[:2])) < (0, 29):
        pytest.skip("it shows help as typer lays it out since 0.29")
    count = run_blocks(present(document))
    assert count > 0 or document != README, "README.md shows no example"


def test_every_public_name_and_option_is_described() -> None:
    text = present(ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert [name for name in hessinit.__all__ if f"`{name}" not in text] == []
    verbs = [name for name in hessinit.__all__ if inspect.isfunction(getattr(hessinit, name))]
    assert len(verbs) >= 14
    options = {
        (verb, name)
        for verb in verbs
        for name, parameter in inspect.signature(getattr(hessinit, verb)).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert {
        (verb, name) for verb, name in options if f"`{name}" not in text and f" {name}=" not in text
    } == set()


@pytest.mark.parametrize("package", [hessinit, hessinit.paper], ids=lambda package: package.__name__)
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    """Once the module is imported, by whomever, its package would give it in place of the function."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules & set(package.__all__) == set()


def test_every_command_is_described() -> None:
    from hessinit.cli import app

    text = present(ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    names = [command.callback.__name__ for command in app.registered_commands]
    assert [name for name in names if f"$ hessinit {name} --help\n" not in text] == []
    assert len(names) >= 9


@pytest.mark.parametrize("document", GUIDES, ids=relative_name)
def test_a_command_is_in_a_block_that_says_whether_it_runs(document: Path) -> None:
    text = FENCE.sub("", present(document).read_text(encoding="utf-8"))
    assert INDENTED_COMMAND.findall(text) == [], "put it in a block marked console (run) or text (shown)"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_name)
def test_the_relative_links_of_a_document_lead_somewhere(document: Path) -> None:
    assert broken_links(present(document)) == []


# The checks above pass on good documents; these show that they fail on bad ones.


def write_document(folder: Path, *lines: str) -> Path:
    document = folder / "sample.md"
    document.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return document


def test_blocks_share_one_namespace_and_other_languages_are_left_alone(tmp_path: Path) -> None:
    first = ["```python", "x = 1", "```", "```text", "not python", "```"]
    second = ["- item", "  ```python", "  assert x == 1", "  ```"]
    assert run_blocks(write_document(tmp_path, *first, *second)) == 2


def test_a_failing_block_is_reported_with_its_line_in_the_document(tmp_path: Path) -> None:
    document = write_document(tmp_path, "# Title", "", "```python", "x = 1", "assert x == 2", "```")
    with pytest.raises(AssertionError) as failure:
        run_blocks(document)
    assert failure.traceback[-1].lineno + 1 == 5


def test_a_warning_in_a_block_is_an_error(tmp_path: Path) -> None:
    document = write_document(
        tmp_path, "```python", "import warnings", "warnings.warn('stale example')", "```"
    )
    with pytest.raises(UserWarning, match="stale example"):
        run_blocks(document)


def test_a_stale_output_is_found_and_the_last_figure_and_the_seconds_are_forgiven(tmp_path: Path) -> None:
    code = ["```python", "print('fc1  10.52 ───── ok')", "print('1 layer in 0.2 s')", "```", "", "```output"]
    assert run_blocks(write_document(tmp_path, *code, "fc1 10.5 ── ok", "1 layer in 7 s", "```")) == 1
    for stale in ("fc1 11.5 ─ ok", "fc2 10.5 ─ ok", "fc1 10.5 ─ sharp", "fc1 10.5 ─"):
        document = write_document(tmp_path, *code, stale, "1 layer in 7 s", "```")
        with pytest.raises(AssertionError, match="sample.md, line 2, prints"):
            run_blocks(document)


def test_an_output_belongs_to_the_block_right_before_it() -> None:
    first, second = "```python\n1\n```\n", "```python\n2\n```\n  ```output\n  two\n  ```\n"
    text = first + second + "```text\n```\n```output\nof nothing\n```\n"
    assert [block.output for block in blocks_of(text)] == [None, "two\n"]


def test_files_are_written_and_commands_run_where_they_are(folder: Path) -> None:
    file = ['```python title="greeting.py"', "import sys", "print('hello', *sys.argv[1:])", "```"]
    commands = ["```console", "$ python greeting.py you  # and you", "hello you", "$ pip install .", "```"]
    both = ["```bash", "python greeting.py \\", "  a 1.00", "```", "```output", "hello a 1.001", "```"]
    assert run_blocks(write_document(folder, *file, *commands, *both)) == 3
    module = ['```python title="shelf.py"', "value = 3", "```"]
    used = ["```python", "import shelf", "print(shelf.value)", "```", "```output", "3", "```"]
    assert run_blocks(write_document(folder, *module, *used)) == 2
    for stale in (["$ python greeting.py", "hello you"], ["$ python greeting.py you", "hello"]):
        with pytest.raises(AssertionError, match="sample.md, line 6, python greeting.py"):
            run_blocks(write_document(folder, *file, "```console", *stale, "```"))


def test_a_file_that_nothing_uses_is_found(folder: Path) -> None:
    with pytest.raises(AssertionError, match="sample.md, line 2: nothing uses net.py"):
        run_blocks(write_document(folder, '```python title="net.py"', "x = 1", "```"))


@pytest.mark.parametrize("command", ["curl example.org", "hessinit demo | head", "python net.py > out"])
def test_a_command_that_no_test_runs_is_found(command: str, folder: Path) -> None:
    with pytest.raises(AssertionError, match="sample.md, line 2: .* is a command that no test runs"):
        run_blocks(write_document(folder, "```bash", command, "```"))


def test_the_exit_status_of_a_command_is_that_of_its_comment(folder: Path) -> None:
    failing = 'python -c "raise SystemExit(3)"'
    run_blocks(write_document(folder, "```bash", f"{failing}  # exit status 3", "```"))
    with pytest.raises(AssertionError, match="exits with 3, not 0"):
        run_blocks(write_document(folder, "```bash", failing, "```"))


def test_links_to_missing_files_and_headings_are_found(tmp_path: Path) -> None:
    document = write_document(
        tmp_path,
        "# What it costs: ‖H‖ & `time`",
        "[good](#what-it-costs-h--time) [web](https://example.org/x#y) [bad](#what-it-cost)",
        "[gone](gone.md#top)",
        "`[code](no.md)`",
        "```",
        "[fenced](no.md)",
        "```",
        '<img src="no.png"> <a href="sample.md">here</a>',
        "[ref]: other.md 'title'",
    )
    assert sorted(broken_links(document)) == ["#what-it-cost", "gone.md#top", "no.png", "other.md"]


def test_the_second_heading_of_a_name_has_a_number_in_its_anchor() -> None:
    assert anchors("# Cost\n## Cost\n### cost\n<a id='by-hand'></a>") == {
        "cost",
        "cost-1",
        "cost-2",
        "by-hand",
    }
