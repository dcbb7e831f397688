"""Tasks on a Dask cluster: each of its workers has a child process of ours that does them, with limits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import pickle
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.formats.stores import EXTRA, shown, told
from iaprof.report.fleet.processes import ADDRESSES, MOST_DEATHS, Processes, Task
from iaprof.report.fleet.sources import DEFAULT_TIMEOUT_S
from iaprof.report.fleet.tasks import Answer, AnswerError, MapTask, check_answers, given_up
from iaprof.sandbox.memory import DEFAULT_BYTES
from iaprof.sandbox.worker import Closing

_TLS = "tls:", "wss:"
_ADDRESS = re.compile(r"(?:tcp|tls|wss?)://(\[[0-9a-fA-F:.%]+\]|[^\s/@:\[\]]+):\d{1,5}/?")
_CONNECT_S = 10
_EACH = 2  # tasks that a Dask worker has at once, so that it does not wait for the next one
_IDLE_S = 60.0  # after which a child of a worker ends: nobody tells it that there is nothing more to do


class Cluster(Closing):
    """A Dask cluster, whose workers need nothing but an iaprof of this version."""

    def __init__(self, address: str, memory_bytes: int = DEFAULT_BYTES, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Connects to the scheduler, with the certificates that Dask's configuration names.

        Args:
            address: tcp://HOST:PORT or tls://HOST:PORT.
            memory_bytes: what the child of each worker may take.
            timeout_s: how long a capture may take; one that takes longer is left out.

        Raises:
            UsageError: the address is none.
            IaprofError: Dask is missing, the scheduler does not answer, or it or a worker is of another version.
        """
        if not _ADDRESS.fullmatch(address):
            raise UsageError(f"--cluster takes {ADDRESSES}, not {shown(address)}")
        try:
            distributed: Any = importlib.import_module("distributed")
        except ImportError:
            raise IaprofError(f"--cluster needs Dask: {EXTRA}") from None
        self._address = address
        self._limits = memory_bytes, timeout_s
        try:
            asyncio.run(asyncio.wait_for(_check_scheduler(distributed, address), _CONNECT_S))
            self._client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, TimeoutError, ValueError):  # ValueError: a scheduler without TLS is asked with it
            certificates = ", or none that accepts Dask's certificates here" if address.startswith(_TLS) else ""
            raise IaprofError(
                f"no scheduler answers at {shown(address)}{certificates}: start one with 'dask scheduler'"
            ) from None
        except RuntimeError as error:  # of threads, for which memory has no room
            raise IaprofError(f"--cluster {shown(address)} cannot be used: {told(str(error))}") from None
        self._check_versions(address)
        self.workers = max(len(self._client.scheduler_info()["workers"]), 1)

    def _check_versions(self, address: str) -> None:
        try:
            of_workers = set(self._client.run(version).values())
        except Exception as error:  # noqa: BLE001 (what the workers raise)
            self.close()
            why = told(str(error)) or type(error).__name__
            raise IaprofError(
                f"workers at {shown(address)} cannot run iaprof {version()} ({why}): install it there: {EXTRA}"
            ) from None
        if others := sorted(map(str, of_workers - {version()})):
            self.close()
            raise IaprofError(
                f"workers at {shown(address)} have iaprof {', '.join(others)}, and this is {version()}: "
                "install one version everywhere"
            )

    def answers(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """See Engine."""
        distributed: Any = importlib.import_module("distributed")
        left = iter(tasks)
        given: dict[Any, Task] = {}

        def give() -> Iterator[Any]:
            for task in left:
                yield submitted(task)
                return

        def submitted(task: Task) -> Any:
            with self._scheduler_stays():
                future = self._client.submit(
                    answered, version(), pickle.dumps(task), *self._limits, pure=False, retries=MOST_DEATHS
                )
            given[future] = task
            return future

        first = [future for _ in range(_EACH * self.workers) for future in give()]
        running = distributed.as_completed(first, loop=self._client.loop)
        for future in running:
            task = given.pop(future)
            try:
                with self._scheduler_stays():
                    found = future.result()
                answers = check_answers(found, task)
            except distributed.KilledWorker:
                if lost := given_up(task, "workers that read {} died, as happens when memory runs out"):
                    yield lost
                else:
                    assert isinstance(task, MapTask)
                    for each in task.divided():
                        running.add(submitted(each))
            except AnswerError as error:
                raise IaprofError(f"{self._a_worker()} gave no answer to its task: {error}") from None
            except IaprofError:
                raise
            except Exception as error:  # noqa: BLE001 (what a worker raises, or what its answer does on its way)
                why = told(f"{type(error).__name__}: {error}")
                raise IaprofError(f"{self._a_worker()} failed ({why}): install the same packages everywhere") from None
            else:
                yield from answers
            for following in give():
                running.add(following)

    def _a_worker(self) -> str:
        return f"a worker of the cluster at {shown(self._address)}"

    @contextlib.contextmanager
    def _scheduler_stays(self) -> Iterator[None]:
        try:
            yield
        except (asyncio.CancelledError, concurrent.futures.CancelledError, OSError):
            raise IaprofError(
                f"the scheduler at {shown(self._address)} is gone: the captures that it had done are kept; try again"
            ) from None

    def close(self) -> None:
        """See Engine."""
        self._client.close()


async def _check_scheduler(distributed: Any, address: str) -> None:
    """Checks that Dask's scheduler answers, and has the version of Dask that is here.

    Raises:
        OSError, ValueError: nothing answers, or not with these certificates.
        IaprofError: what answers is not a scheduler, or one of another version; or certificates are missing.
    """
    where = shown(address)
    scheduler = distributed.rpc(address, connection_args=_connection_arguments(distributed, address))
    try:
        versions = await scheduler.versions(packages=[])
        other = versions["packages"]["distributed"]
    except (OSError, ValueError):
        raise
    except Exception as error:  # noqa: BLE001 (whatever another version makes of the question)
        raise IaprofError(
            f"what answers at {where} is not a Dask scheduler, or has another version "
            f"({told(f'{type(error).__name__}: {error}')})"
        ) from None
    finally:
        await scheduler.close_rpc()
    here = distributed.versions.get_versions()["packages"]["distributed"]
    if other != here:
        raise IaprofError(
            f"the scheduler at {where} has distributed {told(str(other))}, and this is {here}: "
            "install one version everywhere"
        )


def _connection_arguments(distributed: Any, address: str) -> dict[str, Any]:
    """Returns Dask's arguments for a connection, with the certificates that its configuration names.

    Raises:
        IaprofError: the certificates cannot be read, or none are named, and the address needs them.
    """
    try:
        arguments: dict[str, Any] = distributed.Security().get_connection_args("client")
    except OSError as error:
        raise IaprofError(f"a certificate that Dask's configuration names cannot be read: {told(str(error))}") from None
    if address.startswith(_TLS) and arguments["ssl_context"] is None:
        raise IaprofError(
            f"{shown(address)} needs certificates: name them in Dask's configuration, distributed.comm.tls"
        )
    return arguments


def version() -> str:
    """Returns the version of iaprof, in whatever process."""
    import iaprof

    return iaprof.__version__


_children = threading.local()  # of the threads of a worker


def answered(wanted: str, task: bytes, memory_bytes: int, timeout_s: float) -> list[Answer]:
    """Does a task in a child of a Dask worker.

    Args:
        wanted: the version of iaprof that asks; workers that came later may have another one.
        task: pickled, as another version may be unable to read it.
        memory_bytes: what the child may take.
        timeout_s: how long a capture may take.

    Returns:
        The answers: several, if the task had to be divided.

    Raises:
        IaprofError: this worker has another version, or cannot start a process.
    """
    if version() != wanted:
        raise IaprofError(f"a worker has iaprof {version()}, and this is {wanted}: install one version everywhere")
    limits = memory_bytes, timeout_s
    if getattr(_children, "limits", None) != limits:
        if hasattr(_children, "process"):
            _children.process.close()
        _children.limits, _children.process = limits, Processes(1, *limits, idle_s=_IDLE_S)
    return list(_children.process.answers([pickle.loads(task)]))  # noqa: S301 (Dask trusts its clients)
