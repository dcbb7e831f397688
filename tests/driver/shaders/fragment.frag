// SPDX-License-Identifier: Apache-2.0
// Another N is another shader.
#version 460
layout(constant_id = 0) const uint N = 3;
layout(location = 0) in vec4 color;
layout(location = 0) out vec4 result;
void main() {
    vec4 s = color;
    for (uint k = 0; k < N; k++)
        s = fma(s, sqrt(s + gl_FragCoord), vec4(float(k)));
    result = s;
}
