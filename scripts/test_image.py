"""`make test-image`: builds docs/continuous/Containerfile without a registry, and records with the image.

    sudo .venv/bin/python scripts/test_image.py [--keep]

debootstrap makes the base image, which gets this machine's network settings. podman builds on it, and runs the result
as docs/continuous.md says, on the GPU of tests/standin, while a program outside of the container launches. All of it is
in a folder of the user's cache, which is removed at the end, or kept with --keep. Needs root, debootstrap, podman,
buildah and runc (crun refuses machines with both versions of cgroups), and 4 GB of disk: the simplest of podman's
storages, which works everywhere, copies all files for each step.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from iaprof.formats.capture.reader import CaptureReader  # noqa: E402 (needs the line above)
from iaprof.record.session import NICE  # noqa: E402
from standin import runtime  # noqa: E402
from standin.hardware import Hardware  # noqa: E402
from waiting import until  # noqa: E402

SUITE = "trixie"
BASE = "docker.io/library/debian:trixie-slim"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iaprof-tests" / "image"
NETWORK = ("PIP_", "SSL_CERT_", "REQUESTS_CA_", "http_proxy", "https_proxy", "no_proxy")  # variables' names begin so
LAUNCH_S = 5


class Podman:
    """podman with a storage of its own, so that no image or container of the user is touched."""

    def __init__(self, folder: Path) -> None:
        self._words = [
            "podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "vfs",
            "--cgroup-manager", "cgroupfs", "--runtime", "runc",
        ]  # fmt: skip

    def __call__(self, *words: str | Path, stdin: int | None = None) -> str:
        """Runs it, and returns what it printed; what it says goes to stderr."""
        command = [*self._words, *map(str, words)]
        return subprocess.run(command, stdin=stdin, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def make_base(podman: Podman, root: Path) -> None:
    """Makes the base image, with this machine's settings of apt, pip and certificates."""
    words = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, str(root)]
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    settings = ["apt-config", "dump", "--format", '%F "%v";%n', "Acquire"]
    with (root / "etc/apt/apt.conf.d/90machine").open("wb") as file:
        subprocess.run(settings, stdout=file, check=True)
    certificates = "usr/local/share/ca-certificates"
    shutil.copytree(f"/{certificates}", root / certificates, dirs_exist_ok=True)
    subprocess.run(["chroot", root, "update-ca-certificates"], stdout=subprocess.DEVNULL, check=True)
    for source, target in ((Path("/etc/pip.conf"), "etc/pip.conf"), (user_pip_conf(), "etc/xdg/pip/pip.conf")):
        if source.exists():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / target)
    variables = [f"ENV {name}={value}" for name, value in os.environ.items() if name.startswith(NETWORK)]
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
        assert packed.stdout is not None
        podman("import", *(f"--change={each}" for each in variables), "-", BASE, stdin=packed.stdout.fileno())


def user_pip_conf() -> Path:
    """Returns where this user's settings of pip are, if there are any."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pip" / "pip.conf"


def local_packages() -> list[str]:
    """The volumes that pip's settings need: folders and files of this machine that they name."""
    told = subprocess.run(["python3", "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=False)
    words = told.stdout.replace("'", " ").replace("=", " ").replace("file://", " ").split()
    found = {
        word.rstrip("/").removesuffix("/simple") for word in words if word.startswith("/") and "/etc/ssl/" not in word
    }
    found = {each for each in found if Path(each).exists()}
    return [f"--volume={each}:{each}:ro" for each in sorted(found)]


def record(podman: Podman, folder: Path) -> tuple[int, int]:
    """Records with the image's own options; returns the stalls in the capture, and those that the GPU made."""
    volume = folder / "volume"
    volume.mkdir()
    with Hardware(folder / "gpu") as hardware:
        container = podman(
            "run", "--detach", "--pid=host", "--cgroupns=host", "--network=none", "--privileged",
            "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096",  # ours may be lower than what podman asks for
            f"--volume={volume}:/var/lib/iaprof", f"--volume={ROOT / 'tests'}:{ROOT / 'tests'}:ro",
            f"--volume={hardware.folder}:{hardware.folder}",
            *(f"--env={name}={value}" for name, value in hardware.env().items()), "iaprof",
        )  # fmt: skip
        (state,) = json.loads(podman("inspect", container))
        pid = state["State"]["Pid"]
        until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == NICE)
        program = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", LAUNCH_S)
        environment = os.environ | {"STANDIN_DIR": str(hardware.folder)}
        subprocess.run(program, env=environment, stdout=subprocess.DEVNULL, check=True)
        hardware.wait()
        podman("stop", "--time=120", container)
        print(podman("logs", container))
        made = hardware.ledger().records_produced
    header = CaptureReader(volume / "iaprof.parquet").header
    print(f"launches: {header['totals']['launches']:,}, losses: {header['losses']}, thinned: {header['thinned']}")
    return header["totals"]["stalls"], made


def main() -> int:
    """Returns the exit code."""
    if os.geteuid() != 0:
        sys.exit("a container that sees all processes needs root: run this with sudo")
    missing = [name for name in ("debootstrap", "podman", "buildah", "runc") if not shutil.which(name)]
    if missing:
        sys.exit(f"not found: {', '.join(missing)}; install it: apt-get install {' '.join(missing)}")
    keep = "--keep" in sys.argv[1:]
    CACHE.mkdir(parents=True, exist_ok=True)
    podman = Podman(CACHE)
    try:
        with tempfile.TemporaryDirectory(prefix="base-", dir=CACHE) as name:
            make_base(podman, Path(name) / "root")
        podman("build", "--isolation=chroot", "--network=host", "--pull=never", *local_packages(),
               "--file", ROOT / "docs" / "continuous" / "Containerfile", "--tag=iaprof", ROOT)  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="iaprof-image-") as name:
            found, made = record(podman, Path(name))
    finally:
        podman("rm", "--all", "--force")
        if not keep:
            podman("rmi", "--all", "--force")
            shutil.rmtree(CACHE)
    print(f"{found:,} of {made:,} stalls are in the capture")
    return 0 if found == made else 1


if __name__ == "__main__":
    sys.exit(main())
