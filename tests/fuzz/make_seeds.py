"""Makes the seeds of fuzz_binaries.py: small ELF files of each kind that is read, from one little C++ program.

They are kept beside this file, so that a failure that was found can be found again with whatever compiler.

    .venv/bin/python tests/fuzz/make_seeds.py [FOLDER]
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"

SOURCE = r"""
namespace shapes {
template <typename T, int N> struct Row {
    T cells[N];
    T dot(const Row &other) const {
        T sum = 0;
        for (int i = 0; i < N; i++)
            sum += cells[i] * other.cells[i];
        return sum;
    }
};
} // namespace shapes
static __attribute__((noinline)) long local(const shapes::Row<long, 8> &row) { return row.dot(row) % 1000003; }
extern "C" long enter(long n) {
    shapes::Row<long, 8> row;
    auto fill = [&](long by) {
        for (int i = 0; i < 8; i++)
            row.cells[i] = n * by + i;
    };
    fill(3);
    long sum = local(row);
    fill(7);
    return sum + local(row);
}
asm(".text\n.type bare, @function\nbare: nop\nnop\nret\n");
"""
FLAGS = [
    *("-shared", "-fPIC", "-nostdlib", "-g", "-O2", "-fno-exceptions", "-fno-asynchronous-unwind-tables"),
    *("-Wl,--build-id=sha1", "-Wl,-z,noseparate-code"),
]


def make(folder: Path) -> None:
    """Writes all seeds into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)

        def run(*command: str) -> None:
            subprocess.run(command, cwd=here, check=True)

        (here / "shapes.cpp").write_text(SOURCE)
        for version in (4, 5):
            run("g++", *FLAGS, f"-gdwarf-{version}", "shapes.cpp", "-o", f"dwarf{version}.so")
        run("g++", *FLAGS, "-gz=zlib", "shapes.cpp", "-o", "compressed.so")
        run("objcopy", "--only-keep-debug", "dwarf5.so", "apart.debug")
        run("objcopy", "--strip-debug", "--add-gnu-debuglink=apart.debug", "dwarf5.so", "symbols.so")
        run("objcopy", "--strip-all", "dwarf5.so", "stripped.so")
        run("objcopy", "--strip-debug", "--remove-section=.note.gnu.build-id", "dwarf5.so", "small.so")
        (here / "small.xz").write_bytes(lzma.compress((here / "small.so").read_bytes()))
        run("objcopy", "--add-section", ".gnu_debugdata=small.xz", "stripped.so", "debugdata.so")
        for path in [*here.glob("*.so"), here / "apart.debug"]:
            if path.name != "small.so":
                shutil.copy(path, folder)
                (folder / path.name).chmod(0o644)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
