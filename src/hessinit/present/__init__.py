"""Showing a report: text, notebook, page, figure. Each module is its own demo, as `python -m` runs it."""
