/* SPDX-License-Identifier: Apache-2.0
 *
 * The stand-in for Intel's runtime, libze_intel_gpu.so.1: modules placed where their debug ELF says, launches told to
 * the stand-in's GPU, and both told to whoever listens at the two probes of the patched driver.
 *
 *   STANDIN_DIR            folder of the GPU's socket; without it nothing is told to a GPU
 *   STANDIN_DUMP_DIR       where debug ELFs are written (default /tmp, as the patched driver has it)
 *   STANDIN_ADDRESS_DELTA  added to every GPU address: another process's kernels can lie elsewhere
 */
#define _GNU_SOURCE
#include "ze_api.h"
#include "probes.h"
#include "protocol.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EM_INTELGT 205
#define TEXT ".text."
/* What the patches pass: the base of one heap. On integrated GPUs it is not the base in use, and that is on purpose. */
#define IBA 0x800000000000ULL
#define INIT_NS 100000000L

struct standin_placed {
    uint64_t address, size;
    uint32_t *offsets; /* where instructions start */
    uint32_t instructions;
    char name[128];
};

struct standin_module {
    struct standin_module *next;
    unsigned char *elf;
    size_t size, kernels;
    struct standin_placed *placed;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int gpu = -1;
static pid_t connected; /* the process that `gpu` belongs to: a forked child needs a connection of its own */
static struct standin_module *modules;
static char dumped[256][64]; /* removed at exit */
static unsigned dumps;

/* --- the GPU */

static void announce(int fd, const struct standin_placed *kernel) {
    size_t size = sizeof(struct standin_kernel) + kernel->instructions * sizeof(uint32_t);
    struct standin_kernel *message = calloc(1, size);
    if (!message)
        return;
    message->type = STANDIN_MSG_KERNEL;
    message->pid = getpid();
    message->address = kernel->address;
    message->size = kernel->size;
    memcpy(message->name, kernel->name, sizeof message->name);
    message->instructions = kernel->instructions;
    memcpy(message->offsets, kernel->offsets, kernel->instructions * sizeof(uint32_t));
    send(fd, message, size, MSG_NOSIGNAL);
    free(message);
}

/* Called with the lock held. */
static int connect_gpu(void) {
    const char *folder = getenv("STANDIN_DIR");
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fd;

    if (!folder)
        return -1;
    int directory = open(folder, O_PATH | O_CLOEXEC);
    if (directory < 0)
        return -1;
    snprintf(name.sun_path, sizeof name.sun_path, "/proc/self/fd/%d/gpu.sock", directory); /* a path may be too long */
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&name, sizeof name)) {
        close(fd);
        fd = -1;
    }
    close(directory);
    if (fd >= 0)
        for (struct standin_module *module = modules; module; module = module->next)
            for (size_t i = 0; i < module->kernels; i++)
                announce(fd, &module->placed[i]);
    return fd;
}

static int connection(void) {
    static __thread pid_t checked;
    pid_t self = getpid();
    if (checked == self)
        return gpu;
    pthread_mutex_lock(&lock);
    if (connected != self) {
        gpu = connect_gpu();
        connected = self;
    }
    checked = self;
    pthread_mutex_unlock(&lock);
    return gpu;
}

/* --- modules */

/* The header of a section of this type and name's start; NULL at the end. All offsets were checked by `sound`. */
static Elf64_Shdr *section(unsigned char *elf, unsigned index) {
    Elf64_Ehdr *header = (Elf64_Ehdr *)elf;
    return (Elf64_Shdr *)(elf + header->e_shoff) + index;
}

static const char *section_name(unsigned char *elf, unsigned index) {
    Elf64_Ehdr *header = (Elf64_Ehdr *)elf;
    return (char *)elf + section(elf, header->e_shstrndx)->sh_offset + section(elf, index)->sh_name;
}

static bool sound(const unsigned char *elf, size_t size) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)elf;
    if (size < sizeof *header || memcmp(elf, ELFMAG, SELFMAG) || header->e_machine != EM_INTELGT)
        return false;
    if (header->e_shoff > size || header->e_shnum > (size - header->e_shoff) / sizeof(Elf64_Shdr) ||
        header->e_shstrndx >= header->e_shnum || header->e_phoff + header->e_phnum * sizeof(Elf64_Phdr) > size)
        return false;
    for (unsigned i = 0; i < header->e_shnum; i++) {
        const Elf64_Shdr *s = (const Elf64_Shdr *)(elf + header->e_shoff) + i;
        if (s->sh_type != SHT_NOBITS && (s->sh_offset > size || s->sh_size > size - s->sh_offset))
            return false;
    }
    return true;
}

static bool is_text(unsigned char *elf, unsigned index) {
    return index && index < ((Elf64_Ehdr *)elf)->e_shnum && !strncmp(section_name(elf, index), TEXT, strlen(TEXT));
}

/* Moves everything that is an address by `delta`, as if the driver had placed the module there. */
static void relocate(unsigned char *elf, uint64_t delta) {
    Elf64_Ehdr *header = (Elf64_Ehdr *)elf;
    Elf64_Phdr *segment = (Elf64_Phdr *)(elf + header->e_phoff);
    Elf64_Sym *symbols = NULL;
    size_t count = 0;

    for (unsigned i = 0; i < header->e_phnum; i++)
        if (segment[i].p_type == PT_LOAD)
            segment[i].p_vaddr += delta;
    for (unsigned i = 0; i < header->e_shnum; i++) {
        Elf64_Shdr *s = section(elf, i);
        if (is_text(elf, i))
            s->sh_addr += delta;
        if (s->sh_type == SHT_SYMTAB) {
            symbols = (Elf64_Sym *)(elf + s->sh_offset);
            count = s->sh_size / sizeof *symbols;
        }
    }
    for (unsigned i = 0; i < header->e_shnum; i++) {
        Elf64_Shdr *s = section(elf, i);
        if (s->sh_type != SHT_RELA || s->sh_info >= header->e_shnum)
            continue;
        Elf64_Shdr *target = section(elf, s->sh_info);
        Elf64_Rela *entry = (Elf64_Rela *)(elf + s->sh_offset);
        for (size_t n = s->sh_size / sizeof *entry; n; n--, entry++) {
            size_t index = ELF64_R_SYM(entry->r_info);
            if (index >= count || !is_text(elf, symbols[index].st_shndx) || entry->r_offset + 8 > target->sh_size)
                continue;
            unsigned char *place = elf + target->sh_offset + entry->r_offset;
            uint64_t value = symbols[index].st_value + delta + entry->r_addend;
            uint32_t low = value, high = value >> 32;
            switch (ELF64_R_TYPE(entry->r_info)) {
            case 1: /* R_ZE_SYM_ADDR */
                memcpy(place, &value, 8);
                break;
            case 2: /* R_ZE_SYM_ADDR_32 */
                memcpy(place, &low, 4);
                break;
            case 3: /* R_ZE_SYM_ADDR_32_HI */
                memcpy(place, &high, 4);
                break;
            }
        }
    }
    for (size_t i = 0; i < count; i++)
        if (is_text(elf, symbols[i].st_shndx))
            symbols[i].st_value += delta;
}

/* An instruction is 8 bytes when it is compacted (bit 29), otherwise 16. */
static void find_instructions(struct standin_placed *kernel, const unsigned char *code) {
    kernel->offsets = calloc(kernel->size / 8 + 1, sizeof(uint32_t));
    for (uint64_t at = 0; kernel->offsets && at + 8 <= kernel->size;) {
        uint32_t word;
        memcpy(&word, code + at, 4);
        kernel->offsets[kernel->instructions++] = at;
        at += word & (1u << 29) ? 8 : 16;
    }
}

static int place(struct standin_module *module) {
    Elf64_Ehdr *header = (Elf64_Ehdr *)module->elf;
    Elf64_Sym *symbols = NULL;
    const char *names = NULL;
    size_t count = 0;

    for (unsigned i = 0; i < header->e_shnum; i++)
        if (section(module->elf, i)->sh_type == SHT_SYMTAB) {
            Elf64_Shdr *s = section(module->elf, i);
            symbols = (Elf64_Sym *)(module->elf + s->sh_offset);
            count = s->sh_size / sizeof *symbols;
            names = (char *)module->elf + section(module->elf, s->sh_link % header->e_shnum)->sh_offset;
        }
    module->placed = calloc(header->e_shnum, sizeof *module->placed);
    if (!module->placed)
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    for (unsigned i = 0; i < header->e_shnum; i++) {
        if (!is_text(module->elf, i))
            continue;
        struct standin_placed *kernel = &module->placed[module->kernels];
        const char *name = section_name(module->elf, i) + strlen(TEXT);
        kernel->address = section(module->elf, i)->sh_addr;
        snprintf(kernel->name, sizeof kernel->name, "%s", name);
        for (size_t s = 0; s < count; s++) /* the section is padded: its kernel's symbol knows where the code ends */
            if (ELF64_ST_TYPE(symbols[s].st_info) == STT_FUNC && symbols[s].st_shndx == i &&
                !strcmp(names + symbols[s].st_name, name))
                kernel->size = symbols[s].st_size;
        if (kernel->size == 0 || kernel->size > section(module->elf, i)->sh_size)
            continue;
        find_instructions(kernel, module->elf + section(module->elf, i)->sh_offset);
        module->kernels++;
    }
    return ZE_RESULT_SUCCESS;
}

static void remove_dumps(void) {
    for (unsigned i = 0; i < dumps && i < sizeof dumped / sizeof *dumped; i++)
        unlink(dumped[i]);
}

/* The patched driver writes /tmp/dumped_zebin_module.elf, or a numbered one where that is taken. */
static void dump(const struct standin_module *module) {
    const char *folder = getenv("STANDIN_DUMP_DIR");
    char path[4096];
    int fd = -1;

    for (unsigned number = 0; fd < 0 && number < 100000; number++) {
        char suffix[16] = "";
        if (number)
            snprintf(suffix, sizeof suffix, "_%u", number);
        snprintf(path, sizeof path, "%s/dumped_zebin_module%s.elf", folder ? folder : "/tmp", suffix);
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (fd < 0 && errno != EEXIST)
            return;
    }
    for (size_t done = 0; done < module->size;) {
        ssize_t written = write(fd, module->elf + done, module->size - done);
        if (written <= 0)
            break;
        done += written;
    }
    close(fd);
    if (dumps < sizeof dumped / sizeof *dumped && strlen(path) < sizeof *dumped)
        strcpy(dumped[dumps++], path);
    if (dumps == 1)
        atexit(remove_dumps);
    LEVEL_ZERO_COMPILE_KERNEL(path);
}

/* --- the interface */

int zeInit(uint32_t flags) {
    (void)flags;
    nanosleep(&(struct timespec){0, INIT_NS}, NULL);
    connection();
    return ZE_RESULT_SUCCESS;
}

int zeModuleCreate(const void *elf, size_t size, ze_module_handle_t *out) {
    const char *delta = getenv("STANDIN_ADDRESS_DELTA");
    struct standin_module *module = calloc(1, sizeof *module);
    int fd = connection();

    if (!module || !sound(elf, size)) {
        free(module);
        return ZE_RESULT_ERROR_INVALID_NATIVE_BINARY;
    }
    module->size = size;
    module->elf = malloc(size);
    if (!module->elf)
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    memcpy(module->elf, elf, size);
    if (delta)
        relocate(module->elf, strtoull(delta, NULL, 0));
    if (place(module))
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    pthread_mutex_lock(&lock);
    module->next = modules;
    modules = module;
    if (LEVEL_ZERO_COMPILE_KERNEL_ENABLED())
        dump(module);
    for (size_t i = 0; fd >= 0 && i < module->kernels; i++)
        announce(fd, &module->placed[i]);
    pthread_mutex_unlock(&lock);
    *out = module;
    return ZE_RESULT_SUCCESS;
}

int zeModuleDestroy(ze_module_handle_t module) {
    pthread_mutex_lock(&lock);
    for (struct standin_module **link = &modules; *link; link = &(*link)->next)
        if (*link == module) {
            *link = module->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < module->kernels; i++)
        free(module->placed[i].offsets);
    free(module->placed);
    free(module->elf);
    free(module);
    return ZE_RESULT_SUCCESS;
}

size_t zeModuleGetKernelCount(ze_module_handle_t module) {
    return module->kernels;
}

ze_kernel_handle_t zeKernelCreate(ze_module_handle_t module, size_t index) {
    return index < module->kernels ? &module->placed[index] : NULL;
}

const char *zeKernelGetName(ze_kernel_handle_t kernel) {
    return kernel->name;
}

int zeCommandListAppendLaunchKernel(ze_kernel_handle_t kernel, const char *stack, uint64_t delay_ns,
                                    uint64_t duration_ns) {
    struct standin_launch message;
    size_t length = strlen(stack);
    int fd;

    if (LEVEL_ZERO_LAUNCH_KERNEL_ENABLED())
        LEVEL_ZERO_LAUNCH_KERNEL(IBA, kernel->address, kernel->size, kernel->name);
    fd = connection();
    if (fd < 0)
        return ZE_RESULT_SUCCESS;
    message.type = STANDIN_MSG_LAUNCH;
    message.pid = getpid();
    message.tid = syscall(SYS_gettid);
    message.pad = 0;
    message.address = kernel->address;
    message.delay_ns = delay_ns;
    message.duration_ns = duration_ns;
    if (length >= sizeof message.stack)
        length = sizeof message.stack - 1;
    memcpy(message.stack, stack, length);
    message.stack[length] = 0;
    send(fd, &message, offsetof(struct standin_launch, stack) + length + 1, MSG_NOSIGNAL);
    return ZE_RESULT_SUCCESS;
}

int zeCommandQueueSynchronize(void) {
    struct standin_sync message = {STANDIN_MSG_SYNC};
    pthread_mutex_lock(&lock);
    int fd = connect_gpu(); /* a connection of its own, so that nobody else's answer comes here */
    pthread_mutex_unlock(&lock);
    if (fd < 0)
        return ZE_RESULT_SUCCESS;
    if (send(fd, &message, sizeof message, MSG_NOSIGNAL) > 0)
        recv(fd, &message, sizeof message, 0);
    close(fd);
    return ZE_RESULT_SUCCESS;
}
