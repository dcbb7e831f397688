// The module with which `iaprof calibrate` checks what it found: none of its kernels was searched. Its constants and its
// variable make the driver allocate more for it than code.

__constant float WEIGHTS[8] = {0.5f, 0.25f, 0.125f, 0.75f, 1.5f, 3.0f, 6.0f, 12.0f};
__global int count = 1;

__kernel void scale(__global float *values) {
  values[get_global_id(0)] *= WEIGHTS[get_global_id(0) & 7];
  atomic_inc(&count);
}

__kernel void reverse_in_blocks_of_a_group(__global const float4 *from, __global float4 *to, __local float4 *block) {
  size_t here = get_local_id(0), last = get_local_size(0) - 1;
  block[here] = from[get_global_id(0)];
  barrier(CLK_LOCAL_MEM_FENCE);
  to[get_global_id(0)] = block[last - here].wzyx;
}
