"""What a benchmark's record says of the run that made it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import hessinit


def run_facts(script: str, **options: Any) -> dict[str, Any]:
    """The command, the versions and the hardware."""
    words = [f"--{name} {value}" for name, value in options.items()]
    return {
        "command": " ".join([f"python benchmarks/{script}", *words]),
        "versions": {
            "hessinit": hessinit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "hardware": {"processor": processor_name(), "cores": os.cpu_count()},
    }


def write_record(record: dict[str, Any], path: Path | None) -> None:
    """Prints it, and writes it to `path` if there is one."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    if path:
        path.write_text(text + "\n", encoding="utf-8")
    print(text)


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
