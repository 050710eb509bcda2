from __future__ import annotations

import json

from hessinit import load

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
