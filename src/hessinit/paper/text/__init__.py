"""English for word2vec: a Wikipedia corpus, or the docstrings of Python's standard library."""

from __future__ import annotations
