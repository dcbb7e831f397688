/* Where the driver that the tests play keeps things: nowhere that a real one does. driver.py says the same to ctypes. */
#include <stdint.h>

struct allocation {
    uint64_t kind, gpu, bytes;
};

struct code {
    const char *name;
    const void *isa;
    uint32_t size, flags;
    struct allocation *memory;
};

struct module {
    uint64_t kind;
    const void *binary;
    uint64_t bytes;
};

struct kernel {
    const void *class;
    struct code *code;
    uint64_t offset; /* of the first instruction, in the memory */
    struct module *module;
};

struct handle {
    uint64_t magic;
    struct kernel *kernel;
};

#define MODULE_BIAS 16 /* a program's handle of a module is so far behind the module */

extern const void *const kernel_class[4], *const other_class[4];
int launch(void *list, struct handle *kernel);
int launch_many(void *list, struct handle **kernels, uint32_t count);
int kernel_gone(struct handle *kernel);
int module_gone(void *module);
int execute(void *queue, uint32_t count, void **lists);
int list_closed(void *list);
int list_reset(void *list);
int list_gone(void *list);

/* What a program waits for. */
struct work {
    uint64_t ns;                          /* until it is ready */
    int result;                           /* of the wait then; 1 where the program waits for less */
    void (*meanwhile)(struct work *work); /* called by the driver while it waits */
    struct work *other;
};
int wait_event(struct work *work, uint64_t timeout);
int wait_queue(struct work *work, uint64_t timeout);
