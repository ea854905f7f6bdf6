"""The examples in docs/ run, in the order in which a reader would type them."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from spolia import LLM

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text())


@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path):
    names: dict[str, object] = {}
    try:
        for block in re.finditer(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            line = page.read_text()[: block.start()].count("\n") + 1
            exec(compile("\n" * line + block[1], str(page), "exec"), names)
    finally:
        for value in list(names.values()):
            if isinstance(value, LLM):
                value.close()


def test_there_are_pages_with_examples():
    assert DOCS / "sampling.md" in PAGES


def test_the_reference_is_what_the_code_says():
    script = DOCS.parent / "scripts" / "reference"
    loader = SourceFileLoader("reference", str(script))
    spec = importlib.util.spec_from_loader("reference", loader)
    assert spec is not None
    reference = importlib.util.module_from_spec(spec)
    loader.exec_module(reference)
    for name, text in reference.pages().items():
        assert (DOCS / "reference" / name).read_text() == text, f"{name}: run scripts/reference"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
