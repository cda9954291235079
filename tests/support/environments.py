"""Clean virtual environments, to try built wheels where nothing of the source tree is in reach."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"


def clean_variables() -> dict[str, str]:
    """This process's environment without what leads back to the source tree or its .venv."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "PATH": os.defpath}


class Environment:
    """A virtual environment without pip; the pip of this process installs into it."""

    def __init__(self, home: Path, interpreter: str | None = None) -> None:
        self.python = home / "bin" / "python"
        if interpreter is None:
            venv.create(home, symlinks=True)
        else:
            subprocess.run([interpreter, "-m", "venv", "--without-pip", str(home)], check=True)

    def run(self, *args: str, cwd: Path) -> str:
        """Runs this environment's Python and returns what it prints; fails with all its output."""
        return _checked([str(self.python), *args], cwd, clean_variables())

    def script(self, name: str, *args: str, cwd: Path) -> str:
        """Runs an installed command."""
        return _checked([str(self.python.parent / name), *args], cwd, clean_variables())

    def pip(self, *args: str) -> str:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *args]
        return _checked(command, ROOT, dict(os.environ))

    def install(self, *args: str | Path) -> None:
        """Compiles no module, of which few are imported."""
        flags = ("--quiet", "--no-compile", "--constraint", str(CONSTRAINTS))
        self.pip("install", *flags, *map(str, args))

    def site_packages(self, cwd: Path) -> Path:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(self.run("-c", code, cwd=cwd).strip())


def _checked(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}")
    return done.stdout


def find_interpreter(version: str) -> str | None:
    """A working CPython of that version: on PATH, or installed by pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")]
    probe = "import sys, venv; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if candidate is None:
            continue
        command = [str(candidate), "-c", probe]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.stdout.strip() == f"cpython {version}":
            return str(candidate)
    return None


def closure(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions and all that they declare to need, by normalized name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = list(names)
    while pending:
        distribution = importlib.metadata.distribution(pending.pop())
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name in found:
            continue
        found[name] = distribution
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found


def link_distributions(names: Iterable[str], target: Path) -> list[str]:
    """Makes installed distributions, with all that they need, present in another site-packages.

    Links instead of copies, since torch alone is hundreds of megabytes. To pip and to Python the
    distributions are installed there; nothing else of this environment is.
    """
    found = closure(names)
    for distribution in found.values():
        for file in distribution.files or []:
            top = file.parts[0]
            source = Path(str(distribution.locate_file(top)))
            if top in ("..", "__pycache__") or (target / top).exists():
                continue
            (target / top).symlink_to(source)
    return sorted(found)
