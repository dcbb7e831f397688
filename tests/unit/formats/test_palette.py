"""The colours of pictures: distinguishable by every reader, on screen and in print."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from iaprof.formats.profile import CodeKind
from iaprof.formats.stacks import flame_layout

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# severity 1, on linear RGB.
SEEN_BY = {
    "everybody else": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopes": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopes": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopes": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, seen_by: str = "everybody else") -> np.ndarray:
    """CIE L*a*b* under D65."""
    shares = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(np.array(SEEN_BY[seen_by]) @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("colours", [flame_layout.LIGHT, flame_layout.DARK], ids=["light", "dark"])
class TestColours:
    def test_each_kind_has_a_colour(self, colours: dict[CodeKind, str]) -> None:
        assert set(colours) == set(CodeKind)

    @pytest.mark.parametrize("reader", SEEN_BY)
    def test_colour_blind_readers_can_distinguish_any_two_colours(
        self, colours: dict[CodeKind, str], reader: str
    ) -> None:
        # When each colour is seen as by this reader
        seen = {kind: lab(colour, reader) for kind, colour in colours.items()}
        # Then the distance of any two is at least four just noticeable differences (2.3: Mahy and others, 1994)
        distances = {(one, other): np.linalg.norm(seen[one] - seen[other]) for one, other in combinations(seen, 2)}
        assert min(distances.values()) > 4 * 2.3, min(distances, key=distances.__getitem__)

    def test_the_colours_differ_in_black_and_white(self, colours: dict[CodeKind, str]) -> None:
        lightness = sorted(lab(colour)[0] for colour in colours.values())
        assert min(after - before for before, after in pairwise(lightness)) > 4

    def test_text_is_readable_on_each_colour(self, colours: dict[CodeKind, str]) -> None:
        for colour in colours.values():
            assert flame_layout.contrast(colour, flame_layout.ink(colour)) >= 4.5


def test_contrast_is_that_of_wcag() -> None:
    assert flame_layout.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert flame_layout.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # a well-known near miss
