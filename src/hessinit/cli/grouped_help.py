"""The commands in the help, grouped by what people come for."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

GROUPS = {
    "Begin": ("demo", "new"),
    "Your network": ("measure", "initialize", "track"),
    "Many short trainings": ("compare", "sweep"),
    "The paper": ("reproduce",),
    "Saved results": ("show",),
}
WHOLE = 1000  # a long line is folded, not cut


class GroupedHelp(TyperGroup):
    """Lists the commands under headings; a command that no group names comes last, under Others."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        grouped = {name for group in GROUPS.values() for name in group}
        others = tuple(name for name in names if name not in grouped)
        longest = max(map(len, names))
        for heading, group in (*GROUPS.items(), ("Others", others)):
            commands = [(name, self.get_command(ctx, name)) for name in group if name in names]
            rows = [
                (name.ljust(longest), command.get_short_help_str(WHOLE))
                for name, command in commands
                if command is not None
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
