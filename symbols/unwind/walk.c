/* SPDX-License-Identifier: Apache-2.0 */
/* Walks copied stacks to their end by call frame information, starting with the registers of the innermost frame.
 *
 * This finishes stacks that BPF could not walk, and learns a rule for BPF at each address. The caller of code without call
 * frame information is found by the frame pointer if it leads to a likely caller, else by the first word on the stack that
 * looks like a return address. Such callers are guesses, and marked. A direct call tells which function it calls: a guess
 * behind a call of another function is no caller, unless nothing better is found. */

#define _GNU_SOURCE /* memmem */
#include "frames.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define EXPORTED __attribute__((visibility("default")))

#define PAGE 4096ULL
#define USER_END (1ULL << 47)  /* above are mappings that the Linux kernel makes in all processes */
#define MOST_IMAGES (1 << 20)  /* numbers of images */
#define MOST_SPACES 512
#define MOST_MAPPINGS (1 << 16)
#define MOST_FRAMES 1024
#define MOST_PAGES 128         /* of a copied stack, with those of a stack that a signal interrupted */
#define MOST_SIGNALS 64
#define MOST_RULES 4096        /* of one walk */
#define RULE_SLOTS (4 * MOST_RULES)
#define SCANNED_BYTES (36 << 10) /* of the stack, for a word like a return address; OpenBLAS has frames of 32 KiB */
#define MOST_CHECKED (1 << 13) /* words of one walk that are checked as return addresses */
#define MOST_SEARCHED (1 << 18) /* words of the stack and of code that one walk searches */
#define MOST_WORK (1 << 20)    /* CFA instructions and operations of expressions in one walk */
#define LARGEST_FRAME (1 << 20) /* the most bytes that a frame pointer may point upwards */
#define LEARNT_BYTES 1024      /* of code on each side of an instruction for which its rule is learnt, too */
#define BLOCK_BYTES 64
#define OUTERMOST_BYTES 64     /* before a call in a function without a caller: there it clears rbp */
#define OWN_BYTES (1 << 16)    /* before an address, which may belong to the same function */
#define FUNCTION_BYTES (1 << 19) /* of code that are searched for the end of a function; MKL has functions of 250 KiB */
#define MOST_CODE (1 << 22)      /* bytes of code of one walk that are searched for that */
#define MOST_EPILOGUES 64        /* of one function that are tried */
#define MOST_RESTORING 24        /* instructions of one */
#define LARGER_ALIGNMENT 32      /* the least to which code aligns its stack: the System V ABI keeps 16 at calls */
#define MOST_JUMPS 4           /* that are followed from the target of a call */

/* formats/wire/unwind_rules.py: kinds of rules, flags, scopes, and how a walk ends. */
enum { BY_RSP = 1, BY_RBP, BY_DEREF, BY_RBX, BY_SIGNAL, BY_END, BY_HARD };
enum { GUESS = 1, OTHER_STACK = 2 };
enum scope { AT_RETURN, AT_INSTRUCTION, IN_BLOCK };
enum ending { WHOLE, DEEP, MISSED, NOWHERE, MEMORY, DAMAGED, STUCK, NEEDS_SPACE = 16, NEEDS_IMAGE, NEEDS_MEMORY, GOES_ON };
enum how { BY_RULE, BY_GUESS, INTERRUPTED };

struct mapping {
    u64 start, end, offset;
    s64 image; /* its number; -1 for memory without a file */
};

struct space {
    u64 number, used;
    struct mapping *mappings;
    u32 count;
    u64 low, high; /* of the process's code, without mappings that the Linux kernel makes */
};

struct known_image {
    bool is_known;
    struct image *image; /* NULL if it cannot be read */
};

static struct known_image images[MOST_IMAGES];
static struct space spaces[MOST_SPACES];
static u64 uses;

/* A frame's registers: a value, or where on the stack it is saved, which is read only when it is needed. */
struct registers {
    u64 value[REGISTERS];
    u64 saved[REGISTERS];
    bool is_known[REGISTERS], is_saved[REGISTERS];
};

struct learnt {
    u64 address, scope, rule;
};

/* A request, as finishing.py packs it; pages follow. */
struct request {
    u64 space, limit, how, known; /* a bit for each register */
    u64 registers[REGISTERS];
    u64 pages, absent;
};

struct answer {
    u64 ending, value, frames, rules, signals, met_unknown;
};

struct frame {
    u64 ip, how, cfa;
};

struct signal {
    u64 at, rsp, rip;
};

static struct walk {
    const struct space *space;
    u64 page_addresses[MOST_PAGES], absent_addresses[MOST_PAGES];
    const u8 *pages;
    u32 page_count, absent_count, last_page;
    u64 limit;
    struct frame frames[MOST_FRAMES];
    u32 count;
    struct learnt rules[MOST_RULES];
    u32 rule_count;
    u16 slots[RULE_SLOTS]; /* index of a rule plus 1 */
    struct signal signals[MOST_SIGNALS];
    u32 signal_count;
    u32 checked, searched, searched_code;
    bool met_unknown;
    bool uses_cfi, found_by_cfi; /* whether the present step does; whether the last one did, which found the last frame */
    bool has_searched;     /* the stack was searched for a caller: */
    u32 searched_count;    /* so many frames were there before, */
    u64 searched_address, searched_scope; /* and this rule was made */
    enum ending need;      /* what the walk needs before it can go on, or 0 */
    u64 need_value;
} walk;

/* ---- images and spaces ---- */

/* Takes an image as an open file, which the caller closes; -1 if it cannot be read. Returns 0 if it is an ELF image for x86-64,
 * 1 if not, and -1 if there is no memory for its mapping: another process may have some. */
EXPORTED int walk_add_image(u64 number, int file) {
    struct stat status;
    if (number >= MOST_IMAGES)
        return 1;
    images[number] = (struct known_image){true, NULL};
    if (file < 0 || fstat(file, &status) || status.st_size <= 0)
        return 1;
    const u8 *data = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (data == MAP_FAILED) {
        images[number].is_known = false;
        return -1;
    }
    images[number].image = image_open(data, status.st_size);
    if (frames_no_memory) {
        images[number].is_known = false;
        return -1;
    }
    return images[number].image ? 0 : 1;
}

/* See image_read_ahead(). */
EXPORTED int walk_read_ahead(u64 number) {
    return number < MOST_IMAGES && images[number].image && image_read_ahead(images[number].image);
}

EXPORTED int walk_set_space(u64 number, const struct mapping *mappings, u64 count) {
    struct space *space = &spaces[0];
    for (u32 i = 0; i < MOST_SPACES; i++) {
        if (spaces[i].mappings && spaces[i].number == number) {
            space = &spaces[i];
            break;
        }
        if (spaces[i].used < space->used)
            space = &spaces[i];
    }
    struct mapping *copy = count <= MOST_MAPPINGS ? malloc((count + 1) * sizeof(*copy)) : NULL;
    if (!copy)
        return -1;
    memcpy(copy, mappings, count * sizeof(*copy));
    for (u32 i = 0; i < count; i++)
        if (copy[i].start >= copy[i].end || copy[i].end > -PAGE) {
            free(copy);
            return -1;
        }
    free(space->mappings);
    *space = (struct space){.number = number, .used = ++uses, .mappings = copy, .count = count};
    for (u32 i = 0; i < count; i++)
        if (copy[i].end <= USER_END)
            space->high = copy[i].end;
    space->low = space->high ? copy[0].start : 0;
    return 0;
}

static const struct mapping *mapping_of(u64 address) {
    const struct space *space = walk.space;
    u32 low = 0, high = space->count;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (space->mappings[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low && address < space->mappings[low - 1].end ? &space->mappings[low - 1] : NULL;
}

static struct image *needed_image(const struct mapping *mapping) {
    if (!mapping || mapping->image < 0 || mapping->image >= MOST_IMAGES)
        return NULL;
    if (!images[mapping->image].is_known && !walk.need) {
        walk.need = NEEDS_IMAGE;
        walk.need_value = mapping->image;
    }
    return images[mapping->image].image;
}

/* Returns the image of an address, and the address in it; NULL if it cannot be read. */
static struct image *place_of(u64 address, u64 *in_image) {
    const struct mapping *mapping = mapping_of(address);
    struct image *image = needed_image(mapping);
    if (!image || !image_address(image, address - mapping->start + mapping->offset, in_image))
        return NULL;
    return image;
}

/* Returns up to `count` bytes of code before an address; none if they cannot be read. */
static const u8 *code_before(u64 address, u64 *count) {
    u64 in_image;
    struct image *image = place_of(address - 1, &in_image);
    const u8 *code = image ? image_before(image, in_image + 1, count) : NULL;
    if (!code)
        *count = 0;
    return code;
}

static const u8 *code_at(u64 address, u64 *count) {
    const struct mapping *mapping = mapping_of(address);
    struct image *image = needed_image(mapping);
    u64 offset = image ? address - mapping->start + mapping->offset : 0;
    if (!image || offset >= image->size) {
        *count = 0;
        return NULL;
    }
    *count = image->size - offset < *count ? image->size - offset : *count;
    return image->data + offset;
}

static bool is_unread(u64 address) {
    const struct mapping *mapping = mapping_of(address);
    return mapping && !needed_image(mapping);
}

/* ---- the stack ---- */

/* Finds a copied page; NULL if it was not copied. */
static const u8 *page_of(u64 address) {
    if (walk.last_page < walk.page_count && walk.page_addresses[walk.last_page] == address)
        return walk.pages + walk.last_page * PAGE;
    for (u32 at = 0; at < walk.page_count; at++) {
        if (walk.page_addresses[at] == address) {
            walk.last_page = at;
            return walk.pages + at * PAGE;
        }
    }
    return NULL;
}

/* Reads a number from the stack. After a signal frame the stack may be another one, which is not copied yet. */
static bool read_stack(u64 address, u32 size, u64 *value) {
    u64 base = address & -PAGE, inside = address - base;
    const u8 *page = page_of(base);
    if (!page) {
        bool is_absent = false;
        for (u32 i = 0; i < walk.absent_count; i++)
            is_absent |= walk.absent_addresses[i] == base;
        bool has_room = walk.page_count < MOST_PAGES && walk.absent_count < MOST_PAGES;
        if (walk.signal_count && has_room && !is_absent && !walk.need) {
            walk.need = NEEDS_MEMORY;
            walk.need_value = base;
        }
        return false;
    }
    *value = 0;
    if (inside + size > PAGE) {
        u64 low = 0, high = 0, first = PAGE - inside;
        if (!read_stack(address, first, &low) || !read_stack(base + PAGE, size - first, &high))
            return false;
        *value = low | high << 8 * first;
        return true;
    }
    memcpy(value, page + inside, size);
    return true;
}

static bool read_word(u64 address, u64 *value) {
    return read_stack(address, 8, value);
}

static bool register_value(struct registers *registers, u32 number, u64 *value) {
    if (number >= REGISTERS)
        return false;
    if (!registers->is_known[number]) {
        if (!registers->is_saved[number] || !read_word(registers->saved[number], &registers->value[number]))
            return false;
        registers->is_known[number] = true;
    }
    *value = registers->value[number];
    return true;
}

static void set_value(struct registers *registers, u32 number, u64 value) {
    registers->value[number] = value;
    registers->is_known[number] = true;
}

static void set_saved(struct registers *registers, u32 number, u64 address) {
    registers->saved[number] = address;
    registers->is_saved[number] = true;
    registers->is_known[number] = false;
}

static void forget(struct registers *registers, u32 number) {
    registers->is_known[number] = registers->is_saved[number] = false;
}

static bool is_kept(u32 number) { /* callee-saved (System V ABI for x86-64) */
    return number == RBX || number == RBP || (number >= R12 && number <= R15);
}

/* ---- rules for BPF ---- */

static u64 packed(u32 kind, s64 cfa, s64 rbp, u32 flags) {
    return (u64)(u32)(int32_t)cfa | (u64)(u16)(int16_t)rbp << 32 | (u64)kind << 48 | (u64)flags << 56;
}

#define HARD packed(BY_HARD, 0, 0, 0)
#define BY_FRAME_POINTER packed(BY_RBP, 16, -16, GUESS)

/* Makes a rule; HARD if its numbers do not fit. Except for BY_DEREF, rbp 0 means that rbp is not saved. */
static u64 checked_rule(u32 kind, s64 cfa, s64 rbp, bool is_saved, u32 flags) {
    if (cfa != (int32_t)cfa || rbp != (int16_t)rbp || (is_saved && !rbp && kind != BY_DEREF) || kind == BY_HARD)
        return HARD;
    return packed(kind, cfa, is_saved ? rbp : 0, flags);
}

static u32 slot_of(u64 address, u64 scope) {
    u32 slot = ((address * 4 + scope) * 0x9E3779B97F4A7C15ULL) >> 50;
    while (walk.slots[slot % RULE_SLOTS]) {
        const struct learnt *learnt = &walk.rules[walk.slots[slot % RULE_SLOTS] - 1];
        if (learnt->address == address && learnt->scope == scope)
            break;
        slot++;
    }
    return slot % RULE_SLOTS;
}

static void learn(u64 address, u64 scope, u64 rule) {
    u32 slot = slot_of(address, scope);
    if (!walk.slots[slot]) {
        if (walk.rule_count == MOST_RULES)
            return;
        walk.rules[walk.rule_count++] = (struct learnt){address, scope, rule};
        walk.slots[slot] = walk.rule_count;
    }
    walk.rules[walk.slots[slot] - 1].rule = rule;
}

/* Sets the rule of the blocks of code around an instruction: `before` bytes before it, and `behind` from it on. */
static void learn_blocks(u64 address, u64 before, u64 behind, u64 rule) {
    const struct mapping *mapping = mapping_of(address);
    if (!mapping)
        return;
    u64 start = address - (before < LEARNT_BYTES ? before : LEARNT_BYTES);
    u64 end = address + (behind < LEARNT_BYTES ? behind : LEARNT_BYTES);
    start = start < mapping->start || start > address ? mapping->start : start;
    end = end > mapping->end || end < address ? mapping->end : end;
    for (u64 block = (start + BLOCK_BYTES - 1) & -(u64)BLOCK_BYTES; block + BLOCK_BYTES <= end; block += BLOCK_BYTES)
        learn(block, IN_BLOCK, rule);
}

struct constants {
    u64 value[REGISTERS];
    bool is_known[REGISTERS];
};

static bool constant_register(void *context, u32 number, u64 *value) {
    const struct constants *constants = context;
    if (number >= REGISTERS || !constants->is_known[number])
        return false;
    *value = constants->value[number];
    return true;
}

static bool no_memory(void *context, u64 address, u32 size, u64 *value) {
    (void)context, (void)address, (void)size, (void)value;
    return false;
}

/* Returns the constant that an expression adds to a register; false if it does more. `address` is that of the instruction. */
static bool added_constant(struct expression expression, u32 number, u64 address, bool has_address, s64 *constant) {
    static const u64 tried[] = {0x7FFF00000000, 0x7FFF12345678, 0x1000};
    for (u32 i = 0; i < 3; i++) {
        struct constants constants = {};
        struct machine machine = {constant_register, no_memory, &constants};
        u64 value;
        constants.value[number] = tried[i];
        constants.value[RETURN_ADDRESS] = address;
        constants.is_known[number] = true;
        constants.is_known[RETURN_ADDRESS] = has_address;
        if (!evaluate(expression, &machine, NULL, &value) || (i && (s64)(value - tried[i]) != *constant))
            return false;
        *constant = (s64)(value - tried[i]);
    }
    return true;
}

/* Returns the rule that means the same as a row; HARD if there is none. Only for an instruction's address may a rule depend on
 * its value. */
static u64 rule_of(const struct row *row, u64 address, bool is_exact) {
    static const u8 signal_cfa[] = {0x77, 0xA0, 0x01, 0x06}; /* rsp of the ucontext that rsp points to */
    const struct register_rule *rbp = &row->registers[RBP], *returns = &row->registers[RETURN_ADDRESS];
    struct expression cfa = row->cfa.expression;
    s64 constant, saved;
    if (returns->kind == UNDEFINED)
        return packed(BY_END, 0, 0, 0);
    if (row->is_signal_frame)
        return row->has_cfa && row->cfa.kind == VALUE_EXPRESSION && cfa.bytes == 4 && !memcmp(cfa.code, signal_cfa, 4)
                   ? packed(BY_SIGNAL, 0, 0, 0)
                   : HARD;
    if (returns->kind != OFFSET || returns->operand != -8 || row->registers[RSP].kind != SAME || !row->has_cfa)
        return HARD;
    if (row->cfa.kind == VALUE_EXPRESSION) {
        if (cfa.bytes > 1 && cfa.code[0] == 0x76 && cfa.code[cfa.bytes - 1] == 0x06) {
            struct expression base = {cfa.code, cfa.bytes - 1};
            if (rbp->kind == EXPRESSION && rbp->expression.bytes && rbp->expression.code[0] == 0x76 &&
                added_constant(base, RBP, 0, false, &constant) && added_constant(rbp->expression, RBP, 0, false, &saved))
                return checked_rule(BY_DEREF, constant, saved, true, 0);
            return HARD;
        }
        /* A PLT stub: the offset from rsp depends on whether the instruction comes after the push. */
        if (is_exact && rbp->kind == SAME && added_constant(cfa, RSP, address, true, &constant))
            return checked_rule(BY_RSP, constant, 0, false, 0);
        return HARD;
    }
    if ((rbp->kind != SAME && rbp->kind != OFFSET) || (row->cfa.operand != RSP && row->cfa.operand != RBP))
        return HARD;
    return checked_rule(row->cfa.operand == RSP ? BY_RSP : BY_RBP, row->cfa_offset, rbp->operand, rbp->kind == OFFSET, 0);
}

/* ---- steps by call frame information ---- */

static bool register_for_machine(void *context, u32 number, u64 *value) {
    return register_value(context, number, value);
}

static bool memory_for_machine(void *context, u64 address, u32 size, u64 *value) {
    (void)context;
    return read_stack(address, size, value);
}

static enum ending cfa_of(const struct row *row, struct registers *registers, u64 *cfa) {
    struct machine machine = {register_for_machine, memory_for_machine, registers};
    if (!row->has_cfa)
        return DAMAGED;
    if (row->cfa.kind == VALUE_EXPRESSION)
        return evaluate(row->cfa.expression, &machine, NULL, cfa) ? GOES_ON : MEMORY;
    if (row->cfa.operand < 0 || row->cfa.operand >= REGISTERS || !register_value(registers, row->cfa.operand, cfa))
        return MEMORY;
    *cfa += (u64)row->cfa_offset;
    return GOES_ON;
}

/* Finds the caller's value of a register by its rule. */
static bool callers_value(const struct register_rule *rule, u64 cfa, struct registers *registers, u64 *value) {
    struct machine machine = {register_for_machine, memory_for_machine, registers};
    switch (rule->kind) {
    case EXPRESSION:
        return evaluate(rule->expression, &machine, &cfa, value) && read_word(*value, value);
    case VALUE_EXPRESSION:
        return evaluate(rule->expression, &machine, &cfa, value);
    case REGISTER:
        return rule->operand >= 0 && rule->operand < REGISTERS && register_value(registers, rule->operand, value);
    case VALUE_OFFSET:
        *value = cfa + (u64)rule->operand;
        return true;
    case OFFSET:
        return read_word(cfa + (u64)rule->operand, value);
    default:
        return false;
    }
}

/* Steps to the caller by a row. */
static enum ending unwind(const struct row *row, struct registers *registers, struct registers *callers) {
    u64 cfa, value;
    enum ending ending = cfa_of(row, registers, &cfa);
    if (ending != GOES_ON)
        return ending;
    if (cfa & 7 && !row->is_signal_frame)
        return MEMORY;
    *callers = *registers;
    for (u32 number = 0; number < REGISTERS; number++)
        if (!is_kept(number))
            callers->is_known[number] = false;
    set_value(callers, RSP, cfa);
    for (u32 number = 0; number < REGISTERS; number++) {
        const struct register_rule *rule = &row->registers[number];
        if (rule->kind == SAME)
            continue;
        if (rule->kind == OFFSET && is_kept(number))
            set_saved(callers, number, cfa + (u64)rule->operand);
        else if (rule->kind == UNDEFINED)
            forget(callers, number);
        else if (callers_value(rule, cfa, registers, &value))
            set_value(callers, number, value);
        else if (number == RSP || number == RETURN_ADDRESS)
            return MEMORY;
        else
            forget(callers, number); /* the walk may never need it */
    }
    return callers->is_known[RSP] && callers->is_known[RETURN_ADDRESS] ? GOES_ON : MEMORY;
}

/* Offsets of registers in a signal's ucontext (struct sigcontext, asm/sigcontext.h), by DWARF number. */
static const u16 in_ucontext[REGISTERS] = {[RAX] = 144, [RDX] = 136, [RCX] = 152, [RBX] = 128, [RSI] = 112, [RDI] = 104,
                                           [RBP] = 120, [RSP] = 160, [R8] = 40,   [R9] = 48,   [R10] = 56,  [R11] = 64,
                                           [R12] = 72,  [R13] = 80,  [R14] = 88,  [R15] = 96,  [RETURN_ADDRESS] = 168};

static bool note_signal(u64 ucontext) {
    struct signal signal = {.at = ucontext + in_ucontext[RSP]};
    if (walk.signal_count < MOST_SIGNALS)
        walk.signals[walk.signal_count++] = signal;
    struct signal *noted = &walk.signals[walk.signal_count - 1];
    *noted = signal;
    return read_word(signal.at, &noted->rsp) && read_word(signal.at + 8, &noted->rip);
}

/* ---- steps without call frame information ---- */

/* Whether code ends with an indirect call. */
static bool ends_indirect_call(const u8 *code, u64 count) {
    for (u64 length = 2; length <= 7 && length <= count; length++) {
        const u8 *at = code + count - length;
        u32 mode = at[1] >> 6, base = at[1] & 7, has_sib = mode != 3 && base == 4, displacement = mode == 1 ? 1 : mode == 2 ? 4 : 0;
        if (at[0] != 0xFF || (at[1] >> 3 & 7) != 2)
            continue;
        if (mode == 0 && (base == 5 || (has_sib && length > 2 && (at[2] & 7) == 5)))
            displacement = 4;
        if (length == 2 + has_sib + displacement)
            return true;
    }
    return false;
}

static bool ends_direct_call(const u8 *code, u64 count) {
    return count >= 5 && code[count - 5] == 0xE8;
}

static bool follows_call(const u8 *code, u64 count) {
    return ends_direct_call(code, count) || ends_indirect_call(code, count);
}

static bool is_go(u64 address) {
    u64 in_image;
    struct image *image = place_of(address, &in_image);
    return image && image->is_go;
}

/* Whether an address is the return address at which a goroutine begins, without a call: Go pushes the address after
 * runtime.goexit's first nop on its stack. */
static bool begins_goroutine(u64 address) {
    u64 before = 8, after = 1;
    const u8 *code = code_before(address, &before), *next = code_at(address, &after);
    return before && after && code[before - 1] == 0x90 && next[0] == 0xE8 && !follows_call(code, before) && is_go(address);
}

/* Whether code at an address returns from a signal handler: mov $15,%rax or mov $15,%eax; syscall. */
static bool returns_from_signal(u64 address) {
    static const u8 by_rax[] = {0x48, 0xC7, 0xC0, 0x0F, 0, 0, 0, 0x0F, 0x05}, by_eax[] = {0xB8, 0x0F, 0, 0, 0, 0x0F, 0x05};
    u64 count = sizeof(by_rax);
    const u8 *code = code_at(address, &count);
    return (count >= sizeof(by_rax) && !memcmp(code, by_rax, sizeof(by_rax))) ||
           (count >= sizeof(by_eax) && !memcmp(code, by_eax, sizeof(by_eax)));
}

/* What a word of the stack says as a return address of a frame. */
enum caller { NO_CALLER, OF_ANOTHER, LIKELY };

/* Whether the direct call that ends at `returns_to` may have called the function that contains `address`: OF_ANOTHER if it
 * calls another one. Jumps at its target are followed; where a stub jumps is unknown. */
static enum caller called_function(u64 returns_to, u64 address) {
    u64 count = 5, in_target, in_own;
    const u8 *code = code_before(returns_to, &count);
    int32_t relative;
    if (count < 5)
        return LIKELY;
    memcpy(&relative, code + 1, sizeof(relative));
    u64 target = returns_to + (u64)(s64)relative;
    for (u32 jumps = 0; jumps <= MOST_JUMPS; jumps++) {
        struct image *image = place_of(target, &in_target), *own = place_of(address, &in_own);
        u64 bytes = 16;
        const u8 *next = code_at(target, &bytes);
        if (!image || bytes < 16)
            return is_unread(target) ? LIKELY : OF_ANOTHER; /* generated code, or no code */
        if (image == own && image_is_in_function(image, in_target, in_own))
            return LIKELY;
        u32 at = !memcmp(next, "\xf3\x0f\x1e\xfa", 4) ? 4 : 0;
        at += next[at] == 0xF2;
        if (next[at] == 0xFF && (next[at + 1] >> 3 & 7) == 4) /* an indirect jump: a stub of the PLT, for example */
            return LIKELY;
        if (next[at] != 0xE9 && next[at] != 0xEB)
            return OF_ANOTHER;
        if (next[at] == 0xE9) {
            memcpy(&relative, next + at + 1, sizeof(relative));
            target += at + 5 + (u64)(s64)relative;
        } else {
            target += at + 2 + (u64)(s64)(int8_t)next[at + 1];
        }
    }
    return OF_ANOTHER;
}

/* Whether a coroutine's or another stack of the program's own begins at a return address. */
static bool begins_stack(struct image *image, u64 in_image, u64 address) {
    u64 count = 8;
    const u8 *code = code_before(address, &count);
    bool follows = follows_call(code, count);
    return count && (follows || !returns_from_signal(address)) && image_begins_stack(image, in_image, follows);
}

/* Judges a word of the stack as the return address of a frame at `address`. `unread` is for code that cannot be read. */
static enum caller judge(u64 word, u64 address, enum caller unread) {
    const struct mapping *mapping = mapping_of(word);
    if (!mapping)
        return NO_CALLER;
    if (!needed_image(mapping))
        return unread;
    u64 count = 8;
    const u8 *code = code_before(word, &count);
    if (ends_direct_call(code, count))
        return ends_indirect_call(code, count) ? LIKELY : called_function(word, address);
    return ends_indirect_call(code, count) ? LIKELY : NO_CALLER;
}

/* Finds the caller by rbp, if it is a frame pointer that leads to a possible caller. */
static enum caller by_frame_pointer(u64 address, u64 rsp, u64 rbp, struct registers *callers) {
    u64 word, saved;
    if (rbp < rsp || rbp - rsp >= LARGEST_FRAME || rbp & 7 || !read_word(rbp + 8, &word) || !read_word(rbp, &saved))
        return NO_CALLER;
    walk.met_unknown |= word && word < USER_END && !mapping_of(word);
    enum caller caller = judge(word, address, LIKELY);
    if (caller == NO_CALLER && (begins_goroutine(word) || returns_from_signal(word)))
        caller = LIKELY;
    *callers = (struct registers){};
    set_value(callers, RBP, saved);
    set_value(callers, RSP, rbp + 16);
    set_value(callers, RETURN_ADDRESS, word);
    return caller;
}

/* Searches a part of the stack for a word that looks like a return address of the frame. In a stack of generated code, a word
 * that points to generated code ends the search: it may be a return address. Returns the rule, or HARD. */
static u64 search(u64 address, u64 start, u64 base, u64 end, u32 kind, struct registers *registers, bool from_generated,
                  bool takes_others, struct registers *callers) {
    u64 rule = HARD;
    for (u64 page = start & -PAGE; page < end && page < -PAGE; page += PAGE) { /* the last page has no end */
        u64 first = page < start ? start : page, last = page + PAGE < end ? page + PAGE : end, value;
        if (!read_stack(first, 1, &value)) /* nothing was ever pushed there */
            return rule;
        for (u64 at = first; at + 8 <= last; at += 8) {
            u64 word, saved;
            if (walk.searched++ >= MOST_SEARCHED)
                return rule;
            if (!read_word(at, &word) || word < walk.space->low || word >= walk.space->high)
                continue;
            walk.checked++;
            enum caller caller = returns_from_signal(word) ? LIKELY : judge(word, address, NO_CALLER);
            /* Behind a call of another function only if nothing better follows: that one may have jumped to this one. */
            if (caller == LIKELY || (caller == OF_ANOTHER && rule == HARD && takes_others)) {
                bool has_rbp = read_word(at - 8, &saved) && saved > at && saved < at + LARGEST_FRAME && !(saved & 7);
                *callers = *registers;
                if (has_rbp)
                    set_value(callers, RBP, saved);
                set_value(callers, RSP, at + 8);
                set_value(callers, RETURN_ADDRESS, word);
                rule = checked_rule(kind, (s64)(at + 8 - base), has_rbp ? -16 : 0, has_rbp, GUESS);
                if (caller == LIKELY)
                    return rule;
            }
            if (walk.need || walk.checked >= MOST_CHECKED || (from_generated && is_unread(word)))
                return walk.need ? HARD : rule;
        }
    }
    return rule;
}

static bool contains(const u8 *code, u64 count, const void *bytes, u64 length) {
    return code && memmem(code, count, bytes, length);
}

/* Whether the code before an address, as far as it lacks call frame information, copies rsp into rbx. */
static bool may_keep_rsp(u64 address, u64 before) {
    u64 count = before < OWN_BYTES ? before : OWN_BYTES;
    const u8 *code = walk.searched < MOST_SEARCHED ? code_before(address, &count) : NULL;
    walk.searched += count / 8;
    return contains(code, count, "\x48\x89\xe3", 3) || contains(code, count, "\x48\x8b\xdc", 3);
}

static void gap_around(u64 address, u64 *before, u64 *behind) {
    u64 in_image, start, end;
    struct image *image = place_of(address, &in_image);
    *before = *behind = 0;
    if (image && image_gap(image, in_image, &start, &end)) {
        *before = in_image - start;
        *behind = end - in_image;
    }
}

/* Whether the function that contains an address clears rbp before: by xor %ebp,%ebp, with a prefix or without. With other prefixes
 * that clears r13, or reads it. */
static bool clears_rbp(u64 address) {
    u64 count = OUTERMOST_BYTES, in_image;
    struct image *image = place_of(address, &in_image);
    const u8 *code = code_before(address, &count);
    for (u64 i = 0; code && i + 2 <= count; i++)
        if (code[i] == 0x31 && code[i + 1] == 0xED && !(i && (code[i - 1] & 0xF0) == 0x40 && code[i - 1] & 5) &&
            (!image || image_is_in_function(image, in_image - (count - i), in_image)))
            return true;
    return false;
}

static u64 displacement_of(const u8 *at, u32 bytes) {
    int32_t four;
    memcpy(&four, at, sizeof(four));
    return (u64)(s64)(bytes == 1 ? (int8_t)at[0] : four);
}

/* Reads mov DISPLACEMENT(%rsp),REGISTER; returns its size, or 0 if it is another instruction. */
static u32 load_from_stack(const u8 *at, u32 *number, u64 *displacement) {
    u32 mode = at[2] >> 6;
    if ((at[0] != 0x48 && at[0] != 0x4C) || at[1] != 0x8B || mode == 3 || (at[2] & 7) != 4 || at[3] != 0x24)
        return 0;
    *number = (at[0] == 0x4C ? 8 : 0) + (at[2] >> 3 & 7);
    *displacement = mode ? displacement_of(at + 4, mode == 1 ? 1 : 4) : 0;
    return mode == 1 ? 5 : mode == 2 ? 8 : 4;
}

/* Executes instructions that restore registers from the stack at `rsp` and return; false if they do anything else. */
static bool restores(const u8 *code, u64 count, u64 rsp, struct registers *callers) {
    static const u32 dwarf_numbers[16] = {RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15};
    u64 at = 0, displacement, word;
    for (u32 i = 0; i < MOST_RESTORING && count - at >= 8; i++) {
        const u8 *next = code + at;
        u32 extended = next[0] == 0x41, number, size = load_from_stack(next, &number, &displacement);
        if (size) {
            number = dwarf_numbers[number];
            if (!is_kept(number))
                return false;
            set_saved(callers, number, rsp + displacement);
        } else if ((next[extended] & 0xF8) == 0x58) { /* pop */
            number = dwarf_numbers[8 * extended + (next[extended] & 7)];
            if (!is_kept(number))
                return false;
            set_saved(callers, number, rsp);
            rsp += 8;
            size = 1 + extended;
        } else if (next[0] == 0x48 && (next[1] == 0x83 || next[1] == 0x81) && next[2] == 0xC4) { /* add to rsp */
            rsp += displacement_of(next + 3, next[1] == 0x83 ? 1 : 4);
            size = next[1] == 0x83 ? 4 : 7;
        } else if (next[0] == 0xC5 && next[1] == 0xF8 && next[2] == 0x77) { /* vzeroupper */
            size = 3;
        } else if (next[0] == 0xC3) {
            if (!read_word(rsp, &word))
                return false;
            set_value(callers, RETURN_ADDRESS, word);
            set_value(callers, RSP, rsp + 8);
            return true;
        } else {
            return false;
        }
        at += size;
    }
    return false;
}

/* Finds the caller of a function that was interrupted while it returns: what it has left to do tells where the caller is. Sets the
 * rule that means the same. */
static bool by_returning(u64 address, u64 rsp, struct registers *registers, struct registers *callers, u64 *rule) {
    u64 count = 8 * MOST_RESTORING;
    const u8 *code = code_at(address, &count);
    *callers = *registers;
    if (!code || !restores(code, count, rsp, callers) || callers->value[RSP] <= rsp ||
        judge(callers->value[RETURN_ADDRESS], address, NO_CALLER) != LIKELY)
        return false;
    u64 cfa = callers->value[RSP], saved = callers->saved[RBP];
    bool restored = callers->is_saved[RBP] && !callers->is_known[RBP] &&
                    (registers->is_known[RBP] || saved != registers->saved[RBP]);
    *rule = checked_rule(BY_RSP, (s64)(cfa - rsp), restored ? (s64)(saved - cfa) : 0, restored, GUESS);
    return true;
}

/* Finds the caller by the end of the function: code that aligns its stack, and uses rbp for something else, loads the old rsp from
 * its frame there, and then the registers that it has saved. MKL's kernels do, with frames of any size. Where rsp is not aligned,
 * the function has not made its frame yet, or has left it: what the end would load is another frame's. */
static bool by_epilogue(u64 address, u64 rsp, u64 behind, struct registers *registers, struct registers *callers) {
    static const u8 loads[][4] = {{0x48, 0x8B, 0x64, 0x24}, {0x48, 0x8B, 0xA4, 0x24}}; /* mov DISPLACEMENT(%rsp),%rsp */
    u64 in_image, displacement, old;
    u32 number, tried = 0;
    struct image *image = rsp % LARGER_ALIGNMENT ? NULL : place_of(address, &in_image);
    if (!image)
        return false;
    u64 next = image_next_start(image, in_image), count = next && next - in_image < behind ? next - in_image : behind;
    count = count < FUNCTION_BYTES ? count : FUNCTION_BYTES;
    u64 readable = count + 8 * MOST_RESTORING;
    const u8 *code = code_at(address, &readable);
    if (!code || count > MOST_CODE - walk.searched_code)
        return false;
    const u8 *end = code + readable;
    count = count < readable ? count : readable;
    walk.searched_code += count;
    for (u32 i = 0; i < sizeof(loads) / sizeof(loads[0]); i++) {
        const u8 *at = code;
        while ((at = memmem(at, code + count - at, loads[i], sizeof(loads[i]))) && end - at > 8 && tried++ < MOST_EPILOGUES) {
            u32 size = load_from_stack(at, &number, &displacement);
            *callers = *registers;
            if (read_word(rsp + displacement, &old) && old > rsp && old - rsp < LARGEST_FRAME && !(old & 7) &&
                restores(at + size, end - at - size, old, callers) &&
                callers->value[RSP] > old && walk.checked++ < MOST_CHECKED &&
                judge(callers->value[RETURN_ADDRESS], address, NO_CALLER) == LIKELY)
                return true;
            at += sizeof(loads[i]);
        }
    }
    return false;
}

/* Whether the last frame is Go code that called C on another stack, so that rbp points to Go's stack. If C called Go, rbp has
 * any value that C code left in it. */
static bool has_called_c(u64 rsp, u64 rbp) {
    return walk.found_by_cfi && rbp && !(rbp & 7) && (rbp < rsp || rbp - rsp >= LARGEST_FRAME);
}

/* Takes what a search found for the caller, with its rule; HARD if BPF has none for it. Notes where the first search was: if it leads
 * outside of code, what it found was wrong. */
static enum ending take_found(u64 address, u64 scope, u64 rule, const struct registers *found, struct registers *callers) {
    if (!walk.has_searched) {
        walk.has_searched = true;
        walk.searched_count = walk.count;
        walk.searched_address = address;
        walk.searched_scope = scope;
    }
    learn(address, scope, rule);
    *callers = *found;
    return GOES_ON;
}

static enum ending step_without_cfi(u64 address, u64 scope, struct registers *registers, struct registers *callers,
                                    enum how *how) {
    u64 rsp = registers->value[RSP], rbp = 0, rbx, before, behind;
    register_value(registers, RBP, &rbp);
    if (returns_from_signal(address)) {
        learn(address, scope, packed(BY_SIGNAL, 0, 0, 0));
        *callers = (struct registers){};
        for (u32 number = 0; number < REGISTERS; number++) {
            u64 value;
            if (!read_word(rsp + in_ucontext[number], &value))
                return MEMORY;
            set_value(callers, number, value);
        }
        *how = INTERRUPTED;
        return note_signal(rsp) ? GOES_ON : MEMORY;
    }
    /* Functions also use rbp as any other register. So this is no more than a guess, and holds only behind one. */
    if ((*how == BY_GUESS && !rbp && clears_rbp(address)) || begins_goroutine(address)) {
        learn(address, scope, packed(BY_END, 0, 0, 0));
        return WHOLE;
    }
    *how = BY_GUESS;
    struct registers by_rbp, by_search;
    u64 rule = HARD;
    if (scope == AT_INSTRUCTION && by_returning(address, rsp, registers, &by_search, &rule))
        return take_found(address, scope, rule, &by_search, callers);
    enum caller caller = by_frame_pointer(address, rsp, rbp, &by_rbp);
    bool is_in_go = is_go(address);
    if (caller == LIKELY) {
        /* Go's compiler keeps frame pointers in all functions that call others: no guess, once the function has set up its own. */
        *how = is_in_go && scope == AT_RETURN ? BY_RULE : BY_GUESS;
        learn(address, scope, *how == BY_RULE ? packed(BY_RBP, 16, -16, 0) : BY_FRAME_POINTER);
        *callers = by_rbp;
        return GOES_ON;
    }
    if (is_in_go) {
        /* All Go functions that call others keep frame pointers, so searching the stack would only find old calls. */
        learn(address, scope, has_called_c(rsp, rbp) ? packed(BY_RBP, 16, -16, GUESS | OTHER_STACK) : HARD);
        return STUCK;
    }
    u64 start = (rsp + 7) & ~7ULL, end = rsp + SCANNED_BYTES;
    bool from_generated = is_unread(address);
    gap_around(address, &before, &behind);
    if (by_epilogue(address, rsp, behind, registers, &by_search))
        return take_found(address, scope, HARD, &by_search, callers);
    if (caller == OF_ANOTHER) {
        /* rbp belongs to an outer function, as this one does not keep a frame pointer, or not yet: its caller is below. */
        u64 below = rbp + 8 < end ? rbp + 8 : end;
        rule = search(address, start, rsp, below, BY_RSP, registers, from_generated, false, &by_search);
        if (rule == HARD && !walk.need) { /* or the called function has jumped to this one */
            learn(address, scope, BY_FRAME_POINTER);
            *callers = by_rbp;
            return GOES_ON;
        }
    }
    /* OpenBLAS's functions reserve stack for data and keep the old rsp in rbx, so the search begins there: words below are data
     * or left by earlier calls. If it finds no caller there, rbx has another meaning. */
    if (rule == HARD && register_value(registers, RBX, &rbx) && rbx > start && rbx < end && !(rbx & 7) &&
        may_keep_rsp(address, before)) {
        rule = search(address, rbx, rbx, end, BY_RBX, registers, from_generated, true, &by_search);
        if (rule != HARD && walk.count == 1)
            learn_blocks(address, before, behind, rule); /* where it does not hold for the function, BPF finds no caller */
        else if (rule == HARD)
            end = rbx;
        if (rule != HARD && walk.count != 1) /* BPF knows rbx in the innermost frame only */
            return take_found(address, scope, HARD, &by_search, callers);
    }
    if (rule == HARD)
        rule = search(address, start, rsp, end, BY_RSP, registers, from_generated, true, &by_search);
    enum ending ending = take_found(address, scope, rule, &by_search, callers);
    return rule == HARD ? STUCK : ending;
}

/* ---- the walk ---- */

/* Returns how a walk ended that came to an address outside of code. If it searched the stack for a caller before, that caller
 * was wrong: the stack is cut there, and the rules that were learnt from it are dropped. */
static enum ending without_wrong_guess(enum ending ending) {
    if (!walk.has_searched)
        return ending;
    walk.count = walk.searched_count;
    walk.frames[walk.count - 1].cfa = 0;
    u32 searched = walk.slots[slot_of(walk.searched_address, walk.searched_scope)]; /* 0 if there was no room for the rule */
    u64 wrong = searched ? walk.rules[searched - 1].rule : HARD;
    u32 kept = 0;
    for (u32 i = 0; i < walk.rule_count; i++)
        if (walk.rules[i].scope != IN_BLOCK || walk.rules[i].rule != wrong)
            walk.rules[kept++] = walk.rules[i];
    for (u32 i = 0; i < kept; i++)
        if (walk.rules[i].address == walk.searched_address && walk.rules[i].scope == walk.searched_scope)
            walk.rules[i].rule = HARD;
    walk.rule_count = kept;
    return STUCK;
}

/* Steps to the caller of the last frame. */
static enum ending step(u64 address, bool is_exact, const struct mapping *mapping, struct registers *registers,
                        struct registers *callers, enum how *how) {
    const struct row *row;
    struct image *image = needed_image(mapping);
    u64 scope = is_exact ? AT_INSTRUCTION : AT_RETURN, in_image;
    enum result result = ABSENT;
    if (image && !image_address(image, address - mapping->start + mapping->offset, &in_image))
        image = NULL;
    if (image)
        result = image_row(image, in_image, is_exact, &row);
    if (result == DAMAGED_CFI)
        return DAMAGED;
    walk.uses_cfi = result == FOUND;
    bool is_signal_frame = result == FOUND && row->is_signal_frame;
    if (image && !is_exact && !is_signal_frame && begins_stack(image, in_image, address)) {
        learn(address, scope, packed(BY_END, 0, 0, 0));
        return without_wrong_guess(WHOLE);
    }
    if (result == ABSENT)
        return step_without_cfi(address, scope, registers, callers, how);
    u64 rule = rule_of(row, address, is_exact);
    learn(address, scope, rule);
    if (is_exact && rule != HARD && ((rule >> 48 & 255) == BY_DEREF || !row->has_cfa || row->cfa.kind != VALUE_EXPRESSION))
        learn_blocks(address, row->before, row->behind, rule);
    if (row->registers[RETURN_ADDRESS].kind == UNDEFINED)
        return WHOLE;
    *how = is_signal_frame ? INTERRUPTED : BY_RULE;
    enum ending ending = unwind(row, registers, callers);
    if (ending == GOES_ON && is_signal_frame && !note_signal(registers->value[RSP]))
        return MEMORY;
    return ending;
}

static enum ending run(struct registers *start, enum how how) {
    struct registers registers = *start, callers;
    for (;;) {
        u64 address, rsp;
        if (!register_value(&registers, RETURN_ADDRESS, &address) || !register_value(&registers, RSP, &rsp))
            return MEMORY;
        if (!address)
            return without_wrong_guess(WHOLE);
        if (walk.count >= walk.limit)
            return DEEP;
        const struct mapping *mapping = mapping_of(address);
        if (!mapping) {
            walk.met_unknown = true;
            return without_wrong_guess(NOWHERE);
        }
        bool is_exact = how == INTERRUPTED;
        walk.frames[walk.count++] = (struct frame){address, how, 0};
        enum ending ending = step(address, is_exact, mapping, &registers, &callers, &how);
        if (walk.need)
            return walk.need;
        if (ending != GOES_ON)
            return ending;
        /* The caller's frame is further up; only a signal handler may run on another stack. At an instruction that was
         * interrupted, vfork has already moved the return address from the stack to a register. */
        if (how != INTERRUPTED && (callers.value[RSP] < rsp || (callers.value[RSP] == rsp && !is_exact)))
            return STUCK;
        registers = callers;
        walk.found_by_cfi = walk.uses_cfi;
        walk.frames[walk.count - 1].cfa = callers.value[RSP];
    }
}

/* Walks the stack of one request.
 *
 * `data` has a struct request, the addresses of its pages, those of pages that cannot be copied, and the pages; `size` is how
 * many bytes it has. `out` gets a struct answer, frames, rules and signals, and has room for `room` bytes.
 *
 * Returns the bytes written to `out`, and in `taken` those of the request; 0 if the request is damaged, or memory or `out` has
 * no room. */
EXPORTED u64 walk_run(const u8 *data, u64 size, u64 *taken, u8 *out, u64 room) {
    struct request request;
    struct registers registers = {};
    if (size < sizeof(request))
        return 0;
    memcpy(&request, data, sizeof(request));
    if (request.pages > MOST_PAGES || request.absent > MOST_PAGES || request.limit > MOST_FRAMES)
        return 0;
    u64 addresses = 8 * (request.pages + request.absent);
    if (size - sizeof(request) < addresses + PAGE * request.pages)
        return 0;
    *taken = sizeof(request) + addresses + PAGE * request.pages;
    memset(walk.slots, 0, sizeof(walk.slots));
    memcpy(walk.page_addresses, data + sizeof(request), 8 * request.pages);
    memcpy(walk.absent_addresses, data + sizeof(request) + 8 * request.pages, 8 * request.absent);
    walk.pages = data + sizeof(request) + addresses;
    walk.page_count = request.pages;
    walk.absent_count = request.absent;
    walk.limit = request.limit;
    walk.last_page = walk.count = walk.rule_count = walk.signal_count = walk.checked = walk.searched = walk.searched_code = 0;
    frames_work = MOST_WORK;
    walk.met_unknown = walk.has_searched = walk.found_by_cfi = false;
    walk.need = 0;
    walk.need_value = 0;
    walk.space = NULL;
    for (u32 i = 0; i < MOST_SPACES; i++)
        if (spaces[i].mappings && spaces[i].number == request.space)
            walk.space = &spaces[i];
    struct answer answer = {.ending = NEEDS_SPACE, .value = request.space};
    if (walk.space) {
        spaces[walk.space - spaces].used = ++uses;
        for (u32 number = 0; number < REGISTERS; number++)
            if (request.known >> number & 1)
                set_value(&registers, number, request.registers[number]);
        answer.ending = run(&registers, (enum how)request.how);
        answer.value = walk.need_value;
    }
    if (answer.ending < NEEDS_SPACE) {
        answer.frames = walk.count;
        answer.rules = walk.rule_count;
        answer.signals = walk.signal_count;
        answer.met_unknown = walk.met_unknown;
    }
    u64 frames = sizeof(struct frame) * answer.frames, rules = sizeof(struct learnt) * answer.rules,
        signals = sizeof(struct signal) * answer.signals;
    if (frames_no_memory || room < sizeof(answer) + frames + rules + signals)
        return 0;
    memcpy(out, &answer, sizeof(answer));
    memcpy(out + sizeof(answer), walk.frames, frames);
    memcpy(out + sizeof(answer) + frames, walk.rules, rules);
    memcpy(out + sizeof(answer) + frames + rules, walk.signals, signals);
    return sizeof(answer) + frames + rules + signals;
}
