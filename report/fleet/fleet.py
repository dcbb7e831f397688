"""Asks a question of many captures: profiles that are kept are read, the others made, and all added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from iaprof.basics.errors import IaprofError
from iaprof.formats.profile import clean
from iaprof.report.fleet.cache import Cache
from iaprof.report.fleet.engines import Engine, Task
from iaprof.report.fleet.groups import regrouped
from iaprof.report.fleet.mapping import MapOptions
from iaprof.report.fleet.partial import Partial, Sum
from iaprof.report.fleet.rows import Rows
from iaprof.report.fleet.sources import Source
from iaprof.report.fleet.summary import Summary
from iaprof.report.fleet.tasks import MapTask, Question, ReadTask

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

    Raises:
        IaprofError: the cache or the engine fails. A capture that cannot be reported is in the result with its problem.
    """
    names, of_key, unread = _by_key(sources)
    kept = cache.segments_with(list(names))
    known = {key for keys in kept.values() for key in keys}
    missing = [(of_key[key], key) for key in names if key not in known]
    size = max(1, min(_MOST_IN_SEGMENT, -(-len(missing) // (_TASKS_EACH * engine.workers))))

    def tasks() -> Iterator[Task]:
        for first in range(0, len(missing), size):
            some = missing[first : first + size]
            yield MapTask(some, {key: names[key] for _, key in some}, options, question)
        for name, keys in kept.items():
            yield ReadTask(name, cache.read(name), {key: names[key] for key in keys}, question)

    total = Sum()
    total.add(Partial(unread, (), Rows.none(0), (), (), (), (), ()))
    done = len(unread)
    for answer in engine.answers(tasks()):
        if answer.segment:
            cache.add(answer.segment)
        total.add(answer.partial)
        done += len(answer.partial.captures)
        progress(done)
    return regrouped(total.result(), question.grouping, question.kept)


def _by_key(sources: Sequence[Source]) -> tuple[dict[str, list[str]], dict[str, Source], list[Summary]]:
    """Returns the names by key, a source of each key, and summaries of those that cannot be read."""
    names: dict[str, list[str]] = defaultdict(list)
    of_key: dict[str, Source] = {}
    unread: list[Summary] = []
    with ThreadPoolExecutor(_READERS) as threads:  # hashing, and waiting for stores, need no interpreter
        for source, key in zip(sources, threads.map(_key, sources), strict=True):
            if isinstance(key, IaprofError):
                unread.append(Summary(source.name, "", problem=clean(str(key))))
                continue
            names[key].append(source.name)
            of_key.setdefault(key, source)
    return names, of_key, unread


def _key(source: Source) -> str | IaprofError:
    try:
        return source.key()
    except IaprofError as error:
        return error
