"""What the documentation's site needs beyond MkDocs: its hooks, named in ``mkdocs.yml``.

- Pages link to files of the repository (results, sources, folders), as they do where the repository is read. Each such
  file becomes a part of the site, in its folder ``repository``, so that every link leads somewhere.
- Names in docstrings are in Sphinx's way (``:func:`name```): they are shown as code.
- A page that would load something from another host is an error, and so is a link from the root of a host: the site
  opens from a folder, and may lie below another one.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

from loads import foreign  # beside this file: MkDocs puts its folder on the path
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
HOME = "repository"
# A link, or code, in which nothing is one; what begins first counts, so that a link's text may hold code.
LINK = re.compile(
    r"(?P<before>!?\[(?:[^\]\[]|\[[^\]]*\])*\]\()(?P<target>[^)\s#]+)(?P<after>(?:#[^)\s]*)?\))"
    r"|^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[ \t]*$|`+[^`\n]*`+",
    re.DOTALL | re.MULTILINE,
)
INCLUDED = re.compile(r"<!-- included: (\S+) -->")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".cpp": "cpp"}
ROLE = re.compile(r":(?:func|class|data|mod|meth|attr|exc):<code>~?([\w.]*?)(\w+)</code>")
FROM_ROOT = re.compile(r"<a\b[^>]*\bhref=\"?/[^\">]*")
ADDED: dict[str, set[str]] = {}
"""Language -> the files of the repository that its pages lead to."""


def target_of(page: str, link: str) -> str | None:
    """The repository's file or folder that a link of a file leads to; None for anything else.

    Args:
        page: path of the file with the link, in the repository.
        link: without its anchor.
    """
    if re.match(r"[a-z]+:|/|mailto", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(link)))
    return None if path.startswith("..") or not (ROOT / path).exists() else path


def uri_of(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if path.startswith("docs/") and path != "docs":
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{HOME}/{path}/index.md"
    if Path(path).suffix in (".json", ".svg", ".png"):
        return f"{HOME}/{path}"
    return f"{HOME}/{path}" if path.endswith(".md") else f"{HOME}/{path}.md"


def rewritten(text: str, page: str, uri: str, language: str) -> str:
    """The text of a file with its links as the site has them.

    Args:
        page: path of the file, in the repository.
        uri: where it is in the site's sources.
        language: of the site. A file of the repository names English pages; where there is another page in the place of
            one, its headings have other names.
    """

    def link(match: re.Match[str]) -> str:
        path = target_of(page, match["target"]) if match["target"] else None
        if path is None:
            return match[0]
        to = posixpath.relpath(uri_of(path), posixpath.dirname(uri) or ".")
        translated = uri.startswith(f"{HOME}/") and uri_of(path).startswith("en/") and language != "en"
        return f"{match['before']}{to}{')' if translated else match['after']}"

    return LINK.sub(link, text)


def links_of(text: str, page: str) -> list[str]:
    """The files of the repository, outside its documentation, that a text links to."""
    paths = [target_of(page, match["target"]) for match in LINK.finditer(text) if match["target"]]
    return [path for path in paths if path is not None and not uri_of(path).startswith(("en/", "zh/"))]


def included(text: str) -> tuple[str, str | None]:
    """The text with the file of the repository that a comment names in its place, and that file."""
    match = INCLUDED.search(text)
    if match is None:
        return text, None
    whole = (ROOT / match[1]).read_text(encoding="utf-8")
    return text.replace(match[0], whole.partition("\n")[2]), match[1]  # its title is the page's


def content_of(path: str) -> str | None:
    """A file or folder as a page; None for what is shown as it is."""
    where, hidden = ROOT / path, "---\nsearch:\n  exclude: true\n---\n\n"
    if where.is_dir():
        files = sorted(p.relative_to(where).as_posix() for p in where.rglob("*") if p.is_file())
        listed = [name for name in files if "__pycache__" not in name and not name.endswith((".pyc", ".so"))]
        return f"{hidden}# {path}\n\n" + "\n".join(f"- [{name}]({name})" for name in listed) + "\n"
    if where.suffix in (".json", ".svg", ".png"):
        return None
    text = where.read_text(encoding="utf-8")
    if where.suffix == ".md":
        return hidden + text
    return f"{hidden}# {path}\n\n````{LANGUAGES.get(where.suffix, 'text')}\n{text}\n````\n"


def on_config(config: Any) -> Any:
    """Headings are named as GitHub names them, Chinese ones too."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


@event_priority(-200)  # after the languages have got their files
def on_files(files: Files, config: Any) -> Files:
    """Adds the files of the repository that pages link to, and those that these link to."""
    plugin = config.plugins["i18n"]
    language = plugin.current_language
    waiting: list[str] = []
    for file in files.documentation_pages():
        text, source = included((ROOT / "docs" / file.src_uri).read_text(encoding="utf-8"))
        waiting += links_of(text, source or f"docs/{file.src_uri}")
    added: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in added:
            continue
        added.add(path)
        content = content_of(path)
        if content is None:
            file = File.generated(config, uri_of(path), abs_src_path=str(ROOT / path))
        else:
            file = File.generated(config, uri_of(path), content=content)
            base = f"{path}/x" if (ROOT / path).is_dir() else path
            waiting += links_of(content, base) if path.endswith(".md") or (ROOT / path).is_dir() else []
        # What the plug-in for languages wants to know of a file; these are the same in all.
        place = {other: posixpath.join("" if other == "en" else other, file.dest_uri) for other in plugin.all_languages}
        there = {other: SimpleNamespace(url=quote(url)) for other, url in place.items()}
        file.dest_uri = place[language]
        vars(file).update(alternates=there, locale=language, locale_alternate_of=language, localization=None)
        vars(file)["norm_src_uri"] = file.src_uri
        files.append(file)
    ADDED[language] = added
    for other, found in ADDED.items():
        if found != added:
            raise PluginError(f"pages in {language} and {other} lead to other files: {sorted(found ^ added)}")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them; in the place of ``<!-- included: FILE -->`` the file."""
    uri, language = page.file.src_uri, config.plugins["i18n"].current_language
    if not uri.startswith(f"{HOME}/"):
        markdown, source = included(markdown)
        return rewritten(markdown, source or f"docs/{uri}", uri, language)
    path = uri.removeprefix(f"{HOME}/")
    if path.endswith("/index.md") and (ROOT / path).parent.is_dir() and not (ROOT / path).exists():
        return rewritten(markdown, path, uri, language)
    return rewritten(markdown, path, uri, language) if (ROOT / path).exists() else markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Sphinx's roles as code."""
    return ROLE.sub(r"<code>\2</code>", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing may be loaded from elsewhere, and every link be one between pages."""
    found = foreign(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")
    absolute = FROM_ROOT.search(output)
    if absolute:
        raise PluginError(f"{page.file.src_uri} has a link that leads nowhere from a folder: {absolute[0]}")
    return output
