"""Captures and profiles in object stores: S3's interface, served on the loopback by moto."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from iaprof.formats import stores
from iaprof.formats.stores import within, without_credentials
from iaprof.report.fleet.sources import Source, find_sources
from thorough import thorough, usually
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof
from unit.report.fleet.fleets import SAMPLES, as_json, folded, sum_of_single
from waiting import LONGEST_WAIT_S

BUCKET = "s3://fleet"
pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The store with the captures of tests/data in a bucket, and the user's credentials in the environment."""
    import boto3
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret-word",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="fleet")
    for number, path in enumerate(SAMPLES):
        client.upload_file(str(path), "fleet", f"iaprof/date=2026-11-{20 + number % 2}/{path.name}")
    s3fs.S3FileSystem.clear_instance_cache()
    yield client
    bucket = boto3.resource("s3").Bucket("fleet")
    bucket.objects.all().delete()
    bucket.delete()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("place", usually(["iaprof/*/*.parquet"], ["iaprof/", "iaprof/*/*.parquet", "iaprof/date=*/"]))
def test_captures_in_a_store_add_up(store: Any, place: str) -> None:
    assert folded(f"{BUCKET}/{place}") == sum_of_single(SAMPLES)


@thorough
def test_folders_and_single_objects(store: Any) -> None:
    assert folded(f"{BUCKET}/iaprof/date=2026-11-20/") == sum_of_single(SAMPLES[::2])
    assert folded(f"{BUCKET}/iaprof/date=2026-11-20/{SAMPLES[0].name}") == folded(SAMPLES[0])
    groups = as_json("top", "-q", f"{BUCKET}/iaprof/", "--group-by=label:date")["groups"]
    assert {each["group"]["label:date"] for each in groups} == {"2026-11-20", "2026-11-21"}


@thorough
def test_profiles_are_kept_in_a_store(store: Any) -> None:
    words = f"{BUCKET}/iaprof/", f"--cache={BUCKET}/profiles"
    expected = folded(*words)
    kept = [each["Key"] for each in store.list_objects_v2(Bucket="fleet", Prefix="profiles/")["Contents"]]
    assert kept
    # then the captures are not read again
    for number, path in enumerate(SAMPLES):
        key = f"iaprof/date=2026-11-{20 + number % 2}/{path.name}"
        assert store.head_object(Bucket="fleet", Key=key)["ETag"]
    reads: list[str] = []
    opened = Source._open

    def counted(self: Source) -> BinaryIO:
        reads.append(self.name)
        return opened(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "_open", counted)
        assert folded(*words) == expected
    assert reads == []
    again = [each["Key"] for each in store.list_objects_v2(Bucket="fleet", Prefix="profiles/")["Contents"]]
    assert again == kept


@thorough
def test_a_changed_object_is_read_again(store: Any) -> None:
    words = (f"{BUCKET}/iaprof/date=2026-11-20/{SAMPLES[0].name}", f"{BUCKET}/iaprof/date=2026-11-21/")
    folded(*words)
    store.upload_file(str(SAMPLES[4]), "fleet", f"iaprof/date=2026-11-20/{SAMPLES[0].name}")
    stores.file_system(BUCKET)[0].invalidate_cache()
    assert folded(*words) == sum_of_single([SAMPLES[4], *SAMPLES[1::2]])


def test_only_what_a_report_needs_is_read(store: Any, tmp_path: Path) -> None:
    # given a capture of which most are metrics
    chance = np.random.default_rng(1)
    metrics = [
        {
            "time_ns": number,
            "name": f"metric-{number % 7}",
            "value": float(value),
            "card": "card0",
            "gt": 0,
            "pid": None,
        }
        for number, value in enumerate(chance.random(400_000))
    ]
    fields = {each.name for each in sources_schema("metric")}
    rows = [{name: row.get(name) for name in fields} for row in metrics]
    path = capture(
        tmp_path / "large.parquet",
        stall=[stall(2_000_000_000, record(0x1000, sbid=7))],
        launch=[launch(1_500_000_000, 5, 0x1000)],
        metric=rows,
    )
    size = path.stat().st_size
    assert size > 2 << 20
    store.upload_file(str(path), "fleet", "large.parquet")
    got: list[int] = []
    fetch = _fetching(got)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s3fs.core.S3File._fetch_range", fetch)
        (source,) = find_sources([f"{BUCKET}/large.parquet"])
        from iaprof.formats.capture.reader import CaptureReader

        with source.opened() as opened:
            reader = CaptureReader(opened)
            assert len(list(reader.tables("stall"))) == 1
    assert 0 < sum(got) < size / 4


def _fetching(got: list[int]) -> Any:
    import s3fs.core

    fetch = s3fs.core.S3File._fetch_range

    def counted(self: Any, start: int, end: int) -> bytes:
        found: bytes = fetch(self, start, end)
        got.append(len(found))
        return found

    return counted


def sources_schema(kind: str) -> Any:
    from iaprof.formats.capture.schema import KINDS

    return KINDS[kind]


def test_what_a_store_refuses_is_one_sentence(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ["top", "s3://no-such-bucket/"],
        ["top", f"{BUCKET}/nothing.parquet"],
        ["top", f"{BUCKET}/nowhere/*.parquet"],
    ):
        done = iaprof(*words)
        assert (done.code in (1, 2), done.out) == (True, ""), (words, done)
        assert "Traceback" not in done.err
        assert "secret-word" not in done.err
        assert done.err.strip()


@thorough
def test_a_store_that_keeps_no_profiles_is_a_warning(store: Any) -> None:
    done = iaprof("top", f"{BUCKET}/iaprof/", "--cache=s3://no-such-bucket/profiles")
    assert done.code == 0 and done.out == iaprof("top", "-q", f"{BUCKET}/iaprof/", "--cache=none").out
    (warning,) = (line for line in done.err.splitlines() if "warning" in line)
    assert "no-such-bucket" in warning and "secret-word" not in warning, warning


class Refusing(BaseHTTPRequestHandler):
    """A store whose buckets are somebody else's."""

    def refuse(self) -> None:
        body = (
            b""
            if self.command == "HEAD"
            else b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        )
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = refuse

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import s3fs

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            s3fs.S3FileSystem.clear_instance_cache()
            yield
        s3fs.S3FileSystem.clear_instance_cache()
        server.shutdown()


@pytest.mark.parametrize("place", usually(["iaprof/"], ["iaprof/", "iaprof/*.parquet", "iaprof/one.parquet"]))
@pytest.mark.usefixtures("refusing")
def test_a_bucket_without_permission_is_one_sentence(place: str) -> None:
    done = iaprof("top", f"{BUCKET}/{place}")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), done
    assert "your credentials do not allow it" in done.err


@pytest.mark.usefixtures("refusing")
def test_a_cache_without_permission_is_one_sentence() -> None:
    done = iaprof("top", SAMPLES[0].parent, f"--cache={BUCKET}/profiles")
    (said,) = (line for line in done.err.splitlines() if BUCKET in line)
    assert "your credentials do not allow it" in said
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "words",
    [
        ["top", "ftp://me:secret-word@127.0.0.1:1/captures/"],
        ["top", "http://me:sl/secret-word@127.0.0.1:1/captures/c.parquet"],
        ["top", "simplecache::http://me:secret-word@127.0.0.1:1/c.parquet?signature=secret-word"],
        ["top", "http://[secret-word@/c.parquet"],
        ["info", "https://me:secret-word@127.0.0.1:1/c.parquet?signature=secret-word"],
        ["info", "https://me:secret-word/x@127.0.0.1:1/c.parquet"],
        ["top", "simplecache::http://me:secret-word/x@127.0.0.1:1/c.parquet"],
        ["top", "--cluster", "tcp://me:secret-word@127.0.0.1:1", *map(str, SAMPLES[-2:])],
    ],
)
def test_credentials_in_urls_are_not_printed(words: list[str]) -> None:
    done = iaprof(*words)
    assert (done.code in (1, 2), "secret-word" in done.err) == (True, False), done.err


def test_credentials_in_the_errors_of_a_store_are_not_printed(tmp_path: Path) -> None:
    # given a cache whose server refuses everything, which the HTTP library tells with the whole URL
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        do_GET = do_PUT = do_POST = do_HEAD

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # when profiles are to be kept there
        where = f"http://me:secret-word@127.0.0.1:{server.server_port}/profiles?signature=secret-word"
        done = iaprof("top", f"--cache={where}", *map(str, SAMPLES[-2:]))
        server.shutdown()
    # then a warning says so, without what is secret
    assert done.code == 0
    assert "not kept" in done.err and "403" in done.err
    assert "secret-word" not in done.err + done.out


def test_only_credentials_are_left_out_of_a_text() -> None:
    told = "403, url='https://u:p@h:1/a@b/c.parquet?sig=1#f', see s3://bucket/x and /a/b?c"
    assert without_credentials(told) == "403, url='https://h:1/a@b/c.parquet', see s3://bucket/x and /a/b?c"


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("at https://me:secret/x@h:1/a", "at https://h:1/a"),
        ("at https://me:secret?x@h:1/a", "at https://h:1/a"),
        ("at https:/me:secret#x@h/a, b", "at https:/h/a, b"),
        ("at https://me:secret @h:1/a", "at https:// @h:1/a"),
        ("at zip://a::http://me:secret@h/a", "at zip://h/a"),
        (
            "(http://h:1), http://h:1: http://[::1]:1/a and http://h:1/a@b",
            "(http://h:1), http://h:1: http://[::1]:1/a and http://h:1/a@b",
        ),
    ],
)
def test_a_password_may_have_what_separates_others(told: str, shown: str) -> None:
    assert without_credentials(told) == shown


def test_summaries_keep_no_credentials(store: Any) -> None:
    found = as_json("top", "-q", f"{BUCKET}/iaprof/")
    assert "secret-word" not in json.dumps(found)


@pytest.mark.parametrize(
    ("one", "other"), [("https://ours.example/", "https://theirs.example/"), ("s3://a/", "s3://b/")]
)
def test_another_store_cannot_give_a_capture_the_profile_of_its_own(one: str, other: str) -> None:
    # given a store that answers with the size and ETag that a capture has in ours
    ours, theirs = (Source(f"{place}capture.parquet", 1000, '"abc"') for place in (one, other))
    # then its profile is not taken for that of ours, and copies in one store share theirs
    assert ours.key() != theirs.key()
    assert ours.key() == Source(f"{one}copy.parquet?signature=1", 1000, '"abc"').key()


class Endless(BaseHTTPRequestHandler):
    """A server of somebody else's, each of whose answers has no end, or does not come."""

    ended: threading.Event
    most_folders: int  # in a path that was asked for

    def do_GET(self) -> None:
        folder = self.path.rstrip("/")
        Endless.most_folders = max(folder.count("/"), Endless.most_folders)
        if folder.startswith("/deep"):
            body = f'<a href="{folder}/x/">x</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        if folder.startswith("/slow"):
            self.send_response(200)
            self.send_header("Content-Length", "4096")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not self.ended.wait(0.1):
                    self.wfile.write(b" ")
        self.ended.wait()

    do_HEAD = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[str]:
    Endless.ended, Endless.most_folders = threading.Event(), 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Endless.ended.set()
        server.shutdown()


@pytest.mark.parametrize("place", ["slow/", "silent/", "silent/*.parquet", "silent/c.parquet"])
def test_a_store_that_does_not_end_is_one_sentence(endless: str, place: str) -> None:
    done = within(LONGEST_WAIT_S, "", lambda: iaprof("top", "--timeout=1", f"{endless}/{place}"))
    assert (done.code, done.out, done.err) == (1, "", f"iaprof: {endless}/{place} takes longer than 1 s (--timeout)\n")


@pytest.mark.parametrize("place", ["deep/", "deep/**/*.parquet"])
def test_a_store_of_folders_without_end_is_one_sentence(endless: str, place: str) -> None:
    done = within(LONGEST_WAIT_S, "", lambda: iaprof("top", f"--timeout={LONGEST_WAIT_S}", f"{endless}/{place}"))
    why = "it has folders within folders without end"
    assert (done.code, done.out, done.err) == (1, "", f"iaprof: {endless}/{place} cannot be read: {why}\n")
    # and long before Python's limit, at which asyncio would be left with a transport that is closed by halves
    assert 50 < Endless.most_folders < 200


def test_a_cache_that_does_not_answer_is_one_sentence(endless: str) -> None:
    done = within(
        LONGEST_WAIT_S, "", lambda: iaprof("top", "--timeout=1", f"--cache={endless}/silent", SAMPLES[0].parent)
    )
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.endswith(
        "/silent takes longer than 1 s (--timeout): name another place with --cache, or --cache none\n"
    )


def test_a_capture_on_a_server_is_not_read_to_know_that_it_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.http import HTTPFileSystem

    async def told(_: Any, path: str) -> dict[str, Any]:
        return {"name": path, "size": 1 << 40, "type": "file"}

    async def read_whole(*_: object, **__: object) -> list[str]:
        raise AssertionError

    HTTPFileSystem.clear_instance_cache()  # an instance has its own methods
    monkeypatch.setattr(HTTPFileSystem, "_ls", read_whole)
    monkeypatch.setattr(HTTPFileSystem, "_info", told)
    (found,) = find_sources(["http://127.0.0.1:1/large.parquet"])
    assert found.size == 1 << 40
    HTTPFileSystem.clear_instance_cache()
