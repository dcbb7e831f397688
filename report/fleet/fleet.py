"""Asks a question of many captures: profiles that are kept are read, the others made, and all added up."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from iaprof.basics.errors import IaprofError
from iaprof.formats.profile import clean
from iaprof.report.fleet.cache import Cache, CacheError
from iaprof.report.fleet.engines import Engine, Task
from iaprof.report.fleet.groups import regrouped
from iaprof.report.fleet.mapping import MapOptions
from iaprof.report.fleet.partial import Partial, Sum, nothing
from iaprof.report.fleet.sources import Source
from iaprof.report.fleet.summary import Summary
from iaprof.report.fleet.tasks import Answer, MapTask, Question, ReadTask

_MOST_IN_SEGMENT = 64  # captures
_READERS = 8
_TASKS_EACH = 4  # for each worker, so that all end at about the same time


def ask(
    sources: Sequence[Source],
    question: Question,
    options: MapOptions,
    cache: Cache,
    engine: Engine,
    progress: Callable[[int], object] = lambda captures: None,
) -> Partial:
    """Asks a question of captures.

    Args:
        sources: the captures.
        question: what to add up, by what.
        options: the options of profiles.
        cache: where profiles are kept.
        engine: where the work is done.
        progress: called with the number of captures that are done, now and then.

    Returns:
        The sum. Its captures are in the order of the sources; one that cannot be reported has its problem there.

    Raises:
        IaprofError: the cache or the engine fails.
    """
    names, of_key, unread = _by_key(sources)
    kept = cache.segments_with(list(names))
    known = {key for keys in kept.values() for key in keys}
    again: list[str] = []  # keys whose profiles were damaged, or are gone

    def map_tasks(keys: Sequence[str]) -> Iterator[Task]:
        size = max(1, min(_MOST_IN_SEGMENT, -(-len(keys) // (_TASKS_EACH * engine.workers))))
        for first in range(0, len(keys), size):
            some = keys[first : first + size]
            yield MapTask([(of_key[key], key) for key in some], {key: names[key] for key in some}, options, question)

    def tasks() -> Iterator[Task]:
        yield from map_tasks([key for key in names if key not in known])
        for name, keys in kept.items():
            try:
                content = cache.read(name)
            except CacheError:
                again.extend(keys)
            else:
                yield ReadTask(name, content, {key: names[key] for key in keys}, question)

    total = Sum()
    total.add(nothing(unread))
    done = len(unread)

    def add(answers: Iterator[Answer]) -> None:
        nonlocal done
        for answer in answers:
            if answer.unread:
                cache.remove(answer.unread)
                again.extend(kept[answer.unread])
            if answer.segment:
                cache.add(answer.segment)
            total.add(answer.partial)
            done += len(answer.partial.captures)
            progress(done)

    add(engine.answers(tasks()))
    add(engine.answers(map_tasks(again)))
    found = regrouped(total.result(), question.grouping, question.kept)
    order = {source.shown: number for number, source in enumerate(sources)}
    return replace(found, captures=sorted(found.captures, key=lambda each: (order[each.file], each.part)))


def _by_key(sources: Sequence[Source]) -> tuple[dict[str, list[str]], dict[str, Source], list[Summary]]:
    """Returns the names by key, a source of each key, and summaries of those that cannot be read."""
    names: dict[str, list[str]] = defaultdict(list)
    of_key: dict[str, Source] = {}
    unread: list[Summary] = []
    for source, key in zip(sources, _keys(sources), strict=True):
        if isinstance(key, IaprofError):
            unread.append(Summary(source.shown, "", problem=clean(str(key))))
            continue
        names[key].append(source.shown)
        of_key.setdefault(key, source)
    return names, of_key, unread


def _keys(sources: Sequence[Source]) -> list[str | IaprofError]:
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
                got.put((number, sources[number].key()))
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
