"""The library's messages, in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hessinit.errors import ProblemError

# Arguments that are words of no other meaning, and are named also without an equals sign.
ALONE = ("schemes", "learning_rates", "learning_rate", "batch_size", "stds", "data_dir")

# No option has it: the user's function says how its model is to be called.
BY_FUNCTION = {
    'pass dropout="freeze"': 'return {"dropout": "freeze"} as a fourth value',
    "check=False measures": 'to return {"check": False} as a fourth value measures',
    'Pass reduction="mean"': 'Return {"reduction": "mean"} as a fourth value',
    'or reduction="sum"': 'or {"reduction": "sum"}',
}


def translate(message: str, options: Mapping[str, str]) -> str:
    """Call the library's arguments by the names of the options.

    >>> translate("schemes='hee' is unknown", {"schemes": "--start"})
    "--start 'hee' is unknown"
    >>> translate("Pass workers=1, or folder= to keep them.", {"workers": "--workers", "folder": "--folder"})
    'Pass --workers 1, or --folder to keep them.'
    """
    message = message.replace("he same call", "he same command")
    for argument, instead in BY_FUNCTION.items():
        message = message.replace(argument, instead)
    if not options:
        return message
    names = "|".join(options)
    message = re.sub(rf"\b({names})=(?=\S)", lambda found: f"{options[found[1]]} ", message)
    message = re.sub(rf"\b({names})=", lambda found: options[found[1]], message)
    alone = "|".join(name for name in ALONE if name in options)
    return re.sub(rf"\b({alone})\b", lambda found: options[found[1]], message) if alone else message


@contextmanager
def in_words_of(options: Mapping[str, str]) -> Iterator[None]:
    """Refusals speak of the options."""
    try:
        yield
    except ProblemError as refusal:
        raise ProblemError(translate(str(refusal), options)) from refusal.__cause__
