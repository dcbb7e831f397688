// SPDX-License-Identifier: Apache-2.0
// Another N is another shader.
#version 460
layout(constant_id = 0) const uint N = 3;
layout(triangles) in;
layout(triangle_strip, max_vertices = 3) out;
layout(location = 0) in vec4 colors[];
layout(location = 0) out vec4 color;
void main() {
    for (int i = 0; i < 3; i++) {
        vec4 s = colors[i];
        for (uint k = 0; k < N; k++)
            s = fma(s, sqrt(s + gl_in[i].gl_Position), vec4(float(k)));
        color = s;
        gl_Position = gl_in[i].gl_Position;
        EmitVertex();
    }
}
