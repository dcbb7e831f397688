// SPDX-License-Identifier: Apache-2.0
// Another N is another shader.
#version 460
layout(constant_id = 0) const uint N = 3;
layout(vertices = 3) out;
layout(location = 0) in vec4 colors[];
layout(location = 0) out vec4 controlled[];
void main() {
    vec4 s = colors[gl_InvocationID];
    for (uint k = 0; k < N; k++)
        s = fma(s, sqrt(s + gl_in[gl_InvocationID].gl_Position), vec4(float(k)));
    controlled[gl_InvocationID] = s;
    gl_out[gl_InvocationID].gl_Position = gl_in[gl_InvocationID].gl_Position;
    gl_TessLevelOuter[0] = gl_TessLevelOuter[1] = gl_TessLevelOuter[2] = gl_TessLevelInner[0] = 2.0;
}
