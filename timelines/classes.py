"""The classes of events: what a slice is for. The names are those of the reference, IBM's AIU Trace Analyzer."""

from __future__ import annotations

from enum import StrEnum


class EventClass(StrEnum):
    """A class, as in `args.class`."""

    OTHER = "OTHER"
    COMPUTE_PREP = "COMPUTE_PREP"
    COMPUTE_EXEC = "COMPUTE_EXEC"
    DATA_IN = "DATA_IN"
    DATA_OUT = "DATA_OUT"
    SEN_DATA_CONVERT = "SEN_DATA_CONVERT"
    MAIU_WIREUP = "MAIU_WIREUP"
    MAIU_BARRIER = "MAIU_BARRIER"
    ROUNDTRIP_FLEX = "ROUNDTRIP_FLEX"
    ROUNDTRIP_AIU = "ROUNDTRIP_AIU"
    # Through the host's memory
    HDMA_WAIT_DATA = "MAIU_HDMA_PROTOCOL_WAIT_DATA"
    HDMA_WAIT_ACK = "MAIU_HDMA_PROTOCOL_WAIT_ACK"
    HDMA_SIGNAL_ACK = "MAIU_HDMA_PROTOCOL_SIGNAL_ACK"
    HDMA_SIGNAL_DATA = "MAIU_HDMA_PROTOCOL_SIGNAL_DATA"
    HDMA_MONITOR_NOTICE = "MAIU_HDMA_PROTOCOL_MONITOR_NOTICE"
    HDMA_SEND_DATA = "MAIU_HDMA_PROTOCOL_SEND_DATA"
    HDMA_RECV_DATA = "MAIU_HDMA_PROTOCOL_RECV_DATA"
    # From device to device
    PROTOCOL_SERIAL = "MAIU_PROTOCOL_SERIAL"
    P2PRDMA_SEND_DATA = "MAIU_P2PRDMA_PROTOCOL_SEND_DATA"
    P2PRDMA_RECV_DATA = "MAIU_P2PRDMA_PROTOCOL_RECV_DATA"
    # Copies while a job computes
    SEND_DATA = "MAIU_PROTOCOL_SEND_DATA"
    RECV_DATA = "MAIU_PROTOCOL_RECV_DATA"
    SIGNAL_DATA = "MAIU_PROTOCOL_SIGNAL_DATA"
    SIGNAL_ACK = "MAIU_PROTOCOL_SIGNAL_ACK"


CLASSES = tuple(EventClass)
NUMBERS = {each: number for number, each in enumerate(CLASSES)}

TRANSFERS = (EventClass.DATA_IN, EventClass.DATA_OUT, EventClass.SEND_DATA, EventClass.RECV_DATA)
"""The classes of slices whose bandwidth is shown."""

HOST_MEMORY_PATTERNS: tuple[tuple[str, EventClass], ...] = (
    (
        r"Wdone DmaI|Wait for Data Avail Notice|Wait for Notice \(gather notifications\)|R5 Wait DATA",
        EventClass.HDMA_WAIT_DATA,
    ),
    ("Wait for ACK|R5 Wait ACK", EventClass.HDMA_WAIT_ACK),
    ("Send ACK Instruction|R5 Send ACK", EventClass.HDMA_SIGNAL_ACK),
    ("Send Instruction|HCOLL Signal|R5 Send DATA", EventClass.HDMA_SIGNAL_DATA),
    ("Wait for Notice|Wait for Delivery Notice", EventClass.HDMA_MONITOR_NOTICE),
)
"""What names of collectives' slices through the host's memory tell; the first that is found."""
