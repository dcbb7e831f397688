# SPDX-License-Identifier: Apache-2.0
"""The real runtime for the tests in this folder, which `make test-driver` runs, and `make test` with all others."""

import pytest

from driver import opencl as opencl_driver
from driver.driver import Driver, build
from integration.recording import IN_TURN


def pytest_itemcollected(item: pytest.Item) -> None:
    """One worker has them all: a recorder sees every process, and the runtime gives the same addresses in each."""
    item.add_marker("driver")
    item.add_marker(IN_TURN)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def opencl(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> opencl_driver.OpenCL:
    return opencl_driver.build(driver, tmp_path_factory.mktemp("opencl"))
