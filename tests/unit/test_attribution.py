"""Whose stalls they are: one small capture per rule."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from iaprof.formats.capture import KINDS, CaptureError, CaptureReader
from iaprof.report.attribution import join
from iaprof.report.gpu_module import GpuKernel, GpuModule
from iaprof.report.placements import Compilation, place
from unit.capturing import HEADER, capture, launch, record, stall


def module(*kernels: tuple[str, int, int]) -> GpuModule:
    """A module of kernels (name, address, size) of which nothing else is known."""
    made = []
    for name, address, size in kernels:
        kernel = GpuKernel.__new__(GpuKernel)
        for field, value in {"name": name, "demangled": name, "address": address, "size": size}.items():
            object.__setattr__(kernel, field, value)
        made.append(kernel)
    return GpuModule(kernels=tuple(made), problems=())


def joined(
    path: Path, compilations: list[Compilation] | None = None, **kinds: list[dict[str, Any]]
) -> Counter[tuple[int, int, str, str, int]]:
    """Samples by process, stack, kernel's name, note and address."""
    reader = CaptureReader(capture(path / "c", **kinds))
    launches = pa.Table.from_pylist(kinds.get("launch", []), pa.schema(list(KINDS["launch"])))
    placed = place(launches, compilations or [])
    result, _ = join(reader, placed, 0, 0)
    found: Counter[tuple[int, int, str, str, int]] = Counter()
    for index, ip, counts in zip(result.site.tolist(), result.ip.tolist(), result.counts.tolist(), strict=True):
        site = placed.sites[index]
        name = placed.placements[site.placement].name if site.placement is not None else "-"
        found[site.pid, site.stack, name, site.note, ip] += sum(counts)
    return found


A, B = 0xFFFF8000_00010000, 0xFFFF8000_00020000  # sign-extended, as some devices give them
LOW_A, LOW_B = 0x10000, 0x20000


def test_a_stall_goes_to_the_kernel_whose_low_address_bits_it_has(tmp_path: Path) -> None:
    # given two kernels, whose launches carry a wrong iba, as they do on integrated devices
    launches = [launch(1, 7, A, 11, name="a", iba=5 << 40), launch(2, 7, B, 12, name="b", iba=5 << 40)]
    # when
    found = joined(
        tmp_path, stall=[stall(9, record(A, sbid=3), record(A + 8, send=1), record(B + 56, sync=2))], launch=launches
    )
    # then
    assert found == {
        (7, 11, "a", "", LOW_A): 3,
        (7, 11, "a", "", LOW_A + 8): 1,
        (7, 12, "b", "", LOW_B + 56): 2,
    }


def test_outside_of_all_kernels_nothing_is_lost(tmp_path: Path) -> None:
    # given stalls one instruction before, and right behind, a kernel of 64 bytes
    stalls = [stall(9, record(A - 8, sbid=3), record(A + 64, send=1), record(A + 63 & ~7, sync=2))]
    found = joined(tmp_path, stall=stalls, launch=[launch(1, 7, A, 11, name="a")])
    assert found == {
        (0, 0, "-", "", LOW_A - 8): 3,
        (0, 0, "-", "", LOW_A + 64): 1,
        (7, 11, "a", "", LOW_A + 56): 2,
    }


def test_without_any_launch_or_kernel(tmp_path: Path) -> None:
    assert joined(tmp_path, stall=[stall(9, record(A, sbid=3))]) == {(0, 0, "-", "", LOW_A): 3}


def test_the_last_launch_before_the_end_of_the_read_decides(tmp_path: Path) -> None:
    # given a kernel launched from two places in turn
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 12, name="a"), launch(30, 7, A, 11, name="a")]
    stalls = [stall(time, record(A, sbid=1)) for time in (10, 15, 20, 29, 30, 99)]
    found = joined(tmp_path, stall=stalls, launch=launches)
    assert found == {(7, 11, "a", "", LOW_A): 4, (7, 12, "a", "", LOW_A): 2}


def test_before_the_first_launch(tmp_path: Path) -> None:
    found = joined(tmp_path, stall=[stall(5, record(A, sbid=1))], launch=[launch(10, 7, A, 11, name="a")])
    assert found == {(7, 0, "a", "[launched before recording]", LOW_A): 1}


def test_two_processes_with_a_kernel_at_one_address(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 8, A, 21, name="b", size=128)]
    stalls = [stall(15, record(A, sbid=1)), stall(25, record(A, sbid=2)), stall(26, record(A + 64, sbid=4))]
    found = joined(tmp_path, stall=stalls, launch=launches)
    assert found == {(7, 11, "a", "", LOW_A): 1, (8, 21, "b", "", LOW_A): 2, (8, 21, "b", "", LOW_A + 64): 4}


def test_an_address_that_another_kernel_takes_later(tmp_path: Path) -> None:
    # given a process that compiles one module after the other to one place
    compilations = [Compilation(5, 7, module(("old", A, 64))), Compilation(20, 7, module(("new", A, 32)))]
    launches = [launch(10, 7, A, 11), launch(30, 7, A, 11)]
    # when
    stalls = [stall(12, record(A, sbid=1)), stall(25, record(A, sbid=2)), stall(35, record(A, sbid=4))]
    found = joined(tmp_path, compilations, stall=stalls, launch=launches)
    # then what was launched last runs, whatever has been compiled since
    assert found == {(7, 11, "old", "", LOW_A): 3, (7, 11, "new", "", LOW_A): 4}


def test_a_module_of_which_no_launch_was_recorded(tmp_path: Path) -> None:
    found = joined(tmp_path, [Compilation(5, 7, module(("a", A, 64)))], stall=[stall(9, record(A, sbid=1))], launch=[])
    assert found == {(7, 0, "a", "[launch not recorded]", LOW_A): 1}


def test_a_launch_without_a_stack(tmp_path: Path) -> None:
    found = joined(tmp_path, stall=[stall(9, record(A, sbid=1))], launch=[launch(1, 7, A, 0, name="a", flags=2)])
    assert found == {(7, 0, "a", "[no stack]", LOW_A): 1}


def test_thousands_of_reads_and_launches_add_up(tmp_path: Path) -> None:
    # given launches of two places in turn, and reads between
    launches = [launch(10 * n, 7, A, 11 + n % 2, name="a") for n in range(1, 3000)]
    stalls = [stall(10 * n + 5, *[record(A + 8 * (n % 8), sbid=1 + n % 3)] * (n % 5)) for n in range(1, 3000)]
    # when
    found = joined(tmp_path, stall=stalls, launch=launches)
    # then
    expected: Counter[tuple[int, int, str, str, int]] = Counter()
    for n in range(1, 3000):
        expected[7, 11 + n % 2, "a", "", LOW_A + 8 * (n % 8)] += (n % 5) * (1 + n % 3)
    assert found == +expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"w0": [1, 2], "w1": [1]}, "do not belong together"),
        ({"w1": None}, "column 'w1' has nulls"),
        ({"stream": 3}, "does not name"),
    ],
)
def test_stalls_that_do_not_fit_together(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        joined(tmp_path, stall=[stall(9, record(A, sbid=1)) | row])


@pytest.mark.parametrize(
    "streams", [[{}], [7], [{"layout": "xe9", "ip_version": [1, 2]}], [{"layout": "xe2", "ip_version": 1}]]
)
def test_headers_that_make_no_sense(tmp_path: Path, streams: Any) -> None:
    path = capture(tmp_path / "c", {**HEADER, "streams": streams}, stall=[stall(9, record(A, sbid=1))])
    with pytest.raises(CaptureError, match="makes no sense"):
        join(CaptureReader(path), place(pa.Table.from_pylist([], pa.schema(list(KINDS["launch"]))), []), 0, 0)
