"""What is shown while the work goes on, on stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from hessinit.errors import ConvergenceWarning


@contextmanager
def working(doing: str) -> Iterator[None]:
    """Spin while someone watches. What the user's code prints goes to stderr: stdout is for the result."""
    with ExitStack() as stack:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            stack.enter_context(Console(stderr=True).status(Text(doing)))
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        # The report and the exit code say it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
