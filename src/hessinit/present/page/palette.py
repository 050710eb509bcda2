"""The colours of the pages, light and dark: every one is a CSS variable, so that charts follow the theme."""

from __future__ import annotations

import re

# Okabe & Ito (2008): told apart by every common kind of colour vision. Lighter on a dark page.
COLORS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "sky": "#56b4e9",
    "orange": "#e69f00",
    "purple": "#cc79a7",
    "grey": "#5f6670",
}
DARK_COLORS = {
    "blue": "#58aee6",
    "vermilion": "#ff8f45",
    "green": "#34c79c",
    "sky": "#8fd0f5",
    "orange": "#f2b634",
    "purple": "#e39cc2",
    "grey": "#a3abb6",
}

# What is written has a contrast of 4.5 at least with all it may stand on: page, card and tint.
SURFACES = {
    "page": "#f7f8fa",
    "card": "#ffffff",
    "tint": "#eef1f5",
    "ink": "#1b1f24",
    "muted": "#565d67",
    "line": "#d9dee5",
    "grid": "#e6e9ee",
    "link": "#005f94",
    "good": "#00704f",
    "fair": "#8a5a00",
    "bad": "#a84300",
    "ramp-0": "#3b1f6b",
    "ramp-1": "#1f7f8a",
    "ramp-2": "#6aa02a",
}
DARK_SURFACES = {
    "page": "#121519",
    "card": "#1a1e24",
    "tint": "#232932",
    "ink": "#e8ebef",
    "muted": "#a6aeb9",
    "line": "#353d48",
    "grid": "#2a313a",
    "link": "#7cc3f2",
    "good": "#4dd4aa",
    "fair": "#f2b634",
    "bad": "#ff9d5c",
    "ramp-0": "#a18be0",
    "ramp-1": "#37aeb8",
    "ramp-2": "#d8df5a",
}


def css_variables(dark: bool) -> str:
    """The colours as CSS declarations.

    >>> css_variables(dark=False)[:17]
    '--blue: #0072b2; '
    """
    colors = {**DARK_COLORS, **DARK_SURFACES} if dark else {**COLORS, **SURFACES}
    return " ".join(f"--{name}: {value};" for name, value in colors.items())


def css_color(color: str) -> str:
    """What CSS calls a colour of the content.

    >>> css_color("blue"), css_color("ramp:0.25")
    ('var(--blue)', 'color-mix(in oklab, var(--ramp-1) 50%, var(--ramp-0))')
    """
    if color in COLORS:
        return f"var(--{color})"
    if found := re.fullmatch(r"ramp:([01]?\.?\d*)", color):
        place = 2 * min(max(float(found[1] or 0), 0.0), 1.0)
        low, share = (0, place) if place <= 1 else (1, place - 1)
        return f"color-mix(in oklab, var(--ramp-{low + 1}) {100 * share:.3g}%, var(--ramp-{low}))"
    known = ", ".join(map(repr, COLORS))
    raise ValueError(f"color={color!r} is unknown; choose from {known}, or 'ramp:0' to 'ramp:1'.")
