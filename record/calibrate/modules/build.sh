#!/bin/sh
# Makes the modules beside this file again, bit for bit, with the ocloc of the folder that scripts/test-driver prepares.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$("$here/../../scripts/test-driver")
libraries=$folder/usr/lib/x86_64-linux-gnu
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for device in bmg lnl ptl-h pvc; do
    for module in searched checked; do
        "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$folder"/usr/bin/ocloc-* compile -file "$here/$module.cl" \
            -device "$device" -options -cl-std=CL2.0 -exclude_ir -q -output "$module" -output_no_suffix -out_dir "$out"
        cp "$out/$module.bin" "$here/$module.$device.zebin"
    done
done
# Of Vulkan: tests/driver/shaders, which scripts/test-vulkan compiles.
shaders=$("$here/../../scripts/test-vulkan")/shaders
cp "$shaders/special.spv" "$here/searched.spv"
cp "$shaders/table.spv" "$here/checked.spv"
for stage in vertex control evaluation geometry fragment; do
    cp "$shaders/$stage.spv" "$here"
done
# Mesh shaders: the .mesh and .task beside this file, with glslangValidator 12.0 of Debian 12's glslang-tools, which has to be installed.
for stage in mesh task; do
    glslangValidator -V --target-env vulkan1.3 -o "$here/$stage.spv" "$here/$stage.$stage"
done
