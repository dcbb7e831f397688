"""Stage profiles: which stages run. The file is iaprof's TOML, or the AIU Trace Analyzer's JSON.

TOML: a table `stages` with `NAME = true` or `false`, and `others = false` to turn off all that are not listed.
Several stages have the same name: `NAME` is all of them, `"NAME#2"` the second.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from iaprof.basics.errors import IaprofError, UsageError

_MOST_BYTES = 1 << 20
# The AIU's clocks mean nothing in a trace of PyTorch's profiler.
_NOT_FOR_TORCH = (
    "frequency_align_collect", "frequency_align_apply", "remove_ids_from_name", "map_tid_to_range",
    "cycle_count_to_wallclock", "tighten_hts_by_instr_type", "tripple_phased_events", "mp_sync_tight_v1",
    "mp_ts_calibration_v2", "queueing_counter", "drop_global_events", "recombine_cpu_events",
    "assert_ts_sequence#1", "analyze_power_statistics",
)  # fmt: skip
# Stages of the AIU Trace Analyzer that do not exist here: the import or columns make them unnecessary.
_NOT_NEEDED = (
    "pipeline_barrier", "verify", "verify_cleanup", "drop_timestamp_reversed_events", "create_slice_from_BE",
    "detect_partial_overlap_tids", "cleanup_copy_of_device_ts", "cycle_count_conversion_cleanup",
)  # fmt: skip
_MINIMAL = (
    "normalize_phase1", "normalize_phase2", "cycle_count_to_wallclock", "tighten_hts_by_instr_type",
    "event_categorizer", "calculate_stats", "sort_events",
)  # fmt: skip
BUILT_IN = ("everything", "minimal", "torch")


def enabled(stages: Sequence[Sequence[str]], profile: str, changes: Iterable[str]) -> list[bool]:
    """Returns for each stage whether it is on: whether all of its names are.

    Args:
        stages: the names of each stage, in order.
        profile: a stage profile: one of BUILT_IN, or the path of a file.
        changes: names to turn on, with "-" before them to turn off.

    Raises:
        UsageError: there is no stage or stage profile of a name.
        IaprofError: the file cannot be read, or is not a stage profile.
    """
    names = [name for each in stages for name in each]
    places = _places(names)
    if profile == "everything":
        on = [True] * len(names)
    elif profile == "torch":
        on = _with(places, [True] * len(names), dict.fromkeys(_NOT_FOR_TORCH, False))
    elif profile == "minimal":
        on = _with(places, [False] * len(names), dict.fromkeys(_MINIMAL, True))
    else:
        on = _of_file(names, places, Path(profile))
    for change in changes:
        name = change.removeprefix("-")
        if name not in places:
            raise UsageError(f"there is no stage {name}: --list-stages prints them")
        on = _with(places, on, {name: name == change})
    each_name = iter(on)
    of_stages = [[next(each_name) for _ in each] for each in stages]
    return [all(of_stage) for of_stage in of_stages]


def _places(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns the numbers of stages by name, and by NAME#N where a name repeats."""
    places: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        places.setdefault(name, []).append(number)
    for name, numbers in list(places.items()):
        places |= {f"{name}#{nth}": [number] for nth, number in enumerate(numbers, 1)}
    return places


def _with(places: Mapping[str, list[int]], on: list[bool], changes: Mapping[str, bool]) -> list[bool]:
    changed = list(on)
    for name, value in changes.items():
        for number in places.get(name, ()):
            changed[number] = value
    return changed


def _of_file(names: Sequence[str], places: Mapping[str, list[int]], path: Path) -> list[bool]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        if path.suffix or path.parent != Path():
            raise IaprofError(f"{path} cannot be opened: {error.strerror}") from None
        raise UsageError(f"there is no profile {path}: name {', '.join(BUILT_IN)}, or a file") from None
    try:
        text = content.decode()
        if text.lstrip()[:1] == "{":
            return _of_json(names, places, json.loads(text))
        return _of_toml(places, len(names), tomllib.loads(text))
    except (ValueError, RecursionError, TypeError) as error:
        raise IaprofError(f"{path} is not a profile of stages: {error}") from None


def _of_toml(places: Mapping[str, list[int]], count: int, document: Mapping[str, object]) -> list[bool]:
    stages = document.get("stages")
    if not isinstance(stages, dict) or not all(isinstance(value, bool) for value in stages.values()):
        raise ValueError("it has no table [stages] with true and false")
    others = stages.pop("others", True)
    if unknown := sorted(stages.keys() - places.keys()):
        raise ValueError(f"there is no stage {unknown[0]}")
    return _with(places, [others] * count, stages)


def _of_json(names: Sequence[str], places: Mapping[str, list[int]], document: Mapping[str, object]) -> list[bool]:
    """Reads the reference's JSON: a list of {name: bool}. Stages that it does not list are off; in {}, all are on."""
    stages = document.get("stages")
    if stages is None and not document:
        return [True] * len(names)
    if not isinstance(stages, list) or not all(isinstance(each, dict) for each in stages):
        raise ValueError("it has no list of stages")
    settings = [(name, value) for each in stages for name, value in each.items()]
    if unknown := [name for name, _ in settings if name.split("#")[0] not in {*names, *_NOT_NEEDED}]:
        raise ValueError(f"there is no stage {unknown[0]}")
    counts = Counter(name for name, _ in settings)
    seen: Counter[str] = Counter()
    on = [False] * len(names)
    for name, value in settings:
        seen[name] += 1
        # A name that is listed as often as there are stages of that name means each of them in turn.
        is_nth = counts[name] == len(places.get(name, ())) > 1
        on = _with(places, on, {f"{name}#{seen[name]}" if is_nth else name: bool(value)})
    return on
