/* SPDX-License-Identifier: Apache-2.0 */
/* libze_intel_gpu.so.1 of the stand-in: what a recorder can see of Intel's runtime, with a GPU that is another process.
 *
 * It is the patched NEO as intel/iaprof's patches make it: two USDT probes with semaphores, a debug ELF written to a file and named
 * by a probe, kernels at GPU addresses. It computes nothing. What it tells the GPU is in protocol.h.
 *
 *   STANDIN_DIR            the GPU's folder; without it there is no GPU, and launches go nowhere (their probe fires all the same)
 *   STANDIN_DUMP_DIR       where debug ELFs are written (/tmp)
 *   STANDIN_KEEP           leave them there, as NEO does; else they are removed when the process exits
 *   STANDIN_ADDRESS_DELTA  how far from their own addresses modules are placed: a multiple of 4096, may be negative
 *
 * A module whose place is taken is put below, 64 KiB at a time: a file loaded twice, or created again before the old one is
 * destroyed, has two addresses, and a place that was given back is used again. */
#define _GNU_SOURCE
#include "probes.h"
#include "protocol.h"
#include "ze_api.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MACHINE 205 /* EM_INTELGT */
#define PAGE 4096u
#define PLACE_STEP 0x10000u
#define KERNEL_PREFIX ".text."
#define DEBUG_RELOCATIONS ".rela.debug_"
#define COMPACTED (1u << 29) /* of an instruction's first dword: it has 8 bytes, not 16 */
#define LARGEST_MODULE (64u << 20)
#define DUMP_LIFE_NS 1000000000ull
/* The internal heap's base as the patches report it: right on bmg and pvc, wrong on lnl and ptl, where the driver uses another
 * heap. A recorder that relies on it is to be found out. */
#define REPORTED_IBA 0x800000000000ull

enum { R_ZE_SYM_ADDR = 1, R_ZE_SYM_ADDR_32 = 2, R_ZE_SYM_ADDR_32_HI = 3 };
enum { NOT_CONNECTED = -1, NO_GPU = -2, GPU_LOST = -3 };

/* One kernel of a module, as placed. */
struct image {
    char *name;
    uint64_t address, size;
    struct standin_kernel *message; /* what the GPU is told of it */
    size_t message_size;
};

struct _ze_module_handle_t {
    ze_module_handle_t next;
    uint64_t low, high; /* GPU addresses that it takes */
    atomic_uint kernels_alive;
    uint32_t count;
    struct image images[];
};

struct _ze_kernel_handle_t {
    ze_module_handle_t module;
    const struct image *image;
};

struct dump {
    struct dump *next;
    char path[PATH_MAX];
};

/* `state_lock` guards everything here but gpu_fd, which launches read without it. */
static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
static ze_module_handle_t modules;
static struct dump *dumps;
static uint64_t last_dump_ns;
static int64_t address_delta;
static atomic_bool initialized;
static int dir_fd = -1;
static _Atomic int gpu_fd = NO_GPU;

static _Atomic uint32_t own_pid;
static __thread uint32_t own_tid;
static __thread struct {
    const char *stack;
    size_t length;
    uint64_t delay_ns, duration_ns;
} launch_as = {"", 0, 0, 0};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* ---- the GPU ---- */

/* The folder's path may be longer than a socket's address can be, and relative: it is reached through its descriptor. */
static int connect_gpu(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int result, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/gpu.sock", dir_fd);
    do {
        result = connect(fd, (struct sockaddr *)&address, sizeof(address));
    } while (result < 0 && errno == EINTR);
    if (result < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool send_bytes(int fd, const void *bytes, size_t size)
{
    ssize_t sent;
    do {
        sent = send(fd, bytes, size, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)size;
}

static bool announce(int fd, const ze_module_handle_t module)
{
    for (uint32_t i = 0; i < module->count; i++) {
        module->images[i].message->pid = own_pid; /* a forked child has its parent's modules */
        if (!send_bytes(fd, module->images[i].message, module->images[i].message_size))
            return false;
    }
    return true;
}

/* Under state_lock. A descriptor that turned out dead stays open: another thread may be using its number right now. */
static int connected(void)
{
    int fd = gpu_fd;
    if (fd != NOT_CONNECTED)
        return fd;
    fd = connect_gpu();
    for (ze_module_handle_t module = modules; fd >= 0 && module; module = module->next) {
        if (!announce(fd, module)) {
            close(fd);
            fd = -1;
        }
    }
    return gpu_fd = fd >= 0 ? fd : GPU_LOST;
}

static void before_fork(void)
{
    pthread_mutex_lock(&state_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&state_lock);
}

/* The child gets a connection of its own at its first launch: the GPU knows a connection's process by who connected. The dumps are
 * its parent's to remove. */
static void after_fork_in_child(void)
{
    if (gpu_fd >= 0)
        close(gpu_fd);
    if (gpu_fd != NO_GPU)
        gpu_fd = NOT_CONNECTED;
    own_pid = (uint32_t)getpid();
    own_tid = 0;
    dumps = NULL;
    pthread_mutex_unlock(&state_lock);
}

/* ---- a debug ELF's parts: the bytes may be anyone's ---- */

struct elf {
    uint8_t *bytes;
    size_t size;
    /* Copies, because what is in the file changes while a module is moved: sections of a hostile file may overlap its headers. */
    Elf64_Ehdr header;
    Elf64_Shdr *sections; /* [header.e_shnum], each checked to be within the file */
    Elf64_Phdr *segments; /* [header.e_phnum] */
    uint64_t low, high; /* the addresses that its code takes */
};

/* Where `size` bytes at `offset` are, or NULL where they are not all in the file. */
static uint8_t *at(const struct elf *elf, uint64_t offset, uint64_t size)
{
    return offset <= elf->size && size <= elf->size - offset ? elf->bytes + offset : NULL;
}

static Elf64_Shdr section(const struct elf *elf, uint32_t index)
{
    return index < elf->header.e_shnum ? elf->sections[index] : (Elf64_Shdr){0};
}

/* A string of a string table, or "" where there is none that ends inside it. */
static const char *string(const struct elf *elf, Elf64_Shdr table, uint64_t offset)
{
    const uint8_t *text = table.sh_type == SHT_STRTAB ? at(elf, table.sh_offset, table.sh_size) : NULL;
    if (!text || offset >= table.sh_size || !memchr(text + offset, 0, table.sh_size - offset))
        return "";
    return (const char *)text + offset;
}

static const char *section_name(const struct elf *elf, Elf64_Shdr s)
{
    return string(elf, section(elf, elf->header.e_shstrndx), s.sh_name);
}

static bool is_code(const struct elf *elf, Elf64_Shdr s)
{
    const char *name = section_name(elf, s);
    return s.sh_type == SHT_PROGBITS && !strncmp(name, KERNEL_PREFIX, strlen(KERNEL_PREFIX)) && name[strlen(KERNEL_PREFIX)];
}

static bool symbol(const struct elf *elf, Elf64_Shdr table, uint64_t index, Elf64_Sym *found)
{
    if (table.sh_type != SHT_SYMTAB || index >= table.sh_size / sizeof(*found))
        return false;
    const uint8_t *bytes = at(elf, table.sh_offset + index * sizeof(*found), sizeof(*found));
    if (bytes)
        memcpy(found, bytes, sizeof(*found));
    return bytes != NULL;
}

/* Debug sections' own symbols are 0 and stay; those that name code hold its address, in whichever section they are. */
static bool moves(const struct elf *elf, uint64_t value)
{
    return value >= elf->low && value <= elf->high;
}

/* Sections must end before the top of the address space, and not reach around it. */
static bool take_range(struct elf *elf, uint64_t address, uint64_t size)
{
    if (address < PAGE || size > LARGEST_MODULE || address + size < address)
        return false;
    if (address < elf->low)
        elf->low = address;
    if (address + size > elf->high)
        elf->high = address + size;
    return elf->high - elf->low <= LARGEST_MODULE;
}

static bool copy_headers(struct elf *elf)
{
    Elf64_Ehdr *h = &elf->header;
    if (elf->size < sizeof(*h) || elf->size > LARGEST_MODULE)
        return false;
    memcpy(h, elf->bytes, sizeof(*h));
    if (memcmp(h->e_ident, ELFMAG, SELFMAG) || h->e_ident[EI_CLASS] != ELFCLASS64 || h->e_ident[EI_DATA] != ELFDATA2LSB)
        return false;
    if (h->e_machine != MACHINE || h->e_type != ET_EXEC || h->e_shentsize != sizeof(Elf64_Shdr) ||
        (h->e_phnum && h->e_phentsize != sizeof(Elf64_Phdr)))
        return false;
    size_t sections_size = h->e_shnum * sizeof(Elf64_Shdr), segments_size = h->e_phnum * sizeof(Elf64_Phdr);
    const uint8_t *sections = at(elf, h->e_shoff, sections_size), *segments = at(elf, h->e_phoff, segments_size);
    if (!sections || !segments)
        return false;
    elf->sections = malloc(sections_size + 1);
    elf->segments = malloc(segments_size + 1);
    if (!elf->sections || !elf->segments)
        return false;
    memcpy(elf->sections, sections, sections_size);
    memcpy(elf->segments, segments, segments_size);
    return true;
}

static bool elf_open(struct elf *elf)
{
    if (!copy_headers(elf))
        return false;
    elf->low = UINT64_MAX;
    for (uint32_t i = 0; i < elf->header.e_shnum; i++) {
        Elf64_Shdr s = elf->sections[i];
        if (s.sh_type != SHT_NULL && s.sh_type != SHT_NOBITS && !at(elf, s.sh_offset, s.sh_size))
            return false;
        if (is_code(elf, s) && !take_range(elf, s.sh_addr, s.sh_size))
            return false;
    }
    if (elf->low == UINT64_MAX)
        return false; /* no kernel */
    uint64_t low = elf->low, high = elf->high;
    for (uint32_t i = 0; i < elf->header.e_phnum; i++) { /* what the hardware may prefetch lies behind the code */
        Elf64_Phdr p = elf->segments[i];
        if (p.p_type == PT_LOAD && p.p_vaddr >= low && p.p_vaddr <= high && !take_range(elf, p.p_vaddr, p.p_memsz))
            return false;
    }
    return true;
}

static void elf_close(struct elf *elf)
{
    free(elf->bytes);
    free(elf->sections);
    free(elf->segments);
}

/* ---- placing it elsewhere ---- */

static bool put(const struct elf *elf, Elf64_Shdr target, uint64_t offset, uint64_t value, uint32_t type)
{
    uint64_t size = type == R_ZE_SYM_ADDR ? 8 : 4;
    if (type < R_ZE_SYM_ADDR || type > R_ZE_SYM_ADDR_32_HI || target.sh_type == SHT_NOBITS || offset > target.sh_size ||
        size > target.sh_size - offset)
        return false;
    if (type == R_ZE_SYM_ADDR_32_HI)
        value >>= 32;
    uint8_t *bytes = at(elf, target.sh_offset + offset, size);
    if (bytes)
        memcpy(bytes, &value, size);
    return bytes != NULL;
}

/* The driver has applied these relocations already; where they name code they are applied again with the new address. */
static bool move_relocations(const struct elf *elf, Elf64_Shdr relocations, uint64_t delta)
{
    Elf64_Shdr target = section(elf, relocations.sh_info), symbols = section(elf, relocations.sh_link);
    for (uint64_t i = 0; i < relocations.sh_size / sizeof(Elf64_Rela); i++) {
        Elf64_Rela r;
        Elf64_Sym s;
        memcpy(&r, elf->bytes + relocations.sh_offset + i * sizeof(r), sizeof(r));
        if (!symbol(elf, symbols, ELF64_R_SYM(r.r_info), &s))
            return false;
        if (moves(elf, s.st_value) &&
            !put(elf, target, r.r_offset, s.st_value + delta + (uint64_t)r.r_addend, (uint32_t)ELF64_R_TYPE(r.r_info)))
            return false;
    }
    return true;
}

static void move_symbols(const struct elf *elf, Elf64_Shdr symbols, uint64_t delta)
{
    Elf64_Sym s;
    for (uint64_t i = 0; symbol(elf, symbols, i, &s); i++) {
        if (!moves(elf, s.st_value))
            continue;
        s.st_value += delta;
        memcpy(elf->bytes + symbols.sh_offset + i * sizeof(s), &s, sizeof(s));
    }
}

static bool elf_move(struct elf *elf, uint64_t delta)
{
    if (delta == 0)
        return true;
    for (uint32_t i = 0; i < elf->header.e_shnum; i++) { /* while symbols still have their old values */
        Elf64_Shdr s = elf->sections[i];
        if (s.sh_type == SHT_RELA && !strncmp(section_name(elf, s), DEBUG_RELOCATIONS, strlen(DEBUG_RELOCATIONS)) &&
            !move_relocations(elf, s, delta))
            return false;
    }
    for (uint32_t i = 0; i < elf->header.e_shnum; i++)
        if (elf->sections[i].sh_type == SHT_SYMTAB)
            move_symbols(elf, elf->sections[i], delta);
    for (uint32_t i = 0; i < elf->header.e_shnum; i++)
        if (is_code(elf, elf->sections[i]))
            elf->sections[i].sh_addr += delta;
    for (uint32_t i = 0; i < elf->header.e_phnum; i++)
        if (elf->segments[i].p_type == PT_LOAD && moves(elf, elf->segments[i].p_vaddr))
            elf->segments[i].p_vaddr += delta;
    memcpy(elf->bytes + elf->header.e_shoff, elf->sections, elf->header.e_shnum * sizeof(Elf64_Shdr));
    memcpy(elf->bytes + elf->header.e_phoff, elf->segments, elf->header.e_phnum * sizeof(Elf64_Phdr));
    elf->low += delta;
    elf->high += delta;
    return true;
}

static bool is_free(uint64_t low, uint64_t high)
{
    for (ze_module_handle_t module = modules; module; module = module->next)
        if (low < module->high && module->low < high)
            return false;
    return true;
}

/* Under state_lock. GPU addresses of one heap share their upper 32 bits, which is how an ip is joined to a kernel: a module never
 * leaves its heap. */
static bool find_place(const struct elf *elf, uint64_t *delta)
{
    uint64_t low = elf->low + (uint64_t)address_delta, size = elf->high - elf->low;
    while (!is_free(low, low + size)) {
        if ((low & UINT32_MAX) < PLACE_STEP)
            return false;
        low = (low - 1) & ~(uint64_t)(PLACE_STEP - 1);
    }
    *delta = low - elf->low;
    return *delta % PAGE == 0 && low >> 32 == elf->low >> 32 && (low + size - 1) >> 32 == elf->low >> 32;
}

/* ---- kernels ---- */

/* The bytes of a kernel's section that are instructions: its symbol's. A module may have no symbols; then all up to the zeros that
 * the compiler pads with. */
static uint64_t code_size(const struct elf *elf, uint32_t index, const char *name, const uint8_t *code)
{
    Elf64_Shdr code_section = section(elf, index);
    for (uint32_t i = 0; i < elf->header.e_shnum; i++) {
        Elf64_Shdr symbols = section(elf, i);
        Elf64_Sym s;
        for (uint64_t n = 0; symbol(elf, symbols, n, &s); n++) {
            if (s.st_shndx == index && ELF64_ST_TYPE(s.st_info) == STT_FUNC && s.st_value == code_section.sh_addr &&
                s.st_size <= code_section.sh_size && !strcmp(string(elf, section(elf, symbols.sh_link), s.st_name), name))
                return s.st_size;
        }
    }
    uint64_t size = code_section.sh_size;
    while (size && !code[size - 1])
        size--;
    return (size + 7) & ~7ull;
}

/* Where instructions start, from the code alone: bytes from its start. Without `offsets` they are only counted. */
static uint32_t walk(const uint8_t *code, uint64_t size, uint32_t *offsets)
{
    uint32_t count = 0;
    for (uint64_t offset = 0; offset + 8 <= size; count++) {
        uint32_t first;
        memcpy(&first, code + offset, sizeof(first));
        if (offsets)
            offsets[count] = (uint32_t)offset;
        offset += first & COMPACTED ? 8 : 16;
    }
    return count;
}

static bool fill_image(const struct elf *elf, uint32_t index, struct image *image)
{
    Elf64_Shdr s = section(elf, index);
    const char *name = section_name(elf, s) + strlen(KERNEL_PREFIX);
    const uint8_t *code = elf->bytes + s.sh_offset;
    uint64_t size = code_size(elf, index, name, code);
    uint32_t count = size <= s.sh_size ? walk(code, size, NULL) : 0;

    image->name = strdup(name);
    image->address = s.sh_addr;
    image->size = s.sh_size; /* as the patches report it: padding included */
    image->message_size = offsetof(struct standin_kernel, offsets) + count * sizeof(uint32_t);
    image->message = calloc(1, image->message_size);
    if (!count || !image->name || !image->message)
        return false;
    image->message->type = STANDIN_MSG_KERNEL;
    image->message->address = image->address;
    image->message->size = image->size;
    image->message->instructions = count;
    snprintf(image->message->name, sizeof(image->message->name), "%s", name);
    walk(code, size, image->message->offsets);
    return true;
}

static void free_module(ze_module_handle_t module)
{
    for (uint32_t i = 0; i < module->count; i++) {
        free(module->images[i].name);
        free(module->images[i].message);
    }
    free(module);
}

static ze_module_handle_t make_module(const struct elf *elf)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < elf->header.e_shnum; i++)
        count += is_code(elf, section(elf, i));
    ze_module_handle_t module = calloc(1, sizeof(*module) + count * sizeof(struct image));
    if (!module)
        return NULL;
    module->low = elf->low;
    module->high = elf->high;
    module->count = count;
    struct image *image = module->images;
    for (uint32_t i = 0; i < elf->header.e_shnum; i++) {
        if (is_code(elf, section(elf, i)) && !fill_image(elf, i, image++)) {
            free_module(module);
            return NULL;
        }
    }
    return module;
}

/* ---- the debug ELF as a file ---- */

static bool write_all(int fd, const uint8_t *bytes, size_t size)
{
    while (size) {
        ssize_t written = write(fd, bytes, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        bytes += written;
        size -= (size_t)written;
    }
    return true;
}

/* Under state_lock. The first name that is free, counted as NEO counts; O_EXCL because /tmp is everybody's. */
static const char *write_dump(const struct elf *elf)
{
    const char *folder = getenv("STANDIN_DUMP_DIR");
    struct dump *dump = malloc(sizeof(*dump));
    int fd = -1;
    if (!dump)
        return NULL;
    if (!folder || !*folder)
        folder = "/tmp";
    for (int number = -1; fd < 0 && number < INT_MAX; number++) {
        char suffix[16] = "";
        if (number >= 0)
            snprintf(suffix, sizeof(suffix), "_%d", number);
        int length = snprintf(dump->path, sizeof(dump->path), "%s/dumped_zebin_module%s.elf", folder, suffix);
        if (length < 0 || (size_t)length >= sizeof(dump->path))
            break;
        fd = open(dump->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (fd < 0 && errno != EEXIST)
            break;
    }
    bool written = fd >= 0 && write_all(fd, elf->bytes, elf->size);
    if (!written) {
        fprintf(stderr, "libze_intel_gpu (stand-in): %s: %s\n", dump->path, strerror(errno));
        if (fd >= 0)
            unlink(dump->path);
    }
    if (fd >= 0)
        close(fd);
    if (!written) {
        free(dump);
        return NULL;
    }
    dump->next = dumps;
    dumps = dump;
    last_dump_ns = now_ns();
    return dump->path;
}

/* NEO leaves its dumps for ever. Whoever was told of the last one by the probe has a second to read it. */
__attribute__((destructor)) static void remove_dumps(void)
{
    if (!dumps || getenv("STANDIN_KEEP"))
        return;
    uint64_t age = now_ns() - last_dump_ns;
    if (age < DUMP_LIFE_NS)
        nanosleep(&(struct timespec){.tv_nsec = (long)(DUMP_LIFE_NS - age - 1)}, NULL);
    for (struct dump *dump = dumps; dump; dump = dump->next)
        unlink(dump->path);
}

/* ---- Level Zero ---- */

static bool read_delta(void)
{
    const char *text = getenv("STANDIN_ADDRESS_DELTA");
    char *end;
    if (!text || !*text)
        return true;
    errno = 0;
    address_delta = strtoll(text, &end, 0);
    return !errno && !*end && address_delta % PAGE == 0;
}

ze_result_t zeInit(uint32_t flags)
{
    const char *dir = getenv("STANDIN_DIR");
    ze_result_t result = ZE_RESULT_SUCCESS;
    (void)flags;
    pthread_mutex_lock(&state_lock);
    if (!initialized) {
        /* The real zeInit opens devices and starts the compiler, which takes this long. It is why a recorder that sees the library
         * being mapped has its probes attached before the first module is compiled. */
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        own_pid = (uint32_t)getpid();
        if (!read_delta()) {
            result = ZE_RESULT_ERROR_INVALID_ARGUMENT;
        } else if (dir && *dir) {
            dir_fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
            gpu_fd = NOT_CONNECTED;
            if (dir_fd < 0 || connected() < 0) {
                gpu_fd = NO_GPU;
                result = ZE_RESULT_ERROR_UNINITIALIZED;
            }
        }
        if (result == ZE_RESULT_SUCCESS) {
            pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
            initialized = true;
        } else if (dir_fd >= 0) {
            close(dir_fd);
            dir_fd = -1;
        }
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

/* Under state_lock. */
static ze_result_t create_module(struct elf *elf, ze_module_handle_t *created)
{
    uint64_t delta;
    if (!find_place(elf, &delta))
        return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    ze_module_handle_t module = elf_move(elf, delta) ? make_module(elf) : NULL;
    if (!module)
        return ZE_RESULT_ERROR_INVALID_NATIVE_BINARY;
    int fd = connected();
    if (fd >= 0 && !announce(fd, module))
        gpu_fd = GPU_LOST;
    module->next = modules;
    modules = module;
    /* As in the patches: who does not listen costs no file. */
    if (LEVEL_ZERO_COMPILE_KERNEL_ENABLED()) {
        const char *path = write_dump(elf);
        if (path)
            LEVEL_ZERO_COMPILE_KERNEL(path);
    }
    *created = module;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeModuleCreate(ze_context_handle_t context, ze_device_handle_t device, const ze_module_desc_t *desc,
                           ze_module_handle_t *module, ze_module_build_log_handle_t *build_log)
{
    (void)context, (void)device;
    if (!initialized)
        return ZE_RESULT_ERROR_UNINITIALIZED;
    if (!desc || !module || !desc->pInputModule)
        return ZE_RESULT_ERROR_INVALID_NULL_POINTER;
    if (desc->format != ZE_MODULE_FORMAT_NATIVE)
        return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    if (build_log)
        *build_log = NULL;
    struct elf elf = {.bytes = malloc(desc->inputSize + 1), .size = desc->inputSize};
    if (!elf.bytes)
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    memcpy(elf.bytes, desc->pInputModule, elf.size);
    ze_result_t result = ZE_RESULT_ERROR_INVALID_NATIVE_BINARY;
    if (elf_open(&elf)) {
        pthread_mutex_lock(&state_lock);
        result = create_module(&elf, module);
        pthread_mutex_unlock(&state_lock);
    }
    elf_close(&elf);
    return result;
}

ze_result_t zeModuleDestroy(ze_module_handle_t module)
{
    if (!module)
        return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (module->kernels_alive)
        return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
    pthread_mutex_lock(&state_lock);
    for (ze_module_handle_t *link = &modules; *link; link = &(*link)->next) {
        if (*link == module) {
            *link = module->next;
            break;
        }
    }
    pthread_mutex_unlock(&state_lock);
    free_module(module);
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeModuleGetKernelNames(ze_module_handle_t module, uint32_t *count, const char **names)
{
    if (!module)
        return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (!count)
        return ZE_RESULT_ERROR_INVALID_NULL_POINTER;
    for (uint32_t i = 0; names && i < *count && i < module->count; i++)
        names[i] = module->images[i].name;
    if (!names || *count > module->count)
        *count = module->count;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeKernelCreate(ze_module_handle_t module, const ze_kernel_desc_t *desc, ze_kernel_handle_t *kernel)
{
    if (!module)
        return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (!desc || !desc->pKernelName || !kernel)
        return ZE_RESULT_ERROR_INVALID_NULL_POINTER;
    for (uint32_t i = 0; i < module->count; i++) {
        if (strcmp(module->images[i].name, desc->pKernelName))
            continue;
        *kernel = malloc(sizeof(**kernel));
        if (!*kernel)
            return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
        **kernel = (struct _ze_kernel_handle_t){module, &module->images[i]};
        module->kernels_alive++;
        return ZE_RESULT_SUCCESS;
    }
    return ZE_RESULT_ERROR_INVALID_KERNEL_NAME;
}

ze_result_t zeKernelDestroy(ze_kernel_handle_t kernel)
{
    if (!kernel)
        return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    kernel->module->kernels_alive--;
    free(kernel);
    return ZE_RESULT_SUCCESS;
}

/* The first launch after a fork, too: it finds NOT_CONNECTED. */
static int gpu_of_launch(void)
{
    int fd = gpu_fd;
    if (fd == NOT_CONNECTED) {
        pthread_mutex_lock(&state_lock);
        fd = connected();
        pthread_mutex_unlock(&state_lock);
    }
    return fd;
}

/* No allocation, no lock, one system call: a launch must cost so little that a recorder's own cost can be measured with it. The
 * message ends with the stack's text, not with the array that it is in. */
static inline ze_result_t tell_gpu(const struct image *image)
{
    int fd = gpu_of_launch();
    if (fd < 0)
        return fd == NO_GPU ? ZE_RESULT_SUCCESS : ZE_RESULT_ERROR_DEVICE_LOST;
    if (!own_tid)
        own_tid = (uint32_t)gettid();
    struct standin_launch launch;
    launch.type = STANDIN_MSG_LAUNCH;
    launch.pid = own_pid;
    launch.tid = own_tid;
    launch.gt = 0;
    launch.address = image->address;
    launch.delay_ns = launch_as.delay_ns;
    launch.duration_ns = launch_as.duration_ns;
    memcpy(launch.stack, launch_as.stack, launch_as.length);
    launch.stack[launch_as.length] = 0;
    if (!send_bytes(fd, &launch, offsetof(struct standin_launch, stack) + launch_as.length + 1)) {
        gpu_fd = GPU_LOST;
        return ZE_RESULT_ERROR_DEVICE_LOST;
    }
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeCommandListAppendLaunchKernel(ze_command_list_handle_t list, ze_kernel_handle_t kernel,
                                            const ze_group_count_t *groups, ze_event_handle_t signal, uint32_t waits,
                                            ze_event_handle_t *wait)
{
    (void)list, (void)groups, (void)signal, (void)waits, (void)wait;
    if (!kernel)
        return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    const struct image *image = kernel->image;
    if (LEVEL_ZERO_LAUNCH_KERNEL_ENABLED())
        LEVEL_ZERO_LAUNCH_KERNEL(REPORTED_IBA, image->address, image->size, image->name);
    return tell_gpu(image);
}

/* Asks over a connection of its own: answers to several threads cannot be mixed up, nor does one that came too late stay behind.
 * The GPU knows by the process what it is to wait for. */
ze_result_t zeCommandQueueSynchronize(ze_command_queue_handle_t queue, uint64_t timeout)
{
    struct standin_sync sync = {STANDIN_MSG_SYNC};
    (void)queue;
    if (!initialized)
        return ZE_RESULT_ERROR_UNINITIALIZED;
    int state = gpu_of_launch();
    if (state < 0)
        return state == NO_GPU ? ZE_RESULT_SUCCESS : ZE_RESULT_ERROR_DEVICE_LOST;
    int fd = connect_gpu();
    ze_result_t result = ZE_RESULT_ERROR_DEVICE_LOST;
    if (fd >= 0 && send_bytes(fd, &sync, sizeof(sync))) {
        uint64_t end = timeout > UINT64_MAX - now_ns() ? UINT64_MAX : now_ns() + timeout;
        int ready;
        do {
            uint64_t now = now_ns(), left = end > now ? end - now : 0;
            struct pollfd waiting = {.fd = fd, .events = POLLIN};
            struct timespec limit = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
            ready = ppoll(&waiting, 1, end == UINT64_MAX ? NULL : &limit, NULL);
        } while (ready < 0 && errno == EINTR);
        if (ready == 0)
            result = ZE_RESULT_NOT_READY;
        else if (ready > 0 && recv(fd, &sync, sizeof(sync), 0) == sizeof(sync))
            result = ZE_RESULT_SUCCESS;
    }
    if (result == ZE_RESULT_ERROR_DEVICE_LOST)
        gpu_fd = GPU_LOST;
    if (fd >= 0)
        close(fd);
    return result;
}

void zexStandinSetLaunch(const char *stack, uint64_t delay_ns, uint64_t duration_ns)
{
    launch_as.stack = stack;
    launch_as.length = strnlen(stack, sizeof(((struct standin_launch *)0)->stack) - 1);
    launch_as.delay_ns = delay_ns;
    launch_as.duration_ns = duration_ns;
}

int zexStandinGpu(void)
{
    int fd = gpu_fd;
    return fd >= 0 ? 1 : fd == NO_GPU ? 0 : -1;
}
