"""Reader processes that are forks of a process which has imported the reader, where a test only needs what they answer.

A reader process that starts takes 0.1 to 0.2 s of CPU time, almost all of it for imports, and a test of a verb starts
several. Here the first one of each reader is started as always (unit.forked_readers:serve as its function), but then
forks those that are asked for. A fork becomes a child of the process that asked, and from there on all is as always: it
has a session and a channel of its own, gives up its rights, and is waited for and killed by its pid.

tests/unit/sandbox, tests/integration, and all tests that start the command, have readers that start as always.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import threading
from typing import Any, ClassVar

from iaprof.sandbox import child, parent
from iaprof.sandbox.worker import Worker

_CLONE = 56  # asm/unistd_64.h
_CLONE_PARENT = 0x8000  # linux/sched.h: the new process is a child of the parent of the one that calls
_OF_GPUS = "iaprof.report.gpu.reader"  # opens libraries, and keeps descriptors of them, each time
_LIMITS = (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)


def serve(reader: str) -> None:
    """Forks a reader for each message: what the parent's limits and priority are, and the reader's channel."""
    module = importlib.import_module(reader)
    if reader != _OF_GPUS:
        module.operations(0)  # what it imports, each fork has
    control = socket.socket(fileno=os.dup(0))
    libc = ctypes.CDLL(None)
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not message:
            return
        pid = libc.syscall(_CLONE, ctypes.c_ulong(_CLONE_PARENT | signal.SIGCHLD), *[ctypes.c_ulong(0)] * 4)
        if pid == 0:
            _become_reader(reader, json.loads(message), files[0], control)
        assert pid > 0, "no process can be made"
        os.close(files[0])


def _become_reader(reader: str, asked: dict[str, Any], channel: int, control: socket.socket) -> None:
    code = 1
    try:
        os.setsid()
        control.send(str(os.getpid()).encode())  # before anything that can fail
        control.close()
        with contextlib.suppress(OSError):  # only root may lower it
            os.setpriority(os.PRIO_PROCESS, 0, asked["nice"])
        for kind, soft in zip(_LIMITS, asked["soft"], strict=True):
            resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
        os.dup2(channel, 0)
        os.close(channel)
        child.main(reader, asked["limits"])
        code = 0
    finally:
        os._exit(code)


def environment() -> dict[str, str]:
    """What a sandbox gives to its reader."""
    return {name: os.environ[name] for name in parent._ENVIRONMENT if name in os.environ}


class ForkedReader(Worker):
    """A reader process that is a fork, if its environment is that of these tests: others find other programs."""

    _templates: ClassVar[dict[str, Worker]] = {}
    _environment: ClassVar = environment()
    _owner: ClassVar = os.getpid()
    _turn: ClassVar = threading.Lock()

    def __init__(self, function: str, reader: str, limits: str, **more: Any) -> None:
        if (more["environment"], os.getpid()) != (self._environment, self._owner):
            super().__init__(function, reader, limits, **more)
            return
        self._waits = None
        self.status = None
        self.cpu_seconds = 0.0
        self._process = subprocess.Popen.__new__(subprocess.Popen)  # which gets the exit status, and nothing else
        asked = {
            "limits": limits,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "soft": [resource.getrlimit(kind)[0] for kind in _LIMITS],
        }
        self.channel, theirs = socket.socketpair()
        with theirs, self._turn:
            template = self._template(reader)
            template.send(asked, [theirs.fileno()])
            self.pid = int(template.channel.recv(100))

    def _template(self, reader: str) -> Worker:
        template = self._templates.get(reader)
        if template is None or template.has_ended():  # tests/conftest.py kills what a test that fails has started
            template = Worker(f"{__name__}:serve", reader, channel=socket.SOCK_SEQPACKET, environment=self._environment)
            self._templates[reader] = template
        return template

    @classmethod
    def end(cls) -> None:
        """Ends the processes that make forks."""
        while cls._templates:
            cls._templates.popitem()[1].close()
