"""Asks a question of many captures: profiles that are kept are read, the others made, and all added up."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.basics.files import mode_of_report
from iaprof.report.fleet.cache import Cache, CacheError
from iaprof.report.fleet.mapping import MapOptions
from iaprof.report.fleet.partial import Partial, Sum, nothing
from iaprof.report.fleet.processes import Engine, Task
from iaprof.report.fleet.rare import Counting
from iaprof.report.fleet.sources import DEFAULT_TIMEOUT_S, Source
from iaprof.report.fleet.tasks import Answer, MapTask, Question, ReadTask
from iaprof.report.fleet.totals import Summary

_MOST_IN_SEGMENT = 64  # captures
_MOST_BYTES = 256 << 20  # of the captures of a task, so that none takes very long
_READERS = 8
_TASKS_EACH = 4  # for each worker, so that all end at about the same time


def ask(
    sources: Sequence[Source],
    question: Question,
    options: MapOptions,
    cache: Cache,
    engine: Engine,
    progress: Callable[[int], object] = lambda captures: None,
    percent_limit: float = 0.0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Partial:
    """Asks a question of captures.

    Args:
        sources: the captures.
        question: what to add up, by what.
        options: the options of profiles.
        cache: where profiles are kept.
        engine: where the work is done.
        progress: called with the number of captures that are done, now and then.
        percent_limit: stacks, kernels and instructions with a smaller share are folded (rare.py); 0: none.
        timeout_s: how long identifying the content of a capture may take.

    Returns:
        The sum. A capture that cannot be reported is among those that are broken, in the order of the sources.

    Raises:
        IaprofError: the cache or the engine fails.
    """
    names, of_key, unread = _by_key(sources, timeout_s)
    asking = _Asking(names, of_key, options, cache, engine, progress)
    if percent_limit:
        counting = Counting()
        asking.add(replace(question, counting=True), Sum(), counting)
        question = replace(question, frequent=counting.frequent(percent_limit))
    total = Sum()
    total.add(nothing(unread))
    asking.add(question, total)
    found = total.result()
    order = {source.shown: number for number, source in enumerate(sources)}
    found.totals.broken.sort(key=lambda each: (order[each.file], each.name))
    return found


class _Asking:
    """Captures that are asked something."""

    def __init__(
        self,
        names: dict[str, list[str]],
        of_key: dict[str, Source],
        options: MapOptions,
        cache: Cache,
        engine: Engine,
        progress: Callable[[int], object],
    ) -> None:
        """Asks nothing yet.

        Args:
            names: of captures, by key.
            of_key: a capture of each key.
            options: see ask.
            cache: see ask.
            engine: see ask.
            progress: see ask.
        """
        self._names = names
        self._of_key = of_key
        self._options = options
        self._cache = cache
        self._engine = engine
        self._progress = progress

    def add(self, question: Question, total: Sum, counting: Counting | None = None) -> None:
        """Asks a question of all captures, and adds the answers to a sum, and to what counts."""
        kept = self._cache.segments_with(list(self._names))
        known = {key for keys in kept.values() for key in keys}
        again: list[str] = []  # keys whose profiles were damaged, or are gone
        done = 0

        def tasks() -> Iterator[Task]:
            yield from self._map_tasks([key for key in self._names if key not in known], question)
            for name, keys in kept.items():
                try:
                    content = self._cache.read(name)
                except CacheError:
                    again.extend(keys)
                else:
                    yield ReadTask(name, content, {key: self._names[key] for key in keys}, question)

        def take(answers: Iterator[Answer]) -> None:
            nonlocal done
            for answer in answers:
                if answer.unread:
                    self._cache.remove(answer.unread)
                    again.extend(kept[answer.unread])
                if answer.segment:
                    mode = self._mode(answer.keys)
                    self._cache.add(answer.segment, answer.keys, mode, needed=counting is not None)
                if counting is not None and answer.counts is not None:
                    counting.add(answer.counts, answer.partial.facts.stalls)
                total.add(answer.partial)
                done += answer.partial.totals.captures
                self._progress(done)

        take(self._engine.answers(tasks()))
        take(self._engine.answers(self._map_tasks(again, question)))

    def _mode(self, keys: Sequence[str]) -> int:
        """Returns the mode of a file with these profiles: see `mode_of_report`; of a store it is not known who may."""
        sources = [self._of_key[key] for key in keys]
        mode = mode_of_report(*(source.name for source in sources))
        return mode & 0o600 if any(source.is_remote for source in sources) else mode

    def _map_tasks(self, keys: Sequence[str], question: Question) -> Iterator[Task]:
        most = max(1, min(_MOST_IN_SEGMENT, -(-len(keys) // (_TASKS_EACH * self._engine.workers))))
        some: list[str] = []
        size = 0
        for key in keys:
            of_capture = self._of_key[key].size
            if some and (len(some) == most or size + of_capture > _MOST_BYTES):
                yield self._map_task(some, question)
                some, size = [], 0
            some.append(key)
            size += of_capture
        if some:
            yield self._map_task(some, question)

    def _map_task(self, keys: Sequence[str], question: Question) -> MapTask:
        names = {key: self._names[key] for key in keys}
        return MapTask([(self._of_key[key], key) for key in keys], names, self._options, question)


def _by_key(
    sources: Sequence[Source], timeout_s: float
) -> tuple[dict[str, list[str]], dict[str, Source], list[Summary]]:
    """Returns the names by key, a source of each key, and summaries of those that cannot be read."""
    names: dict[str, list[str]] = defaultdict(list)
    of_key: dict[str, Source] = {}
    unread: list[Summary] = []
    for source, key in zip(sources, _keys(sources, timeout_s), strict=True):
        if isinstance(key, IaprofError):
            unread.append(Summary(source.shown, "", problem=clean(str(key))))
            continue
        names[key].append(source.shown)
        of_key.setdefault(key, source)
    return names, of_key, unread


def _keys(sources: Sequence[Source], timeout_s: float) -> list[str | IaprofError]:
    """Returns the key of each source, or why it has none, in order.

    Threads get them, as hashing and waiting for stores need no interpreter. Ctrl-C waits for none of them: they are
    daemons, unlike those of concurrent.futures, which a process waits for at its end.
    """
    left: SimpleQueue[int] = SimpleQueue()
    got: SimpleQueue[tuple[int, str | Exception]] = SimpleQueue()
    for number in range(len(sources)):
        left.put(number)

    def work() -> None:
        while True:
            try:
                number = left.get_nowait()
            except Empty:
                return
            try:
                got.put((number, sources[number].key(timeout_s)))
            except Exception as error:  # noqa: BLE001 (raised below, unless it says what is wrong with the capture)
                got.put((number, error))

    for _ in range(min(_READERS, len(sources))):
        threading.Thread(target=work, daemon=True).start()
    found: dict[int, str | IaprofError] = {}
    for _ in sources:
        number, key = got.get()
        if isinstance(key, Exception) and not isinstance(key, IaprofError):
            raise key
        found[number] = key
    return [found[number] for number in range(len(sources))]
