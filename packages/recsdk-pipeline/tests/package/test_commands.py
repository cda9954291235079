"""The list of all layers' commands, which loads none of them."""

from __future__ import annotations

import subprocess
import sys

from click import Context
from click.testing import CliRunner

from recsdk_core.cli import main

MOST_MODULES = 500
"""What numpy and the engine's package take is 330."""


def test_help_loads_no_command() -> None:
    program = (
        "import sys; from recsdk_core.cli import main; main(['--help'], standalone_mode=False)\n"
        "names = [name for name in sys.modules if name.endswith(('.command', '.doctor'))]\n"
        "heavy = {'torch', 'torchrec', 'pyarrow', 'rich', 'recsdk_pipeline', 'recsdk_sharding'}\n"
        "print(len(sys.modules), names, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=400
    )
    number, _, others = done.stdout.splitlines()[-1].partition(" ")
    assert int(number) < MOST_MODULES
    assert others == "[] []"


def test_help_says_of_each_command_what_it_says_loaded() -> None:
    listed = CliRunner().invoke(main, ["--help"], terminal_width=100).output
    names = main.list_commands(Context(main))
    assert {"ckpt", "data", "demo", "doctor", "plan", "top"} <= set(names)
    for name in names:
        command = main.get_command(Context(main), name)
        assert command is not None
        assert f"{name} " in listed
        assert command.get_short_help_str(40).removesuffix("...") in listed
