"""Layouts of Intel's EU-stall records.

Sources: the Linux kernel's xe driver (drivers/gpu/drm/xe/xe_eu_stall.c, Linux 6.15); for Xe3p, a later version of it.
"""

from __future__ import annotations

from iaprof.gpu.intel.reasons import REASONS
from iaprof.gpu.records import RecordLayout

_PVC = {
    "active": 29,
    "other": 37,
    "control": 45,
    "pipestall": 53,
    "send": 61,
    "dist_acc": 69,
    "sbid": 77,
    "sync": 85,
    "inst_fetch": 93,
}
_XE2 = {**_PVC, "tdr": 29, "active": 101}

PVC = RecordLayout("pvc", REASONS, 2, 29, _PVC)
XE2 = RecordLayout("xe2", REASONS, 2, 29, _XE2)
XE3P = RecordLayout("xe3p", REASONS, 3, 61, {reason: first + 32 for reason, first in _XE2.items()})
