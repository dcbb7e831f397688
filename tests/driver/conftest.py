# SPDX-License-Identifier: Apache-2.0
"""The real runtime for the tests in this folder, which `make test-driver` runs."""

import pytest

from driver.driver import Driver, build


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return build(tmp_path_factory.mktemp("driver"))
