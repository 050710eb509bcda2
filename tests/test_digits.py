from __future__ import annotations

import hashlib

import pytest
import torch

from hessinit.digits import load_digits


def test_the_digits_have_the_promised_shapes_and_types() -> None:
    images, labels = load_digits()
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((1797,), torch.int64)


def test_the_pixels_fill_the_range_from_zero_to_one_in_sixteenths() -> None:
    images, _ = load_digits()
    assert torch.equal((images * 16).unique(), torch.arange(17, dtype=torch.float32))


def test_each_class_has_as_many_images_as_the_source_says() -> None:
    _, labels = load_digits()
    # UCI's own table (optdigits.names, testing set), digits 0 to 9.
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_values_are_those_of_the_published_file() -> None:
    images, labels = load_digits()
    # Both read off scikit-learn's digits.csv.gz, not off the archive in this package.
    assert int((images.double() * 16).sum()) == 561718
    values = (images * 16).to(torch.uint8).numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
    assert (
        hashlib.sha256(values).hexdigest()
        == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    )


def test_the_digits_equal_those_of_scikit_learn() -> None:
    reason = "scikit-learn is not installed; the checksum test stands in for it"
    datasets = pytest.importorskip("sklearn.datasets", reason=reason)
    images, labels = load_digits()
    theirs = datasets.load_digits()
    assert torch.equal(images.squeeze(1).double() * 16, torch.from_numpy(theirs.images))
    assert torch.equal(labels, torch.from_numpy(theirs.target).long())


def test_writing_to_the_digits_does_not_change_those_of_the_next_caller() -> None:
    images, labels = load_digits()
    images.zero_()
    labels.zero_()
    fresh_images, fresh_labels = load_digits()
    assert fresh_images.sum() > 0
    assert fresh_labels.sum() > 0
