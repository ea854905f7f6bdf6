"""The examples in docs/ run, in the order in which a reader would type them."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from server.harness import chatty_engine, serving
from spolia import LLM
from spolia.kvcache import MissReason

# The commands of pages, and what they say, are held against the code: flags, paths, metrics, reasons.
DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "```python" in page.read_text())


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


@pytest.fixture(scope="module")
def url():
    engine = chatty_engine(num_blocks=64)
    with serving({"smollm2": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


SCRIPTS = sorted(page for page in DOCS.rglob("*.md") if "```sh" in page.read_text())


@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_answered(page: Path, url: str):
    lines = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    script = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n' + "".join(lines)
    script = script.replace("http://127.0.0.1:8000", url)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chat.completion" in done.stdout


def test_sessions_have_a_page_that_runs():
    assert DOCS / "guides" / "sessions.md" in SCRIPTS


def test_what_newcomers_should_type_is_there():
    commands, http = ((DOCS / "reference" / name).read_text() for name in ("commands.md", "http.md"))
    rows = re.findall(r"^\| (.*`.*) \| (.*) \|$", (DOCS / "guides" / "coming-from.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    for theirs, ours in rows:
        for flag in re.findall(r"--[a-z-]+", ours):
            assert f"`{flag}`" in commands, flag
        for command in re.findall(r"`spolia (\w+)", ours):
            assert f"## spolia {command}" in commands, command
        if ours.startswith("the same"):
            for path in re.findall(r"`(/[^`]+)`", theirs):
                assert f" {path}`" in http, path
        if ours.startswith("not there"):
            for path in re.findall(r"`(/[^`]+)`", theirs):
                assert f" {path}`" not in http, path


def test_troubles_have_every_reason_and_metrics_that_exist():
    text, metrics = (DOCS / "troubleshooting.md").read_text(), (DOCS / "reference" / "metrics.md").read_text()
    for reason in MissReason:
        assert f"| `{reason.value}` |" in text, reason
    for page in (DOCS / "troubleshooting.md", DOCS / "tiers.md", DOCS / "server.md"):
        for name in re.findall(r"spolia_[a-z_]*[a-z]", page.read_text()):
            assert f"`{name}`" in metrics, name
