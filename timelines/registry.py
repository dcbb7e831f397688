"""The stages in their order. Each is a function in stages/ that changes a Trace."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from iaprof.timelines.options import CounterTrack, Options, Overlap
from iaprof.timelines.trace import Trace

Run = Callable[[Trace, Options], None]


def _always(_: Options) -> bool:
    return True


def _if_aligning_jobs(options: Options) -> bool:
    return options.align_jobs


def _if_async(options: Options) -> bool:
    return options.overlap is Overlap.ASYNC


def _if_splitting(options: Options) -> bool:
    return options.split


def _if_shifting_ranks(options: Options) -> bool:
    return options.align_ranks and not options.dilate_ranks


def _if_dilating_ranks(options: Options) -> bool:
    return options.dilate_ranks


def _if_dropping_globals(options: Options) -> bool:
    return options.drop_globals


def _if_shown(track: CounterTrack) -> Callable[[Options], bool]:
    return lambda options: track in options.tracks


def _if_power_shown(options: Options) -> bool:
    return bool(options.tracks & {CounterTrack.POWER_TS4, CounterTrack.POWER_TS3})


def _if_power_summed(options: Options) -> bool:
    return options.power_statistics


def _if_ideals_known(options: Options) -> bool:
    return bool(options.compiler_logs) and CounterTrack.UTILIZATION in options.tracks


def _if_merging_sends(options: Options) -> bool:
    return options.merge_sends


def _if_flows(options: Options) -> bool:
    return options.flows


def _if_calls(options: Options) -> bool:
    return options.collectives


def _if_bandwidth_of_calls(options: Options) -> bool:
    return CounterTrack.COLLECTIVE_BANDWIDTH in options.tracks and options.collectives


def _if_bandwidth_of_events(options: Options) -> bool:
    return CounterTrack.COLLECTIVE_BANDWIDTH in options.tracks and not options.collectives


def _if_tables(options: Options) -> bool:
    return options.tables


def _if_tables_of_calls(options: Options) -> bool:
    return options.collectives and options.tables


def _if_phases(options: Options) -> bool:
    return bool(options.phases)


def _if_shortening_names(options: Options) -> bool:
    return not options.keep_names


@dataclass(frozen=True)
class Stage:
    """A stage."""

    name: str  # as in stage profiles
    function: str  # "module:function" below iaprof.timelines.stages
    description: str
    is_asked_for: Callable[[Options], bool] = _always  # by the options
    others: tuple[str, ...] = ()  # further names in stage profiles: the stage is on if it and all of these are

    def load(self) -> Run:
        """Imports its function."""
        module, _, name = self.function.partition(":")
        function: Run = getattr(importlib.import_module(f"iaprof.timelines.stages.{module}"), name)
        return function


# fmt: off
STAGES: tuple[Stage, ...] = (
    # 3 to 7: clocks
    Stage("normalize_phase1", "selection:normalize_phase1", "Applies limits and filters, unwraps within slices"),
    Stage("frequency_align_collect", "alignment:frequency_align_collect", "Compares jobs to their round trips",
          _if_aligning_jobs),
    Stage("frequency_align_apply", "alignment:frequency_align_apply", "Moves jobs into their round trips",
          _if_aligning_jobs),
    Stage("normalize_phase2", "epochs:normalize_phase2", "Unwraps counters, estimates the frequency"),
    Stage("event_sanity_checks", "device_counters:event_sanity_checks", "Removes counters that fall"),
    Stage("time_align_collect", "alignment:time_align_collect", "Says how far the runtime's clock is from PyTorch's"),
    Stage("time_align_apply", "alignment:time_align_apply", "Moves the runtime's events onto PyTorch's clock"),
    # 8 to 14: names, rows, times by counters
    Stage("remove_ids_from_name", "rows:remove_ids_from_name", "Takes request numbers out of names", _if_async),
    Stage("map_tid_to_range", "rows:map_tid_to_range", "Numbers threads 1000, 1100, ..."),
    Stage("cycle_count_to_wallclock", "device_counters:cycle_count_to_wallclock",
          "Times slices by counters, from TS1 on"),
    Stage("tighten_hts_by_instr_type", "device_counters:tighten_hts_by_instr_type",
          "Times slices by counters of windows"),
    Stage("tripple_phased_events", "device_counters:tripple_phased_events",
          "Cuts operations into their parts", _if_splitting),
    Stage("mp_sync_tight_v1", "ranks:mp_sync_tight_v1", "Puts devices on one clock", _if_shifting_ranks),
    Stage("mp_ts_calibration_v2", "ranks:mp_ts_calibration_v2", "Puts devices on one clock of one speed",
          _if_dilating_ranks),
    Stage("queueing_counter", "counter_tracks:queueing_counter", "Shows open preparations as a counter",
          _if_shown(CounterTrack.PREPARATIONS)),
    # 16 to 20: rows in order
    Stage("drop_global_events", "rows:drop_global_events", "Drops slices that span others", _if_dropping_globals),
    Stage("recombine_cpu_events", "rows:recombine_cpu_events", "Puts the host's slices into one row"),
    Stage("sort_events", "order:sort_by_row", "Sorts slices in each row"),
    Stage("assert_ts_sequence", "order:assert_ts_sequence", "Warns of unsorted rows and overlapping kernels"),
    Stage("detect_partial_overlap_events", "overlap:detect_partial_overlap_events", "Resolves overlaps"),
    Stage("assert_ts_sequence", "order:assert_ts_sequence", "Warns of unsorted rows and overlapping kernels"),
    # 21 to 25: iterations, power, bandwidth of copies, utilization, sends
    Stage("collect_iteration_stats", "iterations:collect_iteration_stats", "Finds iterations and how long they take"),
    Stage("sort_events", "order:sort_points", "Sorts values of counters"),
    Stage("compute_power", "power:compute_power", "Shows power as counters", _if_power_shown, ("extract_power_event",)),
    Stage("analyze_power_statistics", "power:analyze_power_statistics", "Sums up power", _if_power_summed),
    Stage("compute_bandwidth", "counter_tracks:compute_bandwidth", "Shows the bandwidth of copies as counters",
          _if_shown(CounterTrack.BANDWIDTH), ("extract_data_transfer_event",)),
    Stage("assert_ts_sequence", "order:assert_ts_sequence", "Warns of unsorted rows and overlapping kernels"),
    Stage("communication_event_collection", "collectives.sends:merge_sends", "Makes one slice of those of a send",
          _if_merging_sends, ("communication_event_apply",)),
    Stage("compute_utilization", "utilization:compute_utilization", "Compares kernels to their ideal cycles",
          _if_ideals_known, ("compute_utilization_fingerprints",)),
    # 26
    Stage("sort_events", "order:sort_by_time", "Sorts events of all ranks"),
    Stage("assert_global_ts_sequence", "order:assert_global_ts_sequence", "Warns of unsorted events"),
    # 27 to 30: launches, classes, collectives
    Stage("launch_flow_create_missing", "arrows:add_launch_flows", "Draws arrows to kernels that have none",
          others=("launch_flow_collect",)),
    Stage("event_categorizer", "categorize:categorize", "Finds the class of each slice",
          others=("event_categorizer_update",)),
    Stage("flow_extraction", "collectives.flows:add_collective_flows", "Draws arrows from sends to receives",
          _if_flows, ("flow_prepare_event_data",)),
    Stage("flow_data_cleanup", "arrows:pair_ends", "Gives each arrow one start and one end"),
    Stage("collective_calls", "collectives.calls:add_collective_calls", "Adds a slice for each rank's collective",
          _if_calls),
    Stage("mp_calc_bw_v2", "collectives.bandwidth:compute_from_calls", "Shows the bandwidth of collectives' slices",
          _if_bandwidth_of_calls),
    Stage("mp_calc_bw", "collectives.bandwidth:compute_from_events", "Shows the bandwidth of all-reduces",
          _if_bandwidth_of_events),
    # 31 to 36: tables, and the trace as it is shown
    Stage("calculate_stats", "summaries:calculate_stats", "Makes tables of kernels", _if_tables),
    Stage("compare_ranks", "collectives.balance:compare_ranks", "Makes tables of how ranks share work", _if_tables),
    Stage("processing_filter", "refinement:keep_phases", "Keeps only some phases of events", _if_phases),
    Stage("tb_refinement_intrusive", "refinement:strip_numbers", "Takes numbers out of names", _if_shortening_names),
    Stage("tb_refinement_lightweight", "refinement:place_on_devices", "Puts slices on devices and hosts"),
    Stage("calculate_stats_v2", "collectives.balance:calculate_stats_v2", "Makes a table of communication",
          _if_tables_of_calls),
    # 37
    Stage("sort_events", "order:sort_by_time", "Sorts events of all ranks"),
)
# fmt: on

FOR_OUTPUTS = frozenset(
    {
        "normalize_phase1", "sort_events", "collect_iteration_stats", "analyze_power_statistics", "calculate_stats",
        "compare_ranks", "processing_filter", "tb_refinement_intrusive", "calculate_stats_v2",
    }
)  # fmt: skip
"""Names of the stages that also run on traces that iaprof wrote: they select events and make tables."""


def run(trace: Trace, options: Options, enabled: Sequence[bool], after: Callable[[int, Stage], None]) -> None:
    """Runs the stages that the options ask for and that a stage profile enables.

    Args:
        trace: the trace, which they change.
        options: the options of the stages.
        enabled: for each of STAGES, whether the stage profile enables it.
        after: called after each stage that ran, with its number in STAGES.
    """
    for number, (stage, is_on) in enumerate(zip(STAGES, enabled, strict=True)):
        if is_on and stage.is_asked_for(options) and (stage.name in FOR_OUTPUTS or not trace.is_output):
            with np.errstate(all="ignore"):  # times of an untrusted trace can overflow; they become inf or nan
                stage.load()(trace, options)
            trace.pack()
            after(number, stage)
