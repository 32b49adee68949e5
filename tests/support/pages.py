"""Pages as tests look at them."""

from __future__ import annotations

import html.parser
import re

HOSTILE = "<script>alert(1)</script> & \"quotes\" 'single' \x1b[31mred\x00"


class Parsed(html.parser.HTMLParser):
    """The tags and the text of a page. Raises AssertionError where a tag closes another."""

    _VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join(self.text.split())


def check_page(page: str) -> Parsed:
    """Every tag is closed, nothing is requested, only the page's own script runs, no control character is left."""
    parsed = Parsed(page)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "onload", "onclick"} & attributes.keys()
    assert "http" not in re.sub(r"http-equiv", "", page)
    assert page.count("<script>") == 1
    assert "default-src 'none'" in page
    assert not set("\x1b\x00") & set(page)
    return parsed
