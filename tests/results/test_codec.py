"""Results as JSON: a round trip for every kind, a table of broken files, and atomic writes."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hessinit
from hessinit.results.curvature_report import Estimate
from hessinit.results.result import Result, write_text
from result_examples import (
    ADVICE,
    COMPARISON,
    EVERY_KIND,
    FORMS,
    INITIALIZATION,
    REPORT,
    REPRODUCTION,
    TRACKING,
    make_layer,
    make_report,
    make_run,
)

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"

every_kind = pytest.mark.parametrize("result", EVERY_KIND.values(), ids=EVERY_KIND)


@every_kind
def test_every_kind_comes_back_equal_from_strict_json(result: Result, tmp_path: Path) -> None:
    text = result.to_json()
    data = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert list(data)[:2] == ["kind", "schema"]
    assert text.isascii()
    back = type(result).from_json(text)
    assert (back, hash(back), back.to_json()) == (result, hash(result), text)
    assert type(result).from_dict(result.to_dict()) == result
    result.save(tmp_path / "result.json")
    assert hessinit.load(tmp_path / "result.json") == type(result).load(tmp_path / "result.json") == result
    assert os.listdir(tmp_path) == ["result.json"]
    assert copy.deepcopy(result) == pickle.loads(pickle.dumps(result)) == result
    assert repr(result) == f"<{result.KIND}: print() shows it>"
    result.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("result", [INITIALIZATION, ADVICE, FORMS, TRACKING], ids=lambda one: one.KIND)
def test_a_file_from_before_costs_were_counted_in_gradients_is_read(result: Result) -> None:
    def without(data: Any) -> Any:
        if isinstance(data, list):
            return [without(one) for one in data]
        if not isinstance(data, dict):
            return data
        # Reports had the field from the first.
        dropped = {"gradients"} if data.get("kind") != REPORT.KIND else set()
        return {key: without(value) for key, value in data.items() if key not in dropped}

    old = json.dumps(without(result.to_dict()))
    assert old.count('"gradients"') < result.to_json().count('"gradients"')
    assert type(result).from_json(old) == result


def test_every_bit_of_a_number_survives_and_rows_have_a_line_each() -> None:
    back = hessinit.CurvatureReport.from_json(REPORT.to_json())
    assert back["tied"].norm.hex() == (0.1 + 0.2).hex()
    assert back.network.norm == 5e-324
    assert math.isnan(back["fc2"].norm)
    lines = COMPARISON.to_json().splitlines()
    assert sum(line.startswith('    {"scheme": ') for line in lines) == 2
    assert '  "seeds": [0],' in lines
    assert COMPARISON.to_dict()["experiment"] == "compare"  # the file's own kind is another matter


floats = st.floats(allow_nan=True, allow_infinity=True)
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["inf", "nan", "\ud800", "\x1b[2J", "[red]"])
estimates = st.builds(Estimate, floats, floats, st.booleans(), texts, st.integers(0, 10**6))


@given(name=texts, top=estimates, bottom=estimates, loss=floats)
@settings(max_examples=40, deadline=None)
def test_any_report_comes_back_equal_and_prints(name: str, top: Any, bottom: Any, loss: float) -> None:
    layer = make_layer(name, top=top, bottom=bottom, engine_reason=name)
    report = make_report(layer, network=layer, loss=loss, versions={name: name}, notes=(name,))
    assert hessinit.CurvatureReport.from_json(report.to_json()) == report
    assert str(report)


def test_equality_counts_every_number_but_not_the_time_of_runs() -> None:
    assert make_report(loss=1.0) != make_report(loss=1.0 + 2**-52)
    assert make_report(loss=math.nan) == make_report(loss=math.nan) != make_report(loss=math.inf)
    assert make_report(loss=2) == make_report(loss=2.0)
    slower = tuple(replace(run, seconds=9.0) for run in COMPARISON.runs)
    assert replace(COMPARISON, runs=slower, seconds=9.0) == COMPARISON
    assert replace(COMPARISON, runs=(make_run("he", 0.1, 0, 0.6), COMPARISON.runs[1])) != COMPARISON


def test_what_belongs_to_the_model_is_neither_stored_nor_compared_nor_pickled() -> None:
    undone = []
    applied = replace(INITIALIZATION, _go_back=lambda: undone.append(1), _save_weights=undone.append)
    assert applied == INITIALIZATION
    assert applied.applied
    assert "_go_back" not in applied.to_json()
    applied.undo()
    applied.save_weights("there")
    assert undone == [1, "there"]
    copied = pickle.loads(pickle.dumps(applied))
    assert not copied.applied
    with pytest.raises(ValueError, match="nothing to undo: this is a dry run, or a copy"):
        copied.undo()
    with pytest.raises(ValueError, match="no weights to save: this is a dry run, or a copy"):
        copied.save_weights("there")


def change(result: Result, path: str, value: Any) -> str:
    """JSON with another value there, or with none for KeyError."""
    data = place = result.to_dict()
    *way, last = path.split(".")
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    if value is KeyError:
        del place[last]
    return json.dumps(data)


CUT = r"r\.json cannot be read as 'hessinit {}': {}\. Was the file edited or cut\?$"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", r"r\.json is not JSON \(.*\)\. Give a file that hessinit wrote"),
        (b"\xff\xfe\x00", r"r\.json is not JSON"),
        ("[" * 100_000, r"r\.json is not JSON"),
        ("[]", r"r\.json holds 'a JSON list'; what can be read back is 'hessinit "),
        ("[1, 2]", r"r\.json\[0\] holds 'a JSON int'"),
        ('{"weights": 1}', r"holds 'None'; what can be"),
        (change(REPORT, "loss", math.inf), r"r\.json is not JSON \(Infinity is not a JSON number\)"),
        (change(REPORT, "schema", 99), r"schema 99 of 'hessinit curvature report', .* reads 3\. Upgrade"),
        (change(REPORT, "schema", True), r"schema True of "),
        (change(REPORT, "network", KeyError), CUT.format("curvature report", "'network' is missing in it")),
        (change(REPORT, "colour", "green"), CUT.format("curvature report", "'colour' is unknown in it")),
        (change(REPORT, "layers.0.top.value", KeyError), r"'value' is missing in layers\[0\]\.top"),
        (change(REPORT, "layers.0.top.value", True), r"top\.value is True, not a number"),
        (change(REPORT, "layers.0.top.value", "much"), r"top\.value is 'much', not a number"),
        (change(REPORT, "layers.0.top.products", True), r"top\.products is True, not int"),
        (change(REPORT, "layers.0.top.converged", 1), r"top\.converged is 1, not bool"),
        (change(REPORT, "layers", 3), r"layers is 3, not tuple"),
        (change(REPORT, "network", []), r"network is \[\], not LayerCurvature"),
        (change(REPORT, "versions", {"torch": 2}), r"versions\['torch'\] is 2, not str"),
        (change(REPORT, "curvature", "hessain"), r"'hessain' is unknown; .* Did you mean 'hessian'\?"),
        (change(INITIALIZATION, "after.kind", "hessinit comparison"), r"after holds 'hessinit comp"),
        (change(INITIALIZATION, "plan.schema", 9), r"plan has schema 9 of 'hessinit scheme plan'"),
        (change(COMPARISON, "experiment", "race"), r"kind='race' is unknown; choose from 'compare', 'sweep'"),
        (change(TRACKING, "losses", [[1]]), r"losses\[0\] is \[1\], not tuple\[int, float\]"),
        (change(FORMS, "layers.0.exact", ["x" * 99]), r"exact\[0\] is 'x{59}, not a number"),
    ],
)  # fmt: skip
def test_a_broken_file_is_answered_with_what_is_wrong(tmp_path: Path, text: Any, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        hessinit.load(path)


def test_what_is_of_another_kind_or_not_plain_is_refused_and_a_list_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the text holds 'hessinit comparison', not 'hessinit tracking'"):
        hessinit.Tracking.from_json(COMPARISON.to_json())
    with pytest.raises(TypeError, match=r"cannot hold 1j, a complex; convert it to a float, an int or a"):
        make_report(loss=1j).to_json()
    (tmp_path / "r.json").write_text(json.dumps([REPRODUCTION.to_dict(), COMPARISON.to_dict()]))
    assert hessinit.load(tmp_path / "r.json") == [REPRODUCTION, COMPARISON]


@pytest.mark.parametrize(
    "path", [*sorted((RECORDS / "paper").glob("*.json")), RECORDS / "arena" / "relu-3.json"]
)
def test_committed_records_load(path: Path) -> None:
    text = hessinit.load(path).to_json()
    for later in ('  "constant_loss": null,\n', ', "outcome": ""'):  # of a comparison, not in older files
        text = text.replace(later, "")
    assert text == path.read_text(encoding="utf-8")


def test_a_log_of_json_lines_with_a_broken_line_is_refused(tmp_path: Path) -> None:
    header = json.dumps({**TRACKING.to_dict(), "lines": True})
    (tmp_path / "log.jsonl").write_text(f"{header}\nbroken\n{header}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*log\.jsonl is not a tracked point"):
        hessinit.load(tmp_path / "log.jsonl")


def fail(descriptor: int) -> None:
    raise OSError("disk full")


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "r.json"
    REPORT.save(path)
    with pytest.raises(TypeError, match="cannot hold"):
        make_report(loss=object()).save(path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        make_report().save(path)
    assert hessinit.load(path) == REPORT
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_save_keeps_links_and_usual_permissions_and_names_paths_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "r.json")
    REPORT.save(tmp_path / "link.json")
    (tmp_path / "plain").touch()
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with pytest.raises(FileNotFoundError, match="the folder .*no does not exist"):
        REPORT.save(tmp_path / "no" / "r.json")


def test_what_is_not_a_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ValueError, match="is not a file. Give the name of a file"):
            write_text(path, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
