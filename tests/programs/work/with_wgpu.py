"""Dispatches a kernel of WGSL ROUNDS times by wgpu, each in a command buffer of its own: with_wgpu.py ROUNDS."""

import os
import sys

import wgpu

SOURCE = """
@group(0) @binding(0) var<storage, read_write> values: array<u32>;
@compute @workgroup_size(32)
fn triple(@builtin(global_invocation_id) at: vec3<u32>) { values[at.x] = values[at.x] * 3u + at.x; }
"""
adapter = wgpu.gpu.request_adapter_sync()
device = adapter.request_device_sync()
values = device.create_buffer(size=4 * 512, usage=wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC)
stage = {"module": device.create_shader_module(code=SOURCE), "entry_point": "triple"}
pipeline = device.create_compute_pipeline(layout="auto", compute=stage)
bound = device.create_bind_group(
    layout=pipeline.get_bind_group_layout(0), entries=[{"binding": 0, "resource": {"buffer": values}}]
)


def triple() -> None:
    encoder = device.create_command_encoder()
    work = encoder.begin_compute_pass()
    work.set_pipeline(pipeline)
    work.set_bind_group(0, bound)
    work.dispatch_workgroups(512 // 32)
    work.end()
    device.queue.submit([encoder.finish()])


for _ in range(int(sys.argv[1])):
    triple()
assert len(device.queue.read_buffer(values)) == 4 * 512
os._exit(0)
