"""Calls Mesa's Vulkan driver for `iaprof calibrate` by the functions that it gives loaders, without loader and layers.

Structures and numbers are those of vulkan_core.h and never change; the numbers after a structure's name are its sType.
Every failing call raises DriverError.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from typing import Any

from iaprof.record.calibrate.level_zero_driver import DriverError, load

OF_VULKAN = "vk_icdGetInstanceProcAddr"  # the function by which loaders recognize such a driver
INTEL = 0x8086
MOST_DEVICES = 8
_MOST_EXTENSIONS = 1024
# Functions of an extension can be had only if it is enabled. Others are not: with all of them, some drivers make other
# commands of a dispatch.
_MESH = b"VK_EXT_mesh_shader"
_EXTENSIONS = (b"VK_KHR_device_address_commands", b"VK_EXT_multi_draw", b"VK_EXT_transform_feedback", _MESH)
_EXTENSION_BYTES = 260  # of VkExtensionProperties, which begins with the name
_VERSION_1_3 = 0x403000
_COMPUTE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
_STORAGE_BUFFER, _OF_GRAPHICS, _OF_COMPUTE = 7, 0, 1  # VkDescriptorType, VkPipelineBindPoint
_REQUIRED_SIZE = 1000225001  # VkPipelineShaderStageRequiredSubgroupSizeCreateInfo
# VkShaderStageFlagBits: vertex, tessellation control and evaluation, geometry, fragment, compute, task, mesh.
STAGES = (1, 2, 4, 8, 16, _COMPUTE, 64, 128)
_TRIANGLES, _PATCHES = 3, 10  # VkPrimitiveTopology
_COLOR = 37  # VK_FORMAT_R8G8B8A8_UNORM
_SIDE = 64  # of what is drawn into, pixels
_INDIRECT_USAGE = 0x120  # of a buffer: storage, indirect
_COPIED_USAGE = 3  # of a buffer or image: source and target of copies
_COLOR_USAGE = 0x10  # of an image
_BUFFER_BYTES = 4096
_GENERAL = 1  # VkImageLayout
# With INTEL_DEBUG=heaps the driver prints the ranges of its address space when a device is made.
_WINDOW = re.compile(rb"0x([0-9a-f]{16})-0x([0-9a-f]{16}): (?:shader_heap|instruction_state_pool)\b")
_INNER = {  # functions that may call another one for all of their work, and that one
    "vkCmdDispatch": "vkCmdDispatchBase",
    "vkCmdDispatchIndirect": "vkCmdDispatchIndirect2KHR",
    "vkQueueSubmit": "vkQueueSubmit2",
    "vkCmdDrawIndirect": "vkCmdDrawIndirect2KHR",
    "vkCmdDrawIndexedIndirect": "vkCmdDrawIndexedIndirect2KHR",
    "vkCmdDrawIndirectCount": "vkCmdDrawIndirectCount2KHR",
    "vkCmdDrawIndexedIndirectCount": "vkCmdDrawIndexedIndirectCount2KHR",
    "vkCmdDrawIndirectByteCountEXT": "vkCmdDrawIndirectByteCount2EXT",
    "vkCmdDrawMeshTasksIndirectEXT": "vkCmdDrawMeshTasksIndirect2EXT",
    "vkCmdDrawMeshTasksIndirectCountEXT": "vkCmdDrawMeshTasksIndirectCount2EXT",
}
_DEVICE_BYTES = 0x10000  # of a VkDevice that are searched for its table of functions


def _pointers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


class VulkanDriver:
    """The driver, an instance, and the instance's devices."""

    def __init__(self, library: str) -> None:
        """Loads and initializes the driver."""
        self._library = load(library, ("vk_icdGetInstanceProcAddr", "vk_icdNegotiateLoaderICDInterfaceVersion"))
        self._find = self._library.vk_icdGetInstanceProcAddr
        self._find.restype = c_void_p
        self._kept: list[Any] = []
        version = c_uint32(5)
        self._library.vk_icdNegotiateLoaderICDInterfaceVersion(ctypes.byref(version))
        self._instance = 0
        # VkApplicationInfo 0, VkInstanceCreateInfo 1
        application = self.block(struct.pack("<IIQQIIQIII", 0, 0, 0, 0, 0, 0, 0, 0, _VERSION_1_3, 0))
        names = self.block(_pointers(self.block(b"VK_EXT_debug_utils\0")))
        info = struct.pack("<IIQIIQIIQIIQ", 1, 0, 0, 0, 0, application, 0, 0, 0, 1, 0, names)
        self._instance = self.create("vkCreateInstance", self.block(info), 0)
        count = c_uint32(MOST_DEVICES)
        devices = (c_uint64 * MOST_DEVICES)()
        self.call("vkEnumeratePhysicalDevices", self._instance, ctypes.addressof(count), ctypes.addressof(devices))
        self._physical = list(devices)[: count.value]
        find = ctypes.CFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p)
        self.find_in_device = find(self._address("vkGetDeviceProcAddr"))

    def _address(self, name: str) -> int:
        address: int | None = self._find(c_void_p(self._instance), name.encode())
        if not address:
            raise DriverError(f"it has no {name}")
        return address

    def block(self, data: bytes) -> int:
        """Keeps bytes in memory; returns their address."""
        buffer = ctypes.create_string_buffer(data, len(data))
        self._kept.append(buffer)
        return ctypes.addressof(buffer)

    def call(self, name: str, *arguments: int, at: int = 0) -> None:
        """Calls a function, which returns a VkResult, of the instance or at an address."""
        result = _call(at or self._address(name), arguments)
        if result < 0:
            raise DriverError(f"{name} fails with {result}")

    def create(self, name: str, *arguments: int, at: int = 0) -> int:
        """Calls a function that creates an object, whose last argument is where it writes the handle."""
        handle = c_uint64()
        self.call(name, *arguments, ctypes.addressof(handle), at=at)
        return handle.value

    def devices(self) -> Iterator[Device]:
        """Makes each of the GPUs' devices."""
        for physical in self._physical:
            properties = ctypes.create_string_buffer(4096)
            _call(self._address("vkGetPhysicalDeviceProperties"), (physical, ctypes.addressof(properties)))
            version, vendor = struct.unpack_from("<II", properties.raw, 4)
            name = properties.raw[20:276].split(b"\0")[0].decode("utf-8", "replace")
            if vendor == INTEL:
                yield Device(self, physical, name, f"{version >> 22}.{version >> 12 & 0x3FF}.{version & 0xFFF}")

    def extensions(self, physical: int) -> list[bytes]:
        """Returns the names of those of _EXTENSIONS that a GPU has."""
        properties = ctypes.create_string_buffer(_EXTENSION_BYTES * _MOST_EXTENSIONS)
        count = c_uint32(_MOST_EXTENSIONS)
        arguments = (physical, 0, ctypes.addressof(count), ctypes.addressof(properties))
        self.call("vkEnumerateDeviceExtensionProperties", *arguments)
        found = {
            properties.raw[at : at + _EXTENSION_BYTES].split(b"\0")[0]
            for at in range(0, _EXTENSION_BYTES * count.value, _EXTENSION_BYTES)
        }
        return [name for name in _EXTENSIONS if name in found]


def _call(address: int, arguments: Sequence[int]) -> int:
    result: int = ctypes.CFUNCTYPE(ctypes.c_int32)(address)(*map(c_uint64, arguments))
    return result


class Device:
    """A device of a GPU, with what a dispatch needs."""

    def __init__(self, driver: VulkanDriver, physical: int, name: str, version: str) -> None:
        """Does nothing yet: see `open`."""
        self._driver, self._physical, self.name, self.version = driver, physical, name, version
        self.handle = 0

    def open(self) -> None:
        """Makes the device and its objects."""
        driver = self._driver
        extensions = driver.extensions(self._physical)
        names, count = driver.block(_pointers(*(driver.block(name + b"\0") for name in extensions))), len(extensions)
        # VkDeviceQueueCreateInfo 2, VkDeviceCreateInfo 3
        queue = driver.block(struct.pack("<IIQIIIIQ", 2, 0, 0, 0, 0, 1, 0, driver.block(struct.pack("<f", 1))))
        self.has_mesh = _MESH in extensions
        # VkPhysicalDeviceMeshShaderFeaturesEXT: task and mesh shaders
        mesh = driver.block(struct.pack("<IIQ6I", 1000328000, 0, 0, 1, 1, 0, 0, 0, 0)) if self.has_mesh else 0
        info = struct.pack("<IIQIIQIIQIIQQ", 3, 0, mesh, 0, 1, queue, 0, 0, 0, count, 0, names, 0)
        self.handle = driver.create("vkCreateDevice", self._physical, driver.block(info), 0)
        queue_handle = c_uint64()
        self._void("vkGetDeviceQueue", self.handle, 0, 0, ctypes.addressof(queue_handle))
        self._queue = queue_handle.value
        # VkDescriptorSetLayoutCreateInfo 32, VkPipelineLayoutCreateInfo 30 with four bytes of push constants
        buffers = (struct.pack("<IIIIQ", number, _STORAGE_BUFFER, 1, _COMPUTE, 0) for number in range(2))
        bindings = driver.block(b"".join(buffers))
        set_layout = self._make("vkCreateDescriptorSetLayout", struct.pack("<IIQIIQ", 32, 0, 0, 0, 2, bindings))
        layouts, constants = driver.block(_pointers(set_layout)), driver.block(struct.pack("<III", _COMPUTE, 0, 4))
        self._layout = self._make(
            "vkCreatePipelineLayout", struct.pack("<IIQIIQIIQ", 30, 0, 0, 0, 1, layouts, 1, 0, constants)
        )
        # VkDescriptorPoolCreateInfo 33, VkDescriptorSetAllocateInfo 34, VkCommandPoolCreateInfo 39 with single resets
        sizes = driver.block(struct.pack("<II", _STORAGE_BUFFER, 2))
        pool = self._make("vkCreateDescriptorPool", struct.pack("<IIQIIIIQ", 33, 0, 0, 0, 1, 1, 0, sizes))
        info = struct.pack("<IIQQIIQ", 34, 0, 0, pool, 1, 0, layouts)
        self._set = driver.create(
            "vkAllocateDescriptorSets", self.handle, driver.block(info), at=self.function("vkAllocateDescriptorSets")
        )
        self._pool = self._make("vkCreateCommandPool", struct.pack("<IIQII", 39, 0, 0, 2, 0))

    def function(self, name: str) -> int:
        """Returns the address of a function."""
        address = self.functions([name]).get(name)
        if not address:
            raise DriverError(f"it has no {name}")
        return address

    def functions(self, names: Sequence[str]) -> dict[str, int]:
        """Returns the addresses of those functions that it has, by name."""
        found = {name: self._driver.find_in_device(self.handle, name.encode()) for name in names}
        return {name: address for name, address in found.items() if address}

    def _void(self, name: str, *arguments: int) -> None:
        _call(self.function(name), arguments)

    def _call(self, name: str, *arguments: int) -> None:
        self._driver.call(name, *arguments, at=self.function(name))

    def _make(self, name: str, info: bytes) -> int:
        return self._driver.create(name, self.handle, self._driver.block(info), 0, at=self.function(name))

    def module(self, code: bytes) -> int:
        """Makes a shader module of SPIR-V."""
        info = struct.pack("<IIQIIQQ", 16, 0, 0, 0, 0, len(code), self._driver.block(code))
        return self._make("vkCreateShaderModule", info)

    def pipeline(self, module: int, value: int, lanes: int = 0) -> int:
        """Makes a pipeline of a module whose specialization constant 0 has a value, of so many lanes; 0 for any."""
        block = self._driver.block
        entry = block(struct.pack("<IIQ", 0, 0, 4))
        special = block(struct.pack("<IIQQQ", 1, 0, entry, 4, block(struct.pack("<I", value))))
        # VkPipelineShaderStageCreateInfo 18 in VkComputePipelineCreateInfo 29
        size = block(struct.pack("<IIQII", _REQUIRED_SIZE, 0, 0, lanes, 0)) if lanes else 0
        stage = struct.pack("<IIQIIQQQ", 18, 0, size, 0, _COMPUTE, module, block(b"main\0"), special)
        info = struct.pack("<IIQII", 29, 0, 0, 0, 0) + stage + struct.pack("<QQii", self._layout, 0, -1, 0)
        arguments = (self.handle, 0, 1, block(info), 0)
        return self._driver.create("vkCreateComputePipelines", *arguments, at=self.function("vkCreateComputePipelines"))

    def graphics_pipeline(self, modules: Mapping[int, int], value: int) -> int:
        """Makes a pipeline that draws triangles, or patches if it has shaders of tessellation.

        Args:
            modules: by stage.
            value: of their constants.
        """
        block = self._driver.block
        entry = block(struct.pack("<IIQ", 0, 0, 4))
        special = block(struct.pack("<IIQQQ", 1, 0, entry, 4, block(struct.pack("<I", value))))
        # VkPipelineShaderStageCreateInfo 18; the numbers of the others are 19 to 27, that of the pipeline is 28
        main = block(b"main\0")
        stages = (
            struct.pack("<IIQIIQQQ", 18, 0, 0, 0, stage, module, main, special) for stage, module in modules.items()
        )
        has_patches = STAGES[1] in modules
        of_vertices = block(struct.pack("<IIQIIQIIQ", 19, 0, 0, 0, 0, 0, 0, 0, 0))
        assembly = block(struct.pack("<IIQIII", 20, 0, 0, 0, _PATCHES if has_patches else _TRIANGLES, 0))
        tessellation = block(struct.pack("<IIQII", 21, 0, 0, 0, 3))
        whole = block(struct.pack("<6f", 0, 0, _SIDE, _SIDE, 0, 1))
        scissor = block(struct.pack("<4I", 0, 0, _SIDE, _SIDE))
        viewport = block(struct.pack("<IIQIIQIIQ", 22, 0, 0, 0, 1, whole, 1, 0, scissor))
        raster = block(struct.pack("<IIQ7I4fI", 23, 0, 0, *[0] * 7, 0, 0, 0, 1, 0))
        samples = block(struct.pack("<IIQIIIfQII", 24, 0, 0, 0, 1, 0, 0, 0, 0, 0))
        blended = block(struct.pack("<8I", 0, 0, 0, 0, 0, 0, 0, 15))
        blend = block(struct.pack("<IIQIIIIQ4f", 26, 0, 0, 0, 0, 0, 1, blended, 0, 0, 0, 0))
        # VkPipelineRenderingCreateInfo
        rendering = block(struct.pack("<IIQIIQII", 1000044002, 0, 0, 0, 1, block(struct.pack("<I", _COLOR)), 0, 0))
        info = struct.pack("<IIQIIQ", 28, 0, rendering, 0, len(modules), block(b"".join(stages)))
        info += _pointers(of_vertices, assembly, tessellation, viewport, raster, samples, 0, blend, 0, self._layout)
        info += struct.pack("<QIIQII", 0, 0, 0, 0, 0xFFFFFFFF, 0)
        arguments = (self.handle, 0, 1, block(info), 0)
        name = "vkCreateGraphicsPipelines"
        return self._driver.create(name, *arguments, at=self.function(name))

    def image(self) -> int:
        """Makes a view of an image to draw into."""
        image = self._image(1, _COLOR_USAGE)
        # VkImageViewCreateInfo
        info = struct.pack("<IIQIIQII9II", 15, 0, 0, 0, 0, image, 1, _COLOR, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0)
        return self._make("vkCreateImageView", info)

    def _image(self, samples: int, usage: int) -> int:
        # VkImageCreateInfo, of two dimensions
        sizes = (_SIDE, _SIDE, 1, 1, 1, samples, 0, usage, 0, 0, 0, 0, 0)
        image = self._make("vkCreateImage", struct.pack("<IIQ14IQI", 14, 0, 0, 0, 1, _COLOR, *sizes))
        memory = self._allocate("vkGetImageMemoryRequirements", image)
        self._call("vkBindImageMemory", self.handle, image, memory, 0)
        return image

    def operations(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Returns calls for each of which it has one of its own kernels copy, blit or clear.

        Returns:
            Which of these it is, the function, and its arguments after the command buffer.
        """
        block = self._driver.block
        first, second = (self._buffer(_COPIED_USAGE) for _ in range(2))
        image, other = (self._image(1, _COLOR_USAGE | _COPIED_USAGE) for _ in range(2))
        sampled = self._image(4, _COLOR_USAGE | _COPIED_USAGE)
        layer = struct.pack("<4I", 1, 0, 0, 1)
        origin, extent = struct.pack("<3i", 0, 0, 0), struct.pack("<3I", 16, 16, 1)
        # VkImageCopy and VkImageResolve, VkImageBlit, VkImageSubresourceRange, VkBufferImageCopy, VkBufferCopy
        region = block(layer + origin + layer + origin + extent)
        shrunk = block(layer + origin + extent + layer + origin + struct.pack("<3I", 8, 8, 1))
        whole, color = block(struct.pack("<5I", 1, 0, 1, 0, 1)), block(struct.pack("<4f", 1, 0, 0, 1))
        of_buffer = block(struct.pack("<QII", 0, 0, 0) + layer + origin + extent)
        images = (image, _GENERAL, other, _GENERAL, 1)
        return [
            ("clear", "vkCmdFillBuffer", (first, 0, _BUFFER_BYTES, 7)),
            ("copy", "vkCmdUpdateBuffer", (first, 0, 64, block(bytes(64)))),
            ("copy", "vkCmdCopyBuffer", (first, second, 1, block(struct.pack("<3Q", 0, 0, 1024)))),
            ("copy", "vkCmdCopyImage", (*images, region)),
            ("blit", "vkCmdBlitImage", (*images, shrunk, 0)),
            ("blit", "vkCmdBlitImage", (*images, shrunk, 1)),
            ("clear", "vkCmdClearColorImage", (image, _GENERAL, color, 1, whole)),
            ("copy", "vkCmdCopyBufferToImage", (first, image, _GENERAL, 1, of_buffer)),
            ("copy", "vkCmdCopyImageToBuffer", (image, _GENERAL, first, 1, of_buffer)),
            ("blit", "vkCmdResolveImage", (sampled, _GENERAL, other, _GENERAL, 1, region)),
            ("clear", "vkCmdClearColorImage", (sampled, _GENERAL, color, 1, whole)),
        ]

    def record(self, function: str, commands: int, arguments: Sequence[int]) -> None:
        """Calls a function that records a command."""
        self._void(function, commands, *arguments)

    def begin_rendering(self, commands: int, view: int) -> None:
        """Begins to draw into an image."""
        # VkRenderingAttachmentInfo 1000044001, VkRenderingInfo 1000044000
        info = (1000044001, 0, 0, view, 1, 0, 0, 0, 2, 0, *[0] * 5)
        attachment = self._driver.block(struct.pack("<IIQQIIQIII4II", *info))
        info = (1000044000, 0, 0, 0, 0, 0, _SIDE, _SIDE, 1, 0, 1, attachment, 0, 0)
        self._void("vkCmdBeginRendering", commands, self._driver.block(struct.pack("<IIQIiiIIIIIQQQ", *info)))

    def bind_graphics(self, commands: int, pipeline: int) -> None:
        """Binds a pipeline that draws."""
        self._void("vkCmdBindPipeline", commands, _OF_GRAPHICS, pipeline)

    def draw(self, commands: int, vertices: int) -> None:
        """Draws with the bound pipeline."""
        self._void("vkCmdDraw", commands, vertices, 1, 0, 0)

    def draw_mesh(self, commands: int, groups: Sequence[int]) -> None:
        """Draws with the bound pipeline, which has a mesh shader."""
        self._void("vkCmdDrawMeshTasksEXT", commands, *groups)

    def commands(self) -> int:
        """Makes a command buffer."""
        info = struct.pack("<IIQQII", 40, 0, 0, self._pool, 0, 1)
        name = "vkAllocateCommandBuffers"
        return self._driver.create(name, self.handle, self._driver.block(info), at=self.function(name))

    def begin(self, commands: int) -> None:
        """Begins to record commands."""
        self._call("vkBeginCommandBuffer", commands, self._driver.block(struct.pack("<IIQIIQ", 42, 0, 0, 0, 0, 0)))

    def bind(self, commands: int, pipeline: int) -> None:
        """Binds a pipeline and what it needs."""
        sets = self._driver.block(_pointers(self._set))
        self._void("vkCmdBindPipeline", commands, _OF_COMPUTE, pipeline)
        self._void("vkCmdBindDescriptorSets", commands, _OF_COMPUTE, self._layout, 0, 1, sets, 0, 0)

    def dispatch(self, commands: int, groups: Sequence[int]) -> None:
        """Dispatches the bound pipeline."""
        self._void("vkCmdDispatch", commands, *groups)

    def _buffer(self, usage: int) -> int:
        # VkBufferCreateInfo 12; VkMemoryAllocateInfo is 5
        info = struct.pack("<IIQIIQIIIIQ", 12, 0, 0, 0, 0, _BUFFER_BYTES, usage, 0, 0, 0, 0)
        buffer = self._make("vkCreateBuffer", info)
        memory = self._allocate("vkGetBufferMemoryRequirements", buffer)
        self._call("vkBindBufferMemory", self.handle, buffer, memory, 0)
        return buffer

    def _allocate(self, requirements: str, object_: int) -> int:
        needed = ctypes.create_string_buffer(24)  # VkMemoryRequirements
        self._void(requirements, self.handle, object_, ctypes.addressof(needed))
        size, _, types = struct.unpack_from("<QQI", needed.raw)
        first_type = (types & -types).bit_length() - 1
        return self._make("vkAllocateMemory", struct.pack("<IIQQII", 5, 0, 0, size, first_type, 0))

    def forwarding(self, read: Any) -> list[str]:
        """Returns the functions that do nothing but call their inner one, through the device's table of functions.

        Tried with a function of ours in that table.

        Args:
            read: reads this process's memory: (address, bytes) -> bytes.
        """
        commands, buffer = self.commands(), self._buffer(_INDIRECT_USAGE)
        self.begin(commands)
        calls = {
            "vkCmdDispatch": (commands, 1, 1, 1),
            "vkCmdDispatchIndirect": (commands, buffer, 0),
            "vkQueueSubmit": (self._queue, 0, 0, 0),
            "vkCmdDrawIndirect": (commands, buffer, 0, 1, 16),
            "vkCmdDrawIndexedIndirect": (commands, buffer, 0, 1, 20),
            "vkCmdDrawIndirectCount": (commands, buffer, 0, buffer, 64, 1, 16),
            "vkCmdDrawIndexedIndirectCount": (commands, buffer, 0, buffer, 64, 1, 20),
            "vkCmdDrawIndirectByteCountEXT": (commands, 1, 0, buffer, 0, 0, 4),
            "vkCmdDrawMeshTasksIndirectEXT": (commands, buffer, 0, 1, 12),
            "vkCmdDrawMeshTasksIndirectCountEXT": (commands, buffer, 0, buffer, 64, 1, 12),
        }
        functions = self.functions([*_INNER, *_INNER.values()])
        return [
            name
            for name, arguments in calls.items()
            if name in functions and self._calls(functions[name], arguments, functions.get(_INNER[name], 0), read)
        ]

    def _calls(self, function: int, arguments: Sequence[int], inner: int, read: Any) -> bool:
        called: list[int] = []

        def note(first: int) -> int:
            called.append(first)
            return 0

        ours = ctypes.CFUNCTYPE(ctypes.c_int32, c_uint64)(note)
        address = ctypes.cast(ours, c_void_p).value or 0
        content = read(self.handle, _DEVICE_BYTES)
        words = struct.unpack_from(f"<{len(content) // 8}Q", content)
        places = [self.handle + 8 * index for index, word in enumerate(words) if inner and word == inner]
        if not places or function == inner:
            return False
        try:
            for place in places:
                c_uint64.from_address(place).value = address
            _call(function, arguments)
        finally:
            for place in places:
                c_uint64.from_address(place).value = inner
        return called == [arguments[0]]


def window(printed: bytes) -> tuple[int, int] | None:
    """Returns start and bytes of the range in which all shaders lie; None if the driver did not print it."""
    found = _WINDOW.findall(printed)
    if not found:
        return None
    start, end = (int(number, 16) for number in found[-1])
    return start, end - start
