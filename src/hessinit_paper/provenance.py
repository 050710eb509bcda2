"""Where the numbers of a record come from: versions, hardware, and the revision of the code."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from hessinit import __version__


def versions() -> dict[str, str]:
    """Return the versions of hessinit, of the libraries that compute the numbers, and of Python."""
    packages = [name for name in ("torch", "numpy", "scipy") if importlib.util.find_spec(name)]
    installed = {name: metadata.version(name) for name in packages}
    return {"hessinit": __version__, **installed, "python": platform.python_version()}


def hardware() -> dict[str, str]:
    """Return the machine in words; nothing that identifies it."""
    machine = platform.machine()
    return {
        "processor": platform.processor() or machine,
        "cores": str(os.cpu_count() or "unknown"),
        "system": f"{platform.system()} {machine}",
    }


@functools.cache
def revision() -> str:
    """Return the commit of a checkout, with "-dirty" where files differ; otherwise the version."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(
                command, cwd=root, stderr=subprocess.DEVNULL, text=True, timeout=10
            ).strip()
    return f"hessinit {__version__}"
