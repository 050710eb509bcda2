"""Lets the tests import the arena as its own programs do: `from arena import …`."""

from __future__ import annotations

import sys
from pathlib import Path

# Last, so that nothing in benchmarks/ hides a module of the tests.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
