# SPDX-License-Identifier: Apache-2.0
"""Compiles libiaprof_inject.so of record/kernels/inject.c into the package; all else of the build is in pyproject.toml.

Where there is no C compiler, or no <sys/sdt.h> (Debian: systemtap-sdt-dev), iaprof installs without that library, and
`iaprof record --launches=inject` says what is missing.
"""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """What setuptools builds for a module of Python's, but that Python does not import it."""

    def build_extensions(self) -> None:
        """Not with the flags that this Python was built with, such as its rpath."""
        compiler = os.environ.get("CC", "cc")
        self.compiler.set_executables(compiler_so=f"{compiler} -fPIC", linker_so=f"{compiler} -shared")
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        """Without the version of a Python."""
        return fullname.replace(".", "/") + ".so"


class WheelOfAnyPython(bdist_wheel):
    """One wheel serves each version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """As for a package without modules in C, but of this platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "iaprof.record.kernels.libiaprof_inject",
            [f"src/iaprof/record/kernels/inject{part}.c" for part in ("", "_opencl", "_recording", "_children")],
            depends=["src/iaprof/record/kernels/inject.h", "src/iaprof/record/kernels/opencl.h"],
            # Frame pointers, because recorded stacks begin in it.
            extra_compile_args=["-O2", "-fno-omit-frame-pointer", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"],
            # What it calls of its own is its own, whatever a program has by that name.
            extra_link_args=["-Wl,-Bsymbolic,-z,now,-z,relro,-z,noexecstack,--build-id=sha1"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelOfAnyPython},
)
