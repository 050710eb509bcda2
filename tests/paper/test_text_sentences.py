"""Clauses: split where the punctuation says so, and nowhere else."""

from __future__ import annotations

import pytest

from hessinit.paper.text.sentences import read_clauses, split_clauses


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("The cat sat. The dog ran!", ["the cat sat", "the dog ran"]),
        ("it rained; we stayed: we read, and slept", ["it rained", "we stayed", "we read", "and slept"]),
        ("the day—a long one – was over -- at last", ["the day", "a long one", "was over", "at last"]),
        ("the king (born in Rome) was old", ["the king", "born in rome", "was old"]),
        ("Dr. Smith met Mrs. Lee, Acme Inc. of St. Ives", ["dr smith met mrs lee", "acme inc of st ives"]),
        ("The U.S. Army and J. R. R. Tolkien", ["the u.s army and j r r tolkien"]),
        ("some fruit, e.g. apples, i.e. food", ["some fruit", "e.g apples", "i.e food"]),
        ("platform No. 5 was on Jan. 5 closed", ["platform no was on jan closed"]),
        ("he said no. Then he left", ["he said no", "then he left"]),
        ("about 1,000 men at 10:30 ran 3.5 miles", ["about men at ran miles"]),
        ("the Paris–Dakar and the well-known race", ["the paris dakar and the well known race"]),
        ('He said "it works." Then he left', ["he said it works", "then he left"]),
        ("wait... what now", ["what now"]),
        ("don't and don’t, the dogs' o'clock 'tis", ["don't and don't", "the dogs o'clock tis"]),
        ("the 20th mp3 of read_file in the 1990s __NOTOC__", ["the of in the"]),
        ("CAFÉ Cafe\u0301 straße Ελλάδα", ["café café straße ελλάδα"]),
        ("an area of 5 km² or ½ more", ["an area of or more"]),
        ("see http://example.com/a,b;c or www.example.org now", ["see or now"]),
        ("alone. Twice here. Once", ["twice here"]),
        ("", []),
        ("... !!! 123", []),
    ],
)  # fmt: skip
def test_text_is_split_at_punctuation_only(text: str, clauses: list[str]) -> None:
    assert [" ".join(clause) for clause in split_clauses(text)] == clauses


@pytest.mark.parametrize(
    ("many", "lengths"),
    [(1, []), (2, [2]), (20, [20]), (21, [10, 11]), (41, [13, 14, 14]), (1000, [20] * 50)],
)
def test_a_long_clause_is_cut_into_equal_parts_and_loses_nothing(many: int, lengths: list[int]) -> None:
    words = [chr(97 + number // 26 % 26) + chr(97 + number % 26) + "x" for number in range(many)]
    clauses = list(split_clauses(" ".join(words)))
    assert [len(clause) for clause in clauses] == lengths
    assert [word for clause in clauses for word in clause] == (words if many > 1 else [])


def test_a_line_end_ends_a_clause() -> None:
    assert list(read_clauses(["one two", "", "three four"])) == [["one", "two"], ["three", "four"]]


def test_hostile_lines_take_linear_time() -> None:
    # A pattern that backtracks over the whole line would take hours for these.
    for text in (
        "a" * 300_000 + "1",
        "a." * 150_000,
        "." * 300_000,
        ".)" * 150_000,
        " -" * 150_000,
        "'" * 300_000,
    ):
        assert all(len(clause) >= 2 for clause in split_clauses(text))
