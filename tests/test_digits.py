from __future__ import annotations

import hashlib

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


def test_writing_to_the_digits_does_not_change_those_of_the_next_caller() -> None:
    for tensor in load_digits():
        tensor.zero_()
    assert all(tensor.sum() > 0 for tensor in load_digits())
