# SPDX-License-Identifier: Apache-2.0
"""Prints what TensorBoard's plugin for PyTorch shows of the files in a folder: its overview and its distributed view.

It runs with the packages of scripts/test-tensorboard, and prints JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader


def overview(profile: Any) -> list[dict[str, Any]]:
    """The steps of a worker: us of each class."""
    steps = profile.overview["steps"]
    columns = [each["name"] for each in steps["columns"] if "name" in each]
    rows = [[cell for cell in row if not str(cell).startswith("<div")] for row in steps["rows"]]  # without tooltips
    return [dict(zip(columns, row, strict=True)) for row in rows]


def distributed(profile: Any) -> dict[str, Any]:
    """What is shown of all workers together."""
    return {
        "overlap": profile.steps_to_overlap["data"],
        "wait": profile.steps_to_wait["data"],
        "operations": profile.comm_ops["data"],
    }


if __name__ == "__main__":  # the loader starts this file again for each worker
    found: dict[str, Any] = {}
    for each in RunLoader("run", sys.argv[1], io.Cache()).load().profiles.values():
        if each.worker == "All":
            found["distributed"] = distributed(each)
        else:
            found[each.worker] = overview(each)
    print(json.dumps(found))
