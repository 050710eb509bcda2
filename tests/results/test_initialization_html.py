from __future__ import annotations

from dataclasses import replace

import pytest
from test_report_html import Reader

from hessinit.present.initialization_example import example_initialization


def test_a_notebook_shows_an_initialization_as_a_table():
    text = example_initialization()._repr_html_()
    cells = Reader(text).cells
    assert cells[:8] == ["layer", "scale", "‖H‖ before", "after", "fc1", "× 1.21", "0.31", "12.4"]
    assert cells[-4:] == ["network", "", "64.5", "20.2"]
    assert "Met: ‖H‖ = 20.2 is within 5 % of the target." in text
    assert "Target: the network&#39;s ‖H‖ = κ/lr = 2/0.1 = 20." in text
    assert "<script" not in text


def test_names_and_notes_of_an_initialization_are_escaped(tmp_path):
    attack = "<script>alert(1)</script>"
    result = replace(example_initialization(), scales={attack: 2.0}, notes=(attack,), reason=attack)
    result.to_html(tmp_path / "i.html")
    for text in (result._repr_html_(), (tmp_path / "i.html").read_text(encoding="utf-8")):
        assert "<script>alert" not in text
        assert attack in Reader(text).cells


def test_an_initialization_page_in_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist"):
        example_initialization().to_html(tmp_path / "nowhere" / "i.html")
