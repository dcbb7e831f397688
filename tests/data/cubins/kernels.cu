__device__ __forceinline__ float scaled(float value, float factor) {
    return value * factor + 1.0f;
}

__device__ __noinline__ float summed(const float *values, int count) {
    float sum = 0;
    for (int at = 0; at < count; at++)
        sum += scaled(values[at], 0.5f);
    return sum;
}

namespace math {
template <typename T> __global__ void scale(T *out, const T *in, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        out[at] = scaled(in[at], 3.0f);
}
template __global__ void scale<float>(float *, const float *, int);
}

extern "C" __global__ void reduce(float *out, const float *in, int count) {
    __shared__ float part[256];
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = at < count ? summed(in + at, 16) : 0;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half)
            part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = part[0];
}
