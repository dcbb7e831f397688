"""Opens the sources of a recording, each with those that it tells of what it sees, and has the registry of samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import Way
from iaprof.bpf.sizes import MESSAGE_PAGES, PATH_PAGES, PIECE_PAGES
from iaprof.record.kernels.calibrating import Calibrator
from iaprof.record.kernels.collector import DebugElfCollector
from iaprof.record.kernels.drivers import Drivers, vulkan_drivers
from iaprof.record.options import Options
from iaprof.record.scope import Scope
from iaprof.record.signals import StopSignals
from iaprof.record.sources.code_objects import CodeObjects
from iaprof.record.sources.cpu_samples import CpuSamples
from iaprof.record.sources.cuda import CudaSamples
from iaprof.record.sources.finished_stacks import FinishedStacks
from iaprof.record.sources.gpu_jobs import GpuJobs
from iaprof.record.sources.launches import Launches
from iaprof.record.sources.libraries import MappedLibraries
from iaprof.record.sources.metrics import Metering
from iaprof.record.sources.side_band import SideBand
from iaprof.record.sources.source import Sampler, Source
from iaprof.record.sources.stalls import Stalls
from iaprof.record.symbolize.roots import Roots
from iaprof.record.unwinding.learner_process import LearnerProcess

SAMPLERS: Sequence[Callable[[Options], Sampler]] = (Stalls, CudaSamples)
"""Each opens the streams of its vendor's GPUs, or raises an IaprofError that says why it has none to record."""


def open_sampler(options: Options) -> Sampler:
    """Opens the source of samples of the first vendor that has GPUs to record.

    Raises:
        UsageError: the options fit no GPU.
        IaprofError: there is none; the text is that of the first vendor.
    """
    refusals = []
    for sampler in SAMPLERS:
        try:
            return sampler(options)
        except IaprofError as error:
            refusals.append(error)
    raise next((each for each in refusals if isinstance(each, UsageError)), refusals[0])


def open_sources(
    options: Options,
    scope: Scope | None,
    sampled: Scope | None,
    roots: Roots,
    signals: StopSignals,
    until_end: ExitStack,
    until_named: ExitStack,
    learner: LearnerProcess | None = None,
) -> list[Source]:
    """Opens all sources; none records anything yet.

    Args:
        options: what to record.
        scope: the processes in scope; None for all.
        sampled: likewise for CPU samples.
        roots: keeps the root folders of processes whose files are opened when stacks are named.
        signals: can interrupt the opening.
        until_end: closes what the recording needs, also after an error.
        until_named: closes what is needed until stacks are named.
        learner: the process that finishes stacks, if it was started before; `until_end` closes it, too.

    Returns:
        The sources, in the order in which each step of a recording calls them: see Source.

    Raises:
        Interrupted: a signal came meanwhile.
        IaprofError: no device, no permission, no BPF, no room; the text says what to do.
    """
    sampler = until_end.enter_context(closing(open_sampler(options)))
    # The learner's imports, and the BPF programs if they must be compiled, run while the rest is opened.
    learner = until_end.enter_context(closing(learner or LearnerProcess()))
    calibrator = until_end.enter_context(Calibrator())
    if calibrates := Way.ATTACH in options.launches.ways and not sampler.has_library:
        calibrator.take_installed(vulkan_drivers(bool(options.command)))
    probes = LaunchProbes(
        replace(options.sizes, message_pages=MESSAGE_PAGES, piece_pages=PIECE_PAGES, path_pages=PATH_PAGES)
        if sampler.has_library
        else options.sizes,
        options.launches.ways,
        depth=options.max_stack,
        waits=options.waits,
        cpu_samples=options.cpu_hz > 0,
    )
    until_end.enter_context(closing(probes))
    collector = until_end.enter_context(closing(DebugElfCollector()))
    signals.check()
    probes.ready(signals)
    signals.check()
    calibrator.wait(signals.check)
    if calibrates:
        probes.libraries.calibrate = calibrator.take
    learner.learn_from(probes)
    stacks = until_end.enter_context(closing(FinishedStacks(probes.depth, learner)))
    drivers = until_named.enter_context(
        closing(Drivers(probes.libraries, options.launches, bool(options.command), sampler.has_library))
    )
    metering = until_end.enter_context(closing(Metering(sampler, options.metric_interval_ns)))
    code = CodeObjects(collector, drivers.injection)
    launches = until_end.enter_context(
        closing(Launches(options, probes, code, drivers, roots, metering, sampler, scope, sampled))
    )
    libraries = MappedLibraries(probes, drivers.outcomes, scope, roots, stacks, calibrator)
    side_band = until_end.enter_context(closing(SideBand(launches, libraries, stacks, scope or sampled)))
    signals.check()
    cpu_samples = until_end.enter_context(closing(CpuSamples(probes.maps, options.cpu_hz, sampled)))
    jobs = until_end.enter_context(closing(GpuJobs(wanted=not sampler.has_library)))
    return [launches, libraries, stacks, code, side_band, jobs, metering, sampler, cpu_samples]
