"""What `mkdocs build` does beside mkdocs.yml.

Pages that are files of the repository's root come in by their names in `PAGES`. Links are written for readers
of the repository; here they become links to pages, or to the repository's host, or text. If the text of a
link is the name of a file, it becomes the title of that page. At the end, what a page would fetch from
elsewhere is an error.

The repository's host is REPOSITORY_URL, or else where git has the repository from.
"""

from __future__ import annotations

import functools
import logging
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "license.md": "LICENSE",
}
PICTURES = "pictures.md"
FILE_NAME = re.compile(r"[\w/.]+\.md")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)+)\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
REFERENCE = {
    name
    for path in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^::: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
} - {"pipecomm_ext.distributed"}  # a module, without a heading of its own
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^"')\s]+"""
)


def on_startup(**_) -> None:
    """The list of all schedules is known at run time only; docs/site/public_names.py adds what it names."""
    for name in ("griffe", "mkdocs.plugins.griffe"):
        logging.getLogger(name).addFilter(lambda record: "Unsupported item in" not in record.getMessage())


def on_config(config):
    """The link to the repository that each page has."""
    if not config.repo_url and (url := _remote_url()):
        config.repo_url = url
        config.repo_name = url.removeprefix("https://").partition("/")[2] or "Repository"
    return config


def _remote_url() -> str:
    """The address of the remote `origin` if it is one of the web, else nothing."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    try:
        url = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
    url = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", url).removesuffix(".git")
    return url if url.startswith("https://") and "@" not in url else ""


@functools.cache
def title_of(source: str) -> str:
    """The first heading of a file of the repository."""
    text = (ROOT / source).read_text(encoding="utf-8")
    return re.search(r"^# (.+)$", text, re.MULTILINE)[1]


def on_files(files, config):
    for uri, name in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        if uri == "license.md":
            text = f"# Licence\n\n```text\n{text}```\n"
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if page.parent is None:  # there is nothing beside it to go to
        page.meta["hide"] = ["navigation"]
    source = PAGES.get(uri, f"docs/{uri}")

    def resolved(link: str) -> str | None:
        """The link as seen from this page; None: it leads to nothing that the site has."""
        if "://" in link or link.startswith(("#", "mailto:")):
            return link
        path, hash_mark, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = next((page for page, name in PAGES.items() if name == path), path.removeprefix("docs/"))
        if files.get_file_from_path(target) is None:
            if not (ROOT / path).exists():
                return link  # for mkdocs to complain about
            return f"{config.repo_url.rstrip('/')}/tree/main/{path}" if config.repo_url else None
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + hash_mark + anchor

    def link(match: re.Match) -> str:
        target, text = resolved(match[2]), match[1]
        if FILE_NAME.fullmatch(text) and "://" not in match[2]:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2].partition("#")[0]))
            if (ROOT / path).exists():
                text = title_of(path)
        return text if target is None else f"[{text}]({target})"

    def image(match: re.Match) -> str:
        return f"![{match[1]}]({resolved(match[2]) or match[2]})"

    if uri == "api/index.md":
        before, heading, table = markdown.partition("\n## Names\n")
        table = "\n".join(map(linked_to_reference, table.split("\n")))
        markdown = "".join([before, heading, table])
    parts = FENCED.split(markdown)
    parts[::2] = [IMAGE.sub(image, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def linked_to_reference(line: str) -> str:
    """A row of the table of names with each name as a link to its place in the reference."""
    words = CODE.findall(line)
    if not line.startswith("| ") or not words:
        return line
    module = words[0].removeprefix("pipecomm_ext.").split("(")[0]
    places = [f"pipecomm_ext.{module}", "pipecomm_ext", f"pipecomm_ext.{module}.transformers"]

    def link(match: re.Match) -> str:
        name = match[1].split("(")[0]
        if name.startswith("."):
            return f"[{match[0]}][pipecomm_ext.{'StageRelay' if name == '.relay' else 'Communicator'}]"
        place = next((place for place in places if f"{place}.{name}" in REFERENCE), None)
        return f"[{match[0]}][{place}.{name}]" if place else match[0]

    return CODE.sub(link, line)


def on_post_build(config) -> None:
    site = Path(config.site_dir)
    found = [
        f"{path.relative_to(site)}: {match[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css", ".svg")
        for match in FETCHED.finditer(path.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("these pages fetch from elsewhere:\n" + "\n".join(found))
