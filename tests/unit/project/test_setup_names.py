"""What the set-up says on a system that is not Debian: the command that installs what is missing there."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "packages-here"
WANTED = ("gcc", "g++", "python3-bpfcc", "systemtap-sdt-dev", "chromium")


def said(folder: Path, os_release: str, *packages: str) -> list[str]:
    """The command, the packages here, and those that have no name here."""
    (folder / "os-release").write_text(os_release)
    done = subprocess.run([SCRIPT, folder / "os-release", *packages], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 3
    return done.stdout.split("\n")[:3]


@pytest.mark.parametrize(
    ("os_release", "command", "packages", "none"),
    [
        (
            'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_ID="13"\n',
            "apt-get install",
            "gcc g++ python3-bpfcc systemtap-sdt-dev chromium",
            "",
        ),
        (
            'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n',
            "apt-get install",
            "gcc g++ python3-bpfcc systemtap-sdt-dev",
            "chromium",
        ),
        (
            'NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"\n',
            "apt-get install",
            "gcc g++ python3-bpfcc systemtap-sdt-dev",
            "chromium",
        ),
        (
            'NAME="Fedora Linux"\nID=fedora\n',
            "dnf install",
            "gcc gcc-c++ python3-bcc systemtap-sdt-devel systemtap-sdt-dtrace chromium",
            "",
        ),
        (
            'NAME="openSUSE Tumbleweed"\nID="opensuse-tumbleweed"\nID_LIKE="opensuse suse"\n',
            "zypper install",
            "gcc gcc-c++ python3-bcc systemtap-sdt-devel systemtap-dtrace chromium",
            "",
        ),
        ('NAME="Arch Linux"\nID=arch\n', "pacman -S --needed", "gcc python-bcc chromium", "systemtap-sdt-dev"),
        ('NAME="Alpine Linux"\nID=alpine\n', "", "", "gcc g++ python3-bpfcc systemtap-sdt-dev chromium"),
        ("", "", "", "gcc g++ python3-bpfcc systemtap-sdt-dev chromium"),
    ],
)
def test_names_of_packages(tmp_path: Path, os_release: str, command: str, packages: str, none: str) -> None:
    assert said(tmp_path, os_release, *WANTED) == [command, packages, none]


@pytest.mark.parametrize(
    ("os_release", "package"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "binutils"),
        ('ID=debian\nVERSION_ID="13"\n', "binutils-gold"),
        ("ID=debian\n", "binutils-gold"),
        ('ID=ubuntu\nVERSION_ID="24.04"\n', "binutils"),
        ("ID=fedora\n", "binutils-gold"),
    ],
)
def test_where_the_linker_gold_has_a_package_of_its_own(tmp_path: Path, os_release: str, package: str) -> None:
    assert said(tmp_path, os_release, "binutils-gold")[1] == package


def test_every_package_of_the_set_up_has_a_name_in_debian_and_fedora(tmp_path: Path) -> None:
    setup = SCRIPT.with_name("setup").read_text()
    needed = [line.split()[1] for line in setup.splitlines() if line.startswith("need ")]
    assert {"gcc", "linux-headers", "apt"} < set(needed)
    for os_release in ("ID=debian\n", "ID=fedora\n"):
        assert said(tmp_path, os_release, *needed)[2] == ""
