// The module in which `iaprof calibrate` searches. Names that a string holds in itself and one that it cannot; sizes that all differ.

__kernel void add(__global const float *a, __global const float *b, __global float *sum) {
  size_t i = get_global_id(0);
  sum[i] = a[i] + b[i];
}

__kernel void sum_of_sixteen_rows(__global const float *rows, __global float *sums, int columns) {
  size_t column = get_global_id(0);
  float sum = 0.0f;
#pragma unroll
  for (int row = 0; row < 16; row++)
    sum = fma(sum, 0.5f, rows[row * columns + column]);
  sums[column] = sum;
}

__kernel void iterate(__global float2 *points, int steps) {
  float2 at = points[get_global_id(0)];
  for (int step = 0; step < steps; step++)
    at = (float2)(at.x * at.x - at.y * at.y, 2.0f * at.x * at.y + native_sin(at.x)) / (1.0f + dot(at, at));
  points[get_global_id(0)] = at;
}
