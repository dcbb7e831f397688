"""The drivers found when recording begins, and the injected library for a command whose driver needs it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import is_untrusted, make_public_folder, open_regular, others_write
from iaprof.bpf.driver_layout import known_builds
from iaprof.bpf.probes.libraries import SYSTEM_FOLDERS, VULKAN, Libraries, Outcome, is_vulkan
from iaprof.formats.header.launch_warnings import driver_at
from iaprof.record.options import LaunchesBy


def installed(libraries: Libraries, for_command: bool) -> Iterator[Outcome]:
    """Puts probes into the drivers in the folders where programs find them; yields the outcomes.

    Args:
        libraries: probes them.
        for_command: includes drivers that our environment names.
    """
    env = os.environ if for_command else {}
    yield from libraries.installed(_folders(env))
    for driver in manifests_drivers(env):
        yield from libraries.take(driver)
    files = env.get("ZE_ENABLE_ALT_DRIVERS", "").split(",") + env.get("OCL_ICD_FILENAMES", "").split(":")
    for path in filter(None, [*files, env.get("OCL_ICD_VENDORS", "")]):
        yield from libraries.take(Path(path))


_MANIFESTS = ("/usr/share", "/usr/local/share", "/etc", "/etc/xdg", "/usr/local/etc", "/run/opengl-driver/share")
_MOST_MANIFESTS = 64
_MOST_MANIFEST_BYTES = 1 << 16


def vulkan_drivers(for_command: bool) -> Iterator[Path]:
    """Yields the files that Vulkan's loader may load as Mesa's driver, each once: those of `installed`."""
    env: Mapping[str, str] = os.environ if for_command else {}
    seen = set()
    for path in (*(Path(each, VULKAN) for each in _folders(env)), *manifests_drivers(env)):
        if os.path.exists(path) and (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield path


def _folders(env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the folders where programs with this environment find libraries."""
    return (*SYSTEM_FOLDERS, *filter(None, env.get("LD_LIBRARY_PATH", "").split(":")))


def manifests_drivers(env: Mapping[str, str]) -> Iterator[Path]:
    """Yields Mesa's drivers that the manifests of Vulkan's drivers name by a path; only root's manifests count.

    Args:
        env: the command's environment.
    """
    folders = [*_MANIFESTS, *env.get("XDG_DATA_DIRS", "").split(":"), *env.get("XDG_CONFIG_DIRS", "").split(":")]
    files = [Path(each, "vulkan/icd.d") for each in dict.fromkeys(folders) if os.path.isabs(each)]
    for name in ("VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES", "VK_ICD_FILENAMES"):
        files += [Path(each) for each in env.get(name, "").split(":") if os.path.isabs(each)]
    named = (path for each in files for path in (sorted(each.glob("*.json")) if os.path.isdir(each) else [each]))
    for manifest in itertools.islice(named, _MOST_MANIFESTS):
        library = _library_of(manifest)
        if os.path.basename(library) == VULKAN != library:  # a name without a folder is that of the system's
            path = manifest.parent / library
            if os.path.exists(path):  # False for what cannot be a path
                yield path


def _library_of(manifest: Path) -> str:
    """Returns the `library_path` of a manifest; empty if it has none."""
    try:
        with open_regular(str(manifest)) as file:
            if is_untrusted(os.fstat(file.fileno())):
                return ""
            library = json.loads(file.read(_MOST_MANIFEST_BYTES))["ICD"]["library_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return library if isinstance(library, str) and "\0" not in library else ""


class Drivers:
    """The outcomes of probing drivers, and the injection, if there is one."""

    def __init__(
        self, libraries: Libraries, launches: LaunchesBy, has_command: bool, injects_cuda: bool = False
    ) -> None:
        """Probes the drivers; prepares the injection for a command that needs it.

        Args:
            libraries: probes them.
            launches: how the user wants launches recorded.
            has_command: a command is started.
            injects_cuda: the command gets the library that samples NVIDIA's GPUs.

        Raises:
            IaprofError: the user wants launches by injection only, and the library is missing.
        """
        self.injection: Injection | None = None
        self.cuda: CudaInjection | None = None
        self.warning = ""  # why a library is injected that was not asked for, or cannot be
        injects = launches is LaunchesBy.INJECT
        if injects:
            libraries.not_injected = frozenset()
        libraries.cuda_is_injected = injects_cuda
        outcomes = list(installed(libraries, has_command))
        self.outcomes = [outcome for outcome in outcomes if not outcome.unused]
        if injects_cuda:
            self.cuda = CudaInjection()
            self.outcomes += libraries.take(self.cuda.library)
        if launches is LaunchesBy.AUTO and has_command:
            unknown = [outcome for outcome in outcomes if not outcome.probes and not is_vulkan(outcome.path)]
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
        """Returns the command's environment: this one, or one with the injected libraries."""
        if self.cuda:
            environment = self.cuda.environment(environment)
        return self.injection.environment(environment) if self.injection else environment

    def close(self) -> None:
        """Removes the injected libraries."""
        for injected in (self.injection, self.cuda):
            if injected:
                injected.close()


FOLDERS = Path("/var/cache/iaprof/injected")
_BUILT, BUILT_FOR_CUDA = (Path(__file__).with_name(f"libiaprof_{name}.so") for name in ("inject", "cuda"))
_PREFIX = "inject-"
INJECTION_VARIABLE = "CUDA_INJECTION64_PATH"
_ELF = re.compile(rb"[0-9]{1,10}-[0-9a-f]{16}\.elf")


def built_library(path: Path = _BUILT) -> Path:
    """Returns the path of an installed library.

    Raises:
        IaprofError: iaprof was built without it.
    """
    if not os.access(path, os.R_OK):
        raise IaprofError(
            f"this installation lacks {path.name}: install a C compiler and <sys/sdt.h> "
            "(Debian: gcc, libc6-dev and systemtap-sdt-dev), then reinstall iaprof"
        )
    return path


def check_folders(folders: Path = FOLDERS) -> None:
    """Checks that a library can be loaded from there, and that strangers cannot put others there.

    Raises:
        IaprofError: it cannot be loaded, or strangers can.
    """
    place = next(path for path in (folders, *folders.parents) if path.exists())
    status, flags = place.stat(), os.statvfs(place).f_flag
    if (others_write(status) and not status.st_mode & stat.S_ISVTX) or status.st_uid not in (0, os.geteuid()):
        raise IaprofError(f"users other than root and you can put libraries into {place}: change its owner or mode")
    if flags & os.ST_NOEXEC:
        raise IaprofError(f"no library can be loaded from {place}, which is mounted noexec")
    if flags & os.ST_RDONLY:
        raise IaprofError(f"no library can be put into {place}, which is mounted read-only")


class _Injected:
    """A copy of a library of ours in a folder from which programs of all users can load it, while that exists.

    It is a copy, as LD_PRELOAD takes no path with spaces or colons, and other users may not read iaprof's installation.
    Only root makes folders where this folder lies: a program that outlives the recording may start others with its
    environment, and nobody else may put a library there.
    """

    def __init__(self, built: Path, folders: Path) -> None:
        """Makes the folder.

        Args:
            built: the installed library.
            folders: where to make the folder; every user may enter it, and only root and we write to it.

        Raises:
            IaprofError: iaprof was built without the library, or a library cannot be loaded from there.
        """
        built_library(built)
        try:
            make_public_folder(folders)
            for folder in (folders.parent, folders):
                check_folders(folder)
            folders.chmod(0o711)  # others may enter it, and cannot list what is in it
            self._folder, self._fd = _make_folder(folders)
        except OSError as error:
            raise IaprofError(f"no folder can be created in {folders}: {error.strerror}") from error
        self.library = self._folder / built.name
        try:
            shutil.copyfile(built, self.library)
            self.library.chmod(0o755)
            self._fill()
        except OSError as error:
            self.close()
            raise IaprofError(f"{self._folder} cannot be written to: {error.strerror}") from error

    def _fill(self) -> None:
        """Prepares the rest of the folder."""
        self._folder.chmod(0o711)

    def close(self) -> None:
        """Removes the folder. Running programs go on, and report nothing more."""
        _remove(self._folder)
        os.close(self._fd)


class CudaInjection(_Injected):
    """The library that NVIDIA's driver loads into a recorded command and its children (source: inject_cuda.c)."""

    def __init__(self, folders: Path = FOLDERS) -> None:
        """See _Injected."""
        super().__init__(BUILT_FOR_CUDA, folders)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the command's environment."""
        return {**environment, INJECTION_VARIABLE: str(self.library)}


class Injection(_Injected):
    """The library that is injected into a recorded command to report its launches (source: inject.c).

    It writes debug ELFs to its folder, and reads from the file `skip` there which drivers,
    or builds of them, are recorded in another way.
    """

    def __init__(self, skip: Iterable[str] = (), folders: Path = FOLDERS) -> None:
        """Makes the folder.

        Args:
            skip: drivers that are recorded in another way: build-ids, in lower-case hexadecimal, or names, as in
                formats.header.no_launches.DRIVERS.
            folders: see _Injected.

        Raises:
            IaprofError: see _Injected.
        """
        self._skip = tuple(skip)
        super().__init__(_BUILT, folders)

    def _fill(self) -> None:
        skipped = self._folder / "skip"
        skipped.write_text("".join(f"{driver}\n" for driver in self._skip))
        skipped.chmod(0o644)
        self._folder.chmod(0o1733)  # a command that became another user writes there, but cannot list its files

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the command's environment; the library restores it before the command's own code runs."""
        before = environment.get("LD_PRELOAD")
        return {**environment, "LD_PRELOAD": f"{self.library}" if before is None else f"{self.library}:{before}"}

    def remove_elf(self, path: bytes) -> None:
        """Removes a debug ELF of the folder, by the path in a `compile_kernel` record; ignores other paths."""
        folder, name = os.path.split(path)
        if folder == os.fsencode(self._folder) and _ELF.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)


def _make_folder(folders: Path) -> tuple[Path, int]:
    """Makes a folder, opened and locked; removes folders of dead recorders, which nobody locks."""
    parent = os.open(folders, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        for old in folders.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                os.close(_lock(old))
                _remove(old)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folders))
        return folder, _lock(folder)
    finally:
        os.close(parent)


def _lock(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove(folder: Path) -> None:
    with contextlib.suppress(RecursionError):  # any user may have nested folders deeply in it
        shutil.rmtree(folder, ignore_errors=True)
