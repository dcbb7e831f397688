"""The wheel: what is inside, and that it works where nothing else is; and that the import rules bite."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from iaprof.cli.main import app
from iaprof.cli.manual.files import files
from thorough import thorough

ROOT = Path(__file__).resolve().parents[3]
# By setup.py:
COMPILED = tuple(
    f"{folder}/libiaprof_{name}.so"
    for folder, name in (
        ("record/kernels", "inject"),
        ("record/kernels", "cuda"),
        ("symbols/unwind", "unwind"),
        ("report/join", "join"),
    )
)
PACKAGES = ["basics", "bpf", "cli", "formats", "gpu", "record", "report", "sandbox", "symbols", "timelines"]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build needs of the checkout, copied: a build leaves files behind, and old ones end up in the wheel."""
    copy = tmp_path_factory.mktemp("source")
    for name in [*PACKAGES, "src"]:
        ignore = shutil.ignore_patterns("*.egg-info", "__pycache__", *(Path(path).name for path in COMPILED))
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ["pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the source distribution, as a release is."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=source)
    (found,) = out.glob("*.whl")
    return found


@thorough
def test_wheel_holds_every_source_file_and_the_licence(source: Path, wheel: Path) -> None:
    expected = {"iaprof/__init__.py", "iaprof/__main__.py", "iaprof/py.typed", *(f"iaprof/{path}" for path in COMPILED)}
    for package in PACKAGES:
        for path in (source / package).rglob("*"):
            if path.suffix in {".py", ".c", ".h", ".json", ".zebin", ".spv"} or (
                "assets" in path.parts and path.is_file()
            ):
                expected.add(f"iaprof/{path.relative_to(source)}")

    names = set(zipfile.ZipFile(wheel).namelist())

    assert {name for name in names if name.startswith("iaprof/")} == expected
    data = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}
    assert data == set(files(app, "", ""))
    assert any(name.endswith(".c") for name in expected), "no BPF program among the sources"
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl"), "what is compiled knows no Python"


@thorough
def test_wheel_alone_gives_a_working_command(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env")]
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=tmp_path)

    assert "record" in run(tmp_path / "env/bin/iaprof", "--help", cwd=tmp_path)
    assert "--format" in run(tmp_path / "env/bin/iaprof", "report", "--help", cwd=tmp_path)
    page = run("mandoc", "-T", "ascii", tmp_path / "env/share/man/man1/iaprof-report.1", cwd=tmp_path)
    assert "iaprof-report - print where the GPU stalled" in page.replace("\b", "")


@thorough
def test_the_same_commit_gives_the_same_wheel(tmp_path: Path) -> None:
    wheels = []
    for umask in ("022", "077"):
        out = tmp_path / umask
        run("sh", "-c", f'umask {umask} && exec "$0" "$1"', ROOT / "scripts/wheel", out, cwd=tmp_path)
        wheels += [path.read_bytes() for path in out.iterdir()]
    assert len(wheels) == 2
    assert wheels[0] == wheels[1]


def locked(path: str) -> dict[str, list[Requirement]]:
    """Returns the requirements of a lock file, each of which has hashes, by the package's name."""
    lines = [line.partition(" --hash=") for line in (ROOT / path).read_text().replace("\\\n", "").splitlines()]
    lines = [line for line in lines if not line[0].startswith("#")]
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}( +--hash=sha256:[0-9a-f]{64})*", hashes) for _, _, hashes in lines)
    found: dict[str, list[Requirement]] = {}
    for requirement in (Requirement(first.strip()) for first, _, _ in lines):
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


@pytest.mark.parametrize(
    ("path", "has_extras"), [("scripts/requirements.txt", True), ("docs/continuous/requirements.txt", False)]
)
def test_the_lock_has_every_package_that_is_needed(path: str, has_extras: bool) -> None:
    """Each at a version that pyproject.toml allows, and with hashes."""
    pins = locked(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in project["project"]["optional-dependencies"].values() if has_extras else ():
        needed += extra
    for requirement in map(Requirement, needed):
        versions = [str(pin.specifier).removeprefix("==") for pin in pins[canonicalize_name(requirement.name)]]
        assert versions
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_a_recorder_gets_what_the_tests_have() -> None:
    every = locked("scripts/requirements.txt")
    for name, pins in locked("docs/continuous/requirements.txt").items():
        assert {str(pin.specifier) for pin in pins} <= {str(pin.specifier) for pin in every[name]}


@pytest.mark.parametrize("path", ["docs/continuous.md", "docs/continuous/Containerfile", "scripts/setup"])
def test_root_installs_no_package_without_a_hash(path: str) -> None:
    text = (ROOT / path).read_text().replace("\\\n", " ")
    installs = re.findall(r"\bpip install [^&\n]*", text)
    assert len(installs) == 2
    assert all("--no-deps" in install for install in installs)
    assert "--require-hashes" in installs[0] and "--no-build-isolation" in installs[1]


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("formats", "import iaprof.report"),
        ("formats", "import iaprof.bpf"),
        ("bpf", "import iaprof.record"),
        ("record", "import iaprof.report"),
        ("record", "import iaprof.cli"),
        ("report", "import iaprof.record"),
        ("report", "import iaprof.bpf"),
        ("report", "from ..bpf import anything"),
    ],
)
def test_import_rules_refuse(package: str, line: str, source: Path, tmp_path: Path) -> None:
    """Given a module that imports against the arrangement, lint-imports fails and names it."""
    shutil.copytree(source, tmp_path / "source", symlinks=True)
    (tmp_path / f"source/{package}/wrong.py").write_text(line + "\n")

    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path / "source",
        env={"PYTHONPATH": str(tmp_path / "source/src"), "PATH": ""},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert f"iaprof.{package}.wrong" in done.stdout
