"""Names and docstrings that a reader can follow: what a machine can judge of CONTRIBUTING's rules for words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for name in ("bpipe", "megatron", "terra") for path in (ROOT / name).rglob("*.py"))
# They say nothing of what they name.
FORBIDDEN = {"found", "said", "asked", "given", "anew", "one", "other", "what", "that", "stuff", "thing"}
# A docstring of a function says what it does, so it begins with a verb. Fragments begin so.
FRAGMENTS = {
    *("a", "above", "after", "all", "an", "any", "around", "as", "at", "before", "behind", "beside", "between"),
    *("both", "by", "each", "every", "for", "from", "here", "how", "in", "inside", "its", "no", "none", "nothing"),
    *("of", "on", "one", "only", "over", "see", "so", "such", "that", "the", "their", "there", "this", "those", "to"),
    *("until", "what", "whatever", "when", "where", "whether", "which", "while", "who", "whoever", "whose", "why"),
    *("with", "without"),
}
# A property or a class is a noun, which may have an article.
RIDDLES = FRAGMENTS - {"a", "all", "an", "both", "each", "every", "no", "one", "the", "this", "whether"} - {"how"}


def public(node: ast.Module | ast.ClassDef, name: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yield every public function, method and class of a module with its qualified name."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            qualified = f"{name}{child.name}"
            yield qualified, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{qualified}.")


def is_noun(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether it is a class or a property."""
    return isinstance(node, ast.ClassDef) or any("property" in ast.unparse(each) for each in node.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_and_docstrings_say_what_they_are(path: Path) -> None:
    for name, node in public(ast.parse(path.read_text())):
        place = f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        assert node.name not in FORBIDDEN, f"{place} does not say what it is"
        text = ast.get_docstring(node)
        if text is None:
            continue
        first = text.split()[0].strip("`\"',.:;()[]")
        assert first.lower() not in (RIDDLES if is_noun(node) else FRAGMENTS), (
            f"{place}: begin the docstring with {'a noun' if is_noun(node) else 'a verb'}, not {first!r}"
        )
        assert first[:1].isupper() or not first[:1].isalpha(), f"{place}: begin the docstring with a capital"
