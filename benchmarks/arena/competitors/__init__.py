"""The schemes that hessinit is compared with and does not have itself, written from their papers."""

from __future__ import annotations

from arena.competitors.fixup import fixup_
from arena.competitors.gradinit import gradinit_
from arena.competitors.metainit import metainit_

__all__ = ["fixup_", "gradinit_", "metainit_"]
