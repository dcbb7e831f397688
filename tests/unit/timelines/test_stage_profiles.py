"""Profiles say which stages run: ours in TOML, and the AIU Trace Analyzer's in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.timelines.stage_profiles import enabled

STAGES = (("one", "also_one"), ("sort_events",), ("two",), ("sort_events",), ("three",))


def on(profile: str | Path, *changes: str) -> str:
    return "".join("x" if is_on else "." for is_on in enabled(STAGES, str(profile), changes))


def file(folder: Path, text: str) -> Path:
    path = folder / "profile.toml"
    path.write_text(text)
    return path


def test_built_in_profiles_and_changes() -> None:
    assert on("everything") == "xxxxx"
    assert on("minimal") == ".x.x."
    assert on("everything", "-sort_events") == "x.x.x"
    assert on("everything", "-sort_events#2", "-one") == ".xx.x"
    assert on("minimal", "two") == ".xxx."
    assert on("everything", "-also_one") == ".xxxx"


def test_a_profile_in_toml(tmp_path: Path) -> None:
    assert on(file(tmp_path, "[stages]\ntwo = false\n")) == "xx.xx"
    assert on(file(tmp_path, '[stages]\nothers = false\n"sort_events#2" = true\n')) == "...x."


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        # all are listed: by position
        (
            [
                {"one": True},
                {"also_one": True},
                {"sort_events": False},
                {"two": True},
                {"sort_events": True},
                {"three": True},
            ],
            "x.xxx",
        ),
        ([{"sort_events": True}, {"two": True}], ".xxx."),  # sparse: the name is all of them
        ([{"sort_events#2": True}], "...x."),
        (
            [{"pipeline_barrier": True}, {"one": True}, {"also_one": True}, {"verify": True}],
            "x....",
        ),  # which need no stage here
    ],
)
def test_a_profile_in_json(tmp_path: Path, stages: list[dict[str, bool]], expected: str) -> None:
    assert on(file(tmp_path, json.dumps({"stages": stages}))) == expected


def test_an_empty_json_profile_has_all_stages_on(tmp_path: Path) -> None:
    assert on(file(tmp_path, "{}")) == "xxxxx"


@pytest.mark.parametrize(
    "text",
    ["[stages]\nfour = true\n", '{"stages": [{"four": true}]}', '{"stages": 3}', "[stages]\none = 3\n", "[", "\xff",
     '{"stages": [3]}', "[" * 100_000, "x = 1"],
)  # fmt: skip
def test_what_is_no_profile_is_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(IaprofError, match="is not a profile of stages"):
        on(file(tmp_path, text))


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no stage four"):
        on("everything", "four")
    with pytest.raises(UsageError, match="there is no profile nothing"):
        on("nothing")
    with pytest.raises(IaprofError, match="cannot be opened"):
        on(tmp_path / "absent.toml")
