"""The injected library, without a driver: programs and their children run as without it, and its folder is removed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.record.kernels import drivers as module
from iaprof.record.kernels.drivers import FOLDERS, Injection

pytestmark = pytest.mark.beside

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/"}
# Prints its environment, and whether the library is loaded.
CHILD = "env; ! grep -q libiaprof_inject /proc/self/maps || echo preloaded"


@pytest.fixture
def injected() -> Iterator[Injection]:
    made = Injection()
    yield made
    made.close()


def run(*words: str | Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def by_c(call: str) -> list[str]:
    """A Python that starts CHILD by a function of the C library."""
    program = f"""
import ctypes, os
c = ctypes.CDLL(None)
sh, name, option, child = b"/bin/sh", b"sh", b"-c", {CHILD.encode()!r}
argv = (ctypes.c_char_p * 4)(name, option, child)
environment = (ctypes.c_char_p * 3)(b"PATH=/usr/bin:/bin", b"HOME=/")
pid = ctypes.c_int()
{call}
if pid.value:
    os.waitpid(pid.value, 0)
"""
    return [sys.executable, "-S", "-c", program]


STARTS = {
    "sh": ["sh", "-c", f"sh -c '{CHILD}'"],
    "bash": ["bash", "-c", CHILD],  # it has a getenv and an unsetenv of its own
    "env": ["env", "sh", "-c", CHILD],
    "subprocess": [sys.executable, "-c", f"import subprocess; subprocess.run(['sh', '-c', {CHILD!r}])"],
    "execl": by_c("c.execl(sh, name, option, child, None)"),
    "execlp": by_c("c.execlp(name, name, option, child, None)"),
    "execle": by_c("c.execle(sh, name, option, child, None, environment)"),
    "execv": by_c("c.execv(sh, argv)"),
    "execve": by_c("c.execve(sh, argv, environment)"),
    "execvp": by_c("c.execvp(name, argv)"),
    "execvpe": by_c("c.execvpe(name, argv, environment)"),
    "fexecve": by_c("c.fexecve(os.open(sh, os.O_RDONLY), argv, environment)"),
    "posix_spawn": by_c("c.posix_spawn(ctypes.byref(pid), sh, None, None, argv, environment)"),
    "posix_spawnp": by_c("c.posix_spawnp(ctypes.byref(pid), name, None, None, argv, environment)"),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_started_program_has_the_library_and_an_unchanged_environment(injected: Injection, start: str) -> None:
    code, plain, errors = run(*STARTS[start], environment=ENVIRONMENT)

    told = run(*STARTS[start], environment=injected.environment(ENVIRONMENT))

    assert "HOME=/" in plain
    assert told == (code, plain + "preloaded\n", errors) == (0, plain + "preloaded\n", "")


@pytest.mark.parametrize("before", [None, "", "libz.so.1", "libz.so.1:libm.so.6"])
@pytest.mark.parametrize("command", [["env"], ["sh", "-c", "env"]])
def test_ld_preload_is_what_it_was(injected: Injection, before: str | None, command: list[str]) -> None:
    environment = ENVIRONMENT if before is None else {"LD_PRELOAD": before, **ENVIRONMENT}

    assert run(*command, environment=injected.environment(environment)) == run(*command, environment=environment)


UNCHANGED = {
    "exit code": ["sh", "-c", "echo out; echo err >&2; exit 7"],
    "signal": ["sh", "-c", "kill -SEGV $$"],
    "not found": ["env", "no-such-program"],
    "not executable": ["env", "/etc/passwd"],
    "descriptors": ["python3", "-S", "-c", "import os; print(os.listdir('/proc/self/fd'))"],
    "libraries of ldd": ["sh", "-c", "ldd /bin/true | sed 's/ (0x.*//'"],
    "RTLD_NEXT": ["python3", "-S", "-c", "import ctypes; print(ctypes.CDLL('libm.so.6').cos is not None)"],
    "no environment": ["env", "-i", "/usr/bin/env"],
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_a_program_does_what_it_does_without(injected: Injection, what: str) -> None:
    command = UNCHANGED[what]

    assert run(*command, environment=injected.environment(ENVIRONMENT)) == run(*command, environment=ENVIRONMENT)


def test_programs_that_cannot_take_it_get_no_variable(injected: Injection, tmp_path: Path) -> None:
    """Given a static program, one with another C library's loader, and one that changes its user."""
    source, loader = tmp_path / "environment.c", tmp_path / "ld-musl-x86_64.so.1"
    source.write_text(
        "#include <stdio.h>\nextern char **environ;\nint main() { for (char **e = environ; *e; e++) puts(*e); }"
    )
    shutil.copy("/lib64/ld-linux-x86-64.so.2", loader)
    for name, option in (("static", "-static"), ("musl", f"-Wl,--dynamic-linker,{loader}")):
        subprocess.run(["cc", option, source, "-o", tmp_path / name], check=True)
    suid = tmp_path / "suid"
    shutil.copy("/usr/bin/env", suid)
    os.chown(suid, 65534, 65534)
    suid.chmod(0o4755)

    for program in ("static", "musl", "suid"):
        command = ["sh", "-c", f"{tmp_path / program}; true"]
        told = run(*command, environment=injected.environment(ENVIRONMENT))
        assert told == run(*command, environment=ENVIRONMENT)
        assert "HOME=/" in told[1]


def test_another_file_of_that_name_is_not_loaded(injected: Injection) -> None:
    """Given a program that outlives the recording, and then another file at the library's path."""
    command = ["sh", "-c", f"echo ready; read line; {CHILD}"]
    environment = injected.environment(ENVIRONMENT)
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        injected.library.unlink()
        injected.library.write_text("no library")
        output, _ = process.communicate("go\n", timeout=300)

    assert "HOME=/" in output
    assert "ready\n" + output == run(*command, environment=ENVIRONMENT)[1]


def test_only_its_own_elfs_are_forgotten(injected: Injection) -> None:
    folder = injected.library.parent
    own, another = "12-0123456789abcdef.elf", "13-1123456789abcdef.elf"
    for name in (own, another, "other.elf"):
        (folder / name).touch()

    for path in (folder / own, folder / "other.elf", folder / "skip", folder / "../x" / another, Path("/") / another):
        injected.remove_elf(os.fsencode(path))
    injected.remove_elf(os.fsencode(folder / own))

    assert {path.name for path in folder.iterdir()} == {another, "other.elf", "skip", injected.library.name}


def test_a_folder_goes_with_its_recording(tmp_path: Path) -> None:
    """Given folders of a dead and of a running recorder: the first is removed when another is made."""
    died = tmp_path / "inject-died"
    (died / "deep").mkdir(parents=True)
    (died / "1-0123456789abcdef.elf").touch()
    lives = Injection(folders=tmp_path)

    made = Injection(["aa11", "bb22"], tmp_path)

    assert set(tmp_path.iterdir()) == {lives.library.parent, made.library.parent}
    assert made.library.with_name("skip").read_text() == "aa11\nbb22\n"
    assert made.library.parent.stat().st_mode & 0o7777 == 0o1733
    assert tmp_path.stat().st_mode & 0o7777 == 0o711
    made.close()
    lives.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: folder.chmod(0o777),
        lambda folder: folder.chmod(0o775),
        lambda folder: os.chown(folder, 65534, 0),
    ],
)
def test_no_library_is_put_where_a_stranger_could_replace_it(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folders = tmp_path / "cache"
    folders.mkdir()
    spoil(folders)
    with pytest.raises(IaprofError, match=f"users other than root and you can put libraries into {folders}"):
        Injection(folders=folders)
    assert list(folders.iterdir()) == []


def test_it_says_what_to_do_where_it_was_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_BUILT", tmp_path / "libiaprof_inject.so")
    before = set(FOLDERS.glob("*"))

    with pytest.raises(IaprofError, match=r"lacks libiaprof_inject\.so: install a C compiler"):
        Injection()

    assert set(FOLDERS.glob("*")) == before


# --- which libraries it takes for a driver; the real driver is in tests/driver

DRIVER = """
#include <stddef.h>
int launch(void) { return 0; }
int zeGetCommandListProcAddrTable(unsigned version, void **table)
{
    for (int slot = 0; slot < (version < 0x1000e ? 26 : 52); slot++) /* Level Zero 1.14 has the longer one */
        table[slot] = launch;
    return 0;
}
int zetModuleGetDebugInfo(void) { return 1; }
int zeKernelGetName(void) { return 1; }
int zeDriverGetExtensionFunctionAddress(void) { return 1; }
"""
SLOTS = (2, 3, 4, *range(8, 16), *range(22, 29), *range(36, 41))  # ze_command_list_dditable_t
PROGRAM = """
import ctypes, _ctypes

def replaced(driver, version=0x10011):
    table = (ctypes.c_void_p * 64)(*[1] * 64)
    driver.zeGetCommandListProcAddrTable(version, table)
    return [slot for slot, function in enumerate(table) if function not in (1, address(driver.launch))]

def address(function):
    return ctypes.cast(function, ctypes.c_void_p).value

"""


@pytest.fixture
def drivers(tmp_path: Path) -> Path:
    """A folder with a driver by two names, and a library of another name that has the same functions."""
    (tmp_path / "driver.c").write_text(DRIVER)
    for name in ("libze_intel_gpu.so.1", "libze_intel_gpu.so.1.99", "libze_intel_npu.so.1"):
        subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "driver.c", "-o", tmp_path / name], check=True)
    return tmp_path


def printed(injected: Injection, folder: Path, program: str) -> str:
    words = [sys.executable, "-S", "-c", PROGRAM + program]
    done = subprocess.run(
        words, cwd=folder, env=injected.environment(ENVIRONMENT), capture_output=True, text=True, check=True
    )
    return done.stdout


def test_launches_of_a_table_are_replaced_and_nothing_behind_its_end(injected: Injection, drivers: Path) -> None:
    program = 'driver = ctypes.CDLL("./libze_intel_gpu.so.1")\nprint(replaced(driver), replaced(driver, 0x1000d))'

    assert printed(injected, drivers, program) == f"{[*SLOTS]} {[each for each in SLOTS if each < 26]}\n"


def test_another_driver_keeps_its_functions(injected: Injection, drivers: Path) -> None:
    """Given the driver of an NPU, and a second driver beside the first, which would get the first one's handles."""
    program = """
first, second = ctypes.CDLL("./libze_intel_gpu.so.1"), ctypes.CDLL("./libze_intel_gpu.so.1.99")
print(replaced(ctypes.CDLL("./libze_intel_npu.so.1")), replaced(first) != [], replaced(second), replaced(first) != [])
"""
    assert printed(injected, drivers, program) == "[] True [] True\n"


def test_a_driver_that_is_loaded_after_another_was_closed_is_taken(injected: Injection, drivers: Path) -> None:
    program = """
first = ctypes.CDLL("./libze_intel_gpu.so.1")
before = replaced(first)
second = ctypes.CDLL("./libze_intel_gpu.so.1.99")
_ctypes.dlclose(first._handle)
print(before, replaced(second))
"""
    assert printed(injected, drivers, program) == f"{[*SLOTS]} {[*SLOTS]}\n"


OPENCL_DRIVER = """
static void *launch(void) { return launch; }
static void *TABLE table[149] = {[0 ... 148] = launch};
static void *platform[1] = {(void *)table};
int clIcdGetPlatformIDsKHR(unsigned n, void **platforms, unsigned *count)
{
    if (n)
        *platforms = platform;
    return 0;
}
void *clGetExtensionFunctionAddress(const char *name) { return *name ? launch : 0; }
"""
OPENCL_SLOTS = {  # cl_icd_dispatch of <CL/cl_icd.h>
    30: "clBuildProgram",
    37: "clReleaseKernel",
    41: "clWaitForEvents",
    47: "clFinish",
    48: "clEnqueueReadBuffer",
    49: "clEnqueueWriteBuffer",
    50: "clEnqueueCopyBuffer",
    51: "clEnqueueReadImage",
    52: "clEnqueueWriteImage",
    53: "clEnqueueCopyImage",
    54: "clEnqueueCopyImageToBuffer",
    55: "clEnqueueCopyBufferToImage",
    59: "clEnqueueNDRangeKernel",
    60: "clEnqueueTask",
    65: "clGetExtensionFunctionAddress",
    86: "clEnqueueReadBufferRect",
    87: "clEnqueueWriteBufferRect",
    88: "clEnqueueCopyBufferRect",
    99: "clLinkProgram",
    102: "clEnqueueFillBuffer",
    103: "clEnqueueFillImage",
    107: "clGetExtensionFunctionAddressForPlatform",
    129: "clEnqueueSVMMemcpy",
    130: "clEnqueueSVMMemFill",
}
OPENCL_PROGRAM = """
def slots(driver):
    platform = ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))()
    driver.clIcdGetPlatformIDsKHR(1, ctypes.byref(platform), None)
    table = platform[0][:149]
    return [slot for slot, function in enumerate(table) if function != table[0]]

def named(driver, *names):
    ask = driver.clGetExtensionFunctionAddress
    ask.restype = ctypes.c_void_p
    return [name for name in names if ask(name.encode()) != ask(b"clCreateKernel")]

"""


@pytest.fixture
def opencl_drivers(tmp_path: Path) -> Path:
    """A folder with an OpenCL driver, one with a read-only table, and one of another name."""
    (tmp_path / "driver.c").write_text(OPENCL_DRIVER)
    for name, table in (("libigdrcl.so", ""), ("libigdrcl.so.const", "const"), ("libpocl.so", "")):
        flags = ["-shared", "-fPIC", f"-DTABLE={table}", "-Wl,-z,relro,-z,now"]
        subprocess.run(["cc", *flags, tmp_path / "driver.c", "-o", tmp_path / name], check=True)
    return tmp_path


def test_functions_of_opencl_s_table_and_those_that_it_gives_by_name_are_replaced(
    injected: Injection, opencl_drivers: Path
) -> None:
    program = """
driver = ctypes.CDLL("./libigdrcl.so")
print(slots(driver), slots(driver))
print(named(driver, "clEnqueueNDCountKernelINTEL", "clEnqueueMemcpyINTEL", "clEnqueueMemFillINTEL",
            "clEnqueueMemsetINTEL", "clSVMAlloc"))
"""
    names = ["clEnqueueNDCountKernelINTEL", "clEnqueueMemcpyINTEL", "clEnqueueMemFillINTEL", "clEnqueueMemsetINTEL"]
    expected = f"{[*OPENCL_SLOTS]} {[*OPENCL_SLOTS]}\n{names}\n"
    assert printed(injected, opencl_drivers, OPENCL_PROGRAM + program) == expected


def test_another_opencl_driver_keeps_its_functions(injected: Injection, opencl_drivers: Path) -> None:
    """Given a driver of another name, one with a read-only table, and a second driver beside the first."""
    program = """
print(slots(ctypes.CDLL("./libpocl.so")), slots(ctypes.CDLL("./libigdrcl.so.const")))
print(slots(ctypes.CDLL("./libigdrcl.so")), named(ctypes.CDLL("./libpocl.so"), "clEnqueueMemcpyINTEL"))
"""
    assert printed(injected, opencl_drivers, OPENCL_PROGRAM + program) == "[] []\n[] []\n"
