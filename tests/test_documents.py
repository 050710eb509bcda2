"""The documents: their code runs and prints what they show; links lead somewhere; every name is described."""

from __future__ import annotations

import inspect
import pkgutil
import re
import runpy
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import hessinit
import hessinit_paper
from running_documents import FENCE, blocks_of, is_slow, run_blocks

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, from which a document's own files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # as without a terminal
    monkeypatch.setenv("MPLBACKEND", "Agg")
    users = str(tmp_path.parent)  # other tests import files of the same names
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(users):
            del sys.modules[name]
    return tmp_path


def has_slow_commands(document: Path) -> bool:
    blocks = blocks_of(document.read_text(encoding="utf-8"))
    return any(is_slow(line) for block in blocks for line in block.code.splitlines())


# Pages that train for most of a minute: the demo, comparisons, two trainers. tests/errata has the errata's
# numbers.
SLOW = ("index.md", "comparing.md", "lightning-and-trainer.md", "errata.md")
RUN = [
    pytest.param(page, False, id=relative_name(page), marks=pytest.mark.sweep if page.name in SLOW else ())
    for page in GUIDES
]
RUN += [
    pytest.param(page, True, id=f"all of {relative_name(page)}", marks=pytest.mark.sweep)
    for page in GUIDES
    if has_slow_commands(page)
]


@pytest.mark.parametrize(("document", "slow"), RUN)
def test_the_code_of_a_document_runs_and_prints_what_it_shows(
    document: Path, slow: bool, folder: Path
) -> None:
    count = run_blocks(document, slow=slow)
    assert count > 0 or document != README, "README.md shows no example"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_name)
def test_links_lead_somewhere_and_commands_are_in_blocks(document: Path) -> None:
    assert broken_links(document) == []
    if document in GUIDES:
        text = FENCE.sub("", document.read_text(encoding="utf-8"))
        assert INDENTED_COMMAND.findall(text) == [], "put it in a block marked console (run) or text (shown)"


RECORDS = runpy.run_path(str(ROOT / "docs" / "building" / "records.py"))


@pytest.mark.parametrize("document", RECORDS["PAGES"], ids=relative_name)
def test_numbers_and_tables_are_those_of_the_records(document: Path) -> None:
    """`python docs/building/records.py` writes what is stale."""
    assert RECORDS["stale"](document.read_text(encoding="utf-8")) == []


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
    assert [name for name in commands if f"## {name}\n\n<!--command {name}-->" not in text] == []
    assert len(commands) >= 9
    for package in (hessinit, hessinit_paper):  # an imported module would replace the function of its name
        assert {module.name for module in pkgutil.iter_modules(package.__path__)}.isdisjoint(package.__all__)


@pytest.mark.skipif(
    tuple(map(int, version("typer").split(".")[:2])) < (0, 29), reason="the page is read off newer help"
)
def test_the_page_of_the_command_line_is_that_of_its_help() -> None:
    """`python docs/building/command_line.py` writes it."""
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    refreshed = runpy.run_path(str(ROOT / "docs" / "building" / "command_line.py"))["refreshed"]
    assert refreshed(page) == page


def test_the_citation_is_complete_and_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    # What the format requires; `cffconvert --validate` checks all of it before a release.
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == hessinit.__version__ == version("hessinit")


# The checks above pass on good documents; these show that they fail on bad ones.


def write_document(folder: Path, text: str) -> Path:
    document = folder / "sample.md"
    document.write_text(text + "\n", encoding="utf-8")
    return document


GREETING = '```python title="greet.py"\nimport sys\nprint("hi", *sys.argv[1:], "in 2 s")\n```\n'
GOOD = f"{GREETING}```console\n$ python greet.py you 1.00\nhi you 1.001 in 7 s\n$ pip install .\n```"
GOOD += "\n```python\nx = 1\n```\n- item\n  ```python\n  print(x)\n  ```\n\n  ```output\n  1\n  ```"
BAD = {
    f"{GREETING}```console\n$ python greet.py you 1.00\nhi you 1.1 in 7 s\n```": "line 6, python greet",
    "```python\nprint('fc1')\n```\n```output\nfc2\n```": "sample.md, line 2, prints",
    '```python title="net.py"\nx = 1\n```': "line 2: nothing uses net.py",
    "```bash\nhessinit demo | head\n```": "is a command that no test runs",
    '```bash\npython -c "raise SystemExit(3)"  # exit status 2\n```': "exits with 3, not 2",
}


def test_a_block_that_prints_something_else_fails_or_is_never_run_is_found(folder: Path) -> None:
    assert run_blocks(write_document(folder, GOOD)) == 4
    for text, message in BAD.items():
        with pytest.raises(AssertionError, match=message):
            run_blocks(write_document(folder, text))
    skipped = "```console\n$ python -c 'print(3)'  # 8 s\n4\n```"
    assert run_blocks(write_document(folder, skipped)) == 1
    with pytest.raises(AssertionError, match="line 2, python"):
        run_blocks(write_document(folder, skipped), slow=True)
    with pytest.raises(UserWarning, match="stale example"):
        run_blocks(write_document(folder, "```python\nimport warnings\nwarnings.warn('stale example')\n```"))


def test_links_to_missing_files_and_headings_are_found(tmp_path: Path) -> None:
    good = "# What it costs: ‖H‖ & `time`\n[good](#what-it-costs-h--time) [web](https://example.org/x#y)\n"
    good += '`[code](no.md)`\n```\n[fenced](no.md)\n```\n<a href="sample.md">here</a>\n# Cost\n## Cost\n'
    bad = (
        "[second](#cost-1) [bad](#what-it-cost) [gone](gone.md#top)\n<img src='no.png'>\n[ref]: other.md 'x'"
    )
    document = write_document(tmp_path, good + bad)
    assert sorted(broken_links(document)) == ["#what-it-cost", "gone.md#top", "no.png", "other.md"]


def test_a_stale_number_and_a_comment_without_a_number_are_found() -> None:
    good = "Of 1,379<!--ordinary-problems--> problems\n```\n<!--shown-->\n```\n"
    assert RECORDS["stale"](good) == []
    assert len(RECORDS["stale"](good.replace("1,379", "42"))) == 1
    assert RECORDS["stale"]("three<!--ordinary-problems-->") == ["'ordinary-problems' follows no number"]
    assert RECORDS["stale"]("3<!--what-nobody-counts-->") == ["'what-nobody-counts' is no entry"]
    table = "<!--table cost of peers-->\n\n| old |\n\n<!--end-->"
    assert RECORDS["stale"](table) != [] == RECORDS["stale"](RECORDS["filled"](table))
