"""What `make docs` adds to the site's generator: the order of its pages, links out of it, and whole words in tables."""

import re
from pathlib import Path
from typing import Any


def on_nav(nav: Any, config: Any, **_: Any) -> Any:
    """Order pages as docs/README.md names them; the generator has them by the alphabet, decisions before the guide."""
    named = re.findall(r"\]\(([\w/.-]+\.md)", Path(config.docs_dir, "README.md").read_text(encoding="utf-8"))
    places = {name: place for place, name in reversed(list(enumerate(["README.md", *named])))}

    def place(item: Any) -> tuple[bool, int]:
        below = [place(each)[1] for each in item.children or ()]
        return item.is_section, min(below) if below else places.get(item.file.src_uri, len(places))

    def order(items: list[Any]) -> None:
        items.sort(key=place)
        for each in items:
            if each.children:
                order(each.children)

    order(nav.items)
    return nav


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name the pages that the site does not have, where others link to them."""
    return re.sub(r"\[([^]]+)]\((?:\.\./)*((?:decisions|benchmarks)[\w/.-]*)(?:#[^)]*)?\)", _named, markdown)


def _named(found: re.Match[str]) -> str:
    path = f"docs/{found[2]}"
    return f"`{path}`" if found[1].strip("`") == path else f"{found[1]} (`{path}`)"


def on_page_content(html: str, **_: Any) -> str:
    """Show code in tables as it is typed: `A\\|B`, as a cell needs it, becomes `A|B`; no line breaks in `--option`."""
    return re.sub(
        r"<td[ >].*?</td>", lambda cell: re.sub(r"<code>.*?</code>", _code, cell[0], flags=re.S), html, flags=re.S
    )


def _code(found: re.Match[str]) -> str:
    return re.sub(r"(?<![\w-])--[a-z][\w-]*", r'<span class="whole">\g<0></span>', found[0].replace("\\|", "|"))
