"""Metrics of Intel's GPUs under the xe driver: engines' use and frequencies.

A card's perf PMU counts its engines' ticks and sums up its frequencies. The events' meaning:
drivers/gpu/drm/xe/xe_pmu.c, Linux 6.18. Open events keep the GT awake, as an EU-stall stream does anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from iaprof.formats.capture.metrics import FREQUENCY_ACTUAL, FREQUENCY_REQUESTED, Derivation, Metric, busy
from iaprof.record.sources.intel_metrics import EventGroup, IntelGt, NumberFiles, Pmu, why
from iaprof.record.sources.metered import Measured, NotMeasured

_FREQUENCIES = (
    (FREQUENCY_ACTUAL, "gt-actual-frequency", "act_freq"),
    (FREQUENCY_REQUESTED, "gt-requested-frequency", "cur_freq"),
)
"""Metrics; events of the PMU; files in freq0 with the same numbers (drivers/gpu/drm/xe/xe_gt_freq.c)."""

_CLASSES = {0: "render", 1: "copy", 2: "video-decode", 3: "video-enhance", 4: "compute"}
"""DRM_XE_ENGINE_CLASS_* of xe_drm.h, Linux 6.15; its other classes are not hardware."""


class XeGt(IntelGt):
    """A GT under the xe driver."""

    def open_gt(self) -> Iterator[Measured | NotMeasured]:
        """See IntelGt."""
        try:
            pmu = Pmu(self.device)
        except (OSError, ValueError) as error:
            pmu = None
            yield self.lacks("its engines' use", f"the card's perf PMU is needed for it: {why(error)}")
        events, files = EventGroup(), NumberFiles()
        counted: list[Metric] = []
        shown: list[Metric] = []
        folder = self.folder() / f"tile{self.gt.tile}" / f"gt{self.gt.id}" / "freq0"
        for name, event, file in _FREQUENCIES:
            with contextlib.suppress(OSError, ValueError):
                if pmu is not None and pmu.unit(event) == "MHz":
                    counted.append(Metric(name, Derivation.STEP, (1 + events.add(pmu, event, gt=self.gt.id),)))
                    continue
            try:
                shown.append(Metric(name, Derivation.VALUE, (1 + files.add(folder / file),)))
            except OSError as error:
                yield self.lacks(name, why(error))
        if pmu is not None:
            yield from self._open_engines(pmu, events, counted)
        yield Measured("the counters", events, counted, 0)
        yield Measured("the frequency", files, shown, 0)

    def _open_engines(self, pmu: Pmu, events: EventGroup, counted: list[Metric]) -> Iterator[NotMeasured]:
        """Adds the use of each class of engines to what is counted."""
        ticks: dict[int, list[tuple[int, int]]] = {}
        for engine in self.device.engines:
            if engine.gt != self.gt.id or engine.engine_class not in _CLASSES:
                continue
            fields = {"gt": engine.gt, "engine_class": engine.engine_class, "engine_instance": engine.instance}
            try:
                active = 1 + events.add(pmu, "engine-active-ticks", **fields)
                total = 1 + events.add(pmu, "engine-total-ticks", **fields)
            except (OSError, ValueError) as error:
                yield self.lacks(f"the use of its {_CLASSES[engine.engine_class]} engine", why(error))
            else:
                ticks.setdefault(engine.engine_class, []).append((active, total))
        for engine_class, pairs in ticks.items():
            active_columns, total_columns = zip(*pairs, strict=True)
            name = busy(_CLASSES[engine_class])
            counted.append(Metric(name, Derivation.SHARE, active_columns, total_columns, 100.0))
