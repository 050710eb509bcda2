from __future__ import annotations

import hashlib

import pytest
import torch

from hessinit.digits import load_digits


def test_the_digits_are_those_of_the_published_file() -> None:
    images, labels = load_digits()
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((1797,), torch.int64)
    # The checksum is that of scikit-learn's digits.csv.gz, not of the archive in this package.
    values = (images * 16).to(torch.uint8).numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(values).hexdigest()
    assert digest == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    assert images.max() == 1  # sixteenths


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
