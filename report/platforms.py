"""The GPU generations as the decoder IGA numbers them."""

from __future__ import annotations

from enum import IntEnum

LONGEST_INSTRUCTION = 16  # bytes, on all of them; compacted ones have 8


class Platform(IntEnum):
    """IGA's platform ids (iga_platforms_list of libiga64.so.2, Intel graphics compiler 2)."""

    XE_HP = 0x100_0001
    XE_HPG = 0x100_0002
    XE_HPC = 0x100_0004
    XE2 = 0x200_0000
    XE3 = 0x300_0000
    XE3P = 0x300_0003

    @classmethod
    def from_ip_version(cls, major: int, minor: int) -> Platform | None:
        """The platform of a graphics IP version as the xe driver reports it (GMD_ID), None where there is none.

        Source: drivers/gpu/drm/xe/xe_pci.c, Linux 6.18. DG2 is 12.55 to 12.57, Meteor and Arrow Lake (12.70 to 12.74)
        have its instruction set.
        """
        match major, minor:
            case 12, 50:
                return cls.XE_HP
            case 12, 55 | 56 | 57 | 70 | 71 | 73 | 74:
                return cls.XE_HPG
            case 12, 60 | 61:
                return cls.XE_HPC
            case 20, _:
                return cls.XE2
            case 30, _:
                return cls.XE3
            case 35, _:
                return cls.XE3P
        return None
