/* SPDX-License-Identifier: Apache-2.0 */
/* Call frame information (CFI) of ELF images: frames.c reads it, walk.c walks stacks by it.
 *
 * Images are hostile: every number is checked before it is used. Nothing here writes to an image, opens a file or knows of
 * processes. The library runs in the sandboxed child of symbols/unwind/reader.py, which calls it through ctypes. */
#ifndef IAPROF_FRAMES_H
#define IAPROF_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;

/* Registers by their DWARF numbers (System V ABI for x86-64, table 3.36). */
enum { RAX, RDX, RCX, RBX, RSI, RDI, RBP, RSP, R8, R9, R10, R11, R12, R13, R14, R15, RETURN_ADDRESS, REGISTERS };

/* How to find the caller's value of a register (DWARF 5, section 6.4.1). */
enum rule_kind {
    SAME,             /* the register still has it */
    UNDEFINED,        /* the value is lost */
    OFFSET,           /* it is in memory, at the CFA plus the operand */
    VALUE_OFFSET,     /* it is the CFA plus the operand */
    REGISTER,         /* it is in the register with this number */
    EXPRESSION,       /* it is in memory, at the address that an expression gives */
    VALUE_EXPRESSION, /* it is the value of an expression */
};

struct expression {
    const u8 *code;
    u32 bytes;
};

struct register_rule {
    enum rule_kind kind;
    s64 operand;
    struct expression expression;
};

/* The rules for one instruction: a row of the table that CFI stands for. The canonical frame address (CFA) is the stack
 * pointer that the caller has after the return. */
struct row {
    bool has_cfa;
    struct register_rule cfa; /* REGISTER: that register plus `cfa_offset`; VALUE_EXPRESSION */
    s64 cfa_offset;
    struct register_rule registers[REGISTERS];
    bool is_signal_frame;
    u64 before; /* the row also holds for so many bytes before the address that was looked up, */
    u64 behind; /* and for so many bytes from that address on */
};

struct segment {
    u64 offset, address, size; /* size in the file */
    bool is_code;
};

/* A function's start and the offset of its entry (FDE). */
struct entry {
    u64 start, at;
};

/* A section with CFI: .eh_frame, or .debug_frame, whose numbers count from elsewhere. */
struct section {
    u64 offset, size, address;
    bool is_debug;
};

struct cie {
    u64 at; /* its offset plus 1; 0 for none */
    u64 code_unit;
    s64 data_unit;
    u8 encoding; /* of pointers, DW_EH_PE_* */
    bool is_signal_frame, has_size, is_debug;
    u64 start, end; /* offsets of its instructions */
};

struct function {
    u64 start, size;
    struct cie cie;
    u64 bias; /* what turns offsets of the entry into addresses */
    u64 instructions, end;
};

#define CACHED_CIES 64

struct image {
    const u8 *data;
    u64 size;
    u64 entry_point;
    struct segment *segments;
    u32 segment_count;
    bool is_go;
    u64 table, table_address, table_count; /* the sorted table of .eh_frame_hdr; no functions without one */
    struct section eh_frame, debug_frame, symbols[2];
    u64 exported_names, exported_names_size; /* the names of symbols[1] */
    bool has_scanned_eh, has_scanned_debug, has_starts, has_beginning;
    struct entry *scanned_eh, *scanned_debug;
    u32 scanned_eh_count, scanned_debug_count;
    u64 *starts; /* of functions, sorted, by symbols and calls: see function_start() */
    u32 start_count;
    u64 beginning, beginning_size; /* a function in which stacks begin; see image_begins_stack() */
    u64 read_ahead; /* the offset up to which the CFI was read ahead; 0 for none */
    struct cie cies[CACHED_CIES];
};

enum result { FOUND, ABSENT, DAMAGED_CFI };

/* Whether there was no memory for something: what was found since may be incomplete. */
extern bool frames_no_memory;

/* How many more CFA instructions and operations of expressions may be executed; at 0, rows are damaged. */
extern u32 frames_work;

/* Reads the headers of an image; NULL if it is none for x86-64, or damaged. `data` stays the caller's, and has to stay. */
struct image *image_open(const u8 *data, u64 size);

/* Waits until the last piece of the CFI that was read ahead is in memory, and has the kernel read the next one; false if none is to
 * be waited for. Walks read CFI here and there: while it is on a disk only, all launches wait for each of some hundred places. */
bool image_read_ahead(struct image *image);

/* Returns the address of a file offset, or of one in the same page; false if it is not loaded. */
bool image_address(const struct image *image, u64 offset, u64 *address);

/* Returns the row of an address: an instruction's, or a return address, for which the call before it is looked up. The row
 * is valid until the next call. */
enum result image_row(struct image *image, u64 address, bool is_exact, const struct row **row);

/* Returns start and end of the code around an address that CFI does not cover. */
bool image_gap(struct image *image, u64 address, u64 *start, u64 *end);

/* Returns the bytes before an address, at most `count`, and how many there are; NULL if the address is not loaded. */
const u8 *image_before(const struct image *image, u64 address, u64 *count);

/* Returns the first address after an address at which a function begins, as far as symbols and direct calls tell; 0 for none. */
u64 image_next_start(struct image *image, u64 address);

/* Whether a function may begin at `start` and contain `address`, as far as symbols, CFI and direct calls tell. */
bool image_is_in_function(struct image *image, u64 start, u64 address);

/* Whether a stack begins at a return address: its frame is the outermost. `follows_call` is whether a call ends there. */
bool image_begins_stack(struct image *image, u64 address, bool follows_call);

/* The value of an expression. `value_of` gives registers and `read` memory; both return false if there is none. */
struct machine {
    bool (*value_of)(void *context, u32 number, u64 *value);
    bool (*read)(void *context, u64 address, u32 size, u64 *value);
    void *context;
};
bool evaluate(struct expression expression, const struct machine *machine, const u64 *first, u64 *value);

#endif
