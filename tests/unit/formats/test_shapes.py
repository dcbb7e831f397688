"""Options for stacks (--frames, --inverted, --per-interval, --percent-limit, --max-stack), also against plain loops."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.formats.export import Export
from iaprof.formats.profile import COMPONENTS, DEFAULT_COMPONENTS, Code, Kernel, Launch, Profile, StackOptions
from iaprof.formats.writers import folded
from iaprof.formats.writers.folded import Folded
from iaprof.gpu.intel.reasons import REASONS
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof
from unit.profiles import Row, counts, profile, rows

APP = Launch("app", 42, ("main", "run(int)", "zeLaunch"), ("do_syscall_64",), "node1")
OTHER = Launch("", 0, ("main",))
MATMUL, SCALE = Kernel(0x1000, "matmul", "src/matmul.cl"), Kernel(0x5000, "scale", "")
DOT = Code("send", ("matmul", "dot(float)"), (4, 9), ("src/matmul.cl", "lib/vec.h"))
MOV = Code("mov", ("scale",), (0,))
BARE = Code("[no binary]", (), ())
ROWS = [
    Row(0, APP, MATMUL, DOT, 0x10, counts(sbid=600, active=200)),
    Row(0, OTHER, SCALE, MOV, 0x20, counts(pipestall=150)),
    Row(2, APP, MATMUL, DOT, 0x10, counts(sbid=40)),
    Row(2, None, None, BARE, 0xABC0, counts(other=10)),
]
PROFILE = profile(ROWS, (100.0, 101.5, 110.0))


def written(made: Profile, options: StackOptions) -> str:
    out = io.StringIO()
    Folded().write(Export(made), options, out)
    return out.getvalue()


CPU = "main;run(int);zeLaunch;do_syscall_64_[k]"
EACH = {
    "interval": "00.000 s 950\n10.000 s 50\n",
    "host": "[unknown process] 10\n[unknown] 150\nnode1 840\n",
    "process": "[unknown process] 160\napp 840\n",
    "pid": "42 840\n[unknown process] 10\n[unknown] 150\n",
    "operator": "[unknown process] 10\n[unknown] 990\n",
    "cpu": f"[unknown process] 10\nmain 150\n{CPU} 840\n",
    "file": "[unknown] 160\nsrc/matmul.cl_[G] 840\n",
    "function": "[unknown kernel]_[G] 10\nmatmul_[G];dot(float)_[G] 840\nscale_[G] 150\n",
    "line": "[unknown] 160\nvec.h line 9_[G] 840\n",
    "instruction": "[unknown] 10\nmov_[g] 150\nsend_[g] 840\n",
    "reason": "active_[g] 200\nother_[g] 10\npipestall_[g] 150\nsbid_[g] 640\n",
    "offset": "0x10_[g] 840\n0x20_[g] 150\n0xabc0_[g] 10\n",
}


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_alone(component: str) -> None:
    assert written(PROFILE, StackOptions(components=(component,))) == EACH[component]


@pytest.mark.parametrize(
    ("components", "text"),
    [
        (
            "reason,function,process",
            "active_[g];matmul_[G];dot(float)_[G];app 200\n"
            "other_[g];[unknown kernel]_[G];[unknown process] 10\n"
            "pipestall_[g];scale_[G];[unknown process] 150\n"
            "sbid_[g];matmul_[G];dot(float)_[G];app 640\n",
        ),
        (
            "pid,process,reason",
            "42;app;-;active_[g] 200\n"
            "42;app;-;sbid_[g] 640\n"
            "[unknown process];-;other_[g] 10\n"
            "[unknown process];-;pipestall_[g] 150\n",
        ),
        (
            "instruction,function,interval",
            "[unknown kernel]_[G];10.000 s 10\n"
            "mov_[g];scale_[G];00.000 s 150\n"
            "send_[g];matmul_[G];dot(float)_[G];00.000 s 800\n"
            "send_[g];matmul_[G];dot(float)_[G];10.000 s 40\n",
        ),
    ],
)
def test_order(components: str, text: str) -> None:
    assert written(PROFILE, StackOptions(components=tuple(components.split(",")))) == text


def test_inverted() -> None:
    back = "do_syscall_64_[k];zeLaunch;run(int);main"
    assert written(PROFILE, StackOptions(inverted=True)) == (
        f"0x10_[g];active_[g];send_[g];dot(float)_[G];matmul_[G];src/matmul.cl_[G];-;{back};42;app 200\n"
        f"0x10_[g];sbid_[g];send_[g];dot(float)_[G];matmul_[G];src/matmul.cl_[G];-;{back};42;app 640\n"
        "0x20_[g];pipestall_[g];mov_[g];scale_[G];-;main;[unknown process] 150\n"
        "0xabc0_[g];other_[g];[unknown kernel]_[G];-;[unknown process] 10\n"
    )


@pytest.mark.parametrize(
    ("most", "inverted", "stack"),
    [
        (1, False, "[truncated];do_syscall_64_[k]"),
        (2, False, "[truncated];zeLaunch;do_syscall_64_[k]"),
        (3, True, "do_syscall_64_[k];zeLaunch;run(int);[truncated]"),
        (4, False, CPU),
        (9, False, CPU),
    ],
)
def test_max_stack(most: int, inverted: bool, stack: str) -> None:
    options = StackOptions(components=("cpu",), inverted=inverted, max_stack=most)
    assert sorted(written(PROFILE, options).splitlines()) == sorted(
        ["[unknown process] 10", "main 150", f"{stack} 840"]
    )


def test_stacks_that_become_equal_are_one_line() -> None:
    launches = [Launch("app", 1, (name, "run")) for name in ("main", "start")]
    made = profile([Row(0, each, SCALE, MOV, 0, counts(tdr=3)) for each in launches])
    assert written(made, StackOptions(components=("cpu",), max_stack=1)) == "[truncated];run 6\n"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (0, EACH["reason"]),
        (1, EACH["reason"]),  # 10 of 1,000 is not below the limit
        (1.01, "active_[g] 200\npipestall_[g] 150\nsbid_[g] 640\n[below 1.01 %] 10\n"),
        (20, "active_[g] 200\nsbid_[g] 640\n[below 20 %] 160\n"),
        (64, "sbid_[g] 640\n[below 64 %] 360\n"),
        (100, "[below 100 %] 1000\n"),
    ],
)
def test_percent_limit(limit: float, text: str) -> None:
    assert written(PROFILE, StackOptions(components=("reason",), percent_limit=limit)) == text


# The command's options


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of 3 s: two stacks, with stalls in the first and the last second."""
    second = 10**9
    begun = HEADER["clock"]["monotonic_ns"]
    stacks = [
        {"id": number, "time_ns": 1, "pid": 7, "truncated": False, "ips": [number, 0x11, 0x21]} for number in (1, 2)
    ]
    times = (begun + 5, begun + second // 2, begun + 5 * second // 2)
    launches = [launch(time - 3, 7, 0x1000, 1 + time % 2, name="matmul") for time in times]
    stalls = [stall(time, record(0x1000, sbid=3 + time % 2), begin_ns=time - 2) for time in times]
    path = tmp_path_factory.mktemp("shapes") / "c"
    return capture(path, HEADER | {"end_ns": begun + 3 * second}, stall=stalls, launch=launches, stack=stacks)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--frames reason", "sbid_[g] 10\n"),
        ("--frames reason,function", "sbid_[g];matmul_[G] 10\n"),
        ("--frames reason --percent-limit 50 --per-interval", "0.000 s;sbid_[g] 7\n[below 50 %] 3\n"),
        ("--frames reason --per-interval --inverted", "0.000 s;sbid_[g] 7\n2.000 s;sbid_[g] 3\n"),
        (
            "--frames reason --per-interval --interval 0.5",
            "0.000 s;sbid_[g] 4\n0.500 s;sbid_[g] 3\n2.500 s;sbid_[g] 3\n",
        ),
        ("--frames reason,interval --interval 2", "sbid_[g];0.000 s 7\nsbid_[g];2.000 s 3\n"),
        ("--frames reason,interval --per-interval", "sbid_[g];0.000 s 7\nsbid_[g];2.000 s 3\n"),
        ("--frames reason --per-interval --time 2s-", "2.000 s;sbid_[g] 3\n"),
        ("--frames cpu --max-stack 2", "[truncated];0x10;0x1 6\n[truncated];0x10;0x2 4\n"),
        (
            "--max-stack 1 --inverted",
            "0x0_[g];sbid_[g];[no binary]_[g];matmul_[G];-;0x1;[truncated];7;app 6\n"
            "0x0_[g];sbid_[g];[no binary]_[g];matmul_[G];-;0x2;[truncated];7;app 4\n",
        ),
    ],
)
def test_options(path: Path, words: str, text: str) -> None:
    assert iaprof("report", path, "-q", *words.split()) == (0, text, "")


ONCE = "--frames takes at least one part, and each once"
NO_STACKS = "--frames, --inverted, --percent-limit and --cpu-samples shape stacks: {} has none"
PERCENTAGE = "--percent-limit takes a percentage, from 0 to 100"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--frames=", ONCE),
        ("--frames=,", ONCE),
        ("--frames=pid,cpu,pid", ONCE),
        ("--frames=pid,\x1b[2J", f"--frames takes {', '.join(COMPONENTS)}, not '\\x1b[2J'"),
        ("--frames=pid --json", NO_STACKS.format("json")),
        ("--inverted --json", NO_STACKS.format("json")),
        ("--percent-limit=1 --format=iaprof", NO_STACKS.format("iaprof")),
        ("--cpu-samples --format=iaprof", NO_STACKS.format("iaprof")),
        ("--percent-limit=-1", PERCENTAGE),
        ("--percent-limit=100.1", PERCENTAGE),
        ("--percent-limit=nan", PERCENTAGE),
    ],
)  # fmt: skip
def test_contradictory_options(path: Path, words: str, message: str) -> None:
    assert iaprof("report", path, *words.split()) == (2, "", f"iaprof: {message}\n")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--max-stack=0", "--max-stack has to be greater than or equal to 1"),
        ("--max-stack=-3", "--max-stack has to be greater than or equal to 1"),
        ("--max-stack=x", "--max-stack takes a whole number"),
        ("--percent-limit=x", "--percent-limit takes a number"),
    ],
)
def test_invalid_numbers(path: Path, word: str, said: str) -> None:
    message = f"iaprof: {said}: 'iaprof report --help' lists what it takes\n"
    assert iaprof("report", path, word) == (2, "", message)


# An independent implementation with plain loops

NAMES = (
    "main",
    "a",
    "a!",
    "a;",
    ";",
    "-",
    "",
    "\n",
    "a\tb",
    "\u202e",
    "[unknown]",
    "é",
    " 7",
    "x_[k]",
    "\udcff",
    "a" * 40,
)
_name = st.sampled_from(NAMES)
_names = st.lists(_name, max_size=3).map(tuple)
_numbers = st.lists(st.sampled_from((0, 4, 19)), max_size=3).map(tuple)
_launch = st.builds(Launch, _name, st.sampled_from((0, 7, 42)), _names, _names, st.sampled_from(("", "n;1")))
_kernel = st.builds(Kernel, st.just(0x1000), _name, st.sampled_from(("", "a/b.cl", "c;.cl")))
_code = st.builds(
    Code, _name, _names, _numbers, st.lists(st.sampled_from(("", "a/b.cl", "d/\n.h")), max_size=3).map(tuple)
)
_row = st.builds(
    Row,
    st.integers(0, 2),
    st.none() | _launch,
    st.none() | _kernel,
    _code,
    st.sampled_from((0, 0x10, 0xFFFF_FFFF_FFFF_FFFF)),
    st.lists(st.sampled_from((0, 0, 0, 1, 70)), min_size=10, max_size=10).map(tuple),
)
_profiles = st.lists(_row, max_size=12).map(lambda made: profile(made, (1.0, 2.5, 12.25)))
_options = st.builds(
    StackOptions,
    components=st.just(DEFAULT_COMPONENTS)
    | st.lists(st.sampled_from([*COMPONENTS]), min_size=1, unique=True).map(tuple),
    inverted=st.booleans(),
    max_stack=st.integers(0, 3),
    percent_limit=st.sampled_from((0, 0, 7.5, 30)),
)
OF_CPU = ("host", "process", "pid", "operator", "cpu")


def plain(name: str) -> str:
    """A frame's text, escaped."""
    shown = "".join(
        ":"
        if one == ";"
        else one
        if one.isprintable()
        else f"\\x{ord(one) & 255:02x}"
        if one < "\u0100" or "\udc80" <= one <= "\udcff"  # a byte of a name that is not UTF-8
        else f"\\u{ord(one):04x}"
        for one in name
    )
    return {"": "[unknown]", "-": "[-]"}.get(shown, shown)


def of_cpu(launched: Launch, component: str, options: StackOptions) -> list[str]:
    if component == "host":
        return [launched.host] * bool(launched.host)
    if component == "process":
        return [launched.comm or "[unknown process]"]
    if component == "pid":
        return [str(launched.pid)] * bool(launched.pid)
    if component == "operator":
        return list(launched.operators)
    stack = [*launched.stack, *(f"{name}_[k]" for name in launched.kernel_stack)]
    return ["[truncated]", *stack[-options.max_stack :]] if 0 < options.max_stack < len(stack) else stack


def of_gpu(kernel: Kernel | None, code: Code, component: str) -> list[str]:
    if kernel is None:
        known = code.functions[0] if code.functions else ""
        return [f"{known or '[unknown kernel]'}_[G]"] * (component == "function")
    if component == "file":
        return [f"{kernel.file}_[G]"] * bool(kernel.file)
    if component == "function":
        return [f"{name}_[G]" for name in code.functions]
    if component == "instruction":
        return [f"{code.mnemonic}_[g]"]
    if not code.lines or not code.lines[-1]:
        return []
    file = dict(enumerate(code.files)).get(len(code.lines) - 1, "")
    named = f"{file.split('/')[-1]} " if file not in ("", kernel.file) else ""
    return [f"{named}line {code.lines[-1]}_[G]"]


def stack_of(row: Row, reason: str, options: StackOptions) -> str:
    """The folded line of a stack, frame by frame."""
    frames: list[str] = []
    before = ""
    for component in options.components:
        if before in OF_CPU and component not in (*OF_CPU, "interval"):
            frames.append("-")
        if component == "interval":
            found = [("00.000 s", "01.500 s", "11.250 s")[row.interval]]
        elif component == "reason":
            found = [f"{reason}_[g]"]
        elif component == "offset":
            found = [f"0x{row.offset:x}_[g]"]
        elif component not in OF_CPU:
            found = of_gpu(row.kernel, row.code, component)
        elif row.launch is None:
            found = ["[unknown process]"] * (before not in OF_CPU)
        else:
            found = of_cpu(row.launch, component, options)
        frames += map(plain, found)
        before = component
    return ";".join(frames[::-1] if options.inverted else frames) or "[unknown]"


@settings(max_examples=30, deadline=None)
@given(_profiles, _options, st.sampled_from((2, 1 << 16)), st.sampled_from((4, 1 << 62)))
def test_folded_lines_equal_those_of_plain_loops(
    made: Profile, options: StackOptions, at_once: int, widest: int
) -> None:
    # given
    expected: Counter[str] = Counter()
    for row in rows(made):
        for reason, count in zip(REASONS, row.counts, strict=True):
            expected[stack_of(row, reason, options)] += count
    expected = +expected
    small = [stack for stack in expected if expected[stack] * 100 < options.percent_limit * expected.total()]
    below = sum(expected.pop(stack) for stack in small)
    lines = [f"{stack} {expected[stack]}\n" for stack in sorted(expected, key=lambda stack: f"{stack};")]
    # when
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folded, "_LINES_AT_ONCE", at_once)  # as if there were many
        patch.setattr(folded, "_WIDEST_KEY", widest)
        text = written(made, options)
    # then
    assert text == "".join(lines) + (f"[below {options.percent_limit:g} %] {below}\n" if below else "")
