"""The filters that all verbs share: what each keeps, that its values add up to all, and its errors."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from iaprof.formats.header.launch_warnings import COPIES_UNRECORDED
from thorough import usually
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import Done, iaprof

MS, SECOND = 10**6, 10**9
BEGUN = HEADER["clock"]["monotonic_ns"]
CONTAINER = "3f2504e04f8911d39a0c0305e82c3301" * 2
ONE, OTHER = (
    {"layout": "xe2", "ip_version": [20, 1, 0], "device": f"/dev/dri/renderD{128 + n}", "card": f"/dev/dri/card{n}",
     "pci_address": f"0000:{n + 3:02x}:00.0"} for n in (0, 1)
)  # fmt: skip
STREAMS = [ONE, ONE, OTHER]  # one GPU has two GTs
TEN_SECONDS = {**HEADER, "streams": STREAMS, "end_ns": BEGUN + 10 * SECOND}


class Stalled(NamedTuple):
    """A read with one record, and the launch before it."""

    ms: int  # since the recording began
    stream: int
    pid: int
    tid: int
    comm: str
    kernel: str
    reason: str


STALLS = {
    "a": Stalled(500, 0, 7, 7, "app", "matmul", "sbid"),
    "b": Stalled(1000, 0, 7, 71, "app", "matmul_tiled", "send"),
    "c": Stalled(2000, 1, 7, 72, "pool 1", "dot(float*)", "sbid"),
    "d": Stalled(2500, 2, 8, 8, "app", "matmul", "active"),
    "e": Stalled(5000, 2, 9, 9, "web", "attention", "sync"),
    "f": Stalled(9900, 2, 9, 91, "web", "attention", "sbid"),
    "g": Stalled(10_000, 0, 10, 10, "web", "scale", "tdr"),
    "h": Stalled(6000, 0, 0, 0, "", "", "other"),  # without a known launch or kernel
}
SAMPLES = {name: 1 << number for number, name in enumerate(STALLS)}  # each sum identifies its stalls
CGROUPS = {
    7: ("/system.slice/web.service", None),
    8: ("/system.slice/web.service/worker", None),
    9: (f"/docker/{CONTAINER}", CONTAINER),
    10: ("/system.slice/web.service2", "db"),
}


def described(pid: int) -> dict[str, Any]:
    """A `process` row."""
    cgroup, container = CGROUPS[pid]
    return {"time_ns": 1, "pid": pid, "tid": pid, "event": "described", "cgroup": cgroup, "container": container}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of STALLS, each kernel in memory of its own."""
    stalls, launches = [], []
    for number, (name, one) in enumerate(STALLS.items()):
        address, time = 0x10000 + 0x1000 * number, BEGUN + one.ms * MS
        stalls.append(stall(time, record(address, **{one.reason: SAMPLES[name]}), stream=one.stream, begin_ns=time - 9))
        if one.pid:
            launches.append(
                launch(time - MS, one.pid, address, name=one.kernel, tid=one.tid, comm=one.comm, stack=number)
            )
    processes = [{"time_ns": 1, "pid": 7, "tid": 7, "event": "fork", "comm": "app"}, *map(described, CGROUPS)]
    path = tmp_path_factory.mktemp("known") / "known.parquet"
    return capture(path, TEN_SECONDS, stall=stalls, launch=launches, process=processes, **others())


def others() -> dict[str, list[dict[str, Any]]]:
    """Rows of other kinds, by two threads each: 7 has most of them."""
    of_7 = {"time_ns": BEGUN + SECOND, "pid": 7, "tid": 7, "comm": "app", "stack": 0, "flags": 0}
    rows = [of_7, of_7, of_7 | {"time_ns": BEGUN + 5 * SECOND, "pid": 9, "tid": 90, "comm": "web"}]
    waited = {"waited_ns": SECOND, "count": 1, "function": "clFinish", "handle": 1}
    copied = {"cpu": 0, "function": "clFinish", "bytes": 10}
    return {
        "wait": [row | waited | {"end_ns": row["time_ns"] + SECOND} for row in rows],
        "transfer": [row | copied for row in rows],
        "cpu_sample": [row | {"cpu": 0, "kernel_stack": 0} for row in rows],
    }


def folded(done: Done) -> Counter[str]:
    """The stacks of a report, and their counts."""
    assert (done.code, done.err) == (0, "")
    split = [line.rpartition(" ") for line in done.out.splitlines()]
    assert len({stack for stack, _, _ in split}) == len(split)
    return Counter({stack: int(count) for stack, _, count in split})


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("", "abcdefgh"),
        ("--time 1s-10s", "bcdefh"),  # the end is exclusive
        ("--time 0s-1s", "a"),
        ("--time 1-5", "bcd"),
        ("--time 500ms-", "abcdefgh"),
        ("--time 0.1m-", "fgh"),
        ("--time -2m", "abcdefgh"),
        ("--time -1000ms", "a"),
        ("--time -2000001us", "abc"),
        ("--time 999999999ns-1000000001ns", "b"),
        ("--time 10s-", "g"),
        ("--time 10%-20%", "b"),
        ("--time -20%", "ab"),
        ("--time 99%-100%", "fg"),  # the last read belongs to the recording
        ("--time 12.5%-50.5%", "cde"),
        ("--pid 7", "abc"),
        ("-p 8,9 -p 10", "defg"),
        ("--tid 7", "a"),
        ("--tid 71,72 --tid 91", "bcf"),
        ("--comm app", "abd"),
        ("--comm=web,pool\u00a01", "cefg"),
        ("--kernel ^matmul$", "ad"),
        ("--kernel dot\\(float\\*", "c"),
        ("--kernel (?i)ATT|scale", "efg"),
        ("--device card0", "abcgh"),
        ("--device /dev/dri/card1", "def"),
        ("--device renderD128", "abcgh"),
        ("--device /dev/dri/renderD129", "def"),
        ("--device 0000:03:00.0", "abcgh"),
        ("--device 0000:04:00.0,card0", "abcdefgh"),
        ("--device card1,renderD129", "def"),
        ("--reason sbid", "acf"),
        ("--reason send,tdr --reason active", "bdg"),
        ("--cgroup /system.slice/web.service", "abcd"),
        ("--cgroup /system.slice/web.service/", "abcd"),
        ("--cgroup /system.slice/web.service*", "abcdg"),
        ("--cgroup /*.slice", "abcdg"),
        ("--cgroup *2", "g"),
        ("--cgroup /", "abcdefg"),
        (f"--cgroup {CONTAINER[:6]}", "ef"),
        ("--cgroup db", "g"),
        ("--cgroup /docker,/system.slice/web.service2", "efg"),
        ("--pid 7 --reason sbid", "ac"),
        ("--pid 7,9 --time 1s- --reason sbid --device card1", "f"),
        ("--comm app --cgroup /system.slice/web.service --kernel tiled|dot", "b"),
    ],
)
def test_filters_keep_matching_stalls(known: Path, words: str, kept: str) -> None:
    # given stalls with different powers of two as counts; a no-break space stands for a space within a word
    split = [word.replace("\u00a0", " ") for word in words.split(" ") if word]
    # when
    found = folded(iaprof("report", known, "-q", "--frames", "reason", *split))
    # then
    expected: Counter[str] = Counter()
    for name in kept:
        expected[f"{STALLS[name].reason}_[g]"] += SAMPLES[name]
    assert found == expected


KERNELS = "the kernels are scale, attention, matmul, dot(float*), matmul_tiled"
PROCESSES = "the processes are web 10, web 9, app 8, pool 1 7, app 7"
CGROUPS_THERE = (
    f"the cgroups are /docker/{CONTAINER[:52]}..., /system.slice/web.service, /system.slice/web.service/worker, "
    "/system.slice/web.service2"
)
TOGETHER = "the threads are 7, 8, 9, 10, 71, 72, 91"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--time 99999999999999999999999s-", "the recording is 10.00 s long"),
        ("--kernel unknown", KERNELS),
        ("--cgroup system.slice", CGROUPS_THERE),
        (f"--cgroup {CONTAINER[:5]}", CGROUPS_THERE),
        ("--pid 8 --tid 9", f"{PROCESSES}; {TOGETHER}"),
        ("--comm nobody", PROCESSES),
        ("--python forward", "the capture has no Python functions"),
        ("--time 9950ms- --pid 9", "the only process is web 10"),
        ("--time 20s- --pid 9", "the recording is 10.00 s long"),
    ],
)
@pytest.mark.parametrize("format_", usually(["json"], ["folded", "json", "csv"]))
def test_filters_that_match_nothing_say_what_there_is(known: Path, words: str, said: str, format_: str) -> None:
    # given filters that select no stalls, when a report is asked for
    done = iaprof("report", known, f"--format={format_}", *words.split())
    # then there is none, but a sentence
    options = words.split()
    asked = " and ".join(map(" ".join, zip(options[::2], options[1::2], strict=True)))
    assert done == (1, "", f"iaprof: no stall matches {asked}: {said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("top --pid 3", f"no stall matches --pid 3: {PROCESSES}"),
        ("annotate --pid 3", f"no stall matches --pid 3: {PROCESSES}"),
        ("top --by transfer --pid 3", "no transfer matches --pid 3: the processes are app 7, web 9"),
        ("top --by transfer --kernel x", "no transfer matches --kernel x: the only function is clFinish"),
        ("top --by transfer --cgroup x --tid 1",
         f"no transfer matches --tid 1 and --cgroup x: the threads are 7, 90; {CGROUPS_THERE}"),
        ("top --by transfer --time 20s-", "no transfer matches --time 20s-: the recording is 10.00 s long"),
        ("top --by wait --pid 3", "no wait matches --pid 3: the processes are app 7, 9"),
        ("report --waits --pid 3 --tid 3",
         "no wait matches --pid 3 and --tid 3: the processes are app 7, 9; the threads are 7, 90"),
        ("report --cpu-samples --pid 3", "no CPU sample matches --pid 3: the processes are app 7, 9"),
        ("report --cpu-samples --comm x --time 4s-",
         "no CPU sample matches --time 4s- and --comm x: the only process is 9"),
        ("report --cpu-samples --python x", "no CPU sample matches --python x: the capture has no Python functions"),
    ],
)  # fmt: skip
def test_other_verbs_say_so_too(known: Path, words: str, said: str) -> None:
    verb, *options = words.split()
    assert iaprof(verb, known, *options) == (1, "", f"iaprof: {said}\n")


OLD = {"path": "/old.so", "copies": False}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("top --by wait", "waits: record with 'iaprof record --waits'"),
        ("report --waits --pid 3", "waits: record with 'iaprof record --waits'"),
        ("report --cpu-samples", "CPU samples: record with 'iaprof record --cpu-freq 49'"),
        ("report --cpu-samples --pid 3 -q", "CPU samples: record with 'iaprof record --cpu-freq 49'"),
        ("report --cpu-samples --format=html", "CPU samples: record with 'iaprof record --cpu-freq 49'"),
        ("top --by transfer", f"copies and fills: .*iaprof check.*; /old.so: {COPIES_UNRECORDED}"),
    ],
)
def test_a_capture_without_such_rows_says_how_to_record_them(tmp_path: Path, words: str, said: str) -> None:
    empty = capture(tmp_path / "empty.parquet", {**TEN_SECONDS, "libraries": [OLD]})
    verb, *options = words.split()
    done = iaprof(verb, empty, *options)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"iaprof: this capture has no {said}\n", done.err)


def test_a_difference_may_have_nothing_on_one_side(known: Path, tmp_path: Path) -> None:
    # given a kernel that only one of two captures has
    other = capture(tmp_path / "other.parquet", TEN_SECONDS)
    # when they are compared by it, in both orders
    for pair in ((known, other), (other, known)):
        done = iaprof("diff", *pair, "--kernel", "attention", "-q")
        # then there is a difference
        assert (done.code, done.err) == (0, "")
        assert "attention" in done.out
    assert iaprof("diff", known, other, "--kernel", "unknown").code == 1


KINDS_OF_VALUES = {
    "--pid": ["7", "8", "9,10"],
    "--tid": ["70,71", "80", "81,90", "91", "100,101"],
    "--comm": ["app", "pool 1,web"],
    "--kernel": ["^a", "^b$|^c$", "d"],
    "--device": ["card0", "0000:04:00.0"],
    "--reason": ["sbid", "send,active", "control,pipestall,dist_acc,sync,inst_fetch,other,tdr"],
    "--cgroup": ["/system.slice/web.service", f"{CONTAINER},/system.slice/web.service2"],
    "--time": ["-1s", "1000ms-2500000us", "2.5s-9990ms", "9.99s-"],
}
NOBODY = ("[unknown process]", "[ambiguous")
LEFT_OUT = {
    "--pid": NOBODY,
    "--tid": (*NOBODY, "[launched before recording]"),
    "--comm": NOBODY,
    "--cgroup": NOBODY,
    "--kernel": ("[unknown kernel]_[G]", "[ambiguous kernel]_[G]"),
}  # what is of none


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of processes with the same or different kernels, some of which overlap another process's."""
    rng = random.Random(5)
    addresses = [0x10000 + 0x1000 * number for number in range(9)]
    used = {pid: addresses[2 * number : 2 * number + 3] for number, pid in enumerate(CGROUPS)}
    names = {(pid, address): rng.choice("aabcd") for pid in CGROUPS for address in addresses}
    launches = []
    for _ in range(400):
        pid, thread = rng.choice([*CGROUPS]), rng.randrange(2)
        address = rng.choice(used[pid])
        more: dict[str, Any] = {
            "tid": 10 * pid + thread,
            "comm": rng.choice(["app", "pool 1", "web"]),
            "name": names[pid, address],
        }
        stack = rng.randrange(3)
        launches.append(launch(BEGUN + rng.randrange(10_000) * MS, pid, address, stack, **more))
    stalls = []
    for time in sorted([1000, 2500, 4000, 9990, 10_000, *(rng.randrange(10_000) for _ in range(150))]):
        records = [
            record(
                rng.choice([*addresses, 0x90000]) + 8 * rng.randrange(3), sbid=rng.randrange(9), send=1, tdr=time % 3
            )
            for _ in range(rng.randrange(1, 6))
        ]
        end = BEGUN + time * MS
        stalls.append(stall(end, *records, stream=rng.randrange(3), begin_ns=end - 9 * MS))
    path = tmp_path_factory.mktemp("mixed") / "mixed.parquet"
    return capture(path, TEN_SECONDS, stall=stalls, launch=launches, process=[*map(described, CGROUPS)])


@pytest.mark.parametrize("option", KINDS_OF_VALUES)
def test_samples_kept_by_all_values_of_a_filter_add_up(mixed: Path, option: str) -> None:
    # given stalls some of which are ambiguous or in no kernel
    everything = folded(iaprof("report", mixed, "-q"))
    wanted = Counter(
        {line: n for line, n in everything.items() if not any(t in line for t in LEFT_OUT.get(option, ()))}
    )
    assert 0.3 * everything.total() < wanted.total()
    assert (wanted != everything) == (option in LEFT_OUT)
    # when
    parts = [folded(iaprof("report", mixed, "-q", f"{option}={value}")) for value in KINDS_OF_VALUES[option]]
    # then
    assert all(parts)
    together = sum(parts, Counter())
    if option in ("--time", "--tid", "--device"):  # counts are rounded in smaller groups
        assert together.total() == wanted.total()
        assert sums_by_reason(together) == sums_by_reason(wanted)
    else:
        assert together == wanted


def sums_by_reason(stacks: Counter[str]) -> Counter[str]:
    """Returns the samples of each reason."""
    sums: Counter[str] = Counter()
    for stack, count in stacks.items():
        sums[stack.split(";")[-2]] += count
    return sums


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--time 1s-6s", "bcde"),
        ("--time 50%-60%", "e"),
        ("--pid 7,10", "abcg"),
        ("--tid 71", "b"),
        ("--comm app", "abd"),
        ("--kernel mat|scale", "abdg"),
        ("--device card1", "def"),
        ("--reason sbid,active", "acdf"),
        ("--cgroup /docker", "ef"),
        ("--comm web --time -9.95s", "ef"),
    ],
)
def test_verbs_select_the_same_samples(known: Path, words: str, kept: str) -> None:
    # given
    split = [*words.split(), "-q", "--json"]
    expected = sum(SAMPLES[name] for name in kept)
    # when
    rows = json.loads(iaprof("report", known, *split).out)["rows"]
    top = json.loads(iaprof("top", known, *split).out)
    diff = json.loads(iaprof("diff", known, known, *split).out)
    listings = json.loads(iaprof("annotate", known, ".", *split).out)["kernels"]
    # then
    assert sum(sum(row["samples"].values()) for row in rows) == expected
    assert top["total"]["samples"] == sum(entry["samples"] for entry in top["entries"]) == expected
    assert (diff["total"]["samples_before"], diff["total"]["samples_after"]) == (expected, expected)
    assert sum(kernel["samples"] for kernel in listings) == expected


def test_a_device_may_be_missing_in_parts_of_a_merged_capture(tmp_path: Path) -> None:
    # given recordings of two hosts with different GPUs, one begun 5 s after the other
    paths = []
    for number, (stream, sbid) in enumerate(((ONE, 1), (OTHER, 2))):
        clock = {"monotonic_ns": BEGUN, "realtime_ns": 5 * number * SECOND + SECOND}
        header = HEADER | {"clock": clock, "streams": [stream], "end_ns": BEGUN + 5 * SECOND}
        stalls = [stall(BEGUN + MS, record(0x10000, sbid=sbid)), stall(BEGUN + 2 * SECOND, record(0x10000, sync=sbid))]
        paths.append(capture(tmp_path / f"{number}", header | {"host": {"name": f"node{number}"}}, stall=stalls))
    both = tmp_path / "both"
    assert iaprof("merge", *paths, "-o", both).code == 0

    def kept(*words: str) -> Counter[str]:
        return folded(iaprof("report", both, "-q", "--frames=reason", *words))

    # then
    assert kept("--device", "card0") == {"sbid_[g]": 1, "sync_[g]": 1}
    assert kept("--device", "card1") == {"sbid_[g]": 2, "sync_[g]": 2}
    assert kept("--device", "card1,card0") == {"sbid_[g]": 3, "sync_[g]": 3}
    assert kept("--time", "0-2s") == {"sbid_[g]": 1}
    assert kept("--time", "20%-50%") == {"sync_[g]": 1}
    assert kept("--time", "50%-100%") == {"sbid_[g]": 2, "sync_[g]": 2}
    assert "it has: 0000:03:00.0, 0000:04:00.0, card0, card1, " in iaprof("report", both, "--device", "card2").err


TIME = "--time takes a part of the recording such as 1s-10s, 500ms- or 10%-20%, not "
HAS = "0000:03:00.0, 0000:04:00.0, card0, card1, renderD128, renderD129"
REASONS = "active, control, pipestall, send, dist_acc, sbid, sync, inst_fetch, other, tdr"
REGEX = "--kernel takes a regular expression, and this is not one: "


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(
            ("--time", text, f"{TIME}'{text}'")
            for text in ("", "-", "5", "1s", "1s-2s-3s", "-1s-2s", "1h-", "1e3-", "%-")
        ),
        ("--time", "\x1b[2J-", f"{TIME}'\\x1b[2J-'"),
        ("--time", "10%-2s", "--time takes either times or percentages, not '10%-2s'"),
        ("--time", "5s-1000ms", "--time has to end after it begins, and '5s-1000ms' does not"),
        ("--time", "20%-20%", "--time has to end after it begins, and '20%-20%' does not"),
        ("--pid", "x", "--pid takes pids, separated by commas, not 'x'"),
        ("--pid", "7,-1", "--pid takes pids, separated by commas, not '-1'"),
        ("--pid", "4194304", "--pid takes pids, separated by commas, not '4194304'"),
        ("--pid", "9" * 5000, f"--pid takes pids, separated by commas, not '{'9' * 5000}'"),
        ("--tid", "0", "--tid takes thread ids, separated by commas, not '0'"),
        *((option, "", f"{option} takes at least one") for option in ("--pid", "--tid", "--comm", "--device")),
        *((option, " ,", f"{option} takes at least one") for option in ("--reason", "--cgroup")),
        ("--kernel", "", "--kernel takes a regular expression, not an empty text"),
        ("--kernel", "a(", f"{REGEX}missing ), unterminated subpattern at position 1"),
        ("--kernel", "a{99999999999}", f"{REGEX}the repetition number is too large"),
        ("--kernel", "(" * 5000, f"{REGEX}maximum recursion depth exceeded"),
        ("--reason", "sbid,nap", f"--reason takes {REASONS}, long_scoreboard, "),
        ("--device", "card0,card7", f"the capture has no device 'card7'; it has: {HAS}"),
        ("--attribution", "first", "--attribution takes proportional, latest, none, not 'first'"),
        ("--horizon", "nan", "--horizon takes seconds from 0.001 to 600"),
    ],
    ids=lambda value: value[:20],
)
def test_invalid_values_are_refused(known: Path, option: str, value: str, message: str) -> None:
    done = iaprof("report", known, f"{option}={value}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"iaprof: {message}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("words", [["top", "{}"], ["diff", "{}", "{}"], ["annotate", "{}", "."]])
def test_other_verbs_refuse_them_too(known: Path, words: list[str]) -> None:
    for filter_ in ("--time=5", "--reason=nap", "--device=card7"):
        said = iaprof("report", known, filter_)
        assert said.code == 2
        assert iaprof(*(word.format(known) for word in words), filter_) == said


def test_percentages_of_a_recording_of_unknown_length_are_refused(tmp_path: Path) -> None:
    path = capture(tmp_path / "c", stall=[stall(BEGUN + 5, record(64, sbid=1))])
    assert iaprof("report", path, "--time", "10%-20%") == (
        2,
        "",
        "iaprof: this capture does not say how long it is: give --time in seconds, not in percent\n",
    )
    assert folded(iaprof("report", path, "-q", "--frames=reason", "--time", "-1s")) == {"sbid_[g]": 1}


@pytest.mark.parametrize(
    ("streams", "there"),
    [
        ([{"layout": "xe2", "ip_version": [20, 1, 0]}], "none that has a name"),
        ([ONE | {"device": 7, "card": None, "pci_address": "evil\n\x1b[2J"}], "evil\\x0a\\x1b[2J"),
        (
            [ONE | {"pci_address": f"gpu{n:02}"} for n in range(40)],
            f"card0, {', '.join(f'gpu{n:02}' for n in range(19))}, and 22 more",
        ),
    ],
)
def test_untrusted_device_names(tmp_path: Path, streams: list[Any], there: str) -> None:
    path = capture(tmp_path / "c", {**HEADER, "streams": streams}, stall=[])
    done = iaprof("report", path, "--device", "card5")
    assert done == (2, "", f"iaprof: the capture has no device 'card5'; it has: {there}\n")
