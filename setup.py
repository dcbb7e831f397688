# SPDX-License-Identifier: Apache-2.0
"""Compiles four libraries into the package, and makes man pages and completions.

libiaprof_inject.so is made of record/kernels/inject*.c, libiaprof_cuda.so of inject_cuda*.c there, libiaprof_unwind.so
of symbols/unwind/*.c, libiaprof_join.so of report/join/*.c.

pyproject.toml has the rest of the build. The man pages and completions are made by cli/manual of this checkout.

Without <sys/sdt.h> (Debian: systemtap-sdt-dev), iaprof is installed without the first two, and `iaprof record` says
what is missing where it needs one.
"""

import os
import platform
import sys
import time
from pathlib import Path

from setuptools import Extension, setup  # which brings distutils
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

from distutils.command.install_data import install_data  # isort: skip


class BuildLibrary(build_ext):
    """Builds a plain library in place of a Python module."""

    def build_extensions(self) -> None:
        """Builds without the flags that this Python was built with, such as its rpath."""
        compiler = os.environ.get("CC", "cc")
        self.compiler.set_executables(compiler_so=f"{compiler} -fPIC", linker_so=f"{compiler} -shared")
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        """Returns the library's file name, without the version of Python."""
        return fullname.replace(".", "/") + ".so"


class InstallManual(install_data):
    """Makes man pages and completions where they are installed."""

    def run(self) -> None:
        """Writes the files."""
        sys.dont_write_bytecode = True  # nothing but sources may end up in the wheel
        sys.path.insert(0, "src")
        from iaprof.cli.main import app
        from iaprof.cli.manual.files import files

        made = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
        texts = files(app, self.distribution.get_version(), time.strftime("%Y-%m-%d", made))
        for name, text in texts.items():
            path = Path(self.install_dir, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o644)
            self.outfiles.append(str(path))


class WheelOfAnyPython(bdist_wheel):
    """Makes one wheel for all versions of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tag of a package without C modules, but for this platform."""
        return "py3", "none", super().get_tag()[2]


# Frame pointers, because recorded stacks begin in these libraries; no red zone, because Linux writes there for a probe.
INJECTED = ["-O2", "-fno-omit-frame-pointer", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
if platform.machine() == "x86_64":
    INJECTED.append("-mno-red-zone")

# Libraries that only our processes load.
OWN = ["-std=gnu11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
OWN_LINKED = ["-Wl,-z,now,-z,relro,-z,noexecstack,--build-id=sha1"]

setup(
    ext_modules=[
        Extension(
            "iaprof.record.kernels.libiaprof_inject",
            [f"src/iaprof/record/kernels/inject{part}.c" for part in ("", "_opencl", "_recording", "_children")],
            depends=["src/iaprof/record/kernels/inject.h", "src/iaprof/record/kernels/probe.h"],
            extra_compile_args=INJECTED,
            # -Bsymbolic: the library calls its own functions, even if the program has functions with these names.
            extra_link_args=["-Wl,-Bsymbolic,-z,now,-z,relro,-z,noexecstack,--build-id=sha1"],
            optional=True,
        ),
        Extension(
            "iaprof.record.kernels.libiaprof_cuda",
            ["src/iaprof/record/kernels/inject_cuda.c", "src/iaprof/record/kernels/inject_cuda_paths.c"],
            depends=["src/iaprof/record/kernels/probe.h"],
            extra_compile_args=INJECTED,
            extra_link_args=["-Wl,-Bsymbolic,-z,now,-z,relro,-z,noexecstack,-z,nodelete,--build-id=sha1"],
            optional=True,
        ),
        Extension(
            "iaprof.symbols.unwind.libiaprof_unwind",
            [f"src/iaprof/symbols/unwind/{part}.c" for part in ("walk", "frames")],
            depends=["src/iaprof/symbols/unwind/frames.h"],
            extra_compile_args=OWN,
            extra_link_args=OWN_LINKED,
        ),
        Extension(
            "iaprof.report.join.libiaprof_join",
            [f"src/iaprof/report/join/{part}.c" for part in ("records", "launches")],
            extra_compile_args=[*OWN, "-O3"],  # a third faster
            extra_link_args=OWN_LINKED,
        ),
    ],
    data_files=[("share", [])],  # without any, setuptools would not run install_data
    cmdclass={"build_ext": BuildLibrary, "install_data": InstallManual, "bdist_wheel": WheelOfAnyPython},
)
