"""Pages of the documentation's site that lie outside of docs/: README, CHANGELOG and CONTRIBUTING. A hook of mkdocs.

The files stay as they are, links between them and docs/ included, and the site gets links between its own pages. What
is no page of the site, such as a folder of the repository, is named there without a link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]+)?\)|!\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for source, page in PAGES.items():
        text = linked((ROOT / source).read_text(), ".", set(files.src_uris))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Gives pages of docs/ links to pages of the site."""
    return markdown if page.file.src_uri in PAGES.values() else linked(markdown, "docs", set(files.src_uris))


def linked(text: str, folder: str, pages: set[str]) -> str:
    """Returns the text with its links turned into the site's. `folder`: of its file in the repository."""

    def turned(match: re.Match[str]) -> str:
        name, target, anchor, alternative, image = match.groups()
        if re.match(r"\w+:", image or target):  # another site
            return match[0]
        there = posixpath.normpath(posixpath.join(folder, image or target))
        page = PAGES.get(there, there.removeprefix("docs/"))
        if page not in pages | set(PAGES.values()):
            known = (ROOT / there).exists()  # else mkdocs is to say that it leads nowhere
            return match[0] if not known else alternative if image else str(name)
        return f"![{alternative}]({page})" if image else f"[{name}]({page}{anchor or ''})"

    return LINK.sub(turned, text)
