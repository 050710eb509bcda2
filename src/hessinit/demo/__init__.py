"""What `hessinit demo` tells: a deep network on real digits, as PyTorch starts it and as hessinit does."""

from __future__ import annotations

from hessinit.demo.network import problem

__all__ = ["problem"]
