"""Pages: what is on them (`content`), and how they are written (`render`). One file each, nothing loaded."""

from __future__ import annotations
