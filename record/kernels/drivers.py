"""The drivers that are there when recording begins, and what is put into a command whose driver has no other way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from iaprof.basics.errors import IaprofError
from iaprof.bpf.probes.driver_layout import known_builds
from iaprof.bpf.probes.libraries import SYSTEM_FOLDERS, Libraries, Outcome
from iaprof.formats.header.no_launches import driver_at
from iaprof.record.kernels.injection import Injection
from iaprof.record.options import LaunchesBy


def installed(libraries: Libraries, for_command: bool) -> Iterator[Outcome]:
    """Takes the drivers that lie where programs find them.

    Args:
        libraries: takes them.
        for_command: those that our environment leads to, too.
    """
    env = os.environ if for_command else {}
    yield from libraries.installed((*SYSTEM_FOLDERS, *filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))))
    files = env.get("ZE_ENABLE_ALT_DRIVERS", "").split(",") + env.get("OCL_ICD_FILENAMES", "").split(":")
    for path in filter(None, [*files, env.get("OCL_ICD_VENDORS", "")]):
        yield from libraries.take(Path(path))


class Drivers:
    """What became of the drivers, and what is put into the command."""

    def __init__(self, libraries: Libraries, launches: LaunchesBy, has_command: bool) -> None:
        """Takes the drivers; makes ready what is put into a command that needs it.

        Raises:
            IaprofError: launches are to be had that way only, and the library is not there.
        """
        self.injection: Injection | None = None
        self.remark = ""  # why something is put into the command that was not asked for, or cannot be
        wanted = launches is LaunchesBy.INJECT
        if wanted:
            libraries.not_injected = frozenset()
        found = list(installed(libraries, has_command))
        self.outcomes = [outcome for outcome in found if not outcome.unused]
        if launches is LaunchesBy.AUTO and has_command:
            unknown = [outcome for outcome in found if not outcome.probes]
            wanted = bool(unknown)
        if not wanted:
            return
        known = frozenset(outcome.build_id for outcome in found if outcome.probes)
        if launches is LaunchesBy.AUTO:
            known |= known_builds() - {outcome.build_id for outcome in unknown}  # of drivers that are met later
            # Where only the driver of OpenCL is unknown, that of Level Zero needs no library, and the other way round.
            known |= {driver_at(outcome.path) for outcome in found} - {driver_at(outcome.path) for outcome in unknown}
            known -= {""}
        try:
            self.injection = Injection(known)
        except IaprofError as error:
            if launches is LaunchesBy.INJECT:
                raise
            self.remark = f"nothing can be put into the command: {error}"
            return  # each driver's problem says what else can be done
        if launches is LaunchesBy.AUTO:
            why = unknown[0].problem.partition(": run ")[0]
            self.remark = f"{unknown[0].path}: {why}; the command is started as by --launches=inject"
        libraries.not_injected = known
        self.outcomes = [outcome for outcome in self.outcomes if outcome.probes]
        self.outcomes += libraries.take(self.injection.library)

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """The environment that the command gets: this one, or one in which something is put into it."""
        return self.injection.environment(environment) if self.injection else environment

    def close(self) -> None:
        """Takes away what was put there for the command."""
        if self.injection:
            self.injection.close()
