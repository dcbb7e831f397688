"""Finding bcc and kernel headers, and compiling the C programs with them.

clang takes 130 MB and gives little of it back, so the recorder leaves this to a process that ends (load_child.py).

bcc comes from the distribution's package, not from PyPI (what is called `bcc` there is something else). Its Python
part is plain ctypes, so that one package is imported from the distribution's folder by its own path: were the whole
folder put on sys.path, its other packages would shadow those of our environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from iaprof.bpf.uprobe import load_uprobe_program
from iaprof.formats.errors import IaprofError

BCC_FOLDERS = (
    "/usr/lib/python3/dist-packages",
    f"/usr/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages",
    f"/usr/lib64/python{sys.version_info.major}.{sys.version_info.minor}/site-packages",
)
HEADERS_ADVICE = (
    "install the headers of the running kernel (Debian and Ubuntu: apt install linux-headers-$(uname -r); "
    "or any linux-headers package), or name their folder in BCC_KERNEL_SOURCE"
)


class BpfUnavailable(IaprofError):
    """BPF programs cannot be compiled or loaded here; the text says what to install or allow."""


def import_bcc() -> ModuleType:
    """The distribution's `bcc` module.

    Raises:
        BpfUnavailable: it is not installed, or its library does not load.
    """
    if "bcc" in sys.modules:
        return sys.modules["bcc"]
    for folder in BCC_FOLDERS:
        package = Path(folder) / "bcc"
        if not (package / "libbcc.py").is_file():
            continue
        spec = importlib.util.spec_from_file_location(
            "bcc", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules["bcc"] = module
        try:
            spec.loader.exec_module(module)
        except (OSError, ImportError) as error:
            del sys.modules["bcc"]
            raise BpfUnavailable(f"bcc in {folder} does not load ({error}); reinstall python3-bpfcc") from error
        return module
    raise BpfUnavailable(
        "bcc is not installed: install the distribution's package (Debian and Ubuntu: apt install python3-bpfcc; "
        "Fedora: dnf install python3-bcc). The package called bcc on PyPI is another program"
    )


def _has_own_headers() -> bool:
    modules = Path("/lib/modules") / platform.release()
    return (modules / "build").exists() or (modules / "source").exists() or Path("/sys/kernel/kheaders.tar.xz").exists()


def _split_headers() -> tuple[Path, Path] | None:
    """Debian's two header folders, (flavour, common), the newest version first."""
    for common in sorted(Path("/usr/src").glob("linux-headers-*-common"), reverse=True):
        flavours = sorted(Path("/usr/src").glob(common.name.removesuffix("common") + "*"))
        for flavour in flavours:
            if flavour != common and (flavour / "include" / "generated").is_dir():
                return flavour, common
    return None


def _join(target: Path, sources: list[Path]) -> None:
    """Makes `target` show the union of `sources`: a folder that several have is joined, all else is a link."""
    target.mkdir(exist_ok=True)
    for name in {entry.name for source in sources for entry in source.iterdir()}:
        found = [source / name for source in sources if (source / name).exists()]
        folders = [path for path in found if path.is_dir()]
        if len(folders) > 1:
            _join(target / name, folders)
        elif found:
            (target / name).symlink_to(found[0])


@contextlib.contextmanager
def kernel_headers() -> Iterator[None]:
    """Within this, BCC_KERNEL_SOURCE leads to headers where the running kernel brings none of its own.

    The programs touch nothing but pt_regs, which every x86-64 kernel lays out alike, so any version serves.

    Raises:
        BpfUnavailable: no headers anywhere.
    """
    if os.environ.get("BCC_KERNEL_SOURCE") or _has_own_headers():
        yield
        return
    split = _split_headers()
    if split is None:
        raise BpfUnavailable(f"no kernel headers were found for compiling BPF: {HEADERS_ADVICE}")
    with tempfile.TemporaryDirectory(prefix="iaprof-headers-") as folder:
        _join(Path(folder), list(split))
        os.environ["BCC_KERNEL_SOURCE"] = folder
        try:
            yield
        finally:
            del os.environ["BCC_KERNEL_SOURCE"]


def compile_program(
    sources: Sequence[str], defines: dict[str, int], functions: Sequence[str], maps: Sequence[str] = ()
) -> dict[str, int]:
    """Compiles C files in this folder, one behind the other, and loads their uprobe programs.

    Args:
        sources: file names.
        defines: given to the compiler.
        functions: which to load.
        maps: which to hand out.

    Returns:
        Descriptors of the functions' programs and of the maps, by name.

    Raises:
        BpfUnavailable: no bcc, no headers, no permission, or the kernel or compiler refused it.
    """
    bcc = import_bcc()
    # In one piece: what is included, bcc leaves as it is.
    text = b"\n".join((Path(__file__).parent / source).read_bytes() for source in sources)
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    with kernel_headers(), _captured_stderr() as messages:
        try:
            program = bcc.BPF(text=text, cflags=[*flags, "-Wno-everything"])
            loaded = {name: load_uprobe_program(name, program.dump_func(name.encode())) for name in functions}
            return loaded | {name: program[name.encode()].map_fd for name in maps}
        except Exception as error:  # bcc raises bare Exception
            raise BpfUnavailable(_why(str(error), messages())) from error


def _why(error: str, output: str) -> str:
    if os.geteuid() != 0:
        return "BPF needs root: run it with sudo"
    if "Operation not permitted" in output or "Operation not permitted" in error:
        return "the kernel does not permit BPF here (lockdown, a container without CAP_BPF, or a security module)"
    if "chdir" in output or "Unable to find kernel headers" in output:
        return f"kernel headers were not found: {HEADERS_ADVICE}"
    lines = output.strip().splitlines()
    detail = next((line for line in lines if "error:" in line), lines[-1] if lines else "no more was said")
    return f"the BPF programs did not compile or load ({error}: {detail})"


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Keeps what clang and libbcc print to file descriptor 2 from the user's terminal, and gives it as text."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)

        def text() -> str:
            sys.stderr.flush()
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
