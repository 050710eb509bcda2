"""A model's state as safetensors, written whole or not at all."""

from __future__ import annotations

import os
import stat

from torch import nn

from hessinit.results.result import replacing


def save_model_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Every parameter and buffer, shared ones once; `safetensors.torch.load_model` reads them back."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        temporary.touch(exist_ok=False)
        usual = stat.S_IMODE(temporary.stat().st_mode)
        try:
            save_model(model, str(temporary))
        except SafetensorError as failure:  # what it makes of a full disk
            raise OSError(str(failure)) from failure
        temporary.chmod(usual)  # safetensors makes a private file, that only its owner may read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
