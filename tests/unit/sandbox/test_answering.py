"""A file system that does not answer: the child that asks it is stopped, as one that waits for a server is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.basics.mounts import ROOTS_MOUNTS
from iaprof.sandbox import answering
from iaprof.sandbox.answering import Answering

DEVICE, OTHER = 7, 8


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    """Asks file systems, each of which may not answer, and again each time."""
    monkeypatch.setattr(ROOTS_MOUNTS, "may_wait", lambda _: True)
    monkeypatch.setattr(answering, "ASK_AGAIN_S", 0.0)
    with Answering() as made:
        yield made


def test_files_of_a_file_system_that_answers(asked: Answering, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    for name in ("file", "none", "", "\udcff"):  # an error is an answer, too
        assert asked.answers(DEVICE, str(tmp_path / name))


def test_one_that_does_not_answer_is_waited_for_once(asked: Answering, tmp_path: Path) -> None:
    # given a child that is kept waiting
    assert asked.answers(DEVICE, str(tmp_path))
    assert asked._child is not None
    kept = asked._child
    kept.send_signal(signal.SIGSTOP)
    asked._child.channel.settimeout(0.05)
    # when
    assert not asked.answers(DEVICE, str(tmp_path))
    # then it was ended, and nobody is asked about that file system for a while, but about others
    assert asked._child is None
    assert kept.wait(10)
    assert not asked.answers(DEVICE, str(tmp_path))
    assert asked._child is None
    assert asked.answers(OTHER, str(tmp_path))


def test_one_is_asked_again_after_a_rest(asked: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "REST_S", 0.0)
    assert asked.answers(DEVICE, str(tmp_path))
    assert asked._child is not None
    asked._child.send_signal(signal.SIGKILL)
    asked._child.channel.settimeout(0.05)
    asked.answers(DEVICE, str(tmp_path))  # whatever it says: the child ended before, or meanwhile
    assert asked.answers(DEVICE, str(tmp_path))


def test_a_local_file_system_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ROOTS_MOUNTS, "may_wait", lambda _: False)
    with Answering() as made:
        assert made.answers(DEVICE, str(tmp_path))
        assert made._child is None
