"""pprof's profile.proto, gzipped (https://github.com/google/pprof)."""

from __future__ import annotations

from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape
from iaprof.formats.writers.writer import Writer


class Pprof(Writer):
    """The format of `pprof`, and of the services that collect profiles."""

    name = "pprof"
    extensions = (".pb.gz", ".pprof")
    description = "profile.proto with lines and labels, for pprof"
    binary = True
    readable = False

    def write(self, export: Export, shape: Shape, out: IO[bytes]) -> None:
        """Writes the profile of the stalls, or that of the CPU samples."""
        # Imported here, as other verbs need neither NumPy nor protobuf for knowing of this format.
        from iaprof.formats.writers.pprof_samples import write_profile

        write_profile(export, shape, out)
