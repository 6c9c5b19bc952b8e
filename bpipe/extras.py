"""Missing packages, named with the pip command that adds them. Imports none of the packages it looks for."""

import json
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "torch-bpipe"
# The modules that each extra of pyproject.toml installs, and those without any that our commands need.
MODULES = {"": ("numpy", "rich"), "torch": ("torch",), "megatron": ("torch", "megatron.core")}


def require(extra: str, for_what: str) -> None:
    """Raise ValueError if a module of an extra is missing, with the command that installs it."""
    missing = [module for module in MODULES[extra] if util.find_spec(module) is None]
    if missing:
        lacks = f"{' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed"
        raise ValueError(f"{for_what} needs {lacks}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra, or what is installed without any, to the running installation."""
    checkout = Path(__file__).resolve().parents[1]
    brackets = f"[{extra}]" if extra else ""
    if (checkout / "pyproject.toml").is_file():
        place = "." if checkout == Path.cwd() else checkout
        return f'pip install -e "{place}{brackets}"'
    return f'pip install "{_copied_from() or DISTRIBUTION}{brackets}"'


def _copied_from() -> Path | None:
    """Return the folder that pip installed from, if it was one."""
    try:
        record = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(record)["url"] if record else "")
    return Path(unquote(url.path)) if url.scheme == "file" else None
