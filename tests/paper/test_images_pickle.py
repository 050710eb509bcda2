from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import image_files as files
import numpy
import pytest

from hessinit.errors import ProblemError
from hessinit.paper.images.cifar import rows_of_pickle
from hessinit.paper.images.inert_pickle import Recorded, read_inert


def batch(**changes: Any) -> dict[str, Any]:
    rows = files.small_batches()[0]
    return {"labels": rows[:, 0].tolist(), "data": rows[:, 1:].copy(), "batch_label": "one", **changes}


def test_a_batch_written_by_python_2_gives_its_rows() -> None:
    rows = files.small_batches()[0]
    assert numpy.array_equal(rows_of_pickle("batch", files.python_2_batch(rows)), rows)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("keys", ["text", "bytes"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_batch_pickled_again_gives_the_same_rows(protocol: int, keys: str, order: Any) -> None:
    content = batch(data=numpy.array(batch()["data"], order=order))
    if keys == "bytes":
        content = {key.encode(): value for key, value in content.items()}
    rows = rows_of_pickle("batch", pickle.dumps(content, protocol))
    assert numpy.array_equal(rows, files.small_batches()[0])


def test_the_names_of_numpy_one_and_two_are_both_read() -> None:
    written = pickle.dumps(batch(), 2)
    other = written.replace(b"numpy._core.", b"numpy.core.")
    if other == written:
        other = written.replace(b"numpy.core.", b"numpy._core.")
    assert other != written
    assert numpy.array_equal(rows_of_pickle("batch", other), files.small_batches()[0])


class Calling:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_pickle_is_refused_by_name_and_not_run(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for function, arguments, name in (
        (os.mkdir, (str(trace),), f"{os.mkdir.__module__}.mkdir"),
        (os.system, (f"touch {trace}",), f"{os.system.__module__}.system"),
        (eval, (f"open({str(trace)!r}, 'w')",), "eval"),
        (numpy.fromfile, (str(trace),), "fromfile"),
        (getattr, ("", "join"), "getattr"),
    ):
        content = pickle.dumps(batch(labels=Calling(function, *arguments)), protocol)
        with pytest.raises(ProblemError, match=f"batch asks for [a-z_.]*{name.split('.')[-1]}; only arrays"):
            rows_of_pickle("batch", content)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Calling(os.mkdir, str(trace))))  # pickle itself does run it
    assert trace.exists()


def test_a_dotted_name_does_not_lead_out_of_numpy() -> None:
    content = b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."
    with pytest.raises(ProblemError, match="batch asks for numpy.ndarray.tofile; only arrays"):
        read_inert("batch", content)


def test_a_pickle_cannot_write_to_what_stands_for_its_names() -> None:
    content = b"\x80\x02cnumpy\ndtype\n}U\x04nameU\x04evilsb."  # BUILD on the name itself
    with pytest.raises(
        ProblemError, match="batch is no whole pickle of a batch .UnpicklingError: a state for dtype"
    ):
        read_inert("batch", content)


def test_a_call_is_written_down_and_not_made() -> None:
    written = pickle.dumps({"data": Calling(__import__("_codecs").encode, "text", "no such encoding")}, 2)
    recorded = read_inert("batch", written)["data"]
    assert isinstance(recorded, Recorded)
    assert (recorded.name, recorded.arguments[0]) == ("encode", "text")


def test_a_pickle_cut_off_anywhere_is_refused() -> None:
    whole = files.python_2_batch(files.small_batches()[0])
    ends = [position for _, _, position in pickletools.genops(whole)]
    for end in ends:
        with pytest.raises(ProblemError, match="batch is no whole pickle of a batch"):
            read_inert("batch", whole[:end])


def test_random_damage_is_refused_or_harmless() -> None:
    rows = files.small_batches()[0]
    whole = files.python_2_batch(rows)
    generator = numpy.random.default_rng(0)
    program = [place for place in range(len(whole)) if not 280 < place < len(whole) - 250]
    outcomes = set()
    for place in generator.choice(program, 400):
        bad = bytearray(whole)
        bad[place] = generator.integers(256)
        if bad[place] == ord("r"):  # LONG_BINPUT asks for memory, up to all of it
            continue
        try:
            outcomes.add(rows_of_pickle("batch", bytes(bad)).shape)
        except ProblemError as error:
            assert str(error).startswith("batch ")  # noqa: PT017 - either outcome is right
            outcomes.add("refused")
    assert "refused" in outcomes
    assert outcomes <= {"refused", rows.shape}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([1, 2], "no whole pickle of a batch .AttributeError"),
        ({"data": numpy.zeros((1, 3072), numpy.uint8)}, "has no 'labels'; a batch of CIFAR-10 has"),
        ({"labels": [1], "fine_labels": [1]}, "has no 'data'"),
        (batch(data=[1, 2]), "has as 'data' list, not an array; a uint8 array is needed"),
        (batch(data=numpy.dtype("u1")), "has as 'data' numpy's dtype, not an array"),
        (batch(data=numpy.zeros((4, 3072))), "has as 'data' an array of another type than uint8"),
        (
            batch(data=numpy.zeros((4, 3071), numpy.uint8)),
            r"data of the shape \(4, 3071\) for 4 labels; 3072",
        ),
        (batch(data=numpy.zeros((3, 3072), numpy.uint8)), r"data of the shape \(3, 3072\) for 4 labels"),
        (batch(labels=[1, 2, 3, 300]), "has 'labels' that are no list of the numbers 0 to 9"),
        (batch(labels=[1, 2, 3, -1]), "has 'labels' that are no list"),
        (batch(labels=[1, 2, 3, "4"]), "has 'labels' that are no list"),
        (batch(labels=[1, 2, 3, True]), "has 'labels' that are no list"),
        (batch(labels="1234"), "has 'labels' that are no list"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content: Any, match: str) -> None:
    with pytest.raises(ProblemError, match=f"batch (is |has )?{match}"):
        rows_of_pickle("batch", pickle.dumps(content, 5))


def test_a_shape_that_does_not_fit_the_values_is_refused() -> None:
    whole = files.python_2_batch(files.small_batches()[0])
    assert whole.count(b"K\x04M\x00\x0c\x86") == 1  # the shape: 4, 3072
    for shape in (b"K\x05M\x00\x0c\x86", b"NM\x00\x0c\x86", b"J\xff\xff\xff\xffM\x00\x0c\x86", b"]K\x04a"):
        with pytest.raises(
            ProblemError, match="batch has as 'data' an array of (another shape|which a size)"
        ):
            rows_of_pickle("batch", whole.replace(b"K\x04M\x00\x0c\x86", shape))
