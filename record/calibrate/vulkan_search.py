"""Searches Mesa's Vulkan driver for `iaprof calibrate`: where a dispatch finds its shader, and what it knows of it.

The truth are the driver's own commands: it writes a COMPUTE_WALKER for each dispatch, with the offset of the shader's
first instruction from the instruction base, and a 3DPRIMITIVE for each draw, behind commands with those of its shaders.
Several pipelines are made; what of the GPU's memory changes when one is made is its code. A place in the driver's
objects is accepted only if it has what these commands and the code say, for each of these pipelines. Nothing is
submitted.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from iaprof.formats.wire.process_maps import mappings, maps_of
from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.search import Memory, Path, Search
from iaprof.record.calibrate.vulkan_driver import STAGES, Device, VulkanDriver, window
from iaprof.record.calibrate.vulkan_operations import find_operations

MESH_DRAWS = (
    "vkCmdDrawMeshTasksEXT",
    "vkCmdDrawMeshTasksIndirectEXT",
    "vkCmdDrawMeshTasksIndirect2EXT",
    "vkCmdDrawMeshTasksIndirectCountEXT",
    "vkCmdDrawMeshTasksIndirectCount2EXT",
)
DRAWS = (
    *MESH_DRAWS,
    "vkCmdDraw",
    "vkCmdDrawIndexed",
    "vkCmdDrawIndirect",
    "vkCmdDrawIndirect2KHR",
    "vkCmdDrawIndexedIndirect",
    "vkCmdDrawIndexedIndirect2KHR",
    "vkCmdDrawIndirectCount",
    "vkCmdDrawIndirectCount2KHR",
    "vkCmdDrawIndexedIndirectCount",
    "vkCmdDrawIndexedIndirectCount2KHR",
    "vkCmdDrawMultiEXT",
    "vkCmdDrawMultiIndexedEXT",
    "vkCmdDrawIndirectByteCountEXT",
    "vkCmdDrawIndirectByteCount2EXT",
)
FUNCTIONS = (
    *DRAWS,
    "vkCmdDispatch",
    "vkCmdDispatchBase",
    "vkCmdDispatchIndirect",
    "vkCmdDispatchIndirect2KHR",
    "vkCreateComputePipelines",
    "vkCreateGraphicsPipelines",
    "vkDestroyPipeline",
    "vkSetDebugUtilsObjectNameEXT",
    "vkBeginCommandBuffer",
    "vkEndCommandBuffer",
    "vkResetCommandBuffer",
    "vkCmdExecuteCommands",
    "vkQueueSubmit",
    "vkQueueSubmit2",
)
_OBJECT = 0x400  # bytes of an object that are searched
_COMMANDS = 0x20000  # of a command buffer
_BLOCK = 64  # bytes; code begins at a multiple of it
_MOST_PADDING = 64  # bytes behind code that may belong to it and are zero
_MOST_OTHER_BYTES = 16  # of code, in a copy of it: addresses
_FUNCTIONS = 4  # at the beginning of a table of functions, of which one is not null
_WALKER = 0x7208  # the upper half of COMPUTE_WALKER's first word, on Xe2 and Xe3
_WALKER_WORDS, _LANES_AT, _GROUPS_AT, _START_AT = 40, 4, 7, 19
_LANES = (8, 16, 32, 0)  # by the upper two bits of a word of it
_GROUPS = (3, 5, 7)  # of our dispatches
# Of draws: commands that set a shader of STAGES, where they have its start, and whether it is on at all.
_STAGE_COMMANDS = (
    (0, 0x78100007, 1, 7, 1),  # 3DSTATE_VS
    (1, 0x781B0006, 3, 2, 1 << 31),  # 3DSTATE_HS
    (2, 0x781D0009, 1, 7, 1),  # 3DSTATE_DS
    (3, 0x78110008, 1, 7, 1),  # 3DSTATE_GS
    (4, 0x7820000A, 1, 1, 1),  # 3DSTATE_PS, which may have two kernels of one shader
    (4, 0x7820000A, 8, 8, 1),
    (6, 0x787D0005, 1, 5, 0xFFFFFFFF),  # 3DSTATE_TASK_SHADER
    (7, 0x787A0006, 1, 5, 0xFFFFFFFF),  # 3DSTATE_MESH_SHADER
)
_MOST_WORDS = 12  # of these commands
_PRIMITIVE, _VERTICES_AT = 0x7B00, 2  # 3DPRIMITIVE
_MESH_PRIMITIVE, _MESH_GROUPS_AT = 0x7B02, 1  # 3DMESH_3D
_VERTICES = 3 * 1009  # of our draws
_BASE, _MOST_KINDS = 0x40, 8  # bytes of an object that all kinds have; kinds of pipelines
_ENDS = "its process ends while it copies and clears"
_UNKNOWN_DRAW = "its commands for a draw are of a kind that iaprof does not know"
_PIPELINE = 0x4000  # bytes of a pipeline that are searched for its shaders
_MOST_STRIDE = 0x100  # bytes from one of these to the next
_DRAWN_WITH = ((0, 4), (0, 1, 2, 3, 4), (0, 3, 4), (0, 1, 2, 4))  # shaders of the pipelines, by number in STAGES
_MESH_WITH = ((4, 7), (4, 6, 7))  # the same of pipelines with mesh shaders
_WITHOUT_MESH = 5  # the first of STAGES
_VALUES = (4, 9, 17, 23)  # of the constant in the first module: shaders of different code and length
_WORD = 8


@dataclass(frozen=True)
class _Shader:
    """A pipeline's shader, as the GPU's memory and its commands have it."""

    pipeline: int
    start: int  # offset from the instruction base
    lanes: int
    code: bytes  # without the zeros at its end
    at: int  # address of its code in this process's mapping of the GPU's memory


def search_vulkan(
    library: str,
    memory: Memory,
    searched: bytes,
    checked: bytes,
    drawing: Sequence[bytes],
    write_answer: Callable[[dict[str, Any]], None],
) -> None:
    """Searches the driver on each of the machine's GPUs, and writes what it finds.

    Args:
        library: the driver.
        memory: of this process.
        searched: SPIR-V of a shader that its constant changes.
        checked: SPIR-V of another one, which has data behind its code.
        drawing: SPIR-V of a shader of each of STAGES, which its constant changes.
        write_answer: gets the findings.

    Raises:
        DriverError: a call of the driver failed.
    """
    driver = VulkanDriver(library)
    findings: list[dict[str, Any]] = []
    for device in driver.devices():
        about: dict[str, Any] = {"name": device.name, "version": device.version}
        try:
            found, distance = _search(device, memory, searched, checked, drawing)
        except DriverError as error:
            findings.append(about | {"problem": str(error)})
            continue
        # The driver may end this process there, as functions of ours take the place of its own.
        write_answer({"devices": [*findings, about | found | {"no_own": _ENDS}], "no_own": _ENDS})
        try:
            findings.append(about | found | {"operations": _operations(device, memory, distance)})
        except DriverError as error:
            findings.append(about | found | {"no_own": str(error)})
    write_answer({"devices": findings})


def _operations(device: Device, memory: Memory, distance: int) -> dict[str, Any]:
    search = Search(memory, device.function("vkCmdDispatch"))
    return find_operations(device, memory, _kernels, lambda start: start + distance, search.place)


def _kernels(commands: int, write: Callable[[int], None]) -> set[int]:
    """Returns the starts of the kernels with which a function draws and dispatches."""
    before = _gpu_memory()
    write(commands)
    found: set[int] = set()
    for _, content in _changes(before, _gpu_memory()):
        padded = content + bytes(4 * _MOST_WORDS)  # the last command may end where the change does
        words = struct.unpack(f"<{len(padded) // 4}I", padded)
        for at in range(len(words) - _MOST_WORDS):
            for _, command, start, on, bits in _STAGE_COMMANDS:
                if words[at] == command and words[at + on] & bits:
                    found.add(words[at + start] & ~(_BLOCK - 1))
    return found


def _search(
    device: Device, memory: Memory, searched: bytes, checked: bytes, drawing: Sequence[bytes]
) -> tuple[dict[str, Any], int]:
    """Returns what is found, and how far the code of a kernel is, in this process, from its start in commands."""
    device.open()
    range_of_code = window(os.pread(2, 1 << 20, 0))
    if range_of_code is None:
        raise DriverError("it does not say where its shaders lie on the GPU")
    search = Search(memory, device.function("vkCreateComputePipelines"))
    of_first, of_second = device.module(searched), device.module(checked)
    _make(device, of_first, 1)  # so that the memory for code is there
    shaders = [_make(device, of_first, value) for value in _VALUES] + [_make(device, of_second, 1)]
    if len({shader.at - shader.start for shader in shaders}) > 1:
        raise DriverError("its code does not lie where its commands say")
    memory.refresh()
    pipeline, start, size, code = _fields(memory, shaders)
    objects = [memory.number(shader.pipeline + pipeline) or 0 for shader in shaders]
    class_at, class_place = _class(memory, search, objects)
    known = _Known(class_at, memory.number(objects[0] + class_at) or 0, start, size)
    try:
        drawn = _drawn(device, memory, drawing, known, [shader.pipeline for shader in shaders])
    except DriverError as error:
        drawn = {"no_draws": str(error)}
    found = {
        "functions": search.places(device.functions(FUNCTIONS)),
        "forwarding": device.forwarding(memory.read),
        "window": range_of_code,
        "pipeline": pipeline,
        "start": start,
        "size": size,
        "code": code,
        "class": (class_at, class_place),
        "simd": _simd(device, memory, of_first, pipeline),
        "bound": _bound(device, memory, shaders, pipeline),
        **drawn,
    }
    return found, shaders[0].at - shaders[0].start


def _gpu_memory() -> dict[int, bytes]:
    """Returns what this process has mapped of the GPU's memory, by address."""
    return {
        mapping.start: ctypes.string_at(mapping.start, mapping.end - mapping.start)
        for mapping in mappings(maps_of())
        if b"renderD" in mapping.name and mapping.rights.startswith(b"rw")
    }


def _changes(before: dict[int, bytes], after: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the ranges that changed, from the first to the last changed block of a mapping: address and content."""
    for start, content in after.items():
        old = before.get(start, b"")
        if content == old:
            continue
        blocks = [at for at in range(0, len(content), _BLOCK) if content[at : at + _BLOCK] != old[at : at + _BLOCK]]
        yield start + blocks[0], content[blocks[0] : blocks[-1] + _BLOCK]


def _make(device: Device, module: int, value: int, lanes: int = 0) -> _Shader:
    before = _gpu_memory()
    pipeline = device.pipeline(module, value, lanes)
    changed = list(_changes(before, _gpu_memory()))
    if len(changed) != 1:
        raise DriverError("it writes the code of a shader to no place or to several")
    commands = device.commands()
    device.begin(commands)
    device.bind(commands, pipeline)
    before = _gpu_memory()
    device.dispatch(commands, _GROUPS)
    walkers = {walker for _, content in _changes(before, _gpu_memory()) for walker in _walkers(content)}
    if len(walkers) != 1:
        raise DriverError("its commands for a dispatch are of a kind that iaprof does not know")
    ((start, simd),) = walkers
    ((at, content),) = changed
    return _Shader(pipeline, start, simd, content.rstrip(b"\0"), at)


def _walkers(content: bytes) -> Iterator[tuple[int, int]]:
    """Yields start and lanes of the kernel of each COMPUTE_WALKER with our number of groups."""
    words = struct.unpack(f"<{len(content) // 4}I", content[: len(content) // 4 * 4])
    for at in range(len(words) - _WALKER_WORDS + 1):
        if words[at] >> 16 == _WALKER and words[at + _GROUPS_AT : at + _GROUPS_AT + 3] == _GROUPS:
            yield words[at + _START_AT] & ~(_BLOCK - 1), _LANES[words[at + _LANES_AT] >> 30]


def _simd(device: Device, memory: Memory, module: int, pipeline: int) -> int:
    """Returns the offset, in a shader, of its number of lanes; 0 if there is none, or the walkers do not prove it."""
    try:
        shaders = [_make(device, module, value, lanes) for lanes in (16, 32) for value in _VALUES]
    except DriverError:
        return 0
    memory.refresh()
    contents = [memory.read(memory.number(shader.pipeline + pipeline) or 0, _OBJECT) for shader in shaders]
    if {shader.lanes for shader in shaders} != {16, 32} or min(map(len, contents)) < _OBJECT:
        return 0
    pairs = list(zip(contents, shaders, strict=True))
    places = (at for at in range(0, _OBJECT, 4) if all(_u32(content, at) == of.lanes for content, of in pairs))
    return next(places, 0)


def _fields(memory: Memory, shaders: Sequence[_Shader]) -> tuple[int, int, int, int]:
    """Returns the offset, in a pipeline, of the pointer to its shader, and in a shader of start, size and code."""
    pointers = range(0, _OBJECT, _WORD)
    for pipeline in pointers:
        objects = [memory.number(shader.pipeline + pipeline) or 0 for shader in shaders]
        if len(set(objects)) < len(objects) or not all(map(memory.is_object, objects)):
            continue
        contents = [memory.read(each, _OBJECT) for each in objects]
        pairs = list(zip(contents, shaders, strict=True))
        starts = [at for at in range(0, _OBJECT, 4) if all(_u32(content, at) == of.start for content, of in pairs)]
        sizes = [
            at
            for at in range(0, _OBJECT, 4)
            if all(0 <= _u32(content, at) - len(of.code) < _MOST_PADDING for content, of in pairs)
        ]
        codes = [
            at
            for at in pointers
            if all(_is_code(memory.read(_u64(content, at), len(of.code)), of.code) for content, of in pairs)
        ]
        if starts and sizes and codes:
            # Several places may have the same number; those that belong to the code are beside its pointer.
            code = codes[0]
            return pipeline, _nearest(starts, code), _nearest(sizes, code), code
    raise DriverError("no way from its pipelines leads to place, size and code of their shaders")


def _is_code(content: bytes, code: bytes) -> bool:
    """Whether this is a shader's code; addresses of its data in it may not have been put in."""
    return len(content) == len(code) and sum(map(int.__ne__, content, code)) <= _MOST_OTHER_BYTES


def _nearest(places: Sequence[int], to: int) -> int:
    return min(places, key=lambda at: (abs(at - to), at))


def _u32(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 4], "little")


def _u64(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 8], "little")


def _class(memory: Memory, search: Search, objects: Sequence[int]) -> tuple[int, int]:
    """Returns the offset in a shader of the pointer to its table of functions, and the table's place in the file."""
    for at in range(0, _OBJECT, _WORD):
        tables = {memory.number(each + at) or 0 for each in objects}
        if len(tables) == 1 and (place := search.place(table := tables.pop())) is not None:
            functions = (memory.mapping(memory.number(table + _WORD * index) or 0) for index in range(_FUNCTIONS))
            of_driver = memory.mapping(table)
            if any(each and of_driver and each.file == of_driver.file and b"x" in each.rights for each in functions):
                return at, place
    raise DriverError("nothing tells its shaders from other objects")


def _bound(device: Device, memory: Memory, shaders: Sequence[_Shader], pipeline: int) -> list[Path]:
    """Returns the paths from a command buffer to its bound shader, at the time of a dispatch; best first."""
    paths: set[Path] | None = None
    for first, second in zip(shaders, [*shaders[1:], shaders[0]], strict=True):
        commands = device.commands()
        device.begin(commands)
        device.bind(commands, first.pipeline)
        device.dispatch(commands, _GROUPS)
        device.bind(commands, second.pipeline)  # what is bound now, not what was dispatched
        memory.refresh()
        shader = memory.number(second.pipeline + pipeline) or 0
        content = _readable(memory, commands, _COMMANDS)
        mine: set[Path] = set()
        for at in range(0, len(content) - _WORD + 1, _WORD):
            word = _u64(content, at)
            if word == shader:
                mine.add((at,))
            elif word == second.pipeline:
                mine.add((at, pipeline))
        paths = mine if paths is None else paths & mine
    if not paths:
        raise DriverError("its command buffers do not lead to the bound shader")
    return sorted(paths, key=lambda path: (len(path), path))


@dataclass(frozen=True)
class _Known:
    """What is known of shaders."""

    class_at: int
    table: int  # of functions, of all shaders
    start: int  # offsets of its numbers
    size: int

    def holds(self, memory: Memory, shader: int, kernel: int) -> bool:
        """Whether this is a shader that has a kernel, given by its offset from the instruction base."""
        if memory.number(shader + self.class_at) != self.table:
            return False
        content = memory.read(shader, _OBJECT)
        return len(content) == _OBJECT and 0 <= kernel - _u32(content, self.start) < _u32(content, self.size)


def _drawn(
    device: Device, memory: Memory, drawing: Sequence[bytes], known: _Known, dispatching: Sequence[int]
) -> dict[str, Any]:
    """Returns the paths from a command buffer to the array of the shaders with which it draws, best first, as `drawn`.

    And where a pipeline has its shaders, as `stages`: the offset of the first pointer, and the bytes to the next one;
    as `stage` the offset in a shader of its number in STAGES, 0 if it is not known; and as `kind` the offset of a small
    number that tells pipelines that draw from `dispatching`, with both numbers.
    """
    modules = [
        device.module(code) if stage < _WITHOUT_MESH or device.has_mesh else 0 for stage, code in enumerate(drawing)
    ]
    pipelines = [
        device.graphics_pipeline({STAGES[stage]: modules[stage] for stage in used}, value)
        for used, value in zip(_DRAWN_WITH, _VALUES, strict=True)
    ]
    view = device.image()
    kernels = [_draw(device, pipeline, view) for pipeline in pipelines]
    if [tuple(sorted(each)) for each in kernels] != list(_DRAWN_WITH):
        raise DriverError(_UNKNOWN_DRAW)
    found: list[dict[Path, list[int]]] = [{} for _ in pipelines]  # the shaders to which a path leads
    for first, second in zip(range(len(pipelines)), [*range(1, len(pipelines)), 0], strict=True):
        commands = device.commands()
        device.begin(commands)
        device.begin_rendering(commands, view)
        device.bind_graphics(commands, pipelines[first])
        device.draw(commands, _VERTICES)
        device.bind_graphics(commands, pipelines[second])  # what is bound now, not what was drawn
        memory.refresh()
        content = _readable(memory, commands, _COMMANDS)
        for at in range(0, len(content) - _WORD * _WITHOUT_MESH + 1, _WORD):
            if (word := _u64(content, at)) and (shaders := _stages(memory, content, at, kernels[second], known)):
                found[second][at,] = shaders
            elif word == pipelines[second]:
                object_ = _readable(memory, word, _PIPELINE)
                for inner in range(0, len(object_) - _WORD * _WITHOUT_MESH + 1, _WORD):
                    if shaders := _stages(memory, object_, inner, kernels[second], known):
                        found[second][at, inner] = shaders
    paths = sorted(set.intersection(*map(set, found)), key=lambda path: (len(path), path))
    if not paths:
        raise DriverError("its command buffers do not lead to the shaders with which they draw")
    of_each = [each[paths[0]] for each in found]
    contents = [_readable(memory, pipeline, _PIPELINE) for pipeline in pipelines]
    places = [{at: _u64(content, at) for at in range(0, len(content) - 7, _WORD)} for content in contents]
    for at in sorted(places[0]):
        for stride in range(_WORD, _MOST_STRIDE + 1, _WORD):
            slots = [{words.get(at + stride * stage, 0) for stage in range(_WITHOUT_MESH)} for words in places]
            if all(slot >= set(wanted) for slot, wanted in zip(slots, of_each, strict=True)):
                found_here = {
                    "drawn": paths,
                    "stages": (at, stride),
                    "stage": _stage(memory, of_each),
                    "kind": _kind(memory, dispatching, pipelines),
                }
                try:
                    with_mesh = _mesh(device, memory, modules, known, view, pipelines[0], kernels[0], found_here)
                except DriverError as error:
                    return found_here | {"no_mesh": str(error)}
                return found_here | {"drawn": with_mesh, "mesh": True}
    raise DriverError("its pipelines do not lead to the shaders with which they draw")


def _mesh(
    device: Device,
    memory: Memory,
    modules: Sequence[int],
    known: _Known,
    view: int,
    other: int,
    kernels_of_other: dict[int, set[int]],
    found: dict[str, Any],
) -> list[Path]:
    """Returns those of the paths `drawn` that lead to all of STAGES, for pipelines with and without mesh shaders.

    Args:
        device: the device.
        memory: of this process.
        modules: by number in STAGES.
        known: of shaders.
        view: an image to draw into.
        other: a pipeline without mesh shaders.
        kernels_of_other: its kernels.
        found: what _drawn found.

    Raises:
        DriverError: there is none, or these pipelines and shaders are not like others.
    """
    if not device.has_mesh:
        raise DriverError("it has no mesh shaders")
    drawn: list[Path] = found["drawn"]
    pipelines = [
        device.graphics_pipeline({STAGES[stage]: modules[stage] for stage in used}, value)
        for used, value in zip(_MESH_WITH, _VALUES, strict=False)
    ]
    kernels = [_draw(device, pipeline, view, has_mesh=True) for pipeline in pipelines]
    if [tuple(sorted(each)) for each in kernels] != list(_MESH_WITH):
        raise DriverError(_UNKNOWN_DRAW)
    commands = device.commands()
    device.begin(commands)
    device.begin_rendering(commands, view)
    order = [(other, kernels_of_other, False), *((*each, True) for each in zip(pipelines, kernels, strict=True))]
    for pipeline, of_pipeline, has_mesh in [*order, order[0], *order[::-1]]:  # each after each other one
        device.bind_graphics(commands, pipeline)
        memory.refresh()
        places = [(path, _follow(memory, commands, path)) for path in drawn]
        shaders = {path: _stages(memory, content, 0, of_pipeline, known, len(STAGES)) for path, content in places}
        drawn = [path for path in drawn if shaders[path]]
        if not drawn:
            raise DriverError("its command buffers do not lead to mesh shaders with which they draw")
        if has_mesh:
            numbers = [memory.number(shader + found["stage"], 4) for shader in shaders[drawn[0]]]
            first, stride = found["stages"]
            slots = {memory.number(pipeline + first + stride * stage) for stage in range(len(STAGES))}
            kind = memory.number(pipeline + found["kind"][0], 4)
            if numbers != sorted(of_pipeline) or kind != found["kind"][2] or not slots >= set(shaders[drawn[0]]):
                raise DriverError("its pipelines with mesh shaders are not like others")
            device.draw_mesh(commands, _GROUPS)
        else:
            device.draw(commands, _VERTICES)
    return drawn


def _follow(memory: Memory, commands: int, path: Path) -> bytes:
    """Returns the array of the shaders of STAGES to which a path leads; empty if it leads nowhere."""
    *before, last = path
    at: int | None = commands
    for offset in before:
        at = memory.number((at or 0) + offset)
    return memory.read(at + last, _WORD * len(STAGES)) if at else b""


def _stage(memory: Memory, shaders: Sequence[Sequence[int]]) -> int:
    """Returns the offset, in the shaders of _DRAWN_WITH, of the number of their stage; 0 if there is none."""
    numbers = zip(chain.from_iterable(shaders), chain.from_iterable(_DRAWN_WITH), strict=True)
    contents = [(memory.read(shader, _OBJECT), number) for shader, number in numbers]
    least = min(len(content) for content, _ in contents)
    places = (at for at in range(4, least - 3, 4) if all(_u32(content, at) == number for content, number in contents))
    return next(places, 0)


def _kind(memory: Memory, dispatching: Sequence[int], drawing: Sequence[int]) -> tuple[int, int, int]:
    contents = [[memory.read(pipeline, _OBJECT) for pipeline in each] for each in (dispatching, drawing)]
    least = min(map(len, chain.from_iterable(contents)))
    for at in range(_BASE, least - 3, 4):
        first, second = ({_u32(content, at) for content in each} for each in contents)
        if len(first) == len(second) == 1 and first != second and max(*first, *second) < _MOST_KINDS:
            return at, first.pop(), second.pop()
    raise DriverError("nothing tells its pipelines that draw from others")


def _draw(device: Device, pipeline: int, view: int, has_mesh: bool = False) -> dict[int, set[int]]:
    """Draws; returns the kernels that the commands have, by number in STAGES."""
    commands = device.commands()
    device.begin(commands)
    device.begin_rendering(commands, view)
    device.bind_graphics(commands, pipeline)
    before = _gpu_memory()
    if has_mesh:
        device.draw_mesh(commands, _GROUPS)
    else:
        device.draw(commands, _VERTICES)
    kernels: dict[int, set[int]] = {}
    primitives = 0
    for _, content in _changes(before, _gpu_memory()):
        padded = content + bytes(4 * _MOST_WORDS)  # the last command may end where the change does
        words = struct.unpack(f"<{len(padded) // 4}I", padded)
        for at in range(len(words) - _MOST_WORDS):
            primitives += words[at] >> 16 == _PRIMITIVE and words[at + _VERTICES_AT] == _VERTICES
            groups = words[at + _MESH_GROUPS_AT : at + _MESH_GROUPS_AT + len(_GROUPS)]
            primitives += words[at] >> 16 == _MESH_PRIMITIVE and groups == _GROUPS
            for stage, command, start, on, bits in _STAGE_COMMANDS:
                if words[at] == command and words[at + on] & bits:
                    kernels.setdefault(stage, set()).add(words[at + start] & ~(_BLOCK - 1))
    if primitives != 1:
        raise DriverError(_UNKNOWN_DRAW)
    return kernels


def _stages(
    memory: Memory, content: bytes, at: int, kernels: dict[int, set[int]], known: _Known, many: int = _WITHOUT_MESH
) -> list[int]:
    """Returns the shaders that the array at a place has, if it has these kernels' and no others; else an empty list."""
    if len(content) < at + _WORD * many:
        return []
    words = struct.unpack_from(f"<{many}Q", content, at)
    if {stage for stage, word in enumerate(words) if word} != set(kernels):
        return []
    if all(known.holds(memory, words[stage], kernel) for stage, each in kernels.items() for kernel in each):
        return [word for word in words if word]
    return []


def _readable(memory: Memory, address: int, most: int) -> bytes:
    """Reads as much as is mapped."""
    content = b""
    while len(content) < most and (more := memory.read(address + len(content), 0x1000)):
        content += more
    return content
