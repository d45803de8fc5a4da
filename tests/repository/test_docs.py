"""Tests that every Python block of the documentation runs and every public name has a reference."""

import importlib.util
import re
from types import ModuleType

import pytest
from pages import ROOT, blocks, prints

import mpx_pde as mpx


# Pages that need other libraries, which are optional.
LIBRARIES = {"other_libraries.md": ("jinns", "pdequinox")}
# `test_jno.py` runs this section in a separate process.
APART = "jNO"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
# jinns filters this warning of Equinox on import, but pytest resets the filter.
@pytest.mark.filterwarnings("ignore:Using `field:UserWarning")
@pytest.mark.usefixtures("standard_promotion")
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page, capsys):
    """`python docs/prints.py` writes what a page shows. Numbers in it depend on the machine."""
    for library in LIBRARIES.get(page.name, ()):
        pytest.importorskip(library)
    namespace, shown = {"__name__": "__docs__"}, prints(page)
    capsys.readouterr()
    for line, source in blocks(page, "python", without=APART):
        # With the blank lines, tracebacks and warnings name the line of the page.
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
        if line in shown:
            words = lambda text: re.findall(r"[A-Za-z]{3,}", text.split("\n")[0])
            told = words(shown[line])  # a long line is wrapped on the page
            assert told
            assert words(printed.replace(f"{ROOT}/docs/", ""))[: len(told)] == told


def test_the_reference_has_all_public_names_and_no_others():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    directives = re.findall(r"^::: mpx_pde\.(\w+)$", text, re.MULTILINE)
    constants = re.findall(r"^\| `mpx_pde\.(\w+)` \|", text, re.MULTILINE)
    documented = directives + constants
    public = [name for name, x in vars(mpx).items() if not isinstance(x, ModuleType)]
    names = [name for name in public if not name.startswith("_")]
    assert sorted(documented) == sorted([*names, "HALF_PRECISION_DATATYPE"])


def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("html", "pieces"),
    [
        ("<p>8 points of 1e-6, 3.5\nms a step, 512 × 6, 0.81–1.15 and 19 %.</p>",
         ["8 points", "1e-6", "3.5\nms", "512 × 6", "0.81–1.15", "19 %"]),
        ("<p>2 msx, float32 is 16 of <code>3 ms</code></p><pre>3 ms</pre>", []),
        ("<p><code>python -m x --re-run a-b</code></p>", ["-m", "--re-run"]),
        ('<td title="3 ms"><code>3 ms</code></td>', []),
        ("<table><td><code>f(a, b=[c])</code></td></table>3 ms", ["f(a,", "b=[c])", "3 ms"]),
    ],
)  # fmt: skip
def test_numbers_and_code_of_tables_stay_in_one_piece(html, pieces):
    out = hooks().on_page_content(html)
    assert re.findall(r'<span class="piece">(.*?)</span>', out, re.DOTALL) == pieces
    assert re.sub(r'<span class="piece">(.*?)</span>', r"\1", out, flags=re.DOTALL) == html


def test_former_pages_lead_to_sections_that_exist():
    for name, target in hooks().MOVED.items():
        page, _, section = target.partition("/#")
        text = (ROOT / "docs" / f"{page.strip('/')}.md").read_text(encoding="utf-8")
        headings = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
        slugs = [
            re.sub(r"[^a-z0-9]+", "-", h.lower().replace("`", "")).strip("-") for h in headings
        ]
        assert not section or section in " ".join(slugs), target
        assert not (ROOT / "docs" / f"{name}.md").exists()


def test_no_formula_is_left_in_latex():
    """No extension renders LaTeX."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"\\\(|\\\[|\\(sin|frac|partial)\b", text), page


def test_the_index_tells_what_each_name_of_the_reference_is():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md")]
    names = re.findall(r"^::: (mpx_pde[\w.]+)$", "\n".join(pages), re.MULTILINE)
    index = hooks().index(ROOT / "docs/api")
    rows = re.findall(r"^\| \[`.*?`\]\[(.*?)\] \| (.*) \|$", index, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(names)
    assert all(told and told != "None" for _, told in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_text_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\bmpx(?:_pde)?\.([A-Za-z]\w*)", text):
        # `python -m mpx_pde.check` names a module.
        found = hasattr(mpx, name) or importlib.util.find_spec(f"mpx_pde.{name}")
        assert found, f"{page.name} mentions mpx.{name}"
