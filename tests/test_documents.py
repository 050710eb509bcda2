"""The documents keep their word: their Python runs, prints what they show, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
import warnings
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest

import hessinit

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [*GUIDES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]

FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^ *(?P=ticks) *$", re.M | re.S
)
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
INLINE_LINK = re.compile(r"\]\(<?(?P<target>[^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
REFERENCE_LINK = re.compile(r"^ {0,3}\[[^\]^]+\]:\s+<?(?P<target>[^\s>]+)", re.M)
HTML_LINK = re.compile(r"<[^>]*\b(?:href|src)\s*=\s*[\"'](?P<target>[^\"']+)[\"']")
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<text>.+?)[ \t#]*$", re.M)
HTML_ANCHOR = re.compile(r"<[^>]*\b(?:id|name)\s*=\s*[\"']([^\"']+)[\"']")


# A number, but not the digits of a name such as fc1; rules of a table; the seconds that a run took.
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
RULE = re.compile("─+")
SECONDS = re.compile(r"(?<=in )\S+(?= s\b)")
AGREEMENT = 0.02  # the last figure may differ between machines; the second must not


@dataclass(frozen=True)
class Block:
    """A fenced block of Python: the line its code starts on, and what the next block says it prints."""

    line: int
    code: str
    output: str | None


def python_blocks(text: str) -> list[Block]:
    """The blocks marked `python`; one marked `output` right after holds what the Python prints."""
    blocks: list[Block] = []
    fences = [(fence, fence["info"].strip().lower().split(" ")[0]) for fence in FENCE.finditer(text)]
    for (fence, kind), (after, after_kind) in zip_longest(fences, fences[1:], fillvalue=(None, "")):
        if fence is not None and kind in ("python", "py"):
            shown = dedented(after) if after is not None and after_kind == "output" else None
            blocks.append(Block(text.count("\n", 0, fence.start("code")) + 1, dedented(fence), shown))
    return blocks


def dedented(fence: re.Match[str]) -> str:
    return re.sub(rf"^{fence['indent']}", "", fence["code"], flags=re.M)


def run_python_blocks(document: Path) -> int:
    """Run the blocks of `document` in order, in one namespace, and return how many there were."""
    # Not "__main__": process pools would look for the names of a block in pytest itself.
    namespace: dict[str, object] = {"__name__": document.stem}
    blocks = python_blocks(document.read_text(encoding="utf-8"))
    for block in blocks:
        printed = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("error")
            # The blank lines make a traceback point at the line of the document.
            exec(compile("\n" * (block.line - 1) + block.code, str(document), "exec"), namespace)
        if block.output is not None:
            different = differences(block.output, printed.getvalue())
            assert different == [], f"{document.name}, line {block.line}, prints:\n{printed.getvalue()}"
    return len(blocks)


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


@pytest.mark.parametrize("document", GUIDES, ids=relative_name)
def test_the_python_of_a_document_runs_without_a_warning(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present(document)
    monkeypatch.chdir(tmp_path)  # examples may write files
    monkeypatch.setenv("COLUMNS", "100")  # as without a terminal
    monkeypatch.setenv("MPLBACKEND", "Agg")
    count = run_python_blocks(document)
    assert count > 0 or document != README, "README.md shows no Python example"


def test_every_public_name_and_option_is_described() -> None:
    text = present(ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    options = [name for name in inspect.signature(hessinit.measure).parameters if name != "model"]
    assert [name for name in (*hessinit.__all__, *options) if f"`{name}" not in text] == []


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
    assert run_python_blocks(write_document(tmp_path, *first, *second)) == 2


def test_a_failing_block_is_reported_with_its_line_in_the_document(tmp_path: Path) -> None:
    document = write_document(tmp_path, "# Title", "", "```python", "x = 1", "assert x == 2", "```")
    with pytest.raises(AssertionError) as failure:
        run_python_blocks(document)
    assert failure.traceback[-1].lineno + 1 == 5


def test_a_warning_in_a_block_is_an_error(tmp_path: Path) -> None:
    document = write_document(
        tmp_path, "```python", "import warnings", "warnings.warn('stale example')", "```"
    )
    with pytest.raises(UserWarning, match="stale example"):
        run_python_blocks(document)


def test_a_stale_output_is_found_and_the_last_figure_and_the_seconds_are_forgiven(tmp_path: Path) -> None:
    code = ["```python", "print('fc1  10.52 ───── ok')", "print('1 layer in 0.2 s')", "```", "", "```output"]
    assert run_python_blocks(write_document(tmp_path, *code, "fc1 10.5 ── ok", "1 layer in 7 s", "```")) == 1
    for stale in ("fc1 11.5 ─ ok", "fc2 10.5 ─ ok", "fc1 10.5 ─ sharp", "fc1 10.5 ─"):
        document = write_document(tmp_path, *code, stale, "1 layer in 7 s", "```")
        with pytest.raises(AssertionError, match="sample.md, line 2, prints"):
            run_python_blocks(document)


def test_an_output_belongs_to_the_python_right_before_it() -> None:
    first, second = "```python\n1\n```\n", "```python\n2\n```\n  ```output\n  two\n  ```\n"
    text = first + second + "```text\n```\n```output\nof nothing\n```\n"
    assert [block.output for block in python_blocks(text)] == [None, "two\n"]


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
