"""What the official files are: names, shapes, checksums and where they are offered. Training splits only."""

from __future__ import annotations

from dataclasses import dataclass

CIFAR_ROW = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane


@dataclass(frozen=True)
class OfficialFile:
    """One file without its compression: `shape` is what it holds, `md5` that of all its bytes."""

    name: str
    shape: tuple[int, ...]
    md5: str


@dataclass(frozen=True)
class Offer:
    """A file to download, as it is offered: `md5` is that of the compressed file."""

    name: str
    md5: str
    mirrors: tuple[str, ...]


@dataclass(frozen=True)
class IdxSet:
    """A set of two idx files; `folders` are where below a data folder they may lie, in order."""

    title: str
    folders: tuple[str, ...]
    images: OfficialFile
    labels: OfficialFile
    offers: tuple[Offer, ...]


@dataclass(frozen=True)
class CifarSet:
    """A set of batches; what is written of them is the binary form, to which the others are brought."""

    title: str
    batches: tuple[OfficialFile, ...]
    offers: tuple[Offer, ...]


def describe_idx(
    title: str, folders: tuple[str, ...], images: str, labels: str, offers: tuple[Offer, ...]
) -> IdxSet:
    return IdxSet(
        title,
        folders,
        OfficialFile("train-images-idx3-ubyte", (60_000, 28, 28), images),
        OfficialFile("train-labels-idx1-ubyte", (60_000,), labels),
        offers,
    )


MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FASHION_MIRRORS = (
    # Without TLS: the checksum, not the connection, says that the file is the right one.
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
CIFAR_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)

CIFAR_MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
)

OFFICIAL: dict[str, IdxSet | CifarSet] = {
    "mnist": describe_idx(
        "MNIST",
        ("mnist", "MNIST/raw", ""),
        images="6bbc9ace898e44ae57da46a324031adb",
        labels="a25bea736e30d166cdddb491f175f624",
        offers=(
            Offer("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", MNIST_MIRRORS),
            Offer("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", MNIST_MIRRORS),
        ),
    ),
    "fashion-mnist": describe_idx(
        "Fashion-MNIST",
        ("fashion-mnist", "FashionMNIST/raw", ""),
        images="f4a8712d7a061bf5bd6d2ca38dc4d50a",
        labels="9018921c3c673c538a1fc5bad174d6f9",
        offers=(
            Offer("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", FASHION_MIRRORS),
            Offer("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", FASHION_MIRRORS),
        ),
    ),
    "cifar-10": CifarSet(
        "CIFAR-10",
        tuple(
            OfficialFile(f"data_batch_{number}.bin", (10_000, CIFAR_ROW), md5)
            for number, md5 in enumerate(CIFAR_MD5, start=1)
        ),
        (Offer("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", CIFAR_MIRRORS),),
    ),
}

# By the md5 of the bytes: a file in the wrong place is told by its own name.
KNOWN = {
    "6bbc9ace898e44ae57da46a324031adb": "MNIST's training images",
    "a25bea736e30d166cdddb491f175f624": "MNIST's training labels",
    "2646ac647ad5339dbf082846283269ea": "MNIST's test images",
    "27ae3e4e09519cfbb04c329615203637": "MNIST's test labels",
    "f4a8712d7a061bf5bd6d2ca38dc4d50a": "Fashion-MNIST's training images",
    "9018921c3c673c538a1fc5bad174d6f9": "Fashion-MNIST's training labels",
    "8181f5470baa50b63fa0f6fddb340f0a": "Fashion-MNIST's test images",
    "15d484375f8d13e6eb1aabb0c3f46965": "Fashion-MNIST's test labels",
    **{md5: f"CIFAR-10's training batch {number}" for number, md5 in enumerate(CIFAR_MD5, start=1)},
    "803d5f7f4d78ea53de84dbe85f74fb6d": "CIFAR-10's test batch",
}
