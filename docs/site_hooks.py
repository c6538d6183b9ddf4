"""Hooks of mkdocs: what is not written by hand is put into the pages when the site is built."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

REPOSITORY_FILE = re.compile(r"\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
REPORT_MARK = "<!-- report -->"
REPORT = "tour-report.html"
RECORDING = "tour.jsonl"
IFRAME = f"""
<iframe class="report" src="{REPORT}" title="The recording, to move through"></iframe>

The frame above is the dashboard's report of the recording, a page that needs nothing else: [open it alone]({REPORT}).
"""


def on_files(files: Files, *, config: MkDocsConfig, **kwargs: Any) -> Files:
    """Adds the report of the recording that tour.md follows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / REPORT
        recording = str(Path(config.docs_dir) / RECORDING)
        subprocess.run([sys.executable, "-m", "aioengine", "top", recording, "--report", str(path)], check=True, stdout=subprocess.DEVNULL)
        files.append(File.generated(config, REPORT, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Puts the report into its place. Links to files outside of docs/ lead somewhere in a checkout only: they become paths."""
    markdown = markdown.replace(REPORT_MARK, IFRAME)
    return REPOSITORY_FILE.sub(lambda found: f"] (`{posixpath.normpath(found[1].removeprefix('../'))}`)", markdown)
