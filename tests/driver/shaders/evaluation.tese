// SPDX-License-Identifier: Apache-2.0
// Another N is another shader.
#version 460
layout(constant_id = 0) const uint N = 3;
layout(triangles) in;
layout(location = 0) in vec4 controlled[];
layout(location = 0) out vec4 color;
void main() {
    vec4 s = controlled[0] * gl_TessCoord.x + controlled[1] * gl_TessCoord.y + controlled[2] * gl_TessCoord.z;
    for (uint k = 0; k < N; k++)
        s = fma(s, sqrt(s), vec4(float(k)));
    color = s;
    gl_Position = gl_in[0].gl_Position + s;
}
