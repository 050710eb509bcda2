"""The documents: their code runs and prints what they show; links lead somewhere; every name is described."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import hessinit
import hessinit.paper
from running_documents import FENCE, run_blocks

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [*GUIDES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]

CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"\]\(<?([^)\s>]+)|^ {0,3}\[[^\]^]+\]:\s+<?([^\s>]+)|\b(?:href|src)=[\"']([^\"']+)", re.M)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t#]*$", re.M)
INDENTED_COMMAND = re.compile(r"^ {4,}(?:\$ )?(?:hessinit|python|pytest|pip|torchrun) .*", re.M)


def anchors(text: str) -> set[str]:
    """Of the headings: lower case, punctuation dropped, blanks to hyphens; the second gets `-1`."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-1" if slug in found else slug)
    return found


def broken_links(document: Path) -> list[str]:
    """The relative links and anchors of `document` that lead nowhere; links to the web are not followed."""
    text = CODE.sub("", FENCE.sub("", document.read_text(encoding="utf-8")))
    broken = []
    for target in ("".join(parts) for parts in LINK.findall(text)):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        is_local = not re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.I)
        leads = file.exists() and (not anchor or anchor in anchors(file.read_text(encoding="utf-8")))
        if is_local and not leads:
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


# Pages that train for most of a minute: the demo, comparisons, two trainers.
SLOW = ("index.md", "comparing.md", "lightning-and-trainer.md")
RUN = [
    pytest.param(page, id=relative_name(page), marks=pytest.mark.sweep if page.name in SLOW else ())
    for page in GUIDES
]


@pytest.mark.parametrize("document", RUN)
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
    verbs = [verb for name in hessinit.__all__ if inspect.isfunction(verb := getattr(hessinit, name))]
    assert len(verbs) >= 14
    options = {name for verb in verbs for name in (verb.__kwdefaults__ or {})}
    assert {name for name in options if f"`{name}" not in text and f" {name}=" not in text} == set()
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    commands = [command.callback.__name__ for command in app.registered_commands]
    assert [name for name in commands if f"$ hessinit {name} --help\n" not in text] == []
    assert len(commands) >= 9
    for package in (hessinit, hessinit.paper):  # an imported module would replace the function of its name
        assert {module.name for module in pkgutil.iter_modules(package.__path__)}.isdisjoint(package.__all__)


# The checks above pass on good documents; these show that they fail on bad ones.


def write_document(folder: Path, *lines: str) -> Path:
    document = folder / "sample.md"
    document.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return document


def test_blocks_share_one_namespace_and_a_failing_one_is_reported_with_its_line(tmp_path: Path) -> None:
    first = ["```python", "x = 1", "```", "```text", "not python", "```"]
    second = ["- item", "  ```python", "  assert x == 1", "  ```"]
    assert run_blocks(write_document(tmp_path, *first, *second)) == 2
    with pytest.raises(AssertionError) as failure:
        run_blocks(write_document(tmp_path, "# Title", "", "```python", "x = 1", "assert x == 2", "```"))
    assert failure.traceback[-1].lineno + 1 == 5
    warning = ["```python", "import warnings", "warnings.warn('stale example')", "```"]
    with pytest.raises(UserWarning, match="stale example"):
        run_blocks(write_document(tmp_path, *warning))


def test_a_stale_output_is_found_but_not_the_last_figure_or_the_seconds(tmp_path: Path) -> None:
    code = ["```python", "print('fc1  10.52 ───── ok')", "print('1 layer in 0.2 s')", "```", "", "```output"]
    assert run_blocks(write_document(tmp_path, *code, "fc1 10.5 ── ok", "1 layer in 7 s", "```")) == 1
    for stale in ("fc1 11.5 ─ ok", "fc2 10.5 ─ ok", "fc1 10.5 ─ sharp", "fc1 10.5 ─"):
        with pytest.raises(AssertionError, match="sample.md, line 2, prints"):
            run_blocks(write_document(tmp_path, *code, stale, "1 layer in 7 s", "```"))


def test_files_are_written_and_commands_run(folder: Path) -> None:
    file = ['```python title="greeting.py"', "import sys", "print('hello', *sys.argv[1:])", "```"]
    commands = ["```console", "$ python greeting.py you  # and you", "hello you", "$ pip install .", "```"]
    both = ["```bash", "python greeting.py \\", "  a 1.00", "```", "```output", "hello a 1.001", "```"]
    assert run_blocks(write_document(folder, *file, *commands, *both)) == 3
    for stale in (["$ python greeting.py", "hello you"], ["$ python greeting.py you", "hello"]):
        with pytest.raises(AssertionError, match="sample.md, line 6, python greeting.py"):
            run_blocks(write_document(folder, *file, "```console", *stale, "```"))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (['```python title="net.py"', "x = 1"], "line 2: nothing uses net.py"),
        (["```bash", "curl example.org"], "is a command that no test runs"),
        (["```bash", "hessinit demo | head"], "is a command that no test runs"),
        (["```bash", 'python -c "raise SystemExit(3)"'], "exits with 3, not 0"),
        (["```bash", 'python -c "raise SystemExit(3)"  # exit status 2'], "exits with 3, not 2"),
    ],
)
def test_a_block_that_no_test_could_run_is_found(block: list[str], message: str, folder: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run_blocks(write_document(folder, *block, "```"))


def test_links_to_missing_files_and_headings_are_found(tmp_path: Path) -> None:
    links = "[good](#what-it-costs-h--time) [web](https://example.org/x#y) [bad](#what-it-cost)"
    ignored = ["`[code](no.md)`", "```", "[fenced](no.md)", "```", '<a href="sample.md">here</a>']
    more = [
        "[gone](gone.md#top)",
        '<img src="no.png">',
        "[ref]: other.md 'title'",
        "# Cost",
        "## Cost",
        "[second](#cost-1)",
    ]
    document = write_document(tmp_path, "# What it costs: ‖H‖ & `time`", links, *ignored, *more)
    assert sorted(broken_links(document)) == ["#what-it-cost", "gone.md#top", "no.png", "other.md"]
