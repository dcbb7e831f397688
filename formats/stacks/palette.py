"""The colours of kinds of code, the same in every picture.

The hues are those of Okabe and Ito's set for colour-blind readers ("Color Universal Design", 2008): warm hues for the
GPU, cool ones for the CPU. Each kind has its own lightness, about six steps of CIE L* from the next, so that they
differ in black-and-white prints, too. tests/unit/formats/test_palette.py measures both.
"""

from __future__ import annotations

from iaprof.formats.profile import CodeKind

LIGHT = {
    CodeKind.PROCESS: "#e9e9e9",
    CodeKind.PYTHON: "#eade40",
    CodeKind.SOURCE: "#fdb651",
    CodeKind.CPP: "#56bbeb",
    CodeKind.UNKNOWN: "#a0a0a0",
    CodeKind.INSTRUCTION: "#ef662e",
    CodeKind.KERNEL: "#b660a2",
    CodeKind.JIT: "#047959",
    CodeKind.C: "#055e92",
}
"""For light backgrounds, lightest first."""
DARK = {**LIGHT, CodeKind.PROCESS: "#4e4e4e"}
"""For backgrounds as dark as #1b1b1f, where the lightest colour of LIGHT would glare."""


def ink(colour: str) -> str:
    """Black or white, whichever has more contrast with a background.

    Args:
        colour: `#rrggbb`.
    """
    return "#000000" if contrast(colour, "#000000") >= contrast(colour, "#ffffff") else "#ffffff"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2); text is easy to read from 4.5 on."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """The relative luminance of a colour (sRGB, IEC 61966-2-1), 0 to 1."""
    shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
