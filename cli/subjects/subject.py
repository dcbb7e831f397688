"""The interface of what verbs show: a recording that goes on, or what captures hold."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.options.declared import For, Given, Of
from iaprof.cli.options.shown import Comparison, Intervals, StackShape

if TYPE_CHECKING:
    from iaprof.cli.interactive.contents import Contents
    from iaprof.cli.terminal.answers import Answers
    from iaprof.cli.terminal.destination import Destination
    from iaprof.formats.writers.registry import Format


@dataclass(frozen=True)
class Subject(ABC):
    """What a verb shows.

    Attributes:
        verb: the verb's name, with which summaries begin.
        of: what options have to be for.
    """

    verb: str
    of: ClassVar[Of]

    def refusal(self, option: str, what: For) -> str:
        """Says that an option is not taken; `what` takes it."""
        return what.otherwise or self._refusal(option, what.of)

    @abstractmethod
    def _refusal(self, option: str, of: Of) -> str: ...

    def check(self, given: Given) -> None:
        """Checks that all options that the user gave are taken.

        Raises:
            UsageError: one is not.
        """
        given.refuse(self.of, self.refusal)

    @abstractmethod
    def table(self, by: str, limit: int, intervals: Intervals, answers: Answers, quiet: bool) -> None:
        """Prints or writes what `iaprof top` shows.

        Args:
            by: what a row is.
            limit: maximum number of rows; 0: all.
            intervals: the intervals and groups that have tables of their own.
            answers: where the table goes.
            quiet: print no summary.

        Raises:
            IaprofError: it cannot be read, or filters select nothing.
            UsageError: it has no rows of that kind, or lacks something that the options name.
        """


class Recorded(Subject):
    """What captures hold."""

    @abstractmethod
    def output_mode(self, output: Path, force: bool) -> int:
        """Checks that a report may be written to a file, and over no capture; returns the file's mode.

        Raises:
            IaprofError: it may not.
        """

    @abstractmethod
    def view(self, quiet: bool) -> None:
        """Shows it on the terminal: a table to look through."""

    @abstractmethod
    def export(self, format_: Format, shape: StackShape, destination: Destination, quiet: bool) -> None:
        """Writes it in an output format.

        Args:
            format_: the format.
            shape: the shape of stacks.
            destination: where the report goes.
            quiet: print no summary.

        Raises:
            IaprofError: it cannot be read or written, or filters select nothing.
            UsageError: the format does not show it, or it lacks something that the options name.
        """

    @abstractmethod
    def tree(self, by: str, shape: StackShape, quiet: bool) -> None:
        """Shows it in the interactive view until the user quits, then prints the summary.

        Args:
            by: what the verb shows rows of.
            shape: whether the tree is inverted, and where source files are.
            quiet: print no summary.

        Raises:
            IaprofError: it cannot be read, or filters select nothing.
            UsageError: it lacks something that the options name.
        """

    @abstractmethod
    def difference(
        self, after: Self, by: str, limit: int | None, comparison: Comparison, answers: Answers, quiet: bool
    ) -> None:
        """Prints or writes what changed.

        Args:
            after: what it is compared with.
            by: what a row is.
            limit: maximum number of rows; 0: all; None: what suits the format.
            comparison: how they are compared.
            answers: where the difference goes.
            quiet: print no summary.

        Raises:
            IaprofError: one cannot be read, or filters select nothing.
            UsageError: it has no rows of that kind, or lacks something that the options name.
        """

    def tree_of_difference(self, after: Self, by: str, comparison: Comparison, quiet: bool) -> None:
        """Shows what changed in the interactive view until the user quits, then prints a summary of each side.

        Args:
            after: what it is compared with.
            by: what the verb shows rows of.
            comparison: how they are compared.
            quiet: print no summary.

        Raises:
            IaprofError: one cannot be read.
            UsageError: the view shows no differences of this, or one lacks something that the options name.
        """
        raise UsageError("--interactive compares two captures of stalls: leave it out")


def check_tree(given: Given) -> None:
    """Checks that the interactive view can be opened, and that it takes all options that the user gave.

    Raises:
        UsageError: it cannot, or one is not taken.
        IaprofError: textual is not installed.
    """
    given.refuse(Of.TREE, lambda option, _: f"{option} has no effect on the interactive view: leave out one of them")
    check_terminal("--interactive")


def check_terminal(option: str) -> None:
    """Checks that there is what an interactive view needs.

    Raises:
        UsageError: input, output or errors are no terminal.
        IaprofError: textual is not installed.
    """
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError(f"{option} needs a terminal for its input, output and errors")
    if find_spec("textual") is None:
        raise IaprofError("the interactive view needs textual: install it with pip install 'iaprof[interactive]'")


def grouping_of(by: str) -> str:
    """Returns the tree that shows best what a value of --by means, one of browsing.levels.GROUPINGS.

    Raises:
        UsageError: there is none.
    """
    found = _GROUPINGS.get(by)
    if found is None:
        raise UsageError(f"the interactive view has no tree of --by {by}: choose from {', '.join(_GROUPINGS)}")
    return found


_GROUPINGS = {name: name for name in ("kernel", "line", "instruction", "reason", "process", "launcher", "stack")} | {
    "function": "kernel",
    "operator": "stack",
}


def browse(contents: Contents) -> None:
    """Shows contents in the interactive view until the user quits."""
    from iaprof.cli.interactive.view import View

    View(contents).run()
