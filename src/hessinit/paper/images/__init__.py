"""MNIST, Fashion-MNIST and CIFAR-10 in their official formats: from a folder, or downloaded and checked."""

from __future__ import annotations
