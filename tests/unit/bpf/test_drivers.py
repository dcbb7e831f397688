"""How launches of each driver are recorded, when a library is injected into the command, and what is reported."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.bpf import driver_layout
from iaprof.bpf.driver_layout import Action, Entry, Field, Layout
from iaprof.bpf.probes.libraries import INJECTED, OPENCL, VULKAN, Libraries, Way
from iaprof.bpf.probes.usdt import Probe
from iaprof.formats.header.launch_warnings import LEVEL_ZERO
from iaprof.record.kernels import drivers
from iaprof.record.kernels.drivers import Drivers
from iaprof.record.options import LaunchesBy
from unit.builds import Build, build

DRIVER = "libze_intel_gpu.so.1"
FIELD = Field((0,))
AUTO, PROBES, ATTACH, INJECT = LaunchesBy


@pytest.fixture(scope="module")
def with_probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with both probes."""
    folder = tmp_path_factory.mktemp("probes")
    (folder / "p.d").write_text(
        "provider level_zero {\n probe launch_kernel(long);\n probe compile_kernel(long);\n};\n"
    )
    (folder / "l.c").write_text(
        '#include "p.h"\nvoid f(long a) { LEVEL_ZERO_LAUNCH_KERNEL(a); LEVEL_ZERO_COMPILE_KERNEL(a); }'
    )
    for command in (
        "dtrace -h -s p.d -o p.h",
        "cc -O2 -fPIC -c l.c -o l.o",
        "dtrace -G -s p.d -o p.o",
        "cc -shared -Wl,--build-id l.o p.o -o l.so",
    ):
        subprocess.run(command.split(), cwd=folder, check=True)
    return folder / "l.so"


@pytest.fixture(scope="module")
def without_probes(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build(tmp_path_factory.mktemp("plain") / "l.so")


class Machine:
    """A machine with drivers; the recorder's libraries see only their files."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, with_probes: Path, without: Build) -> None:
        self._folder, self._probes, self._without = folder, with_probes, without
        self.layouts = folder / "layouts"
        self.layouts.mkdir()
        patch.setattr(driver_layout, "CACHE", self.layouts)
        patch.setattr(drivers, "SYSTEM_FOLDERS", (str(folder / "lib"),))
        patch.setattr(drivers, "Injection", self._inject)
        for name in ("LD_LIBRARY_PATH", "ZE_ENABLE_ALT_DRIVERS", "OCL_ICD_FILENAMES", "OCL_ICD_VENDORS"):
            patch.delenv(name, raising=False)
        self.skipped: frozenset[str] | None = (
            None  # drivers that the injected library leaves alone; None before it is injected
        )
        self.injection_refuses = ""
        self.attached: list[Sequence[Probe] | Layout] = []
        self.kernel_refuses: OSError | None = None

    def _inject(self, known: frozenset[str]) -> Machine:
        if self.injection_refuses:
            raise IaprofError(self.injection_refuses)
        self.skipped = known
        return self

    @property
    def library(self) -> Path:
        """The injected library."""
        return self._copied(self._probes, self._folder / INJECTED)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {**environment, "LD_PRELOAD": "it"}

    def close(self) -> None:
        self.skipped = None

    @staticmethod
    def _copied(path: Path, to: Path) -> Path:
        to.parent.mkdir(exist_ok=True)
        shutil.copy(path, to)
        return to

    def has(self, kind: str, name: str = DRIVER, folder: str = "lib") -> Path:
        """Installs a driver: of a `known` or `unknown` build, or with `probes`."""
        path = self._copied(self._probes if kind == "probes" else self._without.path, self._folder / folder / name)
        if kind == "known":
            self.layout(self._without.offset)
        return path

    def layout(self, address: int) -> Path:
        """Writes a layout of the driver without probes, whose only function is at this address."""
        assert self._without.build_id is not None
        build_id = self._without.build_id.hex()
        entries = (Entry("launch", Action.LAUNCH, address, 1), Entry("gone", Action.KERNEL_GONE, address, 0))
        fields = {"size": FIELD, "code": FIELD, "name": FIELD, "kernel_class": FIELD, "allocation": (FIELD, FIELD)}
        layout = Layout(build_id, "level_zero", "1", entries, (FIELD,), classes=(1,), **fields)  # type: ignore[arg-type]
        path = self.layouts / f"{build_id}.json"
        path.write_text(layout.to_json())
        return path

    def libraries(self, launches: LaunchesBy) -> Libraries:
        def attach(_: int, what: Sequence[Probe] | Layout, *__: object) -> str:
            if self.kernel_refuses:
                raise self.kernel_refuses
            self.attached.append(what)
            return ""

        return Libraries(attach, attach, launches.ways)

    def drivers(self, launches: LaunchesBy, has_command: bool) -> Drivers:
        return Drivers(self.libraries(launches), launches, has_command)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_probes: Path, without_probes: Build) -> Machine:
    return Machine(tmp_path, monkeypatch, with_probes, without_probes)


NO_PROBES = "it has no launch_kernel and compile_kernel probes; --launches=auto may have another way"
UNKNOWN = "its build (BUILD) is not known"
CALIBRATE = "run 'sudo iaprof calibrate LIBRARY', or start the program by 'iaprof record --launches=inject -- COMMAND'"
NOT_SEEN = f"it has no probes, and {UNKNOWN}: {CALIBRATE}"


@dataclass(frozen=True)
class Case:
    launches: LaunchesBy
    driver: str
    has_command: bool
    ways: tuple[Way | None, ...]  # of the drivers and of the injected library
    problem: str = ""


CASES = [
    *(Case(AUTO, "probes", command, (Way.PROBES,)) for command in (False, True)),
    *(Case(AUTO, "known", command, (Way.ATTACH,)) for command in (False, True)),
    Case(AUTO, "unknown", False, (None,), NOT_SEEN),
    Case(AUTO, "unknown", True, (Way.INJECT,)),
    *(Case(AUTO, "none", command, ()) for command in (False, True)),
    *(Case(PROBES, "probes", command, (Way.PROBES,)) for command in (False, True)),
    *(Case(PROBES, "known", command, (None,), NO_PROBES) for command in (False, True)),
    *(Case(PROBES, "unknown", command, (None,), NO_PROBES) for command in (False, True)),
    *(Case(ATTACH, "probes", command, (None,), f"{UNKNOWN}: {CALIBRATE}") for command in (False, True)),
    *(Case(ATTACH, "known", command, (Way.ATTACH,)) for command in (False, True)),
    *(Case(ATTACH, "unknown", command, (None,), f"{UNKNOWN}: {CALIBRATE}") for command in (False, True)),
    *(Case(ATTACH, "none", command, ()) for command in (False, True)),
    *(Case(INJECT, driver, True, (Way.INJECT,)) for driver in ("probes", "known", "unknown", "none")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.launches}-{c.driver}{'-command' * c.has_command}")
def test_ways(machine: Machine, case: Case) -> None:
    if case.driver != "none":
        machine.has(case.driver)
    # when
    made = machine.drivers(case.launches, case.has_command)
    # then
    assert tuple(outcome.way for outcome in made.outcomes) == case.ways
    assert len(machine.attached) == sum(way is not None for way in case.ways)
    for outcome in made.outcomes:
        assert outcome.problem == case.problem.replace("BUILD", outcome.build_id)
        assert (outcome.probes > 0) == (outcome.way is not None)
    injects = Way.INJECT in case.ways
    assert (made.injection is not None) == (machine.skipped is not None) == injects
    assert made.environment({}).get("LD_PRELOAD") == ("it" if injects else None)
    # and a warning says why it is injected if the user has not asked for it
    assert bool(made.warning) == (injects and case.launches is AUTO)
    made.close()
    assert machine.skipped is None


def test_the_injected_library_leaves_drivers_with_another_way_alone(machine: Machine) -> None:
    known, _ = machine.has("probes"), machine.has("unknown", f"{DRIVER}.2")
    made = machine.drivers(AUTO, True)
    assert [(outcome.path, outcome.way) for outcome in made.outcomes] == [
        (str(known), Way.PROBES),
        (str(machine.library), Way.INJECT),
    ]
    assert machine.skipped is not None and made.outcomes[0].build_id in machine.skipped
    assert f"{DRIVER}.2: it has no probes, and its build (" in made.warning
    assert made.warning.endswith(" is not known; the command is started as with --launches=inject")


def test_a_later_driver_with_probes_is_reported_if_a_library_is_injected(
    machine: Machine,
) -> None:
    """The injected library reports its launches: with the driver's probes they would be recorded twice."""
    machine.has("unknown")
    taken = machine.libraries(AUTO)
    Drivers(taken, AUTO, True)
    later = machine.has("probes", folder="later")
    [outcome] = taken.take(later)
    assert (outcome.probes, outcome.problem) == (0, "its launches are recorded in the command only")
    # and a driver without probes is left to the injected library
    other = machine.has("unknown", folder="other")
    other.write_bytes(other.read_bytes() + b"another file")
    assert [outcome.problem for outcome in taken.take(other)] == [""]
    # even if its layout is found later
    other = machine.has("known", folder="calibrated")
    other.write_bytes(other.read_bytes() + b"a third file")
    [outcome] = taken.take(other)
    assert (outcome.probes, outcome.problem) == (0, "its launches are recorded in the command only")


def test_the_injected_library_leaves_later_drivers_with_layouts_alone(
    machine: Machine, without_probes: Build, tmp_path: Path
) -> None:
    # given a driver of an unknown build, and one of a known build that no process uses yet
    other = build(tmp_path / "other.so", build_id="0x" + 20 * "ab")
    (tmp_path / "lib").mkdir()
    shutil.copy(other.path, tmp_path / "lib" / DRIVER)
    later = machine.has("known", folder="later")
    taken = machine.libraries(AUTO)
    # when
    Drivers(taken, AUTO, True)
    # then either the injected library or the recorder records its launches
    assert without_probes.build_id is not None and machine.skipped is not None
    assert without_probes.build_id.hex() in machine.skipped
    assert other.build_id is not None and other.build_id.hex() not in machine.skipped
    assert [outcome.way for outcome in taken.take(later)] == [Way.ATTACH]


def test_if_no_library_can_be_injected(machine: Machine) -> None:
    machine.has("unknown")
    machine.injection_refuses = "no compiler"
    with pytest.raises(IaprofError, match="no compiler"):
        machine.drivers(INJECT, True)
    # but if the user has not asked for it, each driver's problem says what can be done
    [outcome] = (made := machine.drivers(AUTO, True)).outcomes
    assert outcome.problem == NOT_SEEN.replace("BUILD", outcome.build_id)
    assert (made.environment({}), made.warning) == ({}, "iaprof cannot put its library into the command: no compiler")


@pytest.mark.parametrize(
    "variable", ["LD_LIBRARY_PATH", "ZE_ENABLE_ALT_DRIVERS", "OCL_ICD_FILENAMES", "OCL_ICD_VENDORS"]
)
def test_a_commands_environment_leads_to_drivers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    path = machine.has("known", folder="elsewhere")
    monkeypatch.setenv(variable, str(path.parent if variable == "LD_LIBRARY_PATH" else path))
    assert [outcome.path for outcome in machine.drivers(AUTO, True).outcomes] == [str(path)]
    # but not without a command
    assert machine.drivers(AUTO, False).outcomes == []


@pytest.mark.parametrize(("launches", "has_command"), [(AUTO, False), (ATTACH, False), (ATTACH, True)])
def test_opencl_of_an_unknown_build_is_reported_when_it_is_used(
    machine: Machine, launches: LaunchesBy, has_command: bool
) -> None:
    path = machine.has("unknown", OPENCL)
    taken = machine.libraries(launches)
    made = Drivers(taken, launches, has_command)
    assert (made.outcomes, made.warning, made.injection) == ([], "", None)
    [outcome] = taken._take(str(path), f"{path} (deleted)")  # as it is mapped
    advice = "run 'sudo iaprof calibrate LIBRARY', or start the program by 'iaprof record --launches=inject -- COMMAND'"
    assert (outcome.problem, outcome.unused) == (f"its build ({outcome.build_id}) is not known: {advice}", False)


def test_a_command_is_injected_for_opencl_of_an_unknown_build(machine: Machine) -> None:
    level_zero, opencl = machine.has("probes"), machine.has("unknown", OPENCL)
    made = machine.drivers(AUTO, True)
    # Level Zero's launches are recorded in another way
    assert [(outcome.path, outcome.way) for outcome in made.outcomes] == [
        (str(level_zero), Way.PROBES),
        (str(machine.library), Way.INJECT),
    ]
    assert machine.skipped is not None and made.outcomes[0].build_id in machine.skipped
    assert LEVEL_ZERO in machine.skipped and OPENCL not in machine.skipped
    assert made.warning.startswith(f"{opencl}: its build (")
    assert made.warning.endswith(") is not known; the command is started as with --launches=inject")


def test_later_level_zero_drivers_keep_their_ways_if_only_opencl_s_is_unknown(
    machine: Machine,
) -> None:
    machine.has("probes")
    opencl = machine.has("unknown", OPENCL)
    taken = machine.libraries(AUTO)
    made = Drivers(taken, AUTO, True)
    assert made.injection
    # as in a container
    with_probes, unknown = machine.has("probes", folder="later"), machine.has("unknown", folder="other")
    with_probes.write_bytes(with_probes.read_bytes() + b"another file")
    assert [outcome.way for outcome in taken.take(with_probes)] == [Way.PROBES]
    assert [outcome.problem.partition(" (")[0] for outcome in taken.take(unknown)] == [
        "it has no probes, and its build"
    ]
    # and OpenCL's driver is left to the injected library when it is mapped
    assert [outcome.problem for outcome in taken._take(str(opencl), f"{opencl} (deleted)")] == [""]


def test_opencl_is_reported_when_it_is_used_if_no_library_can_be_injected(machine: Machine) -> None:
    path = machine.has("unknown", OPENCL)
    machine.injection_refuses = "no compiler"
    taken = machine.libraries(AUTO)
    made = Drivers(taken, AUTO, True)
    assert (made.outcomes, made.warning) == ([], "iaprof cannot put its library into the command: no compiler")
    [outcome] = taken._take(str(path), f"{path} (deleted)")  # as it is mapped
    assert "is not known: run 'sudo iaprof calibrate" in outcome.problem


def test_vulkan_of_an_unknown_build_is_reported_when_it_is_used_and_nothing_is_injected_for_it(
    machine: Machine, tmp_path: Path
) -> None:
    library = machine.has("unknown", VULKAN)
    made = machine.drivers(AUTO, has_command=True)
    assert (made.outcomes, made.injection, made.warning) == ([], None, "")
    # when a process maps it
    used = shutil.copy(library, tmp_path / VULKAN)
    (outcome,) = machine.libraries(AUTO)._take(str(used), str(used), 1)
    assert outcome.problem.endswith("so what programs dispatch is not recorded: run 'sudo iaprof calibrate LIBRARY'")


def test_a_library_that_has_no_build_id(machine: Machine, tmp_path: Path) -> None:
    plain = build(tmp_path / "plain.so", build_id="none")
    [outcome] = machine.libraries(ATTACH).take(Path(shutil.copy(plain.path, tmp_path / DRIVER)))
    assert (outcome.build_id, outcome.problem) == ("", f"its build (without a build-id) is not known: {CALIBRATE}")


def test_a_layout_that_cannot_be_used(machine: Machine) -> None:
    path = machine.has("known")
    layout = machine.layout(0)  # the ELF header
    assert problem(machine, path) == "a probe of it points outside its executable segments"
    layout.write_text("{")
    assert problem(machine, path).startswith(f"{layout}: it is not a driver's layout (")
    assert problem(machine, path).endswith("; remove it, and run 'iaprof calibrate'")
    assert machine.attached == []


def test_what_the_kernel_refuses(machine: Machine) -> None:
    path = machine.has("known")
    machine.kernel_refuses = OSError(22, "Invalid argument")
    assert problem(machine, path) == "the kernel refuses probes in it (Invalid argument)"


def problem(machine: Machine, path: Path) -> str:
    [outcome] = machine.libraries(ATTACH).take(path)
    assert (outcome.probes, outcome.way) == (0, None)
    return outcome.problem
