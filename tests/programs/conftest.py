# SPDX-License-Identifier: Apache-2.0
"""The programs for the tests in this folder, which `make test-programs` runs."""

import subprocess
from collections.abc import Iterator

import pytest

from driver import vulkan as vulkan_driver
from iaprof.bpf.driver_layout import find_layout
from iaprof.bpf.probes.library_file import LibraryFile
from integration.recording import IAPROF, IN_TURN
from programs.programs import Programs, prepare


def pytest_itemcollected(item: pytest.Item) -> None:
    """One worker has them all: a recorder sees every process, and Linux counts launches by file."""
    item.add_marker("programs")
    item.add_marker("bpf")
    item.add_marker(IN_TURN)


@pytest.fixture(scope="session")
def vulkan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, vulkan_driver.Mesa]]:
    with vulkan_driver.build(tmp_path_factory.mktemp("vulkan")) as drivers:
        yield drivers


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Those that there are; a driver that is newer than the layouts that ship is calibrated."""
    prepared = prepare(tmp_path_factory.mktemp("programs"))
    for driver in prepared.drivers:
        with driver.open("rb") as file:
            known = find_layout(LibraryFile(file).build_id())
        if known is None:
            subprocess.run([*IAPROF, "calibrate", driver], check=True)
    return prepared
