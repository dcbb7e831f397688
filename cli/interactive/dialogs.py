"""Screens over the tree: dialogs that ask for a text or for some of the stall reasons, and a text to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, SelectionList, Static
from textual.widgets.selection_list import Selection

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError


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


_FRAME = """
    align: center middle;
    Vertical { width: 64; max-width: 95%; height: auto; max-height: 90%; border: round $primary; padding: 0 1; }
    Static { height: auto; }
"""


class Prompt(ModalScreen[str | None]):
    """Asks for a text; None if the user escapes."""

    CSS = f"Prompt {{ {_FRAME} }}"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]

    def __init__(self, question: str, value: str = "", check: Callable[[str], object] = str) -> None:
        """Args: the question; the text that is there at first; what raises UsageError if the text is wrong."""
        super().__init__()
        self._question, self._value, self._check = question, value, check

    def compose(self) -> ComposeResult:
        """The question, the text and room for what is wrong with it."""
        with Vertical():
            yield Static(self._question, markup=False)
            yield Input(self._value)
            yield Static("", id="wrong", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Ends the dialog, unless the text is wrong."""
        try:
            self._check(event.value)
        except UsageError as error:
            self.query_one("#wrong", Static).update(str(error))
            return
        self.dismiss(event.value)


class ReasonChooser(ModalScreen[frozenset[str] | None]):
    """Asks for stall reasons; None if the user escapes."""

    CSS = f"ReasonChooser {{ {_FRAME} SelectionList {{ height: auto; max-height: 20; }} }}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("enter", "accept", "Show these", priority=True),
        Binding("a", "all", "All"),
        Binding("o", "only", "Only this one"),
    ]

    def __init__(self, reasons: Sequence[tuple[str, str]], chosen: frozenset[str]) -> None:
        """Args: the reasons with their samples as a text; which are chosen at first."""
        super().__init__()
        self._reasons, self._chosen = reasons, chosen

    def compose(self) -> ComposeResult:
        """The list of reasons."""
        with Vertical():
            yield Static("Space: choose  a: all  o: only this one  Enter: show these", markup=False)
            yield SelectionList(
                *(
                    Selection(Content(f"{clean(name):12} {text:>13}"), name, name in self._chosen)
                    for name, text in self._reasons
                )
            )

    def action_accept(self) -> None:
        """Ends the dialog with what is chosen."""
        self.dismiss(frozenset(self._list.selected))

    def action_all(self) -> None:
        """Chooses all reasons."""
        self._list.select_all()

    def action_only(self) -> None:
        """Chooses the reason with the cursor alone."""
        if self._list.highlighted is not None:
            self._list.deselect_all()
            self._list.select(self._list.get_option_at_index(self._list.highlighted))

    @property
    def _list(self) -> SelectionList[str]:
        return self.query_one(SelectionList)
