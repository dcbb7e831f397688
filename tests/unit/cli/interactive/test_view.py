"""Whole screens of the interactive view: what keys do, in several sizes, and names that try to do harm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from iaprof.cli.interactive.contents import Contents
from iaprof.cli.interactive.view import View, keys_for
from iaprof.formats.profile import Code, Kernel, Launch, Profile
from iaprof.report.views.browsing.levels import GROUPINGS, OF_SLICES
from iaprof.report.views.difference import joined
from unit.cli.interactive.screens import after, screen
from unit.cli.test_top import APP, MATMUL, PROFILE, ROWS, SEND
from unit.profiles import Row, counts, profile

HARM = "[bold red]kern\x1b[2Jel[/]"
KEYS = "⏎ Annotate  tab Group by  / Search  f Filter  r Reasons  t Time  ? Keys  q Quit"


def listing(of: Profile, kernel: str, width: int) -> list[str]:
    """A kernel with many instructions, of which 0x500 has the stalls."""
    rows = [f"{'>' if at == 0x500 else ' '}{at:#7x}  \x1b[31msend\x1b[0m" for at in range(0, 0x1000, 16)]
    return [f"{kernel} in {width} cells: {int(of.counts.sum()):,} samples", *rows]


CONTENTS = Contents("cap.parquet", PROFILE, interval_s=1.0, listing=listing)


def shown(lines: list[str]) -> str:
    """The lines of a screen that are not empty."""
    return "".join(f"{line}\n" for line in lines if line)


def test_the_first_screen_has_the_tree_of_stacks_with_its_first_branch() -> None:
    assert (
        shown(screen(CONTENTS))
        == f"""\
 cap.parquet
 █▁▁ 3 s
 1,000 samples, 20.0 % active
    SAMPLES    SHARE  TOP REASON        STACK
        900   90.0 %  sbid 67 %         ▾ app 42
        900   90.0 %  sbid 67 %         ▾ main
        900   90.0 %  sbid 67 %         ▾ run(int)
        900   90.0 %  sbid 67 %         ▾ zeLaunch
        900   90.0 %  sbid 67 %         ▾ do_syscall_64_[k]
        900   90.0 %  sbid 67 %         ▾ matmul
        800   80.0 %  sbid 75 %           ▸ dot(float)
        100   10.0 %  sync 100 %          ▸ fib
         70    7.0 %  sbid 71 %         ▸ app 43
         20    2.0 %  tdr 100 %         ▸ [ambiguous: 2 processes]
         10    1.0 %  other 100 %       ▸ [unknown process]
 process: app 42
 {KEYS}
"""
    )


def test_a_tree_turned_around_and_opened_where_it_is_hottest() -> None:
    assert (
        shown(screen(CONTENTS, "i", "e"))
        == f"""\
 cap.parquet
 █▁▁ 3 s
 1,000 samples, 20.0 % active
    SAMPLES    SHARE  TOP REASON        STACK (inverted)
        650   65.0 %  sbid 100 %        ▾ sbid
        650   65.0 %  sbid 100 %        ▾ 0x10 send
        650   65.0 %  sbid 100 %        ▾ vec.h:9
        650   65.0 %  sbid 100 %        ▾ dot(float)
        650   65.0 %  sbid 100 %        ▾ matmul
        650   65.0 %  sbid 100 %        ▾ do_syscall_64_[k]
        650   65.0 %  sbid 100 %        ▾ zeLaunch
        600   60.0 %  sbid 100 %          ▾ run(int)
        600   60.0 %  sbid 100 %          ▾ main
        600   60.0 %  sbid 100 %            app 42
         50    5.0 %  sbid 100 %          ▸ warm_up()
        200   20.0 %  active 100 %      ▸ active
        100   10.0 %  sync 100 %        ▸ sync
         20    2.0 %  pipestall 100 %   ▸ pipestall
         20    2.0 %  tdr 100 %         ▸ tdr
         10    1.0 %  other 100 %       ▸ other
 process: app 42
 {KEYS}
"""
    )


def test_filters_by_reason_time_and_text_add_up_and_are_named() -> None:
    # when
    lines = screen(CONTENTS, "7", "t", *"0-1", "enter", "r", "o", "enter", "f", *"dot", "enter", "right")
    # then
    assert (
        shown(lines[1:9])
        == """\
 █·· 3 s
 200 samples of 1,000; reasons: active; time: 0 s to 1 s; with 'dot'
    SAMPLES    SHARE  TOP REASON        REASON
        200  100.0 %  active 100 %      ▾ active
        200  100.0 %  active 100 %      ▾ matmul
        200  100.0 %  active 100 %      ▾ vec.h:9
        200  100.0 %  active 100 %        0x10 send
"""
    )
    # when
    lines = screen(CONTENTS, "f", *"dot", "enter", "x")
    # then
    assert lines[2] == " 1,000 samples, 20.0 % active"


def test_searching_opens_what_it_finds_and_goes_on() -> None:
    # when
    lines = screen(CONTENTS, "slash", *"dot", "enter", "n", "n")
    # then
    assert lines[2] == " 1,000 samples, 20.0 % active; 'dot' is in stacks with 950 samples: n and N"
    assert (
        shown(lines[11:20])
        == """\
        100   10.0 %  sync 100 %          ▾ fib
        100   10.0 %  sync 100 %          ▸ dot(float)
         70    7.0 %  sbid 71 %         ▾ app 43
         70    7.0 %  sbid 71 %         ▾ main
         70    7.0 %  sbid 71 %         ▾ warm_up()
         70    7.0 %  sbid 71 %         ▾ zeLaunch
         70    7.0 %  sbid 71 %         ▾ do_syscall_64_[k]
         50    5.0 %  sbid 100 %          ▾ matmul
         50    5.0 %  sbid 100 %          ▸ dot(float)
"""
    )
    assert screen(CONTENTS, "slash", *"nothing", "enter")[2] == " 1,000 samples, 20.0 % active; no 'nothing'"


def test_enter_annotates_the_kernel_with_what_is_selected() -> None:
    # when
    lines = screen(CONTENTS, "f", *"dot", "enter", "2", "enter", size=(60, 10))
    # then the hottest instruction is in the middle
    assert (
        shown(lines)
        == """\
 matmul
   0x4c0  send
   0x4d0  send
   0x4e0  send
   0x4f0  send
>  0x500  send
   0x510  send
   0x520  send
   0x530  send
 esc Back
"""
    )
    # when
    lines = screen(CONTENTS, "f", *"dot", "enter", "2", "enter", "g", size=(60, 10))
    # then
    assert lines[1] == "matmul in 59 cells: 950 samples"
    # when
    lines = screen(CONTENTS, "2", "enter", "escape")
    # then
    assert lines[0] == " cap.parquet"


def test_a_wrong_range_of_time_is_explained_in_the_dialog() -> None:
    lines = screen(CONTENTS, "t", *"5-2", "enter")
    assert lines[14].split("│")[1].strip() == "--time has to end after it begins, and '5-2' does not"


def test_two_captures_are_compared_in_fewer_columns_where_there_is_no_room() -> None:
    # given
    later = profile([*ROWS[:2], ROWS[3]._replace(counts=counts(sbid=9000))])
    both = Contents("a before, b after", joined(profile(ROWS), later), "kernel", sides=2, listing=listing)
    # then
    assert (
        shown(screen(both, size=(100, 20)))
        == f"""\
 a before, b after
 1,000 samples before, 9,900 after
     BEFORE        AFTER      CHANGE  MOST CHANGED      KERNEL
      2.0 %       90.9 %       +88.9  sbid +90.9        ▾ scale src/a.cl
      2.0 %       90.9 %       +88.9  sbid +90.9        ▾ a.cl:7
      2.0 %       90.9 %       +88.9  sbid +90.9        ▾ 0x30 mov
      0.0 %       90.9 %       +90.9  sbid +90.9            sbid
      2.0 %        0.0 %        -2.0  pipestall -2.0        pipestall
     95.0 %        9.1 %       -85.9  sbid -58.9        ▸ matmul
      2.0 %        0.0 %        -2.0  tdr -2.0          ▸ scale src/b.cl
      1.0 %        0.0 %        -1.0  other -1.0        ▸ [unknown kernel]
 kernel: scale src/a.cl
 {KEYS}
"""
    )
    assert screen(both, size=(50, 20))[2:4] == [
        "     BEFORE        AFTER      CHANGE  KERNEL",
        "      2.0 %       90.9 %       +88.9  ▾ scal…a.cl",
    ]
    samples = replace(both, is_relative=False)
    assert (
        screen(samples, size=(100, 20))[3] == "         20        9,000      +8,980  sbid +9,000       ▾ scale src/a.cl"
    )


def test_names_are_shown_as_they_are_without_being_obeyed() -> None:
    # given
    row = ROWS[0]._replace(
        launch=Launch("[b]ev\u202eil[/b]\n", 1, ("f[link=x]y[/link]",)),
        kernel=Kernel(1, HARM, "x"),
        code=Code("se[u]nd", (HARM,), (1,), ("a[i].h",)),
    )
    harmful = replace(CONTENTS, title=HARM, profile=profile([row]))
    # then
    assert (
        shown(screen(harmful, "e", size=(100, 20)))
        == f"""\
 [bold red]kern\\x1b[2Jel[/]
 800 samples, 25.0 % active
    SAMPLES    SHARE  TOP REASON        STACK
        800  100.0 %  sbid 75 %         ▾ [b]ev\\u202eil[/b]\\x0a 1
        800  100.0 %  sbid 75 %         ▾ f[link=x]y[/link]
        800  100.0 %  sbid 75 %         ▾ [bold red]kern\\x1b[2Jel[/]
        800  100.0 %  sbid 75 %         ▾ a[i].h:1
        800  100.0 %  sbid 75 %         ▾ 0x10 se[u]nd
        600   75.0 %  sbid 100 %            sbid
        200   25.0 %  active 100 %          active
 reason: sbid
 {KEYS}
"""
    )
    assert screen(harmful, "e", "enter", size=(100, 20))[0] == " [bold red]kern\\x1b[2Jel[/]"
    assert screen(harmful, "f", *"[b]", "enter", size=(100, 20))[1] == " 800 samples of 800; with '[b]'"


def test_other_stalls_leave_the_open_lines_and_the_cursor_where_they_are() -> None:
    # given
    later = replace(CONTENTS, profile=profile([*ROWS[2:], ROWS[0]._replace(counts=counts(send=5))]), costs="CPU: 1 %")

    def show(view: View) -> None:
        view.stalls.show_contents(later)

    # when
    lines = after(View(CONTENTS), show, "2", "down", "down")
    # then
    assert (
        shown(lines)
        == f"""\
 cap.parquet
 105 samples; CPU: 1 %
    SAMPLES    SHARE  TOP REASON        KERNEL
         55   52.4 %  sbid 91 %         ▾ matmul
         55   52.4 %  sbid 91 %         ▸ dot(float)
         20   19.0 %  pipestall 100 %   ▸ scale src/a.cl
         20   19.0 %  tdr 100 %         ▸ scale src/b.cl
         10    9.5 %  other 100 %       ▸ [unknown kernel]
 kernel: matmul
 {KEYS}
"""
    )


def test_of_very_many_instructions_those_with_most_samples_are_shown() -> None:
    # given
    row = ROWS[0]
    one = profile([row])
    size = 100_000
    zeros, offsets = np.zeros(size, np.int64), np.arange(size, dtype=np.uint64) * np.uint64(16)
    many = replace(
        one, interval=zeros, launch=zeros, kernel=zeros, code=zeros, device=zeros, offset=offsets,
        counts=np.repeat(one.counts, size, axis=0),
    )  # fmt: skip
    # when
    lines = screen(replace(CONTENTS, profile=many, grouping="instruction"), "end")
    # then
    assert lines[21] == " " * 42 + "(99,500 more: Enter shows them)"


def test_a_capture_without_stalls_is_shown_empty() -> None:
    assert (
        shown(screen(replace(CONTENTS, profile=profile([])), "e", "enter", "right", "space", "i", "n"))
        == f"""\
 cap.parquet
 0 samples
    SAMPLES    SHARE  TOP REASON        STACK (inverted)
 {KEYS}
"""
    )


def test_the_texts_of_keys_fit_80_columns() -> None:
    for groupings in (GROUPINGS, OF_SLICES):
        assert max(map(len, keys_for(list(groupings), 1000))) <= 78


def test_the_first_line_says_which_share_is_divided_until_something_is_selected() -> None:
    half = replace(CONTENTS, profile=replace(PROFILE, divided=PROFILE.counts.sum(axis=1) // 2))
    assert screen(half)[2] == " 1,000 samples, 20.0 % active; 50.0 % divided among stacks: estimates"
    assert screen(half, "f", *"dot", "enter")[2].startswith(" 950 samples of 1,000; with 'dot'")


def test_lines_with_divided_samples_are_marked() -> None:
    # given a kernel whose samples are divided between two stacks of a process
    other = replace(APP, stack=("main", "other"))
    some = [Row(0, each, MATMUL, SEND, 0x10, counts(sbid=samples)) for each, samples in ((APP, 30), (other, 10))]
    divided = replace(profile(some), divided=np.array([30, 10], np.uint64))
    # when it is shown
    lines = screen(Contents("cap.parquet", divided), "down", "right")
    # then frames below the one that the stacks share are marked
    marked = [line.split()[0] for line in lines if "%" in line and line.endswith((" main", " run(int)", " other"))]
    assert marked == ["40", "~30", "~10"]
