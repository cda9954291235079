"""`recsdk ckpt`: look at checkpoints, check, compare, merge and convert them, without torch."""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from recsdk_core._internal.checks import require_table_name
from recsdk_core.checkpoint import comparing, tabular, transforming
from recsdk_core.checkpoint._fields import printable
from recsdk_core.checkpoint.columns import WholeTable, all_tables, whole_tables
from recsdk_core.checkpoint.joining import whole_fields
from recsdk_core.checkpoint.merging import bytes_to_read
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import (
    Checkpoint,
    Position,
    Progress,
    chain_of,
    open_checkpoint,
    read_whole,
)
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.checkpoint.stores import check_path, is_frozen, open_store
from recsdk_core.cli import Failure, checked_by, escaped
from recsdk_core.errors import RecsdkError
from recsdk_core.files import local_path
from recsdk_core.files.urls import require_protocols
from recsdk_core.predicates import Predicate
from recsdk_core.serving.inspecting import inspected, lines_of
from recsdk_core.serving.one_freeze import open_frozen
from recsdk_core.serving.verifying import verify_frozen

__all__ = ["check_place", "ckpt", "progress_bar", "refuse_other_tables"]

F = TypeVar("F", bound=Callable[..., Any])

_KEY = re.compile(r"-?[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}")


class _Trouble(Failure):
    """The same for commands whose status 1 has another meaning."""

    exit_code = 2


class _Unwritten(Exception):
    """The output could not be written, which says nothing of what was read or made."""

    def __init__(self, number: int | None, reason: str | None) -> None:
        super().__init__(f"the output cannot be written: {reason}")
        self.errno = number


@click.group()
def ckpt() -> None:
    """Inspect, verify, compare and convert checkpoints.

    Give a checkpoint by its path or fsspec URL. The checkpoints before a delta are found beside it;
    `compact`, `reshard` and `verify` also take a whole chain. The exit status is 0 if all is well,
    1 if something is wrong or not found, 2 for a command line that is wrong.
    """


def _command(
    *options: Callable[[F], F], status: int = 1, reads_again: bool = True
) -> Callable[[F], click.Command]:
    """A command with options; errors that users can cause become messages and a status.

    If what it reads is replaced meanwhile it begins anew, where it `reads_again`: not if what it
    calls does so.
    """

    kind = Failure if status == 1 else _Trouble

    def decorate(function: F) -> click.Command:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if not reads_again:
                    return function(*args, **kwargs)
                return read_whole(lambda _: function(*args, **kwargs))  # it prints at its end only
            except _Unwritten as error:
                if error.errno == errno.EPIPE:  # the reader of a pipe has left: no error
                    raise click.exceptions.Exit(status) from None
                raise kind(error) from error
            except (RecsdkError, ValueError, OSError, ImportError) as error:
                raise kind(error) from error

        made: Any = call
        for option in reversed(options):
            made = option(made)
        name = function.__name__.rstrip("_")
        settings = {"ignore_unknown_options": name == "get"}  # keys may be negative
        return ckpt.command(name, context_settings=settings)(made)

    return decorate


def check_place(path: str) -> None:
    """Raises for what can be no checkpoint's path or URL, whatever there is."""
    require_protocols(check_path(path))


_A_PLACE = checked_by(check_place)
_A_FILE = checked_by(local_path)
_SOURCE = click.argument("source", metavar="CHECKPOINT", callback=_A_PLACE)
_CHAIN = click.argument(
    "sources", metavar="CHECKPOINT...", nargs=-1, required=True, callback=_A_PLACE
)
_TARGET = click.argument("target", metavar="TARGET", callback=_A_PLACE)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_TABLE = click.option("--table", help="The table; may be left out if one only has keys.")
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace a checkpoint at TARGET.")
_EXAMPLES = {"only_in_a": "only in {a}", "only_in_b": "only in {b}", "changed": "changed"}
_CODEC = click.option(
    "--codec", type=click.Choice(["none", "zstd"]), default="none", show_default=True
)


@contextmanager
def progress_bar(total: int, label: str) -> Iterator[Progress]:
    """A progress bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    with click.progressbar(length=max(total, 1), label=label, file=sys.stderr) as bar:
        yield bar.update


def _print(as_json: bool, value: Any, lines: Sequence[str]) -> None:
    text = "\n".join(map(escaped, lines))
    try:
        click.echo(json.dumps(printable(value), indent=2) if as_json else text)
    except OSError as error:
        raise _Unwritten(error.errno, error.strerror) from error


def _source(sources: Sequence[str]) -> str | list[str]:
    """The path of a chain's end, or the paths of all of it in order."""
    return sources[0] if len(sources) == 1 else list(sources)


def _bytes_of(chain: Sequence[Checkpoint]) -> int:
    """How many bytes of rows it has, in all tables."""
    names = [entry.name for entry in chain[-1].manifest.tables]
    return bytes_to_read(chain, names, [Owner()])


def _bytes_of_table(chain: Sequence[Checkpoint], table: WholeTable) -> int:
    return bytes_to_read(chain, [part.name for part in table.parts], [Owner()])


def _table_of(chain: Sequence[Checkpoint], name: str | None) -> WholeTable:
    tables = all_tables(chain[-1].manifest.tables)
    of_keys = whole_tables(chain[-1].manifest.tables)
    found = of_keys if name is None else [table for table in tables if table.name == name]
    if len(found) != 1:
        given = "say which" if name is None else f"there is no {name!r}"
        names = ", ".join(table.name for table in tables)
        raise click.UsageError(f"--table: {given}; {chain[-1].location} has {names}")
    return found[0]


def refuse_other_tables(source: Any, names: Sequence[str]) -> None:
    """Refuses a command line with a --table that has no keys in the checkpoint, or is not there."""
    last = open_checkpoint(source)
    tables = [table.name for table in whole_tables(last.manifest.tables)]
    for name in names:
        if name not in tables:
            raise click.UsageError(
                f"--table: there is no {name!r}; {last.location} has {', '.join(tables)}"
            )


@_command(_SOURCE, _JSON)
def inspect(source: str, as_json: bool) -> None:
    """Show what the manifest says: tables, sizes, step, parent.

    For a delta, also show whether the chain before it lies beside it. This does not change the
    status: its links may be elsewhere. Of a folder of checkpoints it shows a line for each. What
    `recsdk freeze` made may be given, too.
    """
    value, lines, is_whole = inspected(source)
    _print(as_json, value, lines)
    if not is_whole:
        raise click.exceptions.Exit(1)


@_command(_CHAIN, click.option("--alone", is_flag=True, help="Only the given ones, not the chain."),
          _JSON)  # fmt: skip
def verify(sources: tuple[str, ...], alone: bool, as_json: bool) -> None:
    """Read every byte of a checkpoint and its chain.

    It is compared with its checksums. A folder that `recsdk freeze` made may be given, too.
    """
    frozen = [one for one in sources if is_frozen(open_store(one))]
    if frozen:
        _verify_frozen(sources, frozen, as_json)
        return
    chain = [open_checkpoint(one) for one in sources] if alone else chain_of(_source(sources))
    with progress_bar(sum(one.manifest.num_bytes for one in chain), "verifying") as progress:
        for one in chain:
            one.verify(progress)
    value = {"checkpoints": [{"location": one.location, "hash": one.hash} for one in chain]}
    lines = [f"{one.location}: all {len(one.manifest.files) + 1} files are intact" for one in chain]
    _print(as_json, value, lines)


def _verify_frozen(sources: Sequence[str], frozen: Sequence[str], as_json: bool) -> None:
    others = [one for one in sources if one not in frozen]
    if others:
        raise click.UsageError(
            f"CHECKPOINT... must all be frozen or a chain, got {others[0]} and the frozen "
            f"{frozen[0]}; verify them apart"
        )
    total = sum(open_frozen(one).num_bytes for one in sources)
    with progress_bar(total, "verifying") as progress:
        found = [verify_frozen(one, progress) for one in sources]
    told = list(zip(sources, found, strict=True))
    value = {"frozen": [{"location": one, "token": each.token} for one, each in told]}
    files = [(one, sum(len(table.files) for table in each.tables) + 1) for one, each in told]
    _print(as_json, value, [f"{one}: all {number} files are intact" for one, number in files])


@_command(
    click.argument("a", metavar="A", callback=_A_PLACE),
    click.argument("b", metavar="B", callback=_A_PLACE),
    click.option("--num-examples", type=click.IntRange(0), default=5, show_default=True,
                 help="Keys to show of each kind."),
    _JSON,
    status=2,
)  # fmt: skip
def diff(a: str, b: str, num_examples: int, as_json: bool) -> None:
    """Compare rows and settings of two checkpoints.

    The exit status is 1 if they differ, 2 for errors. Settings are what is saved of a table beside
    its rows, such as its count of updates.
    """
    with progress_bar(sum(_bytes_of(chain_of(one)) for one in (a, b)), "comparing") as progress:
        found = comparing.diff(a, b, num_examples=num_examples, progress=progress)
    lines = []
    for table in found:
        lines.append(
            f"table {table.name!r}: {table.equal} equal, {table.changed} changed, "
            f"{table.only_in_a} only in {a}, {table.only_in_b} only in {b}"
        )
        lines += [f"  {k}: {x!r} and {y!r}" for k, (x, y) in table.settings.items()]
        lines += [
            f"  {_EXAMPLES[k].format(a=a, b=b)}: {', '.join(map(str, v))}"
            for k, v in table.examples.items()
            if v
        ]
    is_equal = all(table.is_equal for table in found)
    _print(as_json, {"equal": is_equal, "tables": [asdict(table) for table in found]}, lines)
    if not is_equal:
        raise click.exceptions.Exit(1)


@_command(_SOURCE, click.argument("key"), _TABLE, _JSON)
def get(source: str, key: str, table: str | None, as_json: bool) -> None:
    """Show the row of a key.

    KEY is a number of 64 bits, decimal or 0x...; the exit status is 1 if it has none.
    """
    number = _number(key)
    chain = chain_of(source)
    found = _table_of(chain, table)
    row = comparing.find_row(chain, found, number)
    dtypes = {field.name: field.dtype for field in whole_fields(found)}
    values = {k: comparing.as_floats(v, dtypes[k]).tolist() for k, v in (row or {}).items()}
    value = {"table": found.name, "key": number, "found": row is not None, "fields": values}
    missing = [f"table {found.name!r} has no row of key {number}"]
    lines = [f"{k}: {' '.join(f'{x:.9g}' for x in v)}" for k, v in values.items()] or missing
    _print(as_json, value, lines)
    if row is None:
        raise click.exceptions.Exit(1)


def _number(text: str) -> int:
    number = int(text, 16 if "x" in text.lower() else 10) if _KEY.fullmatch(text) else None
    if number is None or not -(2**63) <= number < 2**64:
        raise click.BadParameter(
            f"{text!r} is no number of 64 bits: pass -2**63 to 2**64 - 1, decimal or 0x...",
            param_hint="KEY",
        )
    return number


@_command(
    _SOURCE,
    _TABLE,
    click.option("-n", "--count", type=click.IntRange(1), default=10, show_default=True),
    click.option("--by", default="weight", show_default=True, help="The field to measure."),
    click.option("--smallest", is_flag=True, help="The smallest instead of the largest."),
    _JSON,
)
def top(source: str, table: str | None, count: int, by: str, smallest: bool, as_json: bool) -> None:
    """Show the keys whose field has the largest L2 norm."""
    chain = chain_of(source)
    whole = _table_of(chain, table)
    fields = [field.name for field in whole_fields(whole)]
    if by not in fields:
        raise click.UsageError(
            f"--by must be a field of the table, {', '.join(fields)}, got {by!r}"
        )
    with progress_bar(_bytes_of_table(chain, whole), "reading") as progress:
        found = comparing.top_rows(
            chain, whole, count=count, by=by, smallest=smallest, progress=progress
        )
    rows = [{"key": key, "norm": norm} for key, norm in found]
    lines = [f"{key:>20}  {norm:.9g}" for key, norm in found]
    _print(as_json, {"table": whole.name, "by": by, "rows": rows}, lines)


def _write(
    sources: Sequence[str], target: str, label: str, as_json: bool, write: Callable[..., Position]
) -> None:
    with progress_bar(_bytes_of(chain_of(_source(sources))), label) as progress:
        position = write(_source(sources), target, progress=progress)
    made = open_checkpoint(target)
    value = {
        "location": target,
        "hash": position.hash,
        "world_size": made.manifest.world_size,
    }
    _print(as_json, value, lines_of(made))


@_command(
    _CHAIN,
    _TARGET,
    click.option("--keep", metavar="PREDICATE", callback=checked_by(Predicate),
                 help="Leave out rows of which it is not true, as 'idle <= 1000 or count > 3'."),
    click.option("--table", "tables", multiple=True,
                 help="Of which --keep is; several times for several. By default all are."),
    _OVERWRITE,
    _CODEC,
    _JSON,
    reads_again=False,
)  # fmt: skip
def compact(
    sources: tuple[str, ...],
    target: str,
    keep: str | None,
    tables: tuple[str, ...],
    overwrite: bool,
    codec: Any,
    as_json: bool,
) -> None:
    """Merge a chain into a snapshot at TARGET. Nothing of the chain is removed."""
    if tables and keep is None:
        raise click.UsageError("--table says which tables --keep is for; give --keep, too")
    refuse_other_tables(sources[-1], tables)
    kept = keep if keep is None or not tables else dict.fromkeys(tables, keep)
    write = partial(transforming.compact, keep=kept, overwrite=overwrite, codec=codec)
    _write(sources, target, "merging", as_json, write)


@_command(
    _CHAIN,
    _TARGET,
    click.option("--world-size", type=click.IntRange(1, 65_536), required=True),
    click.option("--rule", type=click.Choice(["virtual_shard", "modulo"]),
                 default="virtual_shard", show_default=True),
    _OVERWRITE,
    _CODEC,
    _JSON,
    reads_again=False,
)  # fmt: skip
def reshard(
    sources: tuple[str, ...],
    target: str,
    world_size: int,
    rule: str,
    overwrite: bool,
    codec: Any,
    as_json: bool,
) -> None:
    """Write a snapshot of another number of ranks.

    It holds what the checkpoint or chain holds. Any number of ranks can load any checkpoint; after
    this step they read less.
    """
    write = partial(
        transforming.reshard, world_size=world_size, rule=rule, overwrite=overwrite, codec=codec
    )
    _write(sources, target, "resharding", as_json, write)


@_command(
    _SOURCE,
    click.argument("target", metavar="TARGET", callback=_A_FILE),
    _TABLE,
    click.option("--format", "form", type=click.Choice(tabular.FORMATS),
                 help="By default by the end of TARGET's name."),
    _JSON,
)  # fmt: skip
def export(source: str, target: str, table: str | None, form: str | None, as_json: bool) -> None:
    """Write a table's rows to a file.

    TARGET is new, of parquet or safetensors.
    """
    form = form or Path(target).suffix.lstrip(".")
    if form not in tabular.FORMATS:
        raise click.UsageError(
            f"--format, or the end of TARGET, must be one of {', '.join(tabular.FORMATS)}, "
            f"got {form!r}"
        )
    chain = chain_of(source)
    whole = _table_of(chain, table)
    name = whole.name
    with progress_bar(_bytes_of_table(chain, whole), "exporting") as progress:
        num_rows = tabular.export_table(chain, name, target, form, progress)
    value = {"location": target, "table": name, "num_rows": num_rows}
    _print(as_json, value, [f"{target}: {num_rows} rows of table {name!r}"])


@_command(
    click.argument("source", metavar="FILE", callback=_A_FILE),
    _TARGET,
    click.option("--name", required=True, help="The table's name.",
                 callback=checked_by(partial(require_table_name, "ckpt import"))),
    click.option("--keys", default="key", show_default=True, help="The array of 64-bit ids (N,)."),
    click.option("--weights", default="weight", show_default=True, help="The array (N, D)."),
    click.option("--keys-file", callback=_A_FILE,
                 help="The file that has the ids, if another: .npy, .npz, .parquet, .safetensors."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
                 default="float32", show_default=True, help="Of the rows, as the table has them."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Of rows that are made later."),
    click.option("--world-size", type=click.IntRange(1, 65_536), default=1, show_default=True),
    _OVERWRITE,
    _CODEC,
    _JSON,
)  # fmt: skip
def import_(
    source: str,
    target: str,
    name: str,
    keys: str,
    weights: str,
    keys_file: str | None,
    dtype: str,
    seed: int | None,
    world_size: int,
    overwrite: bool,
    codec: Any,
    as_json: bool,
) -> None:
    """Make a checkpoint with one table from a file.

    FILE, of .npz, .safetensors or .parquet, has the weights of the rows and their ids, in the same
    order. The checkpoint loads into any table of that width and dtype; optimizer state is then
    fresh.
    """
    arrays = tabular.read_arrays(source, [weights] if keys_file is not None else [keys, weights])
    ids = _array(arrays, keys, source) if keys_file is None else _ids(keys_file, keys)
    options = SaveOptions(overwrite=overwrite, codec=codec)
    position = tabular.import_table(
        target,
        name,
        ids,
        _array(arrays, weights, source),
        dtype=dtype,
        seed=seed,
        world_size=world_size,
        options=options,
        called=(f"{keys_file or source}: ids {keys!r}", f"{source}: array {weights!r}"),
    )
    value = {"location": target, "hash": position.hash, "num_rows": len(ids)}
    _print(as_json, value, lines_of(open_checkpoint(target)))


def _ids(path: str, name: str) -> Any:
    arrays = tabular.read_arrays(path, [name])
    return arrays[""] if list(arrays) == [""] else _array(arrays, name, path)


def _array(arrays: dict[str, Any], name: str, path: str) -> Any:
    if list(arrays) == [""]:
        raise ValueError(
            f"{path}: is one array without a name, where {name!r} is wanted; put it into a .npz, "
            ".safetensors or .parquet under a name"
        )
    return arrays[name]
