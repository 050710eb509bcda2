"""The committed records: what they say follows from their raw values, by today's code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hessinit_paper import Reproduction
from hessinit_paper.experiments import PaperSetting, find_experiment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "paper"
RECORDS = sorted(FOLDER.glob("*.json"))
DOCUMENT = ROOT / "docs" / "reproducing.md"
SHOWN = ("table-1-mnist", "table-2-mnist", "table-3-cifar-10", "table-4-mnist", "table-5-cifar-10")


def rounded(findings: object) -> str:
    return re.sub(r"\d+\.\d+(e[-+]?\d+)?", lambda found: f"{float(found[0]):.6g}", repr(findings))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_its_findings_follow_from_its_results(path: Path) -> None:
    record = Reproduction.load(path)
    experiment = find_experiment(record.experiment)
    setting = PaperSetting(record.experiment, record.data, record.variant, record.seeds)
    assert record.name == path.stem == setting.name
    assert record.configuration == experiment.configure(setting)
    assert {job.key for job in experiment.plan(setting)} == set(record.results)
    # Python 3.10 computes standard deviations with another last digit.
    assert rounded(experiment.conclude(setting, record.results)) == rounded(record.findings)
    assert record.about_variant == experiment.variants[record.variant].about
    assert (record.title, len(record.seeds)) == (experiment.title, experiment.seeds)
    assert path.stat().st_size < 400_000
    assert re.fullmatch(r"[0-9a-f]{12}", record.revision)


@pytest.mark.parametrize("name", SHOWN)
def test_the_document_says_how_many_claims_hold(name: str) -> None:
    record, document = Reproduction.load(FOLDER / f"{name}.json"), DOCUMENT.read_text(encoding="utf-8")
    (row,) = [line for line in document.splitlines() if line.startswith(f"| Table {record.experiment[-1]}, ")]
    assert f"**{record.within} of {len(record.judged)}**" in row
    assert f"| {len(record.seeds)} | {record.variant} |" in row


def test_the_document_says_what_word2vec_found() -> None:
    sentences = Reproduction.load(FOLDER / "word2vec-wikipedia.json").findings.sentences
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for sentence in sentences[:3]:  # how each version of the claim fares
        assert sentence in text
