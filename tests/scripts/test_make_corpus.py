"""scripts/data/make_corpus.py on a library of four files."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def make_corpus(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("data.make_corpus")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    files = {
        "b.py": "b = 1\n",
        "a/x.py": "é = 'ä'\n",
        "a/latin.py": b"# \xe4\n",
        "a/empty.py": " \n",
        "a/notes.txt": "no source",
        "test/test_b.py": "left out",
        "site-packages/other.py": "left out",
        "encodings/cp437.py": "left out",
    }
    for name, content in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / "lib"


def test_order_and_choice(make_corpus: ModuleType, library: Path) -> None:
    texts = [json.loads(line)["text"] for line in make_corpus.corpus(library, 1000).decode().splitlines()]
    assert texts == ["é = 'ä'\n", "b = 1\n"]


def test_the_cap_ends_the_corpus_at_a_whole_file(make_corpus: ModuleType, library: Path) -> None:
    assert list(make_corpus.documents(library, 12)) == ["é = 'ä'\n"]
    assert list(make_corpus.documents(library, 9)) == []


def test_this_interpreter_has_enough(make_corpus: ModuleType) -> None:
    import sysconfig

    content = make_corpus.corpus(Path(sysconfig.get_path("stdlib")), 200_000)
    assert 100_000 < len(content) < 250_000
