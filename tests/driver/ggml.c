/* SPDX-License-Identifier: Apache-2.0
 * ggml LIBGGML_VULKAN [ROUNDS]: computes a small graph on ggml's Vulkan backend, as llama.cpp does, without a model. */
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SIDE = 512 };

int main(int argc, char **argv)
{
    ggml_backend_reg_t registry = argc > 1 ? ggml_backend_load(argv[1]) : NULL;
    if (!registry || !ggml_backend_reg_dev_count(registry))
        return 1;
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(registry, 0), NULL);
    struct ggml_init_params params = {64u << 20, NULL, true};
    struct ggml_context *context = ggml_init(params);
    struct ggml_tensor *half = ggml_new_tensor_2d(context, GGML_TYPE_F16, SIDE, SIDE);
    struct ggml_tensor *quantised = ggml_new_tensor_2d(context, GGML_TYPE_Q4_0, SIDE, SIDE);
    struct ggml_tensor *input = ggml_new_tensor_2d(context, GGML_TYPE_F32, SIDE, SIDE);
    struct ggml_tensor *x = ggml_soft_max(context, ggml_mul_mat(context, half, input));
    x = ggml_rms_norm(context, ggml_mul_mat(context, quantised, x), 1e-5f);
    x = ggml_add(context, ggml_silu(context, x), input);
    struct ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, x);
    ggml_backend_alloc_ctx_tensors(context, backend);
    static float values[SIDE * SIDE];
    ggml_backend_tensor_set(input, values, 0, sizeof(values));
    for (int i = 0; i < (argc > 2 ? atoi(argv[2]) : 10); i++)
        ggml_backend_graph_compute(backend, graph);
    ggml_backend_tensor_get(x, values, 0, sizeof(values));
    _exit(0); /* its threads and the driver's need not end */
}
