"""A model's state as safetensors, written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from torch import nn


def save_model_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Every parameter and buffer, shared ones once; `safetensors.torch.load_model` reads them back."""
    from safetensors.torch import save_model

    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: the folder {target.parent} does not exist. Create it first."
        )
    if target.exists() and not target.is_file():
        raise ValueError(f"cannot write {path}: it is there and is not a file. Give the name of a file.")
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        usual = stat.S_IMODE(temporary.stat().st_mode)
        save_model(model, str(temporary))
        temporary.chmod(usual)  # safetensors makes a private file, that only its owner may read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
