"""Finds the sites that can have launched the kernels of a cell while a read's stalls were sampled, and weighs them.

docs/attribution.md has the rules. They are applied to many (cell, read) pairs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import order_by
from iaprof.formats.ranges import ranges
from iaprof.report.join.cells import NOWHERE, Cells
from iaprof.report.join.jobs import Jobs
from iaprof.report.join.launches import Launches
from iaprof.report.join.placements import Placed, Site
from iaprof.report.join.timed import RunningTimes, sites_of_placements

DEFAULT_WINDOW_S = 0.5
SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 0.001, 600.0
AMBIGUOUS = "[ambiguous]"
BEFORE_RECORDING = "[launched before recording]"
NOT_RECORDED = "[launch not recorded]"
ANY_LAUNCH = "[any launch]"
# Entries are (pair, lane), (pair, placement) or (pair, slice); each takes about a hundred bytes.
_MAX_ENTRIES_AT_ONCE = 1 << 22
_Ints = NDArray[np.int64]
_Times = NDArray[np.uint64]


class Method(Enum):
    """How the samples of a kernel are divided among the sites that launched it."""

    PROPORTIONAL = "proportional"  # in proportion to each site's launches that can be running
    LATEST = "latest"  # all to the last launch before the read, of any process, as Intel's tool does
    NONE = "none"  # not at all: launches only determine the process


@dataclass(frozen=True)
class Rule:
    """How stalls are joined to launches: the user's options."""

    method: Method = Method.PROPORTIONAL
    window_ns: int = int(DEFAULT_WINDOW_S * 1e9)  # the attribution window
    split_ambiguous: bool = False  # divide among processes that cannot be told apart, by their launches


@dataclass(frozen=True)
class Shares:
    """The candidate sites of each pair, and their shares."""

    pair: _Ints  # [n], ascending
    site: _Ints  # [n]
    share: NDArray[np.float64]  # [n]; those of a pair add up to 1
    alone: NDArray[np.bool_]  # [pairs]: there is only one candidate

    def only(self, rows: NDArray[np.bool_]) -> Shares:
        """Returns the shares that the mask selects: bool[n]."""
        return Shares(self.pair[rows], self.site[rows], self.share[rows], self.alone)


class TooManyAtOnce(Exception):
    """These pairs need too much memory together: ask for fewer at a time."""


class Candidates:
    """Weighs the launches of one capture."""

    def __init__(
        self,
        placed: Placed,
        cells: Cells,
        rule: Rule,
        unknown: int,
        count: Callable[[int], None] = lambda candidates: None,
    ) -> None:
        """Sorts the launches.

        Args:
            placed: kernels and launches. Sites with a label instead of a stack are added to it.
            cells: the cells that `weigh` is asked about.
            rule: the user's options.
            unknown: the site for addresses that are in no kernel.
            count: is told of all candidates that are looked at; raises CaptureError if they are too many.
        """
        self._count = count
        self._placed, self._cells, self._rule, self._unknown = placed, cells, rule, unknown
        placement_of_site = [-1 if site.placement is None else site.placement for site in placed.sites]
        self._placement_of_site = np.array(placement_of_site, np.int64)
        self._launches = Launches(placed, self._placement_of_site[placed.site], max(rule.window_ns, 1))
        known = self._placement_of_site[self._placement_of_site >= 0]
        self._only_site = np.bincount(known, minlength=len(placed.placements)) == 1
        # When placements begin and end, as ranks: they fit into a key beside a lane (see _number_versions).
        self._begins, self._ends = np.sort(cells.since), np.sort(placed.ended)
        self._begin_rank = np.searchsorted(self._begins, cells.since)
        self._end_rank = np.searchsorted(self._ends, placed.ended)
        self._timed: RunningTimes | None = None
        if (ran := placed.executions) is not None:
            self._timed = RunningTimes(placed.site, ran.stream, ran.begin, ran.end, len(placed.sites))
            self._sites, self._first_site = sites_of_placements(self._placement_of_site, len(placed.placements))
        self._known_cells = 0
        self._divisible = False
        self._labelled_sites: dict[tuple[int, int], int] = {}

    def weigh(self, cells: _Ints, begins: _Times, ends: _Times, divisible: bool = False, stream: int = 0) -> Shares:
        """Finds the sites that can have launched the kernels of these cells, with their shares.

        Args:
            cells: int64[pairs].
            begins: uint64[pairs], ns; no record of the read was sampled before.
            ends: uint64[pairs], ns, when the read was made.
            divisible: whether the caller can ask for fewer pairs at a time.
            stream: of the reads.

        Raises:
            TooManyAtOnce: divisible pairs have more than _MAX_ENTRIES_AT_ONCE entries.
            CaptureError: all calls so far had too many entries.
        """
        self._number_versions()
        self._divisible = divisible
        begins = np.minimum(begins, ends)  # captures are untrusted
        in_kernel = np.flatnonzero(cells != NOWHERE)
        # By cell, so that the bisections of successive pairs come to places that are close together.
        in_kernel = in_kernel[order_by(cells[in_kernel])]
        nowhere = np.flatnonzero(cells == NOWHERE)
        found = [self._of_no_kernel(nowhere)]
        alone = np.zeros(len(cells), bool)
        if self._rule.method is Method.LATEST:
            found.append(self._latest_of_any_process(*self._all_placements(in_kernel, cells), ends))
        else:
            pair, placement = self._present_placements(in_kernel, cells, begins, ends)
            if self._placed.jobs is not None:
                pair, placement, strange = self._with_jobs(self._placed.jobs, pair, placement, begins, ends)
                found.append(self._of_no_kernel(strange))
                in_kernel = in_kernel[~np.isin(in_kernel, strange)]
            if self._timed is None:
                running, only_one_site = self._running_launches(pair, placement, begins, ends)
            else:
                ran = self._timed_executions(self._timed, pair, placement, begins, ends, stream)
                only_one_site = np.isin(pair, ran.pair)  # that one ran, and no other did, is measured
                others = np.flatnonzero(~only_one_site)
                running, only_one_site[others] = self._running_launches(pair[others], placement[others], begins, ends)
                running = _Entries.concatenated([ran, running])
            running = running.summed(len(self._placed.sites))
            count = np.bincount(running.pair, minlength=len(cells))
            alone[pair[only_one_site]] = count[pair[only_one_site]] == 1
            found.append(running)
            rest = in_kernel[~np.isin(in_kernel, running.pair)]
            keep = np.isin(pair, rest)
            found.append(late := self._last_of_each_process(pair[keep], placement[keep], ends))
            alone[late.pair] = self._only_site[late.placement] & (np.bincount(late.pair)[late.pair] == 1)
            rest = rest[~np.isin(rest, late.pair)]
            # Only placements that have ended are left: the one that ended last, as the stalls arrived late.
            found.append(self._latest_of_any_process(*self._all_placements(rest, cells), ends, ended_last=True))
        rest = in_kernel[~np.isin(in_kernel, np.concatenate([entries.pair for entries in found]))]
        found.append(self._last_compiled(*self._all_placements(rest, cells), begins, ends))
        entries = self._label_ambiguous(_Entries.concatenated(found))
        if self._rule.method is Method.NONE:
            entries = self._kernels_only(entries)
            alone[:] = False
        entries = entries.summed(len(self._placed.sites))
        alone &= np.bincount(entries.pair, minlength=len(cells)) == 1
        total = np.bincount(entries.pair, entries.weight, len(cells))
        return Shares(entries.pair, entries.site, entries.weight / total[entries.pair], alone)

    def _number_versions(self) -> None:
        """Indexes new cells. A lane is the versions of one process in one cell, in the order of their compilation."""
        if self._known_cells == len(self._cells.members):
            return
        members = self._cells.members
        self._known_cells = len(members)
        self._version = np.concatenate(members)
        sizes = np.array([len(each) for each in members])
        cell = np.repeat(np.arange(len(members)), sizes)
        pid = self._cells.pids[self._version]
        new = np.ones(len(cell), bool)
        new[1:] = (cell[1:] != cell[:-1]) | (pid[1:] != pid[:-1])
        lane = np.cumsum(new) - 1
        self._first_lane = np.searchsorted(cell[new], np.arange(len(members) + 1))
        self._first_version = np.append(np.searchsorted(cell, np.arange(len(members))), len(cell))
        self._lane_width = len(self._begins) + 1
        self._version_begin = lane * self._lane_width + self._begin_rank[self._version]
        self._version_end = np.maximum.accumulate(lane * self._lane_width + self._end_rank[self._version])

    def _all_placements(self, pairs: _Ints, cells: _Ints) -> tuple[_Ints, _Ints]:
        """Returns all placements of each pair's cell, as columns of pairs and placements."""
        first, stop = self._first_version[cells[pairs]], self._first_version[cells[pairs] + 1]
        owner, index = self._expand_ranges(first, stop)
        return pairs[owner], self._version[index]

    def _present_placements(self, pairs: _Ints, cells: _Ints, begins: _Times, ends: _Times) -> tuple[_Ints, _Ints]:
        """Returns the placements that existed during each pair's time, as columns of pairs and placements."""
        owner, lane = self._expand_ranges(self._first_lane[cells[pairs]], self._first_lane[cells[pairs] + 1])
        pair = pairs[owner]
        begun = np.searchsorted(self._begins, ends[pair], side="right")  # number of placements that had begun
        gone = np.searchsorted(self._ends, begins[pair])  # number of placements that had ended
        first = np.searchsorted(self._version_end, lane * self._lane_width + gone)
        stop = np.searchsorted(self._version_begin, lane * self._lane_width + begun)
        owner, index = self._expand_ranges(first, np.maximum(first, stop))
        pair, placement = pair[owner], self._version[index]
        present = self._placed.ended[placement] >= begins[pair]
        return pair[present], placement[present]

    def _of_no_kernel(self, pair: _Ints) -> _Entries:
        """Returns an entry for each of these pairs, whose stalls are of no kernel."""
        return _Entries.of_equal_weight(pair, np.full(len(pair), -1), np.full(len(pair), self._unknown))

    def _with_jobs(
        self, jobs: Jobs, pair: _Ints, placement: _Ints, begins: _Times, ends: _Times
    ) -> tuple[_Ints, _Ints, _Ints]:
        """Leaves out placements of processes that had no job on a GPU during each pair's time.

        Returns:
            The pairs and placements that are left, and the pairs that have none, as only processes without a kernel
            had jobs then. If nobody had any, all placements are left.
        """
        ran = jobs.can_have_run(self._cells.pids[placement], begins[pair], ends[pair])
        some, any_ran = np.zeros(len(begins), bool), np.zeros(len(begins), bool)
        some[pair], any_ran[pair[ran]] = True, True
        strange = some & ~any_ran & jobs.others.overlap(begins, ends)
        left = (ran | ~any_ran[pair]) & ~strange[pair]
        return pair[left], placement[left], np.flatnonzero(strange)

    def _running_launches(
        self, pair: _Ints, placement: _Ints, begins: _Times, ends: _Times
    ) -> tuple[_Entries, NDArray[np.bool_]]:
        """Counts the launches that can be running during each pair's time, by site.

        Returns:
            The entries, and for each (pair, placement) whether a single site launched it within the window.
        """
        found = self._launches.running(pair, placement, begins, ends)
        self._check_entries(found.slices)
        return _Entries(*self._launches.count(found)), found.single

    def _timed_executions(
        self, timed: RunningTimes, pair: _Ints, placement: _Ints, begins: _Times, ends: _Times, stream: int
    ) -> _Entries:
        """Returns the sites whose executions ran during each pair's time, weighted by how long they did."""
        first, stop = self._first_site[placement], self._first_site[placement + 1]
        owner, index = self._expand_ranges(first, stop)
        site = self._sites[index]
        known = timed.has_any[site]
        owner, site = owner[known], site[known]
        ran = timed.between(site, stream, begins[pair[owner]], ends[pair[owner]])
        some = ran > 0
        owner, site = owner[some], site[some]
        return _Entries(pair[owner], placement[owner], site, ran[some])

    def _expand_ranges(self, first: _Ints, stop: _Ints) -> tuple[_Ints, _Ints]:
        """Expands ranges of indices, concatenated: the number of the range, and each index in it."""
        count = stop - first
        self._check_entries(int(count.sum()))
        return np.repeat(np.arange(len(count)), count), ranges(first, count)

    def _check_entries(self, number: int) -> None:
        """Counts entries that are about to be made."""
        if number > _MAX_ENTRIES_AT_ONCE and self._divisible:
            raise TooManyAtOnce
        self._count(number)

    def _last_launch(self, placement: _Ints, ends: _Times) -> tuple[_Ints, _Ints]:
        """Finds the last launch of each placement up to a time: its rank by time, -1 for none, and its site."""
        rank = self._launches.last(placement, ends)
        return rank, self._placed.site[rank] if len(self._placed.site) else np.zeros(len(rank), np.int64)

    def _last_of_each_process(self, pair: _Ints, placement: _Ints, ends: _Times) -> _Entries:
        """Finds the last launch of each pair and process up to the pair's end."""
        rank, site = self._last_launch(placement, ends[pair])
        order = np.lexsort((rank, self._cells.pids[placement], pair))
        order = order[rank[order] >= 0]
        pids = self._cells.pids[placement[order]]
        last = _last_of_each(pair[order], pids)
        return _Entries.of_equal_weight(pair[order][last], placement[order][last], site[order][last])

    def _latest_of_any_process(self, pair: _Ints, placement: _Ints, ends: _Times, ended_last: bool = False) -> _Entries:
        """Finds the last launch of each pair up to its end, of any process, or of the placement that ended last."""
        rank, site = self._last_launch(placement, ends[pair])
        ended = self._placed.ended[placement] if ended_last else np.zeros(len(pair), np.uint64)
        order = np.lexsort((rank, ended, pair))
        order = order[rank[order] >= 0]
        last = _last_of_each(pair[order])
        return _Entries.of_equal_weight(pair[order][last], placement[order][last], site[order][last])

    def _last_compiled(self, pair: _Ints, placement: _Ints, begins: _Times, ends: _Times) -> _Entries:
        """Finds the last compiled kernel of each pair and process, for pairs without an earlier launch."""
        present = (self._placed.ended[placement] >= begins[pair]) & (self._cells.since[placement] <= ends[pair])
        any_there = np.zeros(int(pair.max()) + 1 if len(pair) else 0, bool)
        any_there[pair[present]] = True
        keep = present | ~any_there[pair]
        pair, placement = pair[keep], placement[keep]
        pids = self._cells.pids[placement]
        order = np.lexsort((placement, self._cells.since[placement], pids, pair))
        last = order[_last_of_each(pair[order], pids[order])]
        pair, placement = pair[last], placement[last]
        distinct, which = np.unique(placement, return_inverse=True)
        sites = np.array([self._site_without_launch(each) for each in distinct.tolist()], np.int64)
        return _Entries.of_equal_weight(pair, placement, sites[which] if len(distinct) else np.empty(0, np.int64))

    def _site_without_launch(self, placement: int) -> int:
        """Returns the kernel's site for stalls without an earlier launch: it has a label instead of a stack."""
        placed = self._placed
        where = placed.placements[placement]
        if not placed.launched[placement]:
            return self._labelled_site(placement, 0, Site(placement, where.pid, "", 0, NOT_RECORDED))
        comm = placed.sites[placed.site[self._launches.first(placement)]].comm
        return self._labelled_site(placement, 0, Site(placement, where.pid, comm, 0, BEFORE_RECORDING))

    def _labelled_site(self, placement: int, processes: int, site: Site) -> int:
        """Returns the index of a site with a label, which is added when it is first asked for."""
        key = (placement, processes)
        if key not in self._labelled_sites:
            self._labelled_sites[key] = self._placed.add_site(site)
        return self._labelled_sites[key]

    def _label_ambiguous(self, entries: _Entries) -> _Entries:
        """Replaces the entries of pairs with several candidate processes by one site labelled as ambiguous."""
        if self._rule.split_ambiguous or self._rule.method is Method.LATEST or not len(entries.pair):
            return entries
        pids = np.append(self._cells.pids, -1)[entries.placement]
        order = np.lexsort((pids, entries.pair))
        new = _first_of_each(entries.pair[order], pids[order])
        processes = np.bincount(entries.pair[order[new]], minlength=int(entries.pair.max()) + 1)
        doubtful = processes[entries.pair] > 1
        if not doubtful.any():
            return entries
        pair, placement = entries.pair[doubtful], entries.placement[doubtful]
        order = np.lexsort((self._cells.code[placement], pair))
        pair, placement = pair[order], placement[order]
        first = np.flatnonzero(_first_of_each(pair))
        code = self._cells.code[placement]
        same = code[first] == code[np.append(first[1:], len(pair)) - 1]
        kernel = np.where(same, placement[first], -1)
        number = processes[pair[first]]
        keys, key_of = np.unique(np.stack([kernel, number], axis=1), axis=0, return_inverse=True)
        sites = np.array([self._ambiguous_site(*key) for key in keys.tolist()], np.int64)
        labelled = _Entries.of_equal_weight(pair[first], kernel, sites[key_of.reshape(-1)])
        return _Entries.concatenated([entries.only(~doubtful), labelled])

    def _ambiguous_site(self, placement: int, processes: int) -> int:
        comm = f"[ambiguous: {processes:,} processes]"
        if placement >= 0:
            return self._labelled_site(placement, processes, Site(placement, 0, comm, 0, AMBIGUOUS))
        return self._labelled_site(-1, processes, Site(None, 0, comm, 0, AMBIGUOUS, kernel_note="[ambiguous kernel]"))

    def _kernels_only(self, entries: _Entries) -> _Entries:
        """Replaces each kernel's launch sites by one site without a stack."""
        distinct, which = np.unique(entries.site, return_inverse=True)
        sites = np.array([self._any_launch_site(each) for each in distinct.tolist()], np.int64)
        return _Entries(entries.pair, entries.placement, sites[which], entries.weight)

    def _any_launch_site(self, index: int) -> int:
        site = self._placed.sites[index]
        if site.placement is None or site.note == AMBIGUOUS:
            return index
        return self._labelled_site(site.placement, -1, Site(site.placement, site.pid, site.comm, 0, ANY_LAUNCH))


@dataclass(frozen=True)
class _Entries:
    """Candidate sites of pairs, with weights."""

    pair: _Ints
    placement: _Ints  # -1 for none
    site: _Ints
    weight: NDArray[np.float64]

    @classmethod
    def of_equal_weight(cls, pair: _Ints, placement: _Ints, site: _Ints) -> _Entries:
        """Makes entries of weight 1."""
        return cls(pair, placement.astype(np.int64), site.astype(np.int64), np.ones(len(pair)))

    @classmethod
    def concatenated(cls, found: list[_Entries]) -> _Entries:
        """Concatenates entries."""
        names = ("pair", "placement", "site", "weight")
        return cls(*(np.concatenate([getattr(entries, name) for entries in found]) for name in names))

    def only(self, rows: NDArray[np.bool_]) -> _Entries:
        """Returns the entries that the mask selects."""
        return _Entries(self.pair[rows], self.placement[rows], self.site[rows], self.weight[rows])

    def summed(self, sites: int) -> _Entries:
        """Sorts entries by pair and site, and adds up the weights of equal ones."""
        key = self.pair * sites + self.site
        order = order_by(key)
        first = np.flatnonzero(np.diff(key[order], prepend=-1))
        weight = np.add.reduceat(self.weight[order], first) if len(first) else self.weight
        rows = order[first]
        return _Entries(self.pair[rows], self.placement[rows], self.site[rows], weight)


def _first_of_each(*keys: _Ints) -> NDArray[np.bool_]:
    """Whether each row begins a run of rows with equal keys: bool[n]. The rows are sorted by the keys."""
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return new


def _last_of_each(*keys: _Ints) -> _Ints:
    """Returns the last row of each run of rows with equal keys: int64[runs]."""
    return np.flatnonzero(np.append(_first_of_each(*keys)[1:], True)) if len(keys[0]) else np.empty(0, np.int64)
