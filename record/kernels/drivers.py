"""The drivers found when recording begins, and the injected library for a command whose driver needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from iaprof.basics.errors import IaprofError
from iaprof.bpf.driver_layout import known_builds
from iaprof.bpf.probes.libraries import SYSTEM_FOLDERS, Libraries, Outcome
from iaprof.formats.header.launch_warnings import driver_at
from iaprof.record.kernels.injection import Injection
from iaprof.record.options import LaunchesBy


def installed(libraries: Libraries, for_command: bool) -> Iterator[Outcome]:
    """Puts probes into the drivers in the folders where programs find them; yields the outcomes.

    Args:
        libraries: probes them.
        for_command: includes drivers that our environment names.
    """
    env = os.environ if for_command else {}
    yield from libraries.installed((*SYSTEM_FOLDERS, *filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))))
    files = env.get("ZE_ENABLE_ALT_DRIVERS", "").split(",") + env.get("OCL_ICD_FILENAMES", "").split(":")
    for path in filter(None, [*files, env.get("OCL_ICD_VENDORS", "")]):
        yield from libraries.take(Path(path))


class Drivers:
    """The outcomes of probing drivers, and the injection, if there is one."""

    def __init__(self, libraries: Libraries, launches: LaunchesBy, has_command: bool) -> None:
        """Probes the drivers; prepares the injection for a command that needs it.

        Raises:
            IaprofError: the user wants launches by injection only, and the library is missing.
        """
        self.injection: Injection | None = None
        self.warning = ""  # why a library is injected that was not asked for, or cannot be
        injects = launches is LaunchesBy.INJECT
        if injects:
            libraries.not_injected = frozenset()
        outcomes = list(installed(libraries, has_command))
        self.outcomes = [outcome for outcome in outcomes if not outcome.unused]
        if launches is LaunchesBy.AUTO and has_command:
            unknown = [outcome for outcome in outcomes if not outcome.probes]
            injects = bool(unknown)
        if not injects:
            return
        known = frozenset(outcome.build_id for outcome in outcomes if outcome.probes)
        if launches is LaunchesBy.AUTO:
            known |= known_builds() - {outcome.build_id for outcome in unknown}  # of drivers that are mapped later
            # Where only OpenCL's driver is unknown, Level Zero's needs no injection, and the other way round.
            known |= {driver_at(outcome.path) for outcome in outcomes} - {
                driver_at(outcome.path) for outcome in unknown
            }
            known -= {""}
        try:
            self.injection = Injection(known)
        except IaprofError as error:
            if launches is LaunchesBy.INJECT:
                raise
            self.warning = f"iaprof cannot put its library into the command: {error}"
            return  # each driver's problem names other ways
        if launches is LaunchesBy.AUTO:
            why = unknown[0].problem.partition(": run ")[0]
            self.warning = f"{unknown[0].path}: {why}; the command is started as with --launches=inject"
        libraries.not_injected = known
        self.outcomes = [outcome for outcome in self.outcomes if outcome.probes]
        self.outcomes += libraries.take(self.injection.library)

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Returns the command's environment: this one, or one with the injected library."""
        return self.injection.environment(environment) if self.injection else environment

    def close(self) -> None:
        """Removes the injected library."""
        if self.injection:
            self.injection.close()
