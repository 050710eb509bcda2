from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hessinit.paper import Reproduction, load_records

SOURCE = Path(__file__).parents[2] / "src"
SMALL = ("--data", "digits", "--seeds", 3, "--workers", 1)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_table_is_printed_and_its_record_page_and_results_are_kept(run, tmp_path):
    result = run("reproduce", "table-2", *SMALL)
    assert result.exit_code == 0, result.output
    assert "Table 2" in result.stdout
    assert "rtol ≤ 0.5" in result.stdout
    assert "Wrote 1 record and the page reproduction/reproduce.html." in result.stderr
    record = tmp_path / "reproduction" / "table-2-digits.json"
    assert str(Reproduction.load(record)) in result.stdout
    assert run("show", record).stdout == result.stdout


def test_json_is_a_list_of_records_and_nothing_else(run, tmp_path):
    result = run("reproduce", "table-2", *SMALL, "--json", "--folder", "kept")
    (found,) = map(Reproduction.from_dict, json.loads(result.stdout))
    assert [found] == load_records(tmp_path / "kept")


def test_what_json_prints_can_be_shown(run, tmp_path):
    two = run("reproduce", "table-2", "table-3", *SMALL, "--json")
    (tmp_path / "two.json").write_text(two.stdout, encoding="utf-8")
    shown = run("show", "two.json", "--html", "two.html")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == run("reproduce", "table-2", "table-3", *SMALL).stdout
    assert "None of these numbers has a tolerance that is claimed for it" in shown.stdout
    page = (tmp_path / "two.html").read_text(encoding="utf-8")
    assert "Table 2" in page
    assert "Table 3" in page
    (tmp_path / "other.json").write_text('[{"kind": "something else"}]', encoding="utf-8")
    refused = run("show", "other.json")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "other.json is no hessinit reproduction" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-9"], "Error: NAME 'table-9' is unknown; choose from 'table-1',"),
        (
            ["table-2", "--data", "cifar"],
            "Error: --data 'cifar' is unknown; choose from 'paper', 'digits', 'mnist'",
        ),
        (["table-2", "--variant", "x", "--data", "digits"], "Error: --variant 'x' is unknown; choose from"),
        (["table-2", "--seeds", "0"], "Invalid value for '--seeds'"),
        (["table-2", "--data-dir", "nowhere"], "Error: --data-dir 'nowhere'"),
        (["word2vec", "--data-dir", "nowhere"], "Error: --data-dir 'nowhere'"),
        (
            ["table-2", "--data", "digits", "--folder", "file"],
            "Error: --folder 'file' is a file; pass the name",
        ),
    ],
)
def test_a_wrong_option_is_answered_in_the_command_s_own_words(run, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    result = run("reproduce", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in re.sub(r"\s+", " ", result.stderr), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interrupted_command_says_how_to_go_on_and_goes_on(run, tmp_path):
    options = ("table-3", "--data", "digits", "--seeds", "150")
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", "reproduce", *options, "--workers", "2"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    results = tmp_path / "reproduction" / "table-3-digits"
    deadline = time.monotonic() + 300
    while not (results.is_dir() and len(list(results.glob("[!.]*.json"))) >= 3):  # the setting, and two
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, ""), stderr
    found = re.search(
        r"Interrupted: stopped; (\d+) of \d+ pieces are kept in reproduction\. The same command", stderr
    )
    assert found, stderr
    assert int(found[1]) >= 2
    assert "Traceback" not in stderr
    again = json.loads(run("reproduce", *options, "--json").stdout)
    anew = json.loads(run("reproduce", *options, "--json", "--folder", "anew").stdout)
    assert [each["results"] for each in again] == [each["results"] for each in anew]


