"""The command `recsdk`: a group to which every installed layer adds its commands.

A distribution adds a command with an entry point in the group `recsdk.commands`: the entry point's
name is the command's, its object a click command.
"""

from __future__ import annotations

import ast
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from recsdk_core._internal.version import __version__
from recsdk_core.files import local_path

__all__ = ["Failure", "checked_by", "checking_arguments", "escaped", "main", "report_options"]

GROUP = "recsdk.commands"
_OF_LAYERS = {
    "data": "recsdk-pipeline",
    "demo": "recsdk-pipeline",
    "plan": "recsdk-sharding",
    "top": "recsdk-pipeline",
}
"""The layers above whose commands the pages name."""
_SAYS_MORE = frozenset(("help", "short_help", "hidden", "deprecated"))
"""What a decorator may say of a command, in place of its docstring."""


def escaped(text: str) -> str:
    """The text, with what a terminal would act on or could not show escaped as in Python.

    Names of files may have control characters, and bytes that are no UTF-8.
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class Failure(click.ClickException):
    """Ends a command with a message: what is wrong with a checkpoint or a file.

    Of an error of the system the message has the file and the reason, of others their text.
    """

    def __init__(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.strerror is not None:
            files = [error.filename] if error.filename is not None else []
            text = ": ".join([*map(os.fsdecode, files), error.strerror])
        else:
            text = str(error).replace("overwrite=True", "--overwrite")
        super().__init__(escaped(text))


@contextmanager
def checking_arguments() -> Iterator[None]:
    """Has what is wrong with arguments, a ValueError or TypeError, end a command with status 2."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error


def checked_by(check: Callable[[Any], object]) -> Callable[..., Any]:
    """For `callback` of a parameter: what `check` raises of its value, a ValueError, TypeError or
    ImportError, ends the command with status 2."""

    def callback(_: click.Context, parameter: click.Parameter, given: Any) -> Any:
        try:
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None:
                    check(value)
        except (ValueError, TypeError, ImportError) as error:
            raise click.BadParameter(str(error), param=parameter) from error
        return given

    return callback


_REPORT = (
    click.option(
        "--json",
        "target",
        metavar="FILE",
        callback=checked_by(local_path),
        help="Write JSON there; - is standard output.",
    ),
    click.option(
        "--png", metavar="FILE", callback=checked_by(local_path), help="Draw it; needs matplotlib."
    ),
)


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what a command that counts is given: `target`, a file for JSON, and `png`, a plot."""
    for option in reversed(_REPORT):
        command = option(command)
    return command


class _Interrupted(BaseException):
    """Ctrl-C, of which click would make status 1, which is an answer of some commands."""


class _Commands(click.Group):
    """Loads a command only when it is used, so that one layer's imports slow no other."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's; what cannot be written to the output ends it with a message and status 1.

        Ctrl-C ends the process by its signal, so that a script that runs it ends, too. Its status
        in a shell is then 130.
        """
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # not left to the exit, where nobody catches what fails
        except _Interrupted:
            with suppress(OSError):
                click.echo("\nAborted!", err=True)
            sys.excepthook = _tell_nothing
            raise KeyboardInterrupt from None  # Python ends by the signal then
        except OSError as error:
            _give_up_output()
            if error.errno != errno.EPIPE:  # else the reader of a pipe has left: no error
                what = error.filename or "the output cannot be written"
                with suppress(OSError):
                    click.echo(f"Error: {what}: {error.strerror or error}", err=True)
            sys.exit(1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # By their sources: to load all takes torch and torchrec, which is seconds.
        entries = _entries()
        listed = click.Group()
        for name in self.list_commands(ctx):
            text = _docstring(entries[name]) if name in entries else None
            command = (
                self.get_command(ctx, name) if text is None else click.Command(name, help=text)
            )
            if command is not None:
                listed.add_command(command, name)
        listed.format_commands(ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_entries()})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        layer = _OF_LAYERS.get(args[0])
        if layer is not None and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"the command {args[0]} comes with {layer}; run: pip install {layer}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _entries().get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        try:
            command = entry.load()
        except Exception as error:
            return _broken(
                cmd_name,
                f"the command {cmd_name} of {_owner(entry)} does not load: "
                f"{type(error).__name__}: {error}; install what it lacks, or {_owner(entry)} anew",
            )
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{entry.value} of {_owner(entry)} is no click command")
        return command


def _tell_nothing(*_: object) -> None:
    """In place of a traceback."""


def _give_up_output() -> None:
    """Has Python not try again at its end to write what could not be written."""
    with suppress(OSError, AttributeError):
        sys.stdout.close()


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _docstring(entry: EntryPoint) -> str | None:
    """What a command says of itself in its source, which is not run; None: load it to know."""
    package, *inner = entry.module.split(".")
    try:
        spec = find_spec(package)
        folders = (spec and spec.submodule_search_locations) or ()
        sources = (Path(folder, *inner).with_suffix(".py") for folder in folders)
        text = next(path for path in sources if path.is_file()).read_text(encoding="utf-8")
        return _docstring_of(entry.attr, ast.parse(text).body)
    except (StopIteration, ValueError, SyntaxError, OSError):
        return None


def _docstring_of(name: str, statements: Sequence[ast.stmt]) -> str | None:
    for each in statements:
        if isinstance(each, ast.FunctionDef) and each.name == name:
            says_more = any(_says_more(decorator) for decorator in each.decorator_list)
            return None if says_more else ast.get_docstring(each)
    return None


def _says_more(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func).endswith(("command", "group"))
        and any(given.arg in _SAYS_MORE for given in decorator.keywords)
    )


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _broken(name: str, message: str) -> click.Command:
    """Stands for a command whose import fails, so that `recsdk --help` still works.

    It takes whatever is said to the command, also its --help, and fails.
    """

    def fail() -> None:
        raise click.ClickException(message)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(
        name, anything, callback=fail, short_help=f"(broken) {message}", add_help_option=False
    )


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="recsdk")
def main() -> None:
    """Train recommendation models on raw 64-bit ids.

    The exit status is 0 if all is well, 1 if something is wrong with what was read or made, 2 for a
    command line that is wrong, and 130 after Ctrl-C. `recsdk COMMAND --help` says where a command
    differs.
    """
