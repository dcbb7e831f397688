"""Which vendor's GPUs are recorded, and what is said if none can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.record.options import Options
from iaprof.record.sources import opening

OPTIONS = Options(Path("cap.parquet"))


def refusing(error: IaprofError) -> Callable[[Options], Any]:
    def sampler(_: Options) -> Any:
        raise error

    return sampler


NONE, OTHER_NONE = IaprofError("there is no GPU"), IaprofError("the other vendor has none")
WRONG, OTHER_WRONG = UsageError("no GPU is called nvidia0"), UsageError("the rate is no power of 2")


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ((NONE, OTHER_NONE), NONE),
        ((NONE, OTHER_WRONG), OTHER_WRONG),
        ((WRONG, OTHER_NONE), WRONG),
        ((WRONG, OTHER_WRONG), WRONG),
    ],
)
def test_the_refusal_of_a_vendor_with_gpus_is_told(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[IaprofError, ...], told: IaprofError
) -> None:
    monkeypatch.setattr(opening, "SAMPLERS", [refusing(error) for error in errors])
    with pytest.raises(IaprofError) as raised:
        opening.open_sampler(OPTIONS)
    assert raised.value is told


def test_the_first_vendor_that_can_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "SAMPLERS", [refusing(WRONG), lambda _: "second", refusing(NONE)])
    assert str(opening.open_sampler(OPTIONS)) == "second"
