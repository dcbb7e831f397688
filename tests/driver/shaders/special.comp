// SPDX-License-Identifier: Apache-2.0
// A loop of N steps: another N is another shader.
#version 460
layout(local_size_x = 64) in;
layout(constant_id = 0) const uint N = 3;
layout(binding = 0) buffer In { float a[]; };
layout(binding = 1) buffer Out { float b[]; };
layout(push_constant) uniform P { uint n; } p;
void main() {
    uint i = gl_GlobalInvocationID.x;
    float s = 0.0;
    for (uint k = 0; k < N; k++)
        s = fma(s, a[i * p.n + k * 7], sqrt(a[k + p.n]));
    b[i] = s;
}
