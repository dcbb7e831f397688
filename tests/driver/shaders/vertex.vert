// SPDX-License-Identifier: Apache-2.0
// Another N is another shader.
#version 460
layout(constant_id = 0) const uint N = 3;
layout(location = 0) out vec4 color;
void main() {
    float s = float(gl_VertexIndex);
    for (uint k = 0; k < N; k++)
        s = fma(s, sqrt(s + float(gl_InstanceIndex)), float(k));
    color = vec4(s, s * 2.0, s + 1.0, 1.0);
    gl_Position = vec4(float(gl_VertexIndex & 1) - 0.5, float(gl_VertexIndex & 2) - 0.5, sin(s), 1.0);
}
