"""Archives of packages: scripts take them from the machine's own apt sources, and name none themselves."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "archive-here"
OF_ARCHIVES = re.compile(
    r"\b(?:deb|ftp|archive|security|snapshot|ports|mirrors?|httpredir|packages|registry|files)"
    r"(?:\.[a-z0-9-]+)*\.(?:org|com|net|io)\b|\b(?:debian|ubuntu)\.(?:org|com)\b|\bpypi\.org\b",
    re.IGNORECASE,
)
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="it has no apt-get")

ONE_LINE = "deb [arch=amd64] https://one.example/debian/ trixie main contrib\n"
SECURITY = "deb https://one.example/debian-security trixie-security main\n"
OTHERS = "deb https://other.example/tools stable main\n"
DEB822 = "Types: deb\nURIs: https://two.example/debian\nSuites: trixie trixie-updates\nComponents: main\n"
MIRRORS = "# the best one first\n\nhttps://three.example/debian/ priority:1\nhttps://four.example/debian\n"


def archive(
    folder: Path,
    name: str,
    line: str = "",
    deb822: str = "",
    release: str = "ID=debian\nVERSION_CODENAME=trixie\n",
    **given: str,
) -> subprocess.CompletedProcess[str]:
    """Asks on a machine with these apt sources, whose lists were never read."""
    for part in ("parts", "lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "os-release").write_text(release)
    (folder / "mirrors").write_text(MIRRORS)
    (folder / "sources.list").write_text(line)
    (folder / "parts" / "x.sources").write_text(deb822)
    (folder / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{folder}/sources.list";\nDir::Etc::SourceParts "{folder}/parts";\n'
        f'Dir::State::lists "{folder}/lists";\nDir::Cache "{folder}/cache";\n'
    )
    environment = os.environ | {"APT_CONFIG": f"{folder}/apt.conf", "APT_OS_RELEASE": f"{folder}/os-release"}
    without = {name: value for name, value in environment.items() if not name.endswith("_ARCHIVE")}
    return subprocess.run([SCRIPT, name], env=without | given, capture_output=True, text=True, check=False)


@needs_apt
@pytest.mark.parametrize(
    ("line", "deb822", "name", "expected"),
    [
        (OTHERS + ONE_LINE + SECURITY, "", "debian", "https://one.example/debian"),
        (OTHERS + ONE_LINE + SECURITY, "", "debian-security", "https://one.example/debian-security"),
        (OTHERS, DEB822, "debian", "https://two.example/debian"),
        ("deb mirror+file:FOLDER/mirrors trixie main\n", "", "debian", "https://three.example/debian"),
    ],
)
def test_the_archive_of_the_machines_own_sources(
    tmp_path: Path, line: str, deb822: str, name: str, expected: str
) -> None:
    done = archive(tmp_path, name, line.replace("FOLDER", str(tmp_path)), deb822)
    assert (done.stdout, done.stderr, done.returncode) == (f"{expected}\n", "", 0)


@needs_apt
@pytest.mark.parametrize(
    ("line", "name"), [("", "debian"), (OTHERS, "debian"), (ONE_LINE, "debian-security"), (ONE_LINE, "ubuntu")]
)
def test_sources_without_that_archive_are_one_sentence_and_a_variable_is_the_way(
    tmp_path: Path, line: str, name: str
) -> None:
    variable = f"{name.upper().replace('-', '_')}_ARCHIVE"
    done = archive(tmp_path / "none", name, line)
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr == (
        f"archive-here: this machine's apt sources name no archive of {name}: name one with {variable}=URL\n"
    )
    done = archive(tmp_path / "given", name, line, **{variable: "https://mine.example/x/"})
    assert (done.stdout, done.returncode) == ("https://mine.example/x\n", 0)


@needs_apt
def test_an_archive_of_another_distribution_is_not_taken_for_debians(tmp_path: Path) -> None:
    done = archive(tmp_path, "debian", ONE_LINE, release="ID=ubuntu\nVERSION_CODENAME=trixie\n")
    assert done.returncode == 1


def test_no_script_names_the_host_of_an_archive() -> None:
    files = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    files += [ROOT / "Makefile", *(ROOT / ".ci").glob("*"), *(ROOT / "tests" / "kernels").glob("*.py")]
    assert len(files) > 20
    named = {
        (path.name, found[0]) for path in files if path.is_file() for found in OF_ARCHIVES.finditer(path.read_text())
    }
    assert named == set()


@pytest.mark.parametrize("host", ["deb.example.org", "archive.example.com", "security.example.org"])
def test_hosts_of_archives_are_recognised(host: str) -> None:
    assert OF_ARCHIVES.search(f"mirror=http://{host}/x")
