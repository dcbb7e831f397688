"""`make demo`: records and reports once, on the stand-in for the hardware, as a user does.

Records a real process that launches real kernels from several threads, with the recorder that ships. Only the GPU and
Intel's runtime are simulated (tests/standin). Writes the capture, its reports, and pictures of them to demo/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import chromium, opened  # noqa: E402 - needs the line above
from standin import runtime  # noqa: E402
from standin.hardware import Hardware  # noqa: E402
from terminals import Terminal  # noqa: E402
from waiting import until  # noqa: E402

DEMO = ROOT / "demo"
IAPROF = str(Path(sys.prefix) / "bin" / "iaprof")
SECONDS = 10
HOTTEST = 10
LAUNCH = "zeCommandListAppendLaunchKernel"
REPORTS: dict[str, list[str]] = {
    "cap.folded": [],
    "cap.iaprof.txt": [],
    "cap.html": [],
    "flame-graph.svg": ["--percent-limit", "0.1"],  # only what is visible without zooming
}
PAGE_WIDTH = 1000  # width in pixels of the browser's window for pictures of the page
VIEW = (96, 28)  # columns and lines of the terminal for a picture of the interactive view
VIEW_WIDTH = 900  # pixels
VIEW_SECONDS = "3"  # after which textual draws itself
_FONT = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)  # which a browser would download


def main() -> None:
    """Records, reports, and prints the hottest stacks."""
    DEMO.mkdir(exist_ok=True)
    capture = DEMO / "cap.parquet"
    elfs = [runtime.debug_elf("bmg", "matmul"), runtime.debug_elf("bmg", "attention")]
    words = runtime.command(elfs, "--seconds", SECONDS, "--threads", 2, "--rate", 2000, "--bursts-ms", 270)
    # Relative paths, as a user would type them, because the command is shown above every picture.
    command = [os.path.relpath(word, ROOT) if word.startswith("/") else word for word in map(str, words)]
    with tempfile.TemporaryDirectory(prefix="iaprof-demo-") as folder, Hardware(Path(folder)) as hardware:
        record(hardware, capture, command)
        samples = hardware.ledger().samples_captured
    for name, options in REPORTS.items():
        words = [IAPROF, "report", "--quiet", "--force", *options, str(capture), "-o", str(DEMO / name)]
        subprocess.run(words, check=True)
    photograph(DEMO / "cap.html", DEMO / "heat-map.png")
    photograph_view(capture, DEMO / "interactive.png")
    folded = (DEMO / "cap.folded").read_text().splitlines()
    total = print_hottest(folded)
    print(f"\nThe stand-in's GPU produced {samples:,} samples, the report has {total:,}.")
    for name in ("cap.parquet", *REPORTS, "heat-map.png", "interactive.png"):
        print(f"  {(DEMO / name).relative_to(ROOT)!s:22} {(DEMO / name).stat().st_size:>10,} bytes")
    if total != samples:
        sys.exit("demo: these must be equal; please report this")


def record(hardware: Hardware, capture: Path, command: list[str]) -> None:
    """Runs `iaprof record`, with sudo unless this is root; its last line goes to the terminal."""
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    # LD_LIBRARY_PATH lets the recorder probe the runtime before the program starts.
    variables = hardware.env() | {"LD_LIBRARY_PATH": str(runtime.build().library.parent)}
    preload = [f"{name}={value}" for name, value in variables.items()]
    words = [*sudo, "env", *preload, IAPROF, "record", "--force", "-o", str(capture), "--", *command]
    print(f"iaprof record -o demo/cap.parquet -- workload   ({SECONDS} seconds)", flush=True)
    # Hides the output of the recorded command.
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def photograph(page: Path, picture: Path) -> None:
    """Makes a picture of a page's heat maps in a browser."""
    with chromium() as browser, opened(browser, page, width=PAGE_WIDTH) as shown:
        shown.locator("#heat").screenshot(path=picture)


def photograph_view(capture: Path, picture: Path) -> None:
    """Makes a picture of the interactive view, opened where it is hottest."""
    with tempfile.TemporaryDirectory(prefix="iaprof-demo-") as folder:
        drawn = Path(folder) / "view.svg"
        settings = {
            "COLORTERM": "truecolor",
            "TEXTUAL_PRESS": "e",
            "TEXTUAL_SCREENSHOT": VIEW_SECONDS,
            "TEXTUAL_SCREENSHOT_LOCATION": folder,
            "TEXTUAL_SCREENSHOT_FILENAME": drawn.name,
        }
        with Terminal([IAPROF, "report", "-i", capture], os.environ | settings, *VIEW) as terminal:
            terminal.until("Quit")
            until(lambda: drawn.exists() and drawn.read_text().rstrip().endswith("</svg>"))
            terminal.press("q")
            terminal.wait()
        drawn.write_text(_FONT.sub("", drawn.read_text()))
        with chromium() as browser, opened(browser, drawn, width=VIEW_WIDTH) as shown:
            shown.locator("svg > rect").first.screenshot(path=picture)


def print_hottest(folded: list[str]) -> int:
    """Prints the stacks with the most samples, truncated to the terminal's width; returns the sum of all samples."""
    stacks = [(int(count), stack) for stack, _, count in (line.rpartition(" ") for line in folded)]
    total = sum(count for count, _ in stacks)
    width = shutil.get_terminal_size().columns - 18
    print(f"\nThe {HOTTEST} hottest stacks: kernel > instruction > reason > offset; below, who launched it\n")
    for count, stack in sorted(stacks, reverse=True)[:HOTTEST]:
        cpu, _, gpu = stack.partition(";-;")
        file, *rest = (frame.removesuffix("_[G]").removesuffix("_[g]") for frame in gpu.split(";"))
        print(f"{count:>8,} {100 * count / total:>5.1f} %  {_fit(' > '.join(rest) + f'  ({Path(file).name})', width)}")
        # Omits frames of the C library, which call main or a thread's function, and of the runtime, after the launch.
        program = [frame for frame in cpu.split(";")[2:] if not frame.startswith("[")]
        program = program[: program.index(LAUNCH)] if LAUNCH in program else program
        print(f"{'':17} {_fit(' > '.join(program), width)}")
    return total


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


if __name__ == "__main__":
    main()
