# SPDX-License-Identifier: Apache-2.0
"""Mesa's Vulkan driver on the stand-in's render node: what it submits is what the program dispatched."""

from collections import Counter
from pathlib import Path

import pytest

from driver.vulkan import DEVICES, RELEASES, SHADERS, Mesa

OPTIONS = [(), ("--direct", "--indirect"), ("--secondary",), ("--pool", "--anew", "--names")]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "".join(options) or "plain")
def test_walkers_are_the_program_s_dispatches(
    vulkan: dict[str, Mesa], release: str, device: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    run = vulkan[release].run(device, tmp_path, *options, "--rounds", 3, "--submits", 4, "--dispatches", 6)
    times = 2 if "--secondary" in options else 1
    assert run.submitted == dict.fromkeys(SHADERS, 3 * 4 * 6 * times)
    assert Counter(walker.groups[0] for walker in run.walkers) == run.submitted
    assert {walker.simd for walker in run.walkers} <= {8, 16, 32}
