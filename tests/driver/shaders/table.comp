// SPDX-License-Identifier: Apache-2.0
// Its constant data follow its code.
#version 460
layout(local_size_x = 64) in;
layout(constant_id = 0) const uint N = 3;
layout(binding = 0) buffer In { float a[]; };
layout(binding = 1) buffer Out { float b[]; };
layout(push_constant) uniform P { uint n; } p;
const float T[64] = float[](1.5,2.5,3.25,4,5,6,7,8,9.1,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,37,38,39,40,41,42,43,44,45,46,47,48,49,50,51,52,53,54,55,56,57,58,59,60,61,62,63,64.5);
void main() { uint i = gl_GlobalInvocationID.x; b[i] = T[(i * p.n + uint(a[i])) & 63] ; }
