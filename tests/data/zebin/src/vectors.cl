/* Several kernels in one module, with a function that the compiler inlines into each. */

static float weigh(float value, int turn)
{
    float weight = 1.0f / (float)(turn + 1);
    return value * weight + 0.25f;
}

__kernel void shift(__global float *out, __global const float *in, int by)
{
    int i = get_global_id(0);
    out[i] = in[i + by];
}

__kernel void copy(__global float *out, __global const float *in, int turns)
{
    int i = get_global_id(0);
    float sum = 0.0f;
    for (int turn = 0; turn < turns; turn++)
        sum += weigh(in[i], turn);
    out[i] = sum;
}

__kernel void scan(__global float *out, __global const float *in, int turns)
{
    int i = get_global_id(0);
    float most = in[i];
    for (int turn = 1; turn < turns; turn++) {
        float next = weigh(in[i + turn], turn);
        most = fmax(most, next);
    }
    out[i] = most;
}

__kernel void first(__global float *out, __global const float *in)
{
    int i = get_global_id(0);
    out[i] = weigh(in[i], 1);
}

__kernel void second(__global float *out, __global const float *in)
{
    int i = get_global_id(0);
    out[i] = weigh(in[i], 1);
}
