"""The pages: short at the front, no broken link, frames that are those of the recording, nothing from other hosts."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import aioengine
import aioengine.errors
from aioengine.events.recording.reader import read_recording
from tests.docs.pages import PAGES, ROOT

MAX_WORDS = 700
LINKED = (*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")), *sorted(ROOT.glob("[bkt]*/README.md")))
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOREIGN = re.compile(r"""(?:<(?:script|img|link|iframe|source|video)[^>]*(?:src|href|srcset)="?|url\(["']?|@import ["']?)(?:https?:)?//""")


def test_the_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.sub(r"<[^>]*>", "", text).split()) <= MAX_WORDS
    assert text.index("<picture>") < text.index("pip install") < text.index("```python") < text.index("aioengine serve")
    assert text.count("\n- **") == 5
    assert len(re.findall(r"^\| ---", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r" +", "-", re.sub(r"[^\w\- ]", "", heading.lower()).strip()) for heading in headings}


def test_the_frames_of_the_tour_are_those_of_its_recording() -> None:
    tour = module("record_tour")
    page = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    assert page.count("<!-- frame ") >= 5
    assert tour.with_frames(page, read_recording(tour.RECORDING).events) == page


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    names = [name for name in aioengine.__all__ if f".{name}\n" not in page]
    errors = {name for name, value in vars(aioengine.errors).items() if isinstance(value, type)}
    assert set(names) - errors == set()
    assert "::: aioengine.errors\n" in page


def test_the_errors_of_the_faq_are_those_of_the_sources() -> None:
    """Each quotation, cut at the dots and the numbers that stand for what changes, is in the sources."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "aioengine").rglob("*.py")))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # strings that are cut over several lines
    page = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
    quoted = [text for entry in re.findall(r"^\*\*(`.*)$", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", entry.split("**")[0])]
    assert len(quoted) > 8
    pieces = [piece.strip() for text in quoted for piece in re.split(r"\.\.\.|\d+|\[\w+]|'\w+':?| {2,}", text) if len(piece.strip()) > 3]
    assert [piece for piece in pieces if piece not in sources] == []


def test_pictures_need_no_other_host() -> None:
    pictures = sorted((ROOT / "docs").rglob("*.svg"))
    assert len(pictures) > 10
    assert [path.name for path in pictures if FOREIGN.search(path.read_text(encoding="utf-8"))] == []


def test_the_site_needs_no_other_host(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    site = tmp_path / "site"
    pages = {path.name for path in site.glob("*.html")}
    assert {"index.html", "tour.html", "api.html", "SECURITY.html"} <= pages
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    foreign = {path.name: found[0] for path in files if (found := FOREIGN.search(path.read_text(encoding="utf-8")))}
    assert foreign == {}
    assert 'src="tour-report.html"' in (site / "tour.html").read_text(encoding="utf-8")
    assert "whale" in (site / "tour-report.html").read_text(encoding="utf-8")
    assert "--8&lt;--" not in (site / "examples.html").read_text(encoding="utf-8")


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
