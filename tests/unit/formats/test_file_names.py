r"""File names that are not UTF-8 as text, and back."""

import os
import shutil
from pathlib import Path

import pytest

from iaprof.basics.clean import clean
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.file_names import as_text, possible_names


@pytest.mark.parametrize(
    ("name", "names"),
    [
        (b"/srv/caf\xe9/lib\xff.so", 2),
        ("/srv/café".encode(), 1),
        (rb"/srv/caf\xe9", 2),
        (b"/srv/caf\xe9/" + "é".encode(), 2),
        (rb"/srv/\xc3\xa9", 1),  # these bytes would be UTF-8, and the text an é
        (rb"/srv/\x41\\x", 1),
        (b"/srv/\xe9" + rb"\xe9", 2),
    ],
)
def test_a_name_is_among_those_that_its_text_can_stand_for(name: bytes, names: int) -> None:
    assert len(possible_names(as_text(name))) == names
    # a name that mixes both forms is the only kind that is not found
    assert name in possible_names(as_text(name)) or name == b"/srv/\xe9" + rb"\xe9"


def test_paths_of_python_are_names_too() -> None:
    assert possible_names("/srv/caf\udce9") == [b"/srv/caf\xe9"]


def test_a_capture_with_such_a_name_is_read(tmp_path: Path) -> None:
    capture = tmp_path / os.fsdecode(b"c\xe9.parquet")
    shutil.copy(Path(__file__).parents[2] / "data" / "captures" / "format-9.parquet", capture)
    assert CaptureReader(capture).header["format"] == 9
    capture.write_bytes(b"")
    with pytest.raises(CaptureError, match="is empty") as error:
        CaptureReader(capture)
    assert clean(str(error.value)).startswith(f"{tmp_path}/c\\xe9.parquet is empty")
