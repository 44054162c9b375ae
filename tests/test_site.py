"""The site's pages: links and anchors lead somewhere, every page has a place, lines can be read.

Without torch and without mkdocs, so that ``make check`` can ask it at once; ``make docs`` builds the
site itself, strictly.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
WIDEST = 120
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)

EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(text: str) -> str:
    """A page without its code."""
    return FENCED.sub("", text)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings: the second of two that are alike ends in -1."""
    seen: dict[str, int] = {}
    found = set()
    for head in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        # Of a link only its text is part of the anchor.
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen.get(anchor, 0)
        found.add(f"{anchor}-{count}" if count else anchor)
        seen[anchor] = count + 1
    return found


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere, or from the site to what is not part of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        leaves_the_site = DOCS in page.parents and DOCS not in file.parents
        is_there = file.exists() and not leaves_the_site
        if not is_there or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


@EVERY
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One head\n\n# One head\n\n```\n# no head\n```\n")
    page = tmp_path / "page.md"
    good = "[a](other.md) [b](other.md#one-head) [c](other.md#one-head-1) [d](https://x.y/z)"
    bad = "[e](another.md) [f](other.md#no-head) [g](#nothing)"
    page.write_text(f"{good} {bad}\n```\n[h](code.md)\n```\n")
    assert broken_links(page) == ["another.md", "other.md#no-head", "#nothing"]


@EVERY
def test_lines_are_at_most_120_wide(page: Path) -> None:
    """Outside tables and code. The changelog is a list for the record, not a page."""
    if page.name == "CHANGELOG.md":
        return
    lines = prose(page.read_text()).splitlines()
    wide = [line for line in lines if len(line) > WIDEST and not line.lstrip().startswith("|")]
    assert wide == []


def test_every_page_has_a_place_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"^ +- .+: (\S+\.md)$", text, re.MULTILINE)
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - set(named) == set(), "add these to nav in mkdocs.yml"
    assert set(named) - pages == set(), "nav in mkdocs.yml names pages that are not there"
    assert len(named) == len(set(named))


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    mkdocs = shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]'")
    command = [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "first-steps/index.html", "api/index.html"):
        assert (tmp_path / "site" / page).stat().st_size > 1000
    # What docstrings say of `run` is on the page.
    assert "virtual seconds" in (tmp_path / "site/api/index.html").read_text().lower()
