"""A screen of lines to look through: an annotated kernel, or the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Static


class Lines(ScrollView, can_focus=True):
    """Lines with SGR sequences, of which only those on the screen are drawn."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
        Binding("space", "page_down", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G", "scroll_end", show=False),
    ]

    def __init__(self, make: Callable[[int], Sequence[str]], first: Callable[[Sequence[str]], int]) -> None:
        """Args: `make` returns the lines for a width in cells; `first` the number of the line to begin with."""
        super().__init__()
        self._make, self._first = make, first
        self.texts: Sequence[str] = ()

    def on_resize(self, event: events.Resize) -> None:
        """Makes the lines for this width."""
        is_first = not self.texts
        width = event.size.width - 1  # less the scroll bar, which is there from the next drawing on
        self.texts = self._make(width)
        self.virtual_size = Size(width, len(self.texts))
        if is_first:
            line = max(self._first(self.texts) - event.size.height // 2, 0)
            self.scroll_to(y=line, animate=False, force=True, immediate=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draws a line of the widget."""
        number, width = self.scroll_offset.y + y, self.size.width
        if number >= len(self.texts):
            return Strip.blank(width, self.rich_style)
        segments = Text.from_ansi(self.texts[number]).render(self.app.console)
        strip = Strip([each for each in segments if each.text != "\n"])
        return strip.adjust_cell_length(width).apply_style(self.rich_style)


class TextScreen(Screen[None]):
    """Lines with a title above and keys below."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,left", "dismiss", "Back"),
        Binding("ctrl+c", "app.quit", show=False),
    ]

    def __init__(
        self,
        title: str,
        make: Callable[[int], Sequence[str]],
        first: Callable[[Sequence[str]], int] = lambda lines: 0,
    ) -> None:
        """Args: the title, and those of Lines."""
        super().__init__()
        self._title, self._make, self._first = title, make, first

    def compose(self) -> ComposeResult:
        """The title, the lines and the keys."""
        yield Static(self._title, classes="title", markup=False)
        yield Lines(self._make, self._first)
        yield Footer()
