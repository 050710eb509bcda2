from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from hessinit import load

from .conftest import interrupt, without_seconds

SMALL = ("--data", "digits", "--seeds", 2, "--workers", 1)


def test_tables_are_printed_and_kept_and_what_json_prints_can_be_shown(run, folder):
    two = run("reproduce", "table-2", "table-3", *SMALL, "--json")
    assert two.exit_code == 0, two.output
    assert [one["kind"] for one in json.loads(two.stdout)] == ["hessinit reproduction"] * 2
    assert two.stderr.endswith("Wrote 2 records and the page reproduction/reproduce.html.\n")
    (folder / "two.json").write_text(two.stdout, encoding="utf-8")
    assert load("two.json") == [load(f"reproduction/{name}-digits.json") for name in ("table-2", "table-3")]
    again = run("reproduce", "table-2", "table-3", *SMALL)
    assert run("show", "two.json", "--html", "two.html").stdout == again.stdout
    one = run("reproduce", "table-2", *SMALL)
    assert one.stdout == run("show", "reproduction/table-2-digits.json").stdout
    assert "Table 2" in one.stdout
    assert "rtol ≤ 0.5" in one.stdout
    for name in ("two.html", "reproduction/reproduce.html"):
        page = (folder / name).read_text(encoding="utf-8")
        assert page.lower().startswith("<!doctype html>")
        assert "Table 2" in page
        assert "Table 3" in page


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interrupted_reproduction_says_how_to_continue_and_continues(run, folder):
    options = ["table-2", "--data", "digits", "--seeds", "12", "--workers", "1"]
    results = folder / "reproduction" / "table-2-digits" / "runs"
    code, stdout, stderr = interrupt(
        signal.SIGINT, lambda: len(list(results.glob("[!.]*.json"))) >= 1, "reproduce", *options
    )
    assert (code, stdout) == (130, ""), stderr
    found = re.search(
        r"Interrupted: stopped; (\d+) of \d+ runs are kept in reproduction\. The same c", stderr
    )
    assert found, stderr
    assert int(found[1]) >= 1
    assert "Traceback" not in stderr
    again, anew = (run("reproduce", *options, "--json", *more) for more in ([], ["--folder", "anew"]))
    results = [json.loads(one.stdout)[0]["results"] for one in (again, anew)]
    assert without_seconds(results[0]) == without_seconds(results[1])
