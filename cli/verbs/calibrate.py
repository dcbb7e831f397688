"""`iaprof calibrate`: learns the layout of a driver build that iaprof does not know."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.clean import clean
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.formats.header.launch_warnings import COPIES_UNRECORDED, slow_launches

if TYPE_CHECKING:
    from iaprof.bpf.driver_layout import Field, Layout
    from iaprof.record.calibrate.calibrate import Calibration

EXAMPLES = """\b
Examples:
  sudo iaprof calibrate                   the Level Zero driver that is installed
  sudo iaprof calibrate /usr/lib/x86_64-linux-gnu/intel-opencl/libigdrcl.so
  sudo iaprof calibrate /usr/lib/x86_64-linux-gnu/libvulkan_intel.so
  iaprof calibrate ~/neo/libze_intel_gpu.so.1 -o layout.json
  sudo iaprof calibrate --json | jq .layout.entries
"""


def calibrate(
    library: Annotated[
        Path | None,
        typer.Argument(metavar="LIBRARY", help="The driver's file.  [default: the installed Level Zero driver]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the layout to FILE instead of /var/cache/iaprof/layouts."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Learn where a build of the Level Zero, OpenCL or Vulkan driver keeps its kernels.

    Runs the driver in unprivileged processes, as four GPUs that need not be present, searches their memory for what
    its public calls report, and writes what all of them agree on. Recordings then see the launches of every program
    that uses this build. Needs no GPU and takes a few seconds. Mesa's Vulkan driver runs on this machine's GPUs
    instead, and executes nothing there.
    """
    from iaprof.record.calibrate import calibrate as calibration

    calibration.check_store(output)
    library = library or calibration.installed_driver()
    print(f"iaprof: running {clean(str(library))} {calibration.how(library)}", file=sys.stderr, flush=True)
    found = calibration.calibrate(library)
    path = calibration.store(found.layout, output)
    with utf8_stdout():
        if as_json:
            print(json.dumps(_as_dict(library, found, path), indent=2))
        else:
            _show(library, found, path)


def _as_dict(library: Path, found: Calibration, path: Path) -> dict[str, Any]:
    return {
        "library": clean(str(library)),
        "devices": found.devices,
        "left_out": found.left_out,
        "single_stepped": found.single_stepped,
        "no_own_kernels": found.no_own_kernels,
        "no_draws": found.no_draws,
        "layout": asdict(found.layout),
        "written": clean(str(path)),
    }


def _show(library: Path, found: Calibration, path: Path) -> None:
    layout = found.layout
    print(f"Driver    {clean(str(library))}")
    print(f"Version   {layout.version}")
    print(f"Build-id  {layout.build_id}")
    print(f"{'Ran on' if layout.window else 'Agree':<10}{', '.join(found.devices)}")
    for device, why in found.left_out.items():
        print(f"Left out  {device}: {why}")
    print(f"\nFrom a {'shader' if layout.window else 'kernel'}'s handle h to")
    for name, way in _ways(layout):
        print(f"  {name:<12}{way}")
    print("\nProbes at")
    for entry in layout.entries:
        print(f"  {entry.address:<#12x}{entry.name}")
    if found.no_own_kernels:
        print(f"\nWarning: {COPIES_UNRECORDED}: {found.no_own_kernels}")
    if found.no_draws:
        print(f"\nWarning: draws are not recorded: {found.no_draws}")
    elif layout.window and not layout.mesh:
        print("\nWarning: draws with mesh shaders are not recorded: this driver has none, or they could not be proved")
    if found.single_stepped:
        print(f"\nWarning: {slow_launches(found.single_stepped)}")
    print(f"\nWritten to {clean(str(path))}")


def _ways(layout: Layout) -> list[tuple[str, str]]:
    from iaprof.bpf.driver_layout import Field

    fields = {
        "address": layout.address,
        "size": (layout.size,),
        "code": (layout.code,),
        "name": (layout.name,),
        "allocation": layout.allocation[:1] if layout.allocation else (),
        "its size": layout.allocation[1:] if layout.allocation else (),
        "class": (layout.kernel_class,),
        "module": (layout.module,),
        "binary": (layout.binary,),
    }
    ways = [(name, " + ".join(_way(field) for field in of if field)) for name, of in fields.items() if any(of)]
    if layout.window:
        ways[0] = ("address", f"{layout.window[0]:#x} + {ways[0][1]}")
        if layout.simd:
            ways.append(("lanes", _way(Field((layout.simd,), bits=32))))
        ways.append(("from", f"h = {_way(Field(layout.bound), 'c')} of the command buffer c"))
        if layout.drawn:
            *before, last = layout.drawn
            array = f"{_way(Field(tuple(before)), 'c') if before else 'c'}+{last:#x}"
            ways.append(("drawn", f"h = *({array}+8s) of the command buffer c, s = 0 to {layout.stage_count - 1}"))
    if layout.gpu:
        ways.append(("GPU", f"g = {_way(layout.gpu, 'q')} of the queue q"))
    return ways


def _way(field: Field, start: str = "h") -> str:
    """A path of pointers in C notation with byte offsets: *(*(h+0x30)+8); `8g` is 8 bytes times the GPU's number."""
    way = start
    for offset, more in field.steps():
        step = "+".join([f"{offset:#x}"] * (offset > 0 or not more) + [f"{more:#x}g"] * (more > 0))
        way = f"*({way}+{step})"
    return way
