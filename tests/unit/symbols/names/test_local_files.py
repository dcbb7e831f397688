"""Names from the files of this machine: from the recorded build wherever it is, and never from another build."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.wire.sideband import text
from iaprof.symbols.names.names import Module, ModuleKind
from iaprof.symbols.symbolizers import local_files
from iaprof.symbols.symbolizers.binaries import Binaries
from iaprof.symbols.symbolizers.local_files import LocalFiles
from unit.builds import (
    Build,
    build,
    copied,
    function_at,
    link_name,
    no_descriptor_is_lost,
    symbolize,
    take_out_debug_information,
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build(tmp_path_factory.mktemp("compiled") / "libhere.so")


@pytest.fixture
def library(compiled: Build, tmp_path: Path) -> Build:
    """A copy of the library at the recorded path."""
    return copied(compiled, tmp_path / "lib" / "libhere.so")


def name(
    binaries: Binaries, built: Build, symfs: Path | None = None, *dirs: Path, path: str | Path | None = None
) -> tuple[str | None, str, str]:
    """Returns function, source and problem."""
    with no_descriptor_is_lost():
        symbolized = symbolize(LocalFiles(binaries, symfs, dirs, None), built.module(path), built.offset)
    return function_at(symbolized, built.offset), symbolized.source, symbolized.problem


def test_a_file_at_its_recorded_path_names_addresses(library: Build, binaries: Binaries) -> None:
    assert name(binaries, library) == ("here", f"debug information of {library.path}", "")
    everything = symbolize(LocalFiles(binaries, None, [], None, everything=True), library.module(), library.offset)
    assert everything.names.sizes.max() > 1


@pytest.mark.parametrize("folder", [b"caf\xe9", rb"caf\xe9"])
def test_a_path_that_is_not_utf_8(folder: bytes, compiled: Build, tmp_path: Path, binaries: Binaries) -> None:
    # given a library, its debug file beside it, and its path as captures have it
    library = copied(compiled, tmp_path / os.fsdecode(folder) / "libhere.so")
    path = text(os.fsencode(library.path))
    assert name(binaries, library, path=path) == ("here", f"debug information of {path}", "")
    take_out_debug_information(library, library.path.with_name("apart.debug"))
    apart = path.replace("libhere.so", "apart.debug")
    assert name(binaries, library, path=path) == ("here", f"debug information of {apart}", "")
    assert name(binaries, library, tmp_path, path=path.removeprefix(str(tmp_path)))[0] == "here"


def test_modules_that_are_not_files_are_left_to_other_symbolizers(binaries: Binaries) -> None:
    symbolizer = LocalFiles(binaries, None, [], None)
    one = np.ones(1, np.uint64)
    for kind in set(ModuleKind) - {ModuleKind.FILE}:
        assert symbolizer.name(Module(kind, "/bin/true", pid=1), one, one) is None


def test_a_rebuilt_file_at_the_same_path_is_not_used(library: Build, binaries: Binaries) -> None:
    # given another build
    other = build(library.path, "wrong")
    assert other.build_id is not None
    assert other.offset == library.offset
    # then
    expected = f"{library.path} is another build (build-id {other.build_id.hex()})"
    assert name(binaries, library) == (None, "", expected)
    # and one without a build-id
    build(library.path, "wrong", build_id="none")
    assert name(binaries, library) == (None, "", f"{library.path} is another build (without a build-id)")


@pytest.mark.parametrize("build_id", [None, b"", b"\x01", bytes(65)])
def test_a_module_without_a_valid_build_id_gets_no_names(
    library: Build, binaries: Binaries, build_id: bytes | None
) -> None:
    function, source, problem = name(binaries, Build(library.path, build_id, library.offset))
    assert (function, source) == (None, "")
    assert "no build-id" in problem


def test_only_regular_files_are_opened(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    # given paths that would block when opened, or have an effect
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to-fifo").symlink_to("fifo")
    for path in (tmp_path / "fifo", tmp_path / "to-fifo", tmp_path, Path("/dev/zero"), Path("/dev/tty")):
        assert name(binaries, library, path=path) == (None, "", f"{path} is not a regular file")
    # and paths that do not exist
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for missing in ("dangling", "absent", "fifo/below", "x" * 300, "lib/" * 2000, "zero\0byte", "\ud800"):
        _, _, problem = name(binaries, library, path=f"{tmp_path}/{missing}")
        assert problem == f"no file with its build-id ({library.module().build_id.hex()}) was found"  # type: ignore[union-attr]
    assert "cannot be opened" in name(binaries, library, path=tmp_path / "loop")[2]
    (tmp_path / "text").write_text("no ELF file")
    assert name(binaries, library, path=tmp_path / "text")[2] == f"{tmp_path}/text: it is not an ELF file"


def test_symfs_replaces_the_root(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    # given the file below another root, and another build at the same path below /
    below = copied(library, tmp_path / "root" / str(library.path).lstrip("/"))
    build(library.path, "wrong")
    # then
    assert name(binaries, library, tmp_path / "root")[:2] == ("here", f"debug information of {below.path}")
    # and without it, the file below / is not used
    below.path.unlink()
    assert name(binaries, library, tmp_path / "root")[2].startswith("no file")


def test_paths_and_links_do_not_lead_out_of_symfs(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    # given a root with links to the file within it, a link that would lead out, and paths that would
    root = tmp_path / "root"
    (root / "lib").mkdir(parents=True)
    shutil.copy(library.path, root / "lib" / "real.so")
    (root / "absolute.so").symlink_to("/lib/real.so")
    (root / "up.so").symlink_to("../../../../lib/real.so")
    (root / "out.so").symlink_to(library.path)
    up = "/.." * 20
    # then
    assert name(binaries, library, root, path="/lib/real.so\0")[0] is None
    for path in ("/absolute.so", "/up.so", "/lib/../lib/real.so", f"{up}/lib/real.so"):
        assert name(binaries, library, root, path=path)[0] == "here", path
    for path in ("/out.so", f"{up}{library.path}", f"/lib{up}{library.path}", f"/proc/self/root{library.path}"):
        assert name(binaries, library, root, path=path)[0] is None, path
        assert name(binaries, library, root / "lib" / "..", path=path)[0] is None, path


def test_files_are_found_in_symbol_dirs(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    assert library.build_id is not None
    folder = tmp_path / "symbols"
    recorded = "/gone/lib/libhere.so"
    places = (link_name(library.build_id), Path("libhere.so"), Path("gone/lib/libhere.so"), Path("a/b/any-name"))
    folder.mkdir()
    for place in places:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library.path, folder / place)
        expected = ("here", f"debug information of {folder / place}", "")
        assert name(binaries, library, None, tmp_path / "empty", folder, path=recorded) == expected
        (folder / place).unlink()
    assert name(binaries, library, None, folder, path=recorded)[2].startswith("no file with its build-id")


def test_another_build_of_the_same_name_in_a_symbol_dir_is_not_used(
    library: Build, binaries: Binaries, tmp_path: Path
) -> None:
    # given
    folder = tmp_path / "symbols"
    build(folder / "libhere.so", "wrong")
    build(folder / "gone/libhere.so", "wrong2")
    # then
    problem = name(binaries, library, None, folder, path="/gone/libhere.so")[2]
    assert problem.count("is another build") == 2
    # and when the right build is there under any name, the others are not problem
    shutil.copy(library.path, folder / "x")
    expected = ("here", f"debug information of {folder}/x", "")
    assert name(binaries, library, None, folder, path="/gone/libhere.so") == expected


def test_a_path_does_not_leave_a_symbol_dir(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    # given
    opened: list[Path] = []
    folder = tmp_path / "symbols"
    folder.mkdir()

    class Watched(LocalFiles):
        def _open(self, path: Path) -> int | str:
            opened.append(path)
            return super()._open(path)

    # when
    symbolize(
        Watched(binaries, None, [folder], None), library.module(f"/{'../' * 20}{library.path}/.."), library.offset
    )
    # then it is searched only for links that are named after the build-id
    inside = [path for path in opened if path.is_relative_to(folder)]
    assert len(inside) == 2
    assert not any(".." in path.parts for path in inside)


def test_symbol_dirs_are_scanned_once_and_up_to_a_limit(
    library: Build, binaries: Binaries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a folder with many files that are not ELF, and a circular link
    folder = tmp_path / "symbols"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "circle").symlink_to(folder)
    os.mkfifo(folder / "fifo")
    for index in range(50):
        (folder / f"{index}").write_text("text")
    shutil.copy(library.path, folder / "deep" / "er" / "z")
    module = library.module("/gone")
    # then
    symbolizer = LocalFiles(binaries, None, [folder], None)
    assert function_at(symbolize(symbolizer, module, library.offset), library.offset) == "here"
    # and files that are added later are not seen by the same report
    shutil.copy(library.path, folder / "deep" / "second")
    (folder / "deep" / "er" / "z").unlink()
    assert function_at(symbolize(symbolizer, module, library.offset), library.offset) is None
    # and too many files are a problem
    monkeypatch.setattr(local_files, "_MOST_ENTRIES", 30)
    bounded = symbolize(LocalFiles(binaries, None, [folder], None), module, library.offset)
    assert function_at(bounded, library.offset) is None
    assert bounded.problem == "the symbol folders have more files than are looked through"


def test_separate_debug_information_of_the_build_is_used(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    # given a stripped library, whose local function has no name
    debug = library.path.parent / ".debug" / "x.debug"
    take_out_debug_information(library, debug)
    assert name(binaries, library) == ("here", f"debug information of {debug}", "")
    # when its debug file is of another build, it is not used
    right = debug.read_bytes()
    other = build(tmp_path / "other.so", "wrong")
    take_out_debug_information(other, debug)
    function, _, problem = name(binaries, library)
    assert function != "wrong"
    assert problem.endswith(f"{library.path} is stripped, and no debug information of it was found")
    # and a symbol folder may have the right one under any name
    (tmp_path / "symbols").mkdir()
    (tmp_path / "symbols" / "y").write_bytes(right)
    source = f"debug information of {tmp_path}/symbols/y"
    assert name(binaries, library, None, tmp_path / "symbols") == ("here", source, "")


def test_debug_information_below_symfs_is_used(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    assert library.build_id is not None
    root = tmp_path / "root"
    below = copied(library, root / "lib/x.so")
    debug = root / "usr/lib/debug" / link_name(library.build_id, ".debug")
    take_out_debug_information(below, debug)
    assert name(binaries, library, root, path="/lib/x.so") == ("here", f"debug information of {debug}", "")
    # and a link does not lead out of the root
    debug.rename(tmp_path / "outside")
    debug.symlink_to(tmp_path / "outside")
    assert name(binaries, library, root, path="/lib/x.so")[0] is None


def test_debug_information_beside_a_file_in_a_symbol_dir_is_used(
    library: Build, binaries: Binaries, tmp_path: Path
) -> None:
    moved = copied(library, tmp_path / "symbols" / "any")
    debug = tmp_path / "symbols" / ".debug" / "any.debug"
    take_out_debug_information(moved, debug)
    source = f"debug information of {debug}"
    assert name(binaries, library, None, tmp_path / "symbols", path="/gone")[:2] == ("here", source)


def test_debug_information_alone_names_nothing(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    # given the debug file of a missing file, without whose program headers offsets have no meaning
    debug = tmp_path / "symbols" / "x.debug"
    take_out_debug_information(library, debug)
    function, source, problem = name(binaries, library, None, debug.parent, path="/gone")
    assert (function, source) == (None, "")
    assert problem == f"{debug} has only its debug information: the file itself is needed"


def test_an_unstripped_copy_serves_as_debug_information(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    whole = copied(library, tmp_path / "symbols" / "libhere.so")
    take_out_debug_information(library, tmp_path / "unused", link=False)
    source = f"debug information of {whole.path}"
    assert name(binaries, library, None, tmp_path / "symbols") == ("here", source, "")
