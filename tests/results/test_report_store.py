from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from report_examples import make_report, make_three_layers

from hessinit.results.result import load

SCHEMA_1 = Path(__file__).with_name("schema1.json")


def test_a_saved_report_loads_equal(tmp_path):
    report = make_three_layers()
    report.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json") == report
    assert load(str(tmp_path / "r.json")) == report
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_report_of_schema_1_still_loads():
    report = load(SCHEMA_1)
    assert report.names == ("fc1", "fc2")
    assert report["fc1"].norm == 0.25
    assert report["fc1"].error == 0.0001
    assert report["fc1"].products == 8
    assert report["fc1"].spread is None
    assert report["fc2"].norm == math.inf
    assert not report.converged
    assert report.notes == ()
    assert "overflow; measure in float64" in str(report)


def test_a_migrated_report_is_saved_in_the_present_schema(tmp_path):
    load(SCHEMA_1).save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["schema"] == 2
    assert load(tmp_path / "r.json") == load(SCHEMA_1)


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    make_three_layers().save(path)

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        make_report().save(path)
    assert load(path) == make_three_layers()
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_report_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.json"
    make_three_layers().save(path)
    with pytest.raises(TypeError, match="cannot hold"):
        make_report(loss=object()).save(path)
    assert load(path) == make_three_layers()


def test_saving_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "r.json")
    make_three_layers().save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "r.json") == make_three_layers()


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    make_three_layers().save(tmp_path / "r.json")
    (tmp_path / "plain").touch()
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_saving_into_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"cannot write .*r\.json: the folder .*nowhere does not exist"
    ):
        make_three_layers().save(tmp_path / "nowhere" / "r.json")


def test_saving_onto_a_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"is not a file\. Give the name of a file"):
        make_three_layers().save(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.json"):
        load(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", r"r\.json is not JSON \(.*\)\. Give a file that report\.save\(\) wrote"),
        (b"\xff\xfe\x00", r"r\.json is not JSON"),
        (
            b"[1, 2]",
            r"r\.json is not a hessinit report: it holds a list, and a report is an object with 'schema'",
        ),
        (b'{"weights": 1}', r"it holds an object with the keys 'weights'"),
        (b"{}", r"it holds an object with no keys"),
        (
            b'{"schema": 3, "layers": []}',
            r"r\.json has report schema 3, and this hessinit reads up to 2.*Upgrade",
        ),
        (b'{"schema": 0, "layers": []}', r"schema 0; schemas start at 1"),
        (b'{"schema": true, "layers": []}', r"is not a hessinit report"),
        (b'{"schema": 2, "layers": []}', r"r\.json is not a whole report: 'network' is missing"),
        (b'{"schema": 1, "layers": [{}], "network": {}}', r"is not a whole report: '\w+' is missing"),
        (b'{"schema": 1, "layers": 3, "network": {}}', r"is not a whole report: .*Measure again"),
    ],
)
def test_a_file_that_is_no_report_is_answered_with_what_was_found_and_the_way_out(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("value", [None, True, [1], "much"])
def test_a_number_that_is_none_is_answered(tmp_path, value):
    plain = make_three_layers().to_dict()
    plain["layers"][0]["top"]["value"] = value
    path = tmp_path / "r.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=r"r\.json is not a whole report: .*Measure again"):
        load(path)
