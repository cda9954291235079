"""The command `recsdk`: a group to which every installed layer adds its commands.

A distribution adds a command with an entry point in the group `recsdk.commands`: the entry point's
name is the command's, its object a click command.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

from recsdk_core._internal.version import __version__

__all__ = ["main"]

GROUP = "recsdk.commands"


class _Commands(click.Group):
    """Loads a command only when it is used, so that one layer's imports slow no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_entries()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _entries().get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        try:
            command = entry.load()
        except Exception as error:
            message = f"the command {cmd_name} of {_owner(entry)} does not load: {error}"
            return _broken(cmd_name, message)
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{entry.value} of {_owner(entry)} is no click command")
        return command


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _broken(name: str, message: str) -> click.Command:
    """Stands for a command whose import fails, so that `recsdk --help` still works."""

    def fail() -> None:
        raise click.ClickException(message)

    return click.Command(name, callback=fail, short_help=f"(broken) {message}")


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="recsdk")
def main() -> None:
    """Train recommendation models on raw 64-bit ids."""
