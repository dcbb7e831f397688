"""Redacts time lines: names become hashes, and what the stages look for in them stays.

A name is cut at the words and numbers that runtimes write. What is between these is the user's, and becomes a hash of
letters: the stages take digits out of names. So `conv_12 Cmpt Exec` and `conv_3 Cmpt Exec` keep what they share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from iaprof.report.archive.pseudonyms import Pseudonyms

_MOST_PARTS = 16  # of a name; one with more becomes a single hash
_WORDS = re.compile(
    # windows of an operation, its number, and its bytes
    r" Cmpt (?:Exec|Prep)\b| Dma[IO]\b|_\d{1,9}(?= |$)| ?\[\d{1,18}B\]|"
    # collectives
    r"\[sync=|(?:_\d{1,9})?_s\d{1,9}_r(?:0x[0-9a-fA-F]{1,16}|\d{1,9})_\d{1,9}(?=\])|"
    r"SenRdma(?:Send|Recv|Receive)(?:_\d{1,18})?|"
    r" - Set BcList| - Xseg to rank \d{1,9}|(?<=\d) Data(?= \[)|All(?:Reduce|Gather)|_all_(?:reduce|gather)|"
    r"(?:_\d{1,9})?_Add(?:_\d{1,9})?(?= )|HCOLL(?: Signal)?|Host DMA|DLM Wait|Wdone(?= DmaI)|"
    r"Wait for Data Avail Notice|"
    r"Wait for Notice(?: \(gather notifications\))?|Wait for Delivery Notice|Wait for ACK|Send ACK Instruction|"
    r"Send Instruction|R5 (?:Wait|Send) (?:DATA|ACK)|"
    # the host
    r"[Bb]arrier:|[Mm]emcpy \((?:HtoD|DtoH)\)|Flex RoundTrip|AIU Roundtrip|ScheduleCompute|PrepareDmas|"
    r"Compute of (?=SenFusedDeviceNode)|Compute of |SenFusedDeviceNode|(?:aiu)?PrepareAndSyncRdma|"
    r"(?:aiu)?ScheduleWait|aiu(?:LaunchSuperNode|SuperNodeExecution|DataConvert|LaunchControlBlocks)|"
    r"Execute graph|PostKeys|FetchKeys|Callback|HostPrep|AllocateFrame of |Update CBs|"
    r"built-in method Predict of PyCapsule object|Torch-Compiled Region|"
    # the format, and counters
    r"^(?:process_(?:name|labels|sort_index)|thread_(?:name|sort_index)|ac2g|Power|ConcurrentPreps|PT Active|"
    r"BW Dma[IO]|BW allreduce|BW all-pcie|TransferBW|Coll_Bandwidth|gloo:all_reduce)$"
)
_SEPARATORS = re.compile(r"[ _\-:,\[\]()]*")
_TYPES = frozenset({"SingleCast", "MultiCast", "MultiCast XSEG", "Set BCList", "WDone Barrier", "WDoneBarrier"})
_PEERS = re.compile(r"[\d, \[\]]{0,4096}", re.ASCII)
_CATEGORIES = frozenset(
    {
        "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "concurrent_kernel", "cpu_op", "user_annotation",
        "python_function", "cpu_instant_event", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu", "async_gpu", "Trace",
        "cuda_runtime", "cuda_driver", "cuda_sync", "cuda_profiler_range", "xpu_runtime", "xpu_driver", "mtia_runtime",
        "privateuse1_runtime", "privateuse1_driver", "collective_comm", "Power", "Power3", "Power4",
        "Pending Prep Events",
    }
)  # fmt: skip
_DEVICE_CATEGORY = re.compile("gpu|kernel")  # by which the stages tell a device's slices
_SERIES = frozenset({"Watts", "Percent", "Bytes", "GB/s", "GBps", "Unit GBps", "Concurrency"})
_NUMBERS = {
    "deviceProperties": frozenset({"id", "totalGlobalMem", "computeMajor", "computeMinor", "numSms", "warpSize"}),
    "distributedInfo": frozenset({"rank", "world_size"}),
}
"""Members of a file whose numbers stay."""


def redacted_name(names: Pseudonyms, name: str) -> str:
    """Redacts the name of an event."""
    parts, at, hashes = [], 0, 0
    for word in [*_WORDS.finditer(name), None]:
        between = name[at : word.start() if word else len(name)]
        if _SEPARATORS.fullmatch(between):
            parts.append(between)
        else:
            parts.append(_between(names, between))
            hashes += 1
        if word:
            parts.append(word[0])
            at = word.end()
    return "".join(parts) if hashes <= 2 and len(parts) <= 2 * _MOST_PARTS else names.letters("slice", name)


def _between(names: Pseudonyms, text: str) -> str:
    """Returns the hash of what is between two words; spaces around it stay."""
    stripped = text.strip(" ")
    before = " " if text.startswith(" ") else ""
    after = " " if text.endswith(" ") else ""
    return before + names.letters("slice", stripped) + after


def redacted_category(names: Pseudonyms, category: str) -> str:
    """Redacts a category. One that tells a device's slices still does."""
    if category in _CATEGORIES:
        return category
    words = _DEVICE_CATEGORY.findall(category)
    return " ".join([names.letters("category", category), *words[:1]])


def redacted_series(names: Pseudonyms, series: str) -> str:
    """Redacts the name of one of a counter's values."""
    return series if series in _SERIES else names.letters("series", series)


def redacted_type(names: Pseudonyms, type_: str) -> str:
    """Redacts the type of a collective's event."""
    return type_ if type_ in _TYPES else names.letters("type", type_)


def redacted_peers(names: Pseudonyms, peers: str) -> str:
    """Redacts peers, unless they are numbers of ranks."""
    return peers if _PEERS.fullmatch(peers) else names.letters("peers", peers)


def redacted_phase(names: Pseudonyms, phase: str) -> str:
    """Redacts a phase, unless it is a letter, as all are that the format has."""
    return phase if len(phase) <= 1 else names.letters("phase", phase)


def redacted_members(members: Any) -> dict[str, Any]:
    """Returns of a file's members the numbers that tell its devices and ranks."""
    if not isinstance(members, dict):
        return {}
    kept: dict[str, Any] = {}
    devices, info = members.get("deviceProperties"), members.get("distributedInfo")
    if isinstance(devices, list):
        kept["deviceProperties"] = [_numbers(each, "deviceProperties") for each in devices if isinstance(each, dict)]
    if isinstance(info, dict):
        kept["distributedInfo"] = _numbers(info, "distributedInfo")
    return kept


def _numbers(found: Mapping[Any, Any], member: str) -> dict[str, int | float]:
    return {
        name: found[name] for name in sorted(_NUMBERS[member] & found.keys()) if isinstance(found[name], int | float)
    }
