# SPDX-License-Identifier: Apache-2.0
"""Compiles libiaprof_inject.so of record/kernels/inject*.c into the package; pyproject.toml has the rest of the build.

Without a C compiler or <sys/sdt.h> (Debian: systemtap-sdt-dev), iaprof is installed without that library, and
`iaprof record --launches=inject` says what is missing.
"""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


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


class WheelOfAnyPython(bdist_wheel):
    """Makes one wheel for all versions of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tag of a package without C modules, but for this platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "iaprof.record.kernels.libiaprof_inject",
            [f"src/iaprof/record/kernels/inject{part}.c" for part in ("", "_opencl", "_recording", "_children")],
            depends=["src/iaprof/record/kernels/inject.h", "src/iaprof/record/kernels/opencl.h"],
            # Frame pointers, because recorded stacks begin in this library.
            extra_compile_args=["-O2", "-fno-omit-frame-pointer", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"],
            # -Bsymbolic: the library calls its own functions, even if the program has functions with these names.
            extra_link_args=["-Wl,-Bsymbolic,-z,now,-z,relro,-z,noexecstack,--build-id=sha1"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelOfAnyPython},
)
