"""How long the page of `--format=html` takes in Chromium to zoom, leave out a group of frames, and show the call tree.

Its trees have 100,000 frames, about as many as a page can have, and 466,000, which are more.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser import chromium
from iaprof.formats.export import Export
from iaprof.formats.page.data import payload
from iaprof.formats.page.html import STALLS, write_page
from iaprof.formats.page.panels import panels
from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Origin, Profile, StackOptions
from iaprof.gpu.intel.reasons import REASONS

INSTRUCTIONS = 232
ZOOMS = 60
MEASURE = """(zooms) => {
  const { flame } = iaprof, took = (work) => {
    const begun = performance.now();
    work();
    flame.drawNow();
    flame.calls.drawNow();
    return performance.now() - begun;
  };
  const zoomed = [];
  for (let number = 0; number < zooms; number++) {
    let box = flame.picture.root;
    for (let depth = 0; depth <= number % 5; depth++) {
      const next = flame.picture.on(box);
      box = next[number % next.length] || box;
    }
    zoomed.push(took(() => flame.zoom(box, false)), took(() => flame.zoom(null, false)));
  }
  zoomed.sort((a, b) => a - b);
  return [
    flame.tree.size - 1, zoomed[zoomed.length >> 1], zoomed[zoomed.length - 1],
    took(() => flame.leaveOut("libc", true)), took(() => flame.show({ inverted: true })),
    took(() => { flame.show({ inverted: false }); flame.look("tree"); }),
  ];
}"""


def main() -> None:
    """Prints milliseconds for both trees."""
    print("    frames  zoom: median     most  group left out  leaves first  call tree   ms")
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for functions in (430, 2000):
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(written(Path(folder) / f"{functions}.html", functions).as_uri())
            page.wait_for_selector("html[data-ready=yes]")
            frames, *times = page.evaluate(MEASURE, ZOOMS)
            columns = zip(times, (14, 9, 16, 14, 11), strict=True)
            print(f"{frames:>10,}" + "".join(f"{ms:>{width}.1f}" for ms, width in columns))
            page.close()


def written(path: Path, functions: int) -> Path:
    """Writes a page of a program with so many functions, each of which launches the same instructions."""
    own, library = Origin(CodeKind.CPP, "/opt/app"), Origin(CodeKind.C, "/lib/libc.so.6")
    launches = [
        Launch("app", 7, ("__libc_start_main", f"group{number % 40}", f"f{number}"), origins=(library, own, own))
        for number in range(functions)
    ]
    codes = [Code(f"op{number}", ("matmul",), (0,)) for number in range(INSTRUCTIONS)]
    launch, code = np.divmod(np.arange(functions * INSTRUCTIONS), INSTRUCTIONS)
    none = np.zeros(len(launch), np.int64)
    counts = np.zeros((len(launch), len(REASONS)), np.uint64)
    counts[:, REASONS.index("sbid")] = 1 + code % 7
    kernel = Kernel(4096, "matmul", "matmul.cl")
    profile = Profile(
        launches, [kernel], codes, none, launch, none, code, none.astype(np.uint64), counts, none, REASONS, [0.0]
    )
    export = Export(profile)
    options = StackOptions(components=("process", "cpu", "instruction"))
    with path.open("w") as out:
        write_page(STALLS, "bench", payload(export, options, panels(export), most_nodes=1_000_000), out)
    return path


if __name__ == "__main__":
    main()
