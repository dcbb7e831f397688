"""Makes the layout of Mesa's Vulkan driver from its process's answer to `iaprof calibrate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.basics.clean import clean
from iaprof.bpf.driver_layout import (
    MADE_BY,
    OF_DRAWS,
    REVISION,
    Action,
    Entry,
    Field,
    Layout,
    Operations,
)
from iaprof.bpf.structs import MAX_OPERATIONS
from iaprof.record.calibrate.answer import MAX_PROBLEM, read_place, read_places
from iaprof.record.calibrate.code import Code, Problem, address_of
from iaprof.record.calibrate.vulkan_driver import MOST_DEVICES
from iaprof.record.calibrate.vulkan_search import DRAWS, FUNCTIONS, MESH_DRAWS

# By function: action, argument with the handle or array, and argument with the array's length.
_ENTRIES = {
    "vkCmdDispatch": (Action.LAUNCH, 0, None),
    "vkCmdDispatchBase": (Action.LAUNCH, 0, None),
    "vkCmdDispatchIndirect": (Action.LAUNCH, 0, None),
    "vkCmdDispatchIndirect2KHR": (Action.LAUNCH, 0, None),
    **dict.fromkeys(DRAWS, (Action.DRAW, 0, None)),
    "vkDestroyPipeline": (Action.SHADER_GONE, 1, None),
    "vkSetDebugUtilsObjectNameEXT": (Action.NAMED, 1, None),
    "vkCreateComputePipelines": (Action.MAKE, 3, 2),
    "vkCreateGraphicsPipelines": (Action.MAKE_TO_DRAW, 3, 2),
    "vkBeginCommandBuffer": (Action.LIST_RESET, 0, None),
    "vkResetCommandBuffer": (Action.LIST_RESET, 0, None),
    "vkEndCommandBuffer": (Action.LIST_CLOSED, 0, None),
    "vkCmdExecuteCommands": (Action.INCLUDE, 2, 1),
    "vkQueueSubmit2": (Action.SUBMIT, 2, 1),
}
_NEEDED = ("vkCmdDispatchBase", "vkDestroyPipeline")
_MADE = 5  # number of the argument that gets new pipelines
_MOST_PATHS = 64


@dataclass(frozen=True)
class VulkanAnswer:
    """What was found on one device."""

    device: str
    version: str
    functions: Mapping[str, int]  # by name: place in the file
    forwarding: frozenset[str]  # functions that do nothing but call another one that has an entry
    window: tuple[int, int]
    pipeline: int
    start: int
    size: int
    code: int
    shader_class: tuple[int, int]  # offset, and place in the file of what the pointer there points to
    simd: int  # 0 if it is not known
    bound: tuple[tuple[int, ...], ...]  # best first
    drawn: tuple[tuple[int, ...], ...]  # the same of draws; empty if `no_draws`
    stages: tuple[int, int]
    stage: int  # 0 if it is not known
    kind: tuple[int, int, int]
    no_draws: str  # why draws are not recorded; empty if they are
    mesh: bool  # whether the arrays that `drawn` leads to have mesh shaders, too
    operations: Operations | None  # of its own kernels; None if they are not known
    operating: tuple[int, int]  # places in the file of the functions that do operations, and give the GPU a kernel
    no_own: str  # why there are no `operations`; empty if there are


def read_vulkan(raw: Any) -> tuple[dict[str, VulkanAnswer], dict[str, str]]:
    """Checks and reads an answer.

    Returns:
        By device: what was found, and why nothing was found.

    Raises:
        Problem: the answer says why there is none.
        ValueError, KeyError, TypeError, AttributeError, OverflowError: the answer makes no sense.
    """
    if "problem" in raw:
        raise Problem(clean(str(raw["problem"])[:MAX_PROBLEM]))
    answers: dict[str, VulkanAnswer] = {}
    left_out: dict[str, str] = {}
    for device in raw["devices"][:MOST_DEVICES]:
        name = clean(str(device["name"])[:100])
        if "problem" in device:
            left_out[name] = clean(str(device["problem"])[:MAX_PROBLEM])
        else:
            answers[name] = _read_device(name, device)
    return answers, left_out


def _read_device(name: str, raw: Any) -> VulkanAnswer:
    class_at, class_place = raw["class"]
    start, size = raw["window"]
    first, stride = raw.get("stages", (0, 0))
    kind_at, dispatching, drawing = raw.get("kind", (0, 0, 0))
    return VulkanAnswer(
        device=name,
        version=clean(str(raw["version"])[:64]),
        functions=read_places(raw["functions"], FUNCTIONS),
        forwarding=frozenset(map(str, raw["forwarding"])),
        window=(int(start), int(size)),
        pipeline=int(raw["pipeline"]),
        start=int(raw["start"]),
        size=int(raw["size"]),
        code=int(raw["code"]),
        shader_class=(int(class_at), read_place(class_place)),
        simd=int(raw["simd"]),
        bound=_paths(raw["bound"]),
        drawn=_paths(raw.get("drawn", ())),
        stages=(int(first), int(stride)),
        stage=int(raw.get("stage", 0)),
        kind=(int(kind_at), int(dispatching), int(drawing)),
        no_draws=clean(str(raw.get("no_draws", ""))[:MAX_PROBLEM]),
        mesh=raw.get("mesh", False) is True,
        **_read_operations(raw),
    )


def _read_operations(raw: Any) -> dict[str, Any]:
    of = raw.get("operations")
    if of is None:
        return {
            "operations": None,
            "operating": (0, 0),
            "no_own": clean(str(raw.get("no_own", ""))[:MAX_PROBLEM]) or _NO_OWN,
        }
    function, kernel, data, size, kind = (int(of[name]) for name in ("function", "kernel", "data", "size", "kind"))
    names = tuple((int(number), f"blorp {_KINDS[which]}") for number, which in of["names"][:MAX_OPERATIONS])
    operation, upload = of["places"]
    return {
        "operations": Operations(function, kernel, data, size, kind, names),
        "operating": (read_place(operation), read_place(upload)),
        "no_own": "",
    }


_KINDS = {kind: kind for kind in ("blit", "clear", "copy")}
_NO_OWN = "its copies are unknown"


def _paths(raw: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, path)) for path in raw[:_MOST_PATHS])


def vulkan_layout(build_id: str, code: Code, answers: Sequence[VulkanAnswer]) -> tuple[Layout, str, str]:
    """Returns the layout on which all devices agree, and why it lacks draws, and the driver's own kernels.

    These two reasons are empty if it has them.

    Raises:
        Problem: there is none.
        LayoutError: the layout makes no sense.
    """
    first = answers[0]
    for answer in answers[1:]:
        if any(getattr(answer, name) != getattr(first, name) for name in _ALIKE):
            raise Problem(f"{first.device} and {answer.device} do not have their shaders in the same way")
    bound = min(frozenset.intersection(*(frozenset(answer.bound) for answer in answers)), key=_best, default=None)
    if bound is None:
        raise Problem("devices disagree on how a command buffer leads to its bound shader")
    drawn = min(frozenset.intersection(*(frozenset(answer.drawn) for answer in answers)), key=_best, default=())
    no_draws = next((f"as {answer.device}, {answer.no_draws}" for answer in answers if answer.no_draws), "")
    if not no_draws and (
        not drawn or any((answer.stages, answer.kind) != (first.stages, first.kind) for answer in answers)
    ):
        no_draws = "devices disagree on how a command buffer leads to the shaders with which it draws"
    class_at, class_place = first.shader_class
    stage = 0 if no_draws or len({answer.stage for answer in answers}) > 1 else first.stage
    mesh = not no_draws and all(answer.mesh for answer in answers)
    left_out = OF_DRAWS if no_draws else () if stage else (Action.MAKE_TO_DRAW, Action.MADE_TO_DRAW)
    no_own = next((f"as {answer.device}, {answer.no_own}" for answer in answers if answer.no_own), "")
    if not no_own and any(answer.operations != first.operations for answer in answers):
        no_own = "devices disagree on how its operations lead to their kernels"
    layout = Layout(
        build_id=build_id,
        driver="vulkan",
        version=first.version,
        entries=(
            *(
                entry
                for entry in _entries(answers, code)
                if entry.action not in left_out and (mesh or entry.name not in MESH_DRAWS)
            ),
            *(() if no_own else _operating(answers, code)),
        ),
        address=(Field((first.start,), bits=32),),
        size=Field((first.size,), bits=32),
        code=Field((first.code,)),
        name=None,
        allocation=None,
        kernel_class=Field((class_at,)),
        classes=(address_of(code.elf, class_place, executable=False),),
        window=first.window,
        bound=bound,
        pipeline=first.pipeline,
        drawn=() if no_draws else drawn,
        stages=(0, 0) if no_draws else first.stages,
        stage=stage,
        kind=(0, 0, 0) if no_draws else first.kind,
        revision=REVISION,
        mesh=mesh,
        operations=None if no_own else first.operations,
        simd=first.simd if len({answer.simd for answer in answers}) == 1 else 0,
    )
    return Layout.from_json(layout.to_json()), no_draws, no_own


_ALIKE = ("window", "pipeline", "start", "size", "code", "shader_class")


def _best(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


def _entries(answers: Sequence[VulkanAnswer], code: Code) -> Iterator[Entry]:
    """Yields the entries of all devices: functions that record commands exist once for each generation of GPUs."""
    taken: set[int] = set()
    for name, (action, handle, count) in _ENTRIES.items():
        places = {answer.functions[name] for answer in answers if name in answer.functions} - taken
        if not places and name in _NEEDED:
            raise Problem(f"it has no {name}")
        for place in sorted(places):
            if any(answer.functions.get(name) == place and name in answer.forwarding for answer in answers):
                continue
            taken.add(place)
            needed = {handle} if count is None else {0, handle, count}
            if action in MADE_BY:
                if returns := code.returns(place):
                    yield Entry(name, action, code.probe(place, needed | {_MADE}, keeps_stack=True), handle, count)
                    yield from (Entry(name, MADE_BY[action], at, 0) for at in returns)
                continue
            # What comes before the probe may read a structure that an argument points to, as of an indirect dispatch.
            at = code.probe(place, needed, keeps_memory=action not in (Action.LAUNCH, Action.DRAW))
            yield Entry(name, action, at, handle, count)


def _operating(answers: Sequence[VulkanAnswer], code: Code) -> Iterator[Entry]:
    """Yields the entries of the functions for the driver's own kernels."""
    doing, uploading = ({answer.operating[which] for answer in answers} for which in range(2))
    for place in sorted(doing):
        yield Entry("blorp_exec", Action.OPERATION, code.probe(place, {0, 1}), 1)
    for place in sorted(uploading):
        if returns := code.returns(place):
            yield Entry("upload_blorp_shader", Action.UPLOAD, code.probe(place, {4, 5}, keeps_stack=True), 4)
            yield from (Entry("upload_blorp_shader", Action.UPLOADED, at, 0) for at in returns)
