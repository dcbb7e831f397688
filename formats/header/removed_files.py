"""How many earlier files of a recording's name were removed, to keep within `--max-files` and `--max-total`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from iaprof.basics.quantities import counted, in_bytes

MEMBER = "removed_files"
"""The header member: what was removed since the recording began, as far as is known when the file ends."""
_MOST = 1 << 62


@dataclass(frozen=True)
class RemovedFiles:
    """A number of files, and their bytes."""

    files: int = 0
    bytes: int = 0

    def with_file(self, bytes_: int) -> RemovedFiles:
        """Returns these and one more."""
        return RemovedFiles(self.files + 1, self.bytes + bytes_)

    def to_json(self) -> dict[str, int]:
        """Returns the value of the header member."""
        return asdict(self)

    def sentence(self) -> str:
        """Returns the number for people."""
        return f"{counted(self.files, 'earlier file')}, {in_bytes(self.bytes)}, to make room"

    @classmethod
    def from_header(cls, header: dict[str, Any]) -> RemovedFiles | None:
        """Reads a header (untrusted); None if it does not say, or nothing was removed."""
        match header.get(MEMBER):
            case {"files": int(files), "bytes": int(bytes_)} if 0 < files < _MOST and 0 <= bytes_ < _MOST:
                return cls(int(files), int(bytes_))
        return None
