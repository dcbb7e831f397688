"""What stages have to say: sentences with counts, each once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Level(IntEnum):
    """How important a message is."""

    NOTE = 0
    WARNING = 1


@dataclass(frozen=True)
class Message:
    """A sentence about a trace."""

    level: Level
    stage: str  # its identifier, such as OVC
    text: str


@dataclass
class Messages:
    """The messages of a trace, in order."""

    said: list[Message] = field(default_factory=list)

    def warn(self, stage: str, text: str) -> None:
        """Adds a warning."""
        self.said.append(Message(Level.WARNING, stage, text))

    def note(self, stage: str, text: str) -> None:
        """Adds a finding."""
        self.said.append(Message(Level.NOTE, stage, text))
