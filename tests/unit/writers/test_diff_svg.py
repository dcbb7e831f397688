"""Differential flame graphs: widths are the samples after, colours and titles the change."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof

ADDRESS = 0x10000
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Captures in which `more` doubles, `less` halves, `same` stays, and one kernel comes and one goes."""

    def recorded(name: str, samples: dict[str, int]) -> Path:
        places = {kernel: ADDRESS + 0x1000 * number for number, kernel in enumerate(samples)}
        stalls = [stall(9, *(record(places[kernel], sbid=count) for kernel, count in samples.items()))]
        launches = [launch(2, 7, place, 11, name=kernel) for kernel, place in places.items()]
        return capture(tmp_path / name, stall=stalls, launch=launches)

    before = recorded("before.parquet", {"more": 20, "less": 60, "same": 10, "gone": 10})
    after = recorded("after.parquet", {"more": 40, "less": 30, "same": 10, "new": 20})
    return before, after


def boxes(picture: str) -> dict[str, tuple[str, int, str]]:
    """By frame: its class, its samples, and what its title says in parentheses."""
    root = ElementTree.fromstring(picture)
    found = {}
    for box in root.iter(f"{SVG}g"):
        if "data-w" in box.attrib:
            name, _, said = str(box.findtext(f"{SVG}title")).partition(" (")
            found[name] = (box.attrib["class"], int(box.attrib["data-w"]), said.rstrip(")"))
    return found


def test_shares(pair: tuple[Path, Path]) -> None:
    picture = iaprof("diff", *pair, "--format=svg", "-q").out
    found = boxes(picture)
    assert found["more"] == ("more2", 40, "20.00 % before, 40.00 % after: +20.00; 40 samples, 40.00 %")
    assert found["less"] == ("less3", 30, "60.00 % before, 30.00 % after: -30.00; 30 samples, 30.00 %")
    assert found["new"] == ("more2", 20, "0.00 % before, 20.00 % after: +20.00; 20 samples, 20.00 %")
    assert found["same"][0] == "same"
    assert "gone" not in found
    assert "10 samples before belong to stacks that are gone: swap the captures to see them" in picture
    assert "not drawn" not in picture


def test_samples(pair: tuple[Path, Path]) -> None:
    found = boxes(iaprof("diff", *pair, "--format=svg", "-q", "--normalize=none").out)
    assert found["less"] == ("less3", 30, "60 before, 30 after: -30; 30 samples, 30.00 %")
    assert found["all"][0] == "same"


def test_the_other_way_round(pair: tuple[Path, Path]) -> None:
    found = boxes(iaprof("diff", *reversed(pair), "--format=svg", "-q").out)
    assert found["more"][:2] == ("less2", 20)
    assert found["gone"][:2] == ("more1", 10)


def test_captures_are_named(pair: tuple[Path, Path]) -> None:
    picture = iaprof("diff", *pair, "--format=svg", "-q").out
    assert re.search(r"<title>before\.parquet → after\.parquet</title>", picture)
