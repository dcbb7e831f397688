# SPDX-License-Identifier: Apache-2.0
"""The real runtime for the tests in this folder, which `make test-driver` runs."""

from collections.abc import Iterator

import pytest

from driver import opencl as opencl_driver, vulkan as vulkan_driver
from driver.driver import WAYS, Driver, build
from driver.injecting import Recorder
from iaprof.bpf.probes import functions
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.record.kernels.drivers import Injection


def pytest_itemcollected(item: pytest.Item) -> None:
    """None records beside others: a recorder sees every process, and a driver gives the same addresses in each."""
    item.add_marker("driver")
    item.add_marker("alone")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def opencl(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> opencl_driver.OpenCL:
    return opencl_driver.build(driver, tmp_path_factory.mktemp("opencl"))


@pytest.fixture(scope="session")
def vulkan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, vulkan_driver.Mesa]]:
    with vulkan_driver.build(tmp_path_factory.mktemp("vulkan")) as drivers:
        yield drivers


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    probes = LaunchProbes()
    injection = Injection()
    (outcome,) = probes.libraries.take(injection.library)
    executing = 6  # functions that execute, close, reset and destroy command lists
    of_opencl = 3  # forms of launch
    copying = len(functions.LEVEL_ZERO_TRANSFERS) + len(functions.OPENCL_TRANSFERS)
    assert outcome.probes == len(WAYS) + of_opencl + executing + copying, (
        "one for each form of launch, but two of Level Zero share one, and one for modules"
    )
    yield Recorder(injection, probes)
    probes.close()
    injection.close()
