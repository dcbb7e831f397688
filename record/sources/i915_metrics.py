"""Metrics of Intel's GPUs under Intel's own i915 driver: engines' use and frequencies. Untried on hardware.

The numbers of events: i915_drm_prelim.h of intel-gpu-i915-backports, version 25.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from iaprof.formats.capture.metrics import FREQUENCY_ACTUAL, FREQUENCY_REQUESTED, Derivation, Metric, busy
from iaprof.record.sources.intel_metrics import EventGroup, IntelGt, NumberFiles, Pmu, why
from iaprof.record.sources.metered import Measured, NotMeasured

_ANY_ENGINE_BUSY = 0x10000A  # ns in which any engine was busy; the number of the GT is in the highest four bits
_GT_SHIFT = 60
_FREQUENCIES = ((FREQUENCY_ACTUAL, "rps_act_freq_mhz"), (FREQUENCY_REQUESTED, "rps_cur_freq_mhz"))


class I915Gt(IntelGt):
    """A tile under Intel's i915 driver."""

    def open_gt(self) -> Iterator[Measured | NotMeasured]:
        """See IntelGt."""
        events, files = EventGroup(), NumberFiles()
        counted: list[Metric] = []
        try:
            pmu = Pmu(self.device)
            column = 1 + events.add_attr(pmu.of_config(_ANY_ENGINE_BUSY | self.gt.id << _GT_SHIFT), pmu.cpu)
        except (OSError, ValueError) as error:
            yield self.lacks("its engines' use", f"the card's perf PMU is needed for it: {why(error)}")
        else:
            counted.append(Metric(busy("any"), Derivation.RATE, (column,), scale=100 / 1e9))
        shown: list[Metric] = []
        folder = self.folder() / "drm" / self.device.card / "gt" / f"gt{self.gt.id}"
        for name, file in _FREQUENCIES:
            try:
                column = 1 + files.add(folder / file)
            except OSError as error:
                yield self.lacks(name, why(error))
            else:
                shown.append(Metric(name, Derivation.VALUE, (column,)))
        yield Measured("the counters", events, counted, 0)
        yield Measured("the frequency", files, shown, 0)
