"""A hook of mkdocs: pages link to files of the repository as they lie there, and find them in the site; nav may have patterns.

A page of `docs/` may link to `../scripts/slurm.sbatch`, as a reader of the repository wants it. In the site that file is copied to
`files/scripts/slurm.sbatch`, and the link leads there. `CONTRIBUTING.md` and `CHANGELOG.md`, which lie above `docs/`, are pages of
the site too. A link to what does not exist stays as it is, so that mkdocs warns of it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that lie elsewhere in the repository."""
_LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """A pattern in nav stands for all pages that it matches, in the order of their names."""
    config["nav"] = [_expanded(entry) for entry in config["nav"]]
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {name: _expanded(inner) for name, inner in entry.items()}
    if not isinstance(entry, list):
        return entry
    found = []
    for each in entry:
        if isinstance(each, str) and "*" in each:
            found += sorted(page.relative_to(DOCS).as_posix() for page in DOCS.glob(each))
        else:
            found.append(_expanded(each))
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside of `docs/` and is linked to."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES)]
    for page in pages:
        for match in _LINK.finditer(page.read_text(encoding="utf-8")):
            place = _place(_repository_path(page.relative_to(ROOT).as_posix(), match[2]))
            if place.startswith("files/") and files.get_file_from_path(place) is None:
                source_path = str(ROOT / place.removeprefix("files/"))
                files.append(File.generated(config, place, abs_src_path=source_path))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    target = page.file.src_uri
    source = next((path for path, place in PAGES.items() if place == target), f"docs/{target}")

    def turned(match: re.Match[str]) -> str:
        place = _place(_repository_path(source, match[2]))
        link = posixpath.relpath(place, posixpath.dirname(target)) if place else match[2]
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return _LINK.sub(turned, markdown)


def _repository_path(page: str, link: str) -> str:
    """Return the path that a link of a page leads to, from the top of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _place(path: str) -> str:
    """Return the place of a file of the repository in the site; empty for what there is not."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if (ROOT / path).is_file() else ""
