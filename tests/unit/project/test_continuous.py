"""docs/continuous: the units are what systemd takes, the scripts do what they say, the container's recipe is whole."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import typer.main
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import ExportProfilesServiceRequest

from iaprof.cli.main import app
from iaprof.formats.writers.pprof import new_profile
from unit.in_process import iaprof

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "continuous"
CAPTURE = max((ROOT / "tests" / "data" / "captures").glob("format-*.parquet"))
UNITS = sorted(FOLDER.glob("*.service")) + sorted(FOLDER.glob("*.timer"))
MOST_EXPOSED = {"iaprof.service": 38, "iaprof-upload.service": 19}
"""Ten times systemd's measure of what a unit may do, from 0 to 10."""


def installed(folder: Path) -> list[Path]:
    """The units, with programs that exist on this machine."""
    units = []
    for path in UNITS:
        text = re.sub(r"(?m)^(Exec\w+=)\S+", rf"\1{shutil.which('true')}", path.read_text())
        units.append(folder / path.name)
        units[-1].write_text(text)
    return units


if shutil.which("systemd-analyze"):  # not in containers and chroots

    def test_systemd_takes_the_units(tmp_path: Path) -> None:
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *installed(tmp_path)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")

    @pytest.mark.parametrize("name", MOST_EXPOSED)
    def test_units_may_do_no_more_than_they_need(tmp_path: Path, name: str) -> None:
        (unit,) = (path for path in installed(tmp_path) if path.name == name)
        words = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED[name]}"]
        done = subprocess.run([*words, unit], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_recorders_options_exist() -> None:
    record = typer.main.get_command(app).commands["record"]  # type: ignore[attr-defined]
    (start,) = re.findall(r"(?m)^ExecStart=(.*)", (FOLDER / "iaprof.service").read_text().replace("%%", "%"))
    program, verb, *words = [word for word in shlex.split(start) if not word.startswith("$")]
    in_container = json.loads(re.findall(r"(?m)^CMD (.*)", (FOLDER / "Containerfile").read_text())[0])
    for given in (words, in_container):
        parameters = record.make_context("record", list(given), resilient_parsing=True).params
        assert parameters["switch_output"] == "10m"
        assert (parameters["max_total"], parameters["max_cpu"]) == ("10G", "2%")
    assert (program, verb) == ("/usr/local/bin/iaprof", "record")


def script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", FOLDER / name, *words], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_what_dead_recorders_left_is_recovered(tmp_path: Path) -> None:
    # given two spools, one damaged, a half-written capture, what is none, and a link to somebody else's file
    folder = tmp_path / "state"
    folder.mkdir()
    for name in ("iaprof.parquet.spool", "iaprof.20261121-0554231.parquet.spool"):
        (folder / name).write_text("good")
    for name in ("a b.spool", ".iaprof-0011.tmp", "iaprof.20261121-0554230.parquet", "damaged"):
        (folder / name).write_text("bad")
    victim = tmp_path / "victim"
    victim.write_text("good")
    (folder / "link.spool").symlink_to(victim)
    fake = program(tmp_path / "iaprof", '[ "$1 $2" = "recover --force" ] && grep -q good "$3" && : > "${3%.spool}"')
    # when
    done = script("recover-spools", str(folder), IAPROF=str(fake))
    # then
    assert done.returncode == 0, done.stderr
    left = {path.name for path in folder.iterdir()}
    assert left == {
        "iaprof.parquet", "iaprof.20261121-0554231.parquet", "iaprof.20261121-0554230.parquet", "damaged", "link.spool",
    }  # fmt: skip
    assert victim.read_text() == "good"
    # and a folder without any is fine
    (tmp_path / "empty").mkdir()
    assert script("recover-spools", str(tmp_path / "empty"), IAPROF=str(fake)).returncode == 0


def test_finished_files_are_moved_into_the_layout(tmp_path: Path) -> None:
    # given two finished files, one that the store refuses, and what is being written
    folder, store = tmp_path / "state", tmp_path / "store"
    for path in (folder, store, tmp_path / "bin"):
        path.mkdir()
    for name in ("iaprof.20261121-0000001.parquet", "iaprof.20261122-0000001.parquet", "iaprof.refused.parquet",
                 "iaprof.parquet", "iaprof.parquet.spool"):  # fmt: skip
        (folder / name).touch()
        os.utime(folder / name, (1_795_219_200, 1_795_219_200))
    moves = '[ "$1" = moveto ] && case "$2" in *refused*) exit 3;; esac; mkdir -p "${3%/*}" && mv "$2" "$3"'
    program(tmp_path / "bin" / "rclone", moves)
    # when
    programs = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = script("upload-files", str(folder), str(store), "node-07", PATH=programs)
    # then what could not be moved is still here, and the exit code says so
    assert done.returncode == 1
    assert {str(path.relative_to(store)) for path in store.rglob("*.parquet")} == {
        f"date=2026-11-21/host=node-07/iaprof.2026112{day}-0000001.parquet" for day in (1, 2)
    }
    left = {path.name for path in folder.iterdir()}
    assert left == {"iaprof.refused.parquet", "iaprof.parquet", "iaprof.parquet.spool"}
    (folder / "iaprof.refused.parquet").unlink()
    assert script("upload-files", str(folder), str(store), "node-07", PATH=programs).returncode == 0


class Backend(BaseHTTPRequestHandler):
    """Keeps what is sent to it."""

    sent: ClassVar[list[tuple[str, str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.sent.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_backends_get_what_they_read(tmp_path: Path) -> None:
    """Collectors and Pyroscope are not here: what they are sent is read as their protocols say."""
    # given the commands of docs/continuous.md, and a server in the place of theirs
    text = (ROOT / "docs" / "continuous.md").read_text().partition("## To a backend")[2].partition("\n## ")[0]
    commands = re.findall(r"(?m)^    (iaprof report .*\|\n.*curl.*)$", text)
    assert len(commands) == 2
    program(tmp_path / "iaprof", f'exec {sys.executable} -m iaprof "$@"')
    Backend.sent.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Backend) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # when
        for command in commands:
            here = re.sub(r"http://\w+:\d+", f"http://127.0.0.1:{server.server_port}", command)
            here = re.sub(r"iaprof\.\d+-\d+\.parquet", shlex.quote(str(CAPTURE)), here)
            path = f"{tmp_path}:{os.environ['PATH']}"
            done = subprocess.run(["sh", "-c", here], env=os.environ | {"PATH": path}, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr
        server.shutdown()
    # then
    (otlp_path, otlp_type, otlp), (pprof_path, _, pprof) = Backend.sent
    samples = sum(int(line.rsplit(" ", 1)[1]) for line in iaprof("report", "-q", CAPTURE).out.splitlines())
    assert (otlp_path, otlp_type) == ("/v1development/profiles", "application/x-protobuf")
    (resource,) = ExportProfilesServiceRequest.FromString(otlp).resource_profiles
    assert sum(sum(each.values) for each in resource.scope_profiles[0].profiles[0].samples) == samples
    # with format=pprof, Pyroscope takes the body itself for the profile: no form
    assert pprof_path == "/ingest?name=iaprof&format=pprof"
    profile = new_profile()
    profile.ParseFromString(gzip.decompress(pprof))
    assert sum(sum(each.value) for each in profile.sample) == samples


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container's recipe, each with its words."""
    lines = [line for line in (FOLDER / "Containerfile").read_text().splitlines() if line and line[0] != "#"]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in whole]


def test_the_recipe_copies_what_exists() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= {"FROM", "RUN", "COPY", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    stages = {words.split()[-1] for name, words in found if name == "FROM" and " AS " in words}
    copied: list[str] = []
    packages = {path.name for path in (ROOT / "src" / "iaprof").iterdir() if path.is_symlink()}
    assert packages <= {words.split()[0] for name, words in found if name == "COPY"}
    for name, words in found:
        if name == "COPY" and words.startswith("--from="):
            assert words.partition("=")[2].split()[0] in stages
        elif name == "COPY":
            *sources, target = words.split()
            assert all((ROOT / source).exists() for source in sources)
            copied += [f"{target}{Path(source).name}" for source in sources]
        elif name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", words], check=False).returncode == 0
    (entry,) = (json.loads(words) for name, words in found if name == "ENTRYPOINT")
    assert entry[0] in copied
    assert all(os.access(FOLDER / Path(path).name, os.X_OK) for path in copied if path.startswith("/usr"))
