"""Where numbers come from: versions, hardware, and the revision of this code."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from hessinit._version import __version__


def versions() -> dict[str, str]:
    """What the numbers may depend on."""
    found = {"hessinit": __version__}
    for name in ("torch", "numpy", "scipy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "python": platform.python_version()}


def hardware() -> dict[str, str]:
    """The machine, in words; nothing that names it."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count() or "unknown"),
        "system": f"{platform.system()} {platform.machine()}",
    }


@cache
def revision() -> str:
    """The commit of a checkout, with "+ changes" where files differ from it; else the version."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return f"hessinit {__version__}"
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return f"hessinit {__version__}"
    return f"{commit} + changes" if _git(root, "status", "--porcelain", "--", "src") else commit


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _processor() -> str:
    """The name of the processor; Linux keeps it in a file, and platform.processor() is empty there."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
