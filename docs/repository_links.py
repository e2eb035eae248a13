"""mkdocs hook: a page may link to files of the repository outside `docs/`.

In: pages with relative links such as `../../examples/hsdp.py`. Out: the linked files are part of the site, under `repository/`,
and the links point there. A link to a file that does not exist stays as it is, so that mkdocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
UNDER = "repository"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def repository_path(page: str, link: str) -> str:
    """Path of the linked file in the repository, "" for other links. `page` is relative to `docs/`, or under `repository/`."""
    if "://" in link:
        return ""
    own = page.removeprefix(f"{UNDER}/") if page.startswith(f"{UNDER}/") else f"docs/{page}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(own), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else ""


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{UNDER}/{path}"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the linked files, and those that added pages link to."""
    waiting = [(file.src_uri, Path(str(file.abs_src_path))) for file in files.documentation_pages()]
    waiting += [(f"{UNDER}/{name}", ROOT / name) for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    while waiting:
        page, source = waiting.pop()
        if page.startswith(f"{UNDER}/") and files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(source)))
        if not page.endswith(".md"):
            continue
        for _, link, _ in LINK.findall(source.read_text(encoding="utf-8")):
            path = repository_path(page, link)
            if path and (ROOT / path).is_file() and files.get_file_from_path(site_path(path)) is None:
                waiting.append((site_path(path), ROOT / path))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The links of a page, from where it is in the site."""
    here = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path = repository_path(here, found[2])
        if not path:
            return found[0]
        return found[1] + posixpath.relpath(site_path(path), posixpath.dirname(here) or ".") + found[3]

    return LINK.sub(moved, markdown)
