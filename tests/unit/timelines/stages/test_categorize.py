from __future__ import annotations

import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.categorize import CLASSES, EventClass, categorize
from iaprof.timelines.trace import Dialect
from unit.timelines.examples import all_reduce, launched, member, points, two_operations
from unit.timelines.traces import slice_, trace

COUNTERS = (1, 2, 3, 4, 5)


def test_operations() -> None:
    made = two_operations()
    categorize(made, Options())
    assert member(made, "class") == [
        "ROUNDTRIP_FLEX",
        "ROUNDTRIP_AIU",
        "DATA_IN",
        "COMPUTE_PREP",
        "COMPUTE_EXEC",
        "COMPUTE_PREP",
        "MAIU_PROTOCOL_SEND_DATA",
        "COMPUTE_EXEC",
    ]


def test_an_all_reduce() -> None:
    made = all_reduce()
    categorize(made, Options())
    send, receive = "MAIU_P2PRDMA_PROTOCOL_SEND_DATA", "MAIU_P2PRDMA_PROTOCOL_RECV_DATA"
    serial, kernel = "MAIU_PROTOCOL_SERIAL", "COMPUTE_EXEC"
    rank_0 = [kernel, send, receive, kernel]
    assert member(made, "class") == [*rank_0, kernel, receive, kernel, serial, serial, send, kernel]


def test_a_copy_of_torch_and_its_bandwidth() -> None:
    made = launched()
    categorize(made, Options())
    assert member(made, "class") == ["OTHER", "OTHER", "DATA_IN", "COMPUTE_EXEC", "COMPUTE_EXEC"]
    assert points(made, "TransferBW") == [(0, 1050, 4.0), (0, 1060, 0.0)]
    assert made.made == {"points of the counter TransferBW": 2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Host DMA Wdone DmaI", EventClass.HDMA_WAIT_DATA),
        ("Host DMA Wait for Data Avail Notice", EventClass.HDMA_WAIT_DATA),
        ("Host DMA Wait for Notice (gather notifications)", EventClass.HDMA_WAIT_DATA),
        ("HCOLL R5 Wait DATA", EventClass.HDMA_WAIT_DATA),
        ("Cleanup Host DMA Wait for ACK DmaI", EventClass.HDMA_WAIT_ACK),
        ("HCOLL R5 Wait ACK", EventClass.HDMA_WAIT_ACK),
        ("Host DMA Send ACK Instruction DmaO", EventClass.HDMA_SIGNAL_ACK),
        ("HCOLL R5 Send ACK", EventClass.HDMA_SIGNAL_ACK),
        ("Host DMA Send Instruction DmaO", EventClass.HDMA_SIGNAL_DATA),
        ("HCOLL Signal", EventClass.HDMA_SIGNAL_DATA),
        ("HCOLL R5 Send DATA", EventClass.HDMA_SIGNAL_DATA),
        ("Host DMA Wait for Notice", EventClass.HDMA_MONITOR_NOTICE),
        ("Host DMA Wait for Delivery Notice", EventClass.HDMA_MONITOR_NOTICE),
        ("Host DMA x DmaO", EventClass.HDMA_SEND_DATA),
        ("Host DMA x DmaI", EventClass.HDMA_RECV_DATA),
        ("Host DMA x", EventClass.OTHER),
        ("DLM Wait DmaO", EventClass.HDMA_WAIT_DATA),
        ("x Set BcList DmaO", EventClass.PROTOCOL_SERIAL),
        ("x Xseg to rank 3 DmaO", EventClass.PROTOCOL_SERIAL),
        ("x DmaO", EventClass.P2PRDMA_SEND_DATA),
        ("x DmaI", EventClass.P2PRDMA_RECV_DATA),
        ("x Cmpt Exec", EventClass.COMPUTE_EXEC),
    ],
)
def test_classes_of_collectives(name: str, expected: EventClass) -> None:
    made = trace([slice_(name, 0, 1, COUNTERS, CollGroup="G")])
    categorize(made, Options())
    assert member(made, "class") == [expected]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Compute of x", EventClass.SEN_DATA_CONVERT),
        ("Compute of SenFusedDeviceNode_1", EventClass.OTHER),
        ("PrepareAndSyncRdma", EventClass.MAIU_WIREUP),
        ("a Barrier: b", EventClass.MAIU_BARRIER),
        ("Flex RoundTrip 2", EventClass.OTHER),
        ("kernel", EventClass.OTHER),
    ],
)
def test_classes_of_host_slices(name: str, expected: EventClass) -> None:
    made = trace([slice_(name, 0, 1)])
    categorize(made, Options())
    assert member(made, "class") == [expected]


def test_inner_copies_of_128_bytes_are_signals() -> None:
    # Given copies before, at, between and after the first and last kernels' starts
    def copy(name: str, ts: int, size: int | None) -> object:
        return slice_(name, ts, 1, COUNTERS, **({} if size is None else {"Bytes": str(size)}))

    kernels = [slice_("k Cmpt Exec", ts, 10, COUNTERS) for ts in (100, 200)]
    copies = [copy("c DmaI", ts, 128) for ts in (50, 100, 150, 200)]
    copies += [copy("c DmaO", 150, size) for size in (128, 129, None)] + [copy("c DmaI", 150, 129)]
    made = trace([*kernels, *copies])  # type: ignore[list-item]
    categorize(made, Options())
    assert member(made, "class")[2:] == [
        "DATA_IN",
        "DATA_IN",
        "MAIU_PROTOCOL_SIGNAL_ACK",
        "DATA_IN",
        "MAIU_PROTOCOL_SIGNAL_DATA",
        "MAIU_PROTOCOL_SEND_DATA",
        "MAIU_PROTOCOL_SEND_DATA",
        "MAIU_PROTOCOL_RECV_DATA",
    ]


def test_there_are_24_classes() -> None:
    assert len(CLASSES) == 24


def test_a_bandwidth_of_nonsense_makes_no_point() -> None:
    args = [{"memory bandwidth (GB/s)": value} for value in (float("inf"), -1.0, 0.0)]
    copies = [slice_("Memcpy (DtoH)", 0, 1, cat="gpu_memcpy", args=each) for each in args]
    made = trace(copies, dialect=Dialect.TORCH)
    categorize(made, Options())
    assert len(made.points) == 0
