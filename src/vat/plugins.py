"""Python files of users that register aggregators, decoders, backbones or methods, run before a command does."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from vat.errors import VatError

VARIABLE = "VAT_PLUGINS"
"""Environment variable: files, separated as in PATH, so that processes of a command know them as well."""


def use_plugins(files: list[Path]) -> None:
    """Run files, now and in the processes that this one starts."""
    known = os.environ.get(VARIABLE, "").split(os.pathsep)
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*filter(None, known), *(str(f.resolve()) for f in files)]))
    run_plugins()


def run_plugins() -> None:
    """Import every file that the environment names; each once in a process, under the name of the file."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(name)
        if not path.is_file():
            raise VatError(f"There is no plug-in {path}.")
        loaded = sys.modules.get(path.stem)
        if loaded is not None:
            if Path(getattr(loaded, "__file__", None) or "").resolve() != path:
                raise VatError(f"The plug-in {path} has the name of a Python module; rename the file.")
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise VatError(f"{path} is no Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[path.stem]
            raise VatError(f"The plug-in {path} fails: {type(error).__name__}: {error}") from error
