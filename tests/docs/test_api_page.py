"""What pages and examples tell people to import is on the page of what is public."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

from tests.support.markdown import ROOT, blocks, page, pages

INSIDE = "twinkle.kernel.ops."
"""References: the page about ops compares the maths with them."""


def _imported(code: str) -> Iterator[tuple[str, object]]:
    """Names that code takes from our modules, and what they are; a module taken whole is what is used of it."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "twinkle":
            continue
        for alias in node.names:
            module = importlib.import_module(str(node.module))
            if hasattr(module, alias.name) and not isinstance(getattr(module, alias.name), type(ast)):
                yield f"{node.module}.{alias.name}", getattr(module, alias.name)
                continue
            whole = importlib.import_module(f"{node.module}.{alias.name}")
            for use in ast.walk(tree):
                if isinstance(use, ast.Attribute) and isinstance(use.value, ast.Name) and use.value.id == alias.name:
                    yield f"{whole.__name__}.{use.attr}", getattr(whole, use.attr)


def _object(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_what_people_are_told_to_import_is_public() -> None:
    listed = re.findall(r"^::: (\S+)", page("en", "api.md"), re.MULTILINE)
    assert len(listed) == len(set(listed)) and listed == re.findall(r"^::: (\S+)", page("zh", "api.md"), re.MULTILINE)
    public = {id(_object(name)) for name in listed}
    texts = {name: page("en", name) for name in pages("en") if name != "ops.md"}
    texts["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {name: "\n".join(b.text for b in blocks(text) if b.kind == "python") for name, text in texts.items()}
    examples = [
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("examples/trainer/*.py"),
        *ROOT.glob("examples/plugin/src/**/*.py"),
    ]
    shown |= {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in examples}
    told = {name: (where, value) for where, code in shown.items() for name, value in _imported(code)}
    assert {"twinkle.kernel.kernelize", "twinkle.presets.build", "twinkle.aten.conditions.tensor"} <= told.keys()
    private = {name: where for name, (where, value) in told.items() if id(value) not in public}
    assert {name: where for name, where in private.items() if not name.startswith(INSIDE)} == {}
