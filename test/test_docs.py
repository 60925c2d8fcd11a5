"""Every Python example of the documentation runs, page by page, on models of a few thousand parameters.

A block fenced as ``python`` is executed, ``python no-run`` is only compiled. The blocks of a page share one namespace
that already holds ``model`` and ``tokenizer``, and get the same two from ``from_pretrained``, whatever name they ask
for. A line ``print(...)  # text`` promises its output, and so does a ``text`` block right behind a Python block.
"""

import contextlib
import importlib.util
import io
import re
import warnings
from pathlib import Path

import pytest
from fakes import character_tokenizer, tiny_qwen3
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_asyncgrpo import CISPOLoss
from torchrl_asyncgrpo.data import pretrained

ROOT = Path(__file__).parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if page.exists()]
FENCE = re.compile(
    r"^```python(?P<no_run> no-run)?\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
PROMISE = re.compile(r"^print\(.*\)  # (.+)$", re.MULTILINE)


def blocks(page):
    """First line, code, whether it runs, and promised output of every Python block of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (
            text.count("\n", 0, match.start("code")) + 1,
            match["code"],
            match["no_run"] is None,
            PROMISE.findall(match["code"]) + (match["output"] or "").splitlines(),
        )
        for match in FENCE.finditer(text)
    ]


def compiled(page, line, code):
    """The code with the page's own file name and line numbers, so that a traceback points into the page."""
    return compile("\n" * (line - 1) + code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run_and_print_what_they_promise(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs", "model": tiny_qwen3(), "tokenizer": character_tokenizer()}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, model=namespace["model"], **__: model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, tokenizer=namespace["tokenizer"], **__: tokenizer)
    monkeypatch.setattr(pretrained, "resolve_model", lambda name: name)
    try:
        for line, code, runs, promised in blocks(page):
            program = compiled(page, line, code)
            if not runs:
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                exec(program, namespace)
            assert printed.getvalue().splitlines()[: len(promised)] == promised, f"{page.name}:{line}"
    finally:
        for name in ("collector", "engine"):
            if name in namespace:
                namespace[name].shutdown()


@pytest.fixture
def objectives_table():
    path = ROOT / "docs/figures/objectives_table.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_of_objectives_is_that_of_the_docstrings(objectives_table):
    page = objectives_table.PAGE.read_text(encoding="utf-8")
    assert objectives_table.with_table(page) == page, "run: python docs/figures/objectives_table.py"


def test_a_docstring_that_changes_changes_the_table(objectives_table, monkeypatch):
    page = objectives_table.PAGE.read_text(encoding="utf-8")
    docstring = CISPOLoss.__doc__
    monkeypatch.setattr(CISPOLoss, "__doc__", docstring.replace(":Use: when", ":Use: ``only`` | if\n        or when"))
    changed = objectives_table.with_table(page)
    assert changed != page
    assert "| `only` \\| if or when rare tokens" in changed
    monkeypatch.setattr(CISPOLoss, "__doc__", docstring.replace(":Use:", ":Usage:"))
    with pytest.raises(ValueError, match="CISPOLoss .* needs each of Formula, Aggregation, Reference, Use once"):
        objectives_table.table()
    with pytest.raises(ValueError, match="put both lines where the table goes"):
        objectives_table.with_table("a page without markers")


def test_no_python_block_is_overlooked():
    for page in PAGES:
        opened = re.findall(r"^\s*[`~:]{3,}\s*\{?(?:python|py|code)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(opened) == len(blocks(page)), page.name


def test_an_example_that_breaks_fails(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("words\n\n```python\nx = 1\nprint(x)  # 2\n```\n\n```python no-run\nanything()\n```\n")
    assert [(line, runs) for line, _, runs, _ in blocks(page)] == [(4, True), (9, False)]
    with pytest.raises(AssertionError, match=r"page.md:4"):
        test_examples_run_and_print_what_they_promise(page, tmp_path, monkeypatch)
    page.write_text("words\n\n```python\nraise LookupError\n```\n")
    with pytest.raises(LookupError):
        test_examples_run_and_print_what_they_promise(page, tmp_path, monkeypatch)
