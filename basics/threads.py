"""How many threads OpenBLAS, which numpy contains, has in our processes: one, as we call nothing of it.

Otherwise it starts a thread per core when numpy is imported. They take CPU time and address space, and keep the
privileges that a process gives up.
"""

from __future__ import annotations

import os

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of a process that imports numpy."""
_added: list[str] = []


def use_one_thread() -> None:
    """Makes OpenBLAS use one thread in this process, before it imports numpy, unless the user has chosen a number."""
    _added.extend(name for name in ONE_THREAD if name not in os.environ)
    os.environ.update({name: ONE_THREAD[name] for name in _added})


def users_environment() -> dict[str, str]:
    """Returns this process's environment as the user set it: for programs of the user's."""
    return {name: value for name, value in os.environ.items() if name not in _added}
