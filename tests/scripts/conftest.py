"""Load a file of scripts/ as a module. In: its name. Out: the module. The folder is no package, so that each script runs by itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="session")
def scripts() -> Path:
    return SCRIPTS


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    # Scripts import their neighbours as Python lets them when they are run: from the folder they lie in.
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        key = f"scripts_{name}"
        if key not in sys.modules:
            spec = importlib.util.spec_from_file_location(key, SCRIPTS / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # Dataclasses look their module up by name while they are being made.
            sys.modules[key] = module
            spec.loader.exec_module(module)
        return sys.modules[key]

    return load
