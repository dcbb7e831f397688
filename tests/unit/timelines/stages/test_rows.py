from __future__ import annotations

from iaprof.timelines.options import Options
from iaprof.timelines.stages.rows import (
    drop_global_events,
    map_tid_to_range,
    recombine_cpu_events,
    remove_ids_from_name,
)
from iaprof.timelines.trace import Dialect, Trace
from unit.timelines.clock_examples import E1
from unit.timelines.traces import slice_, trace


def _names(of: Trace) -> list[str]:
    return [of.texts[code] for code in of.slices.name]


def test_e1_threads_are_numbered_as_they_appear() -> None:
    e1 = trace(list(reversed(E1)))
    map_tid_to_range(e1, Options())
    assert e1.slices.tid.tolist() == [1400, 1300, 1500, 1400, 1300, 1200, 1100, 1000]


def test_more_than_30_threads_get_numbers_and_marks_go_with_them() -> None:
    instant = {"ph": "i", "name": "here", "tid": 1099, "ts": 5}
    unknown = {"ph": "i", "name": "there", "tid": 7, "ts": 5}
    many = trace([*(slice_("s", number, 1, tid=1000 + number) for number in range(100)), instant, unknown])
    map_tid_to_range(many, Options())
    assert many.slices.tid.tolist() == [1000 + 100 * number for number in range(100)]
    assert many.instants.tid.tolist() == [1000 + 9900, 7]


def test_threads_of_pytorch_keep_their_numbers() -> None:
    torch = trace([slice_("s", 0, 1, tid=71)], dialect=Dialect.TORCH)
    map_tid_to_range(torch, Options())
    recombine_cpu_events(torch, Options())
    assert torch.slices.tid.tolist() == [71]


def test_host_slices_go_into_one_row_with_their_flows() -> None:
    flows = [{"ph": "s", "id": 1, "name": "f", "tid": tid, "ts": 1} for tid in (1100, 1200)]
    host = trace([
        slice_("host", 0, 9, tid=1100), slice_("AIU Roundtrip", 0, 9, tid=1300), slice_("host", 0, 9, tid=1200),
        slice_("k Cmpt Exec", 0, 1, [1, 2, 3, 4, 5], tid=1200), *flows,
    ])  # fmt: skip
    recombine_cpu_events(host, Options())
    assert host.slices.tid.tolist() == [1000, 1300, 1000, 1200]
    assert host.flows.tid.tolist() == [1000, 1200]


def test_requests_are_taken_out_of_names() -> None:
    named = trace([slice_(name, 0, 1) for name in ("SenRdmaSend_12 [sync] DmaO", "Recv_3 DmaI", "k Cmpt Exec")])
    remove_ids_from_name(named, Options())
    assert _names(named) == ["SenRdmaSend [sync] DmaO", "Recv_3 DmaI", "k Cmpt Exec"]
    assert named.texts.taken(named.slices.extra["reqID"]).to_pylist() == ["12", None, None]


def test_global_events_are_dropped_and_counted() -> None:
    e1 = trace([*E1, {"ph": "i", "name": "Callback", "ts": 1}, {"ph": "i", "name": "other", "ts": 1}])
    drop_global_events(e1, Options())
    assert _names(e1) == [event["name"] for event in E1[2:]]
    assert len(e1.instants) == 1
    assert dict(e1.dropped) == {"global events": 3}
