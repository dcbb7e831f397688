/* SPDX-License-Identifier: Apache-2.0 */
/* Reads call frame information, which says how to find the caller of each instruction of an ELF image.
 *
 * Compilers write it to .eh_frame: an entry (FDE) for each function. A sorted table in the segment PT_GNU_EH_FRAME leads to
 * the entry of a function, so a look-up does not depend on the size of the file. Only an image without that table, and
 * .debug_frame, are read through once. Formats: Linux Standard Base Core 5.0, section 10.6; DWARF 5, section 6.4. */

#define _GNU_SOURCE /* memmem */
#include "frames.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MOST_INSTRUCTIONS (1 << 16) /* of one look-up; the longest real functions need a few thousand */
#define MOST_REMEMBERED 64          /* states at once; compilers remember one or two */
#define MOST_SCANNED (1 << 20)      /* entries of a section without a sorted table */
#define MOST_SEGMENTS (1 << 7)
#define MOST_SECTIONS (1 << 12)
#define MOST_SYMBOLS (1 << 20)
#define MOST_STARTS (1 << 21)       /* of functions */
#define MOST_SCANNED_CODE (64 << 20) /* bytes that are searched for direct calls */
#define ALIGNED_BYTES 16            /* compilers align functions so, unless they optimize for size */
#define MOST_DWARF_REGISTERS 144
#define LONGEST_BLOCK (1 << 12) /* bytes; real expressions have fewer than 100 */
#define ENTRY_BYTES 128         /* from the entry point on, that count as code without a caller */
#define AHEAD_BYTES (1 << 19)
#define MOST_AHEAD (64 << 20)   /* libtorch_cpu.so has 21 MiB */
#define PAGE 4096ULL
#define CACHED_ROWS_LOG 13

bool frames_no_memory;
u32 frames_work;

static struct cached_row {
    const struct image *image;
    u64 key; /* the address << 1, and whether it is exact */
    enum result result;
    struct row row;
} cached_rows[1 << CACHED_ROWS_LOG];

enum { EM_X86_64 = 62, PT_LOAD = 1, PT_GNU_EH_FRAME = 0x6474E550, PF_EXECUTE = 1 };
enum { SHT_SYMTAB = 2, SHT_NOBITS = 8, SHT_DYNSYM = 11, SHF_COMPRESSED = 0x800, SYMBOL_BYTES = 24 };
enum { STT_NOTYPE = 0, STT_FUNC = 2, STT_GNU_IFUNC = 10 };
enum { OMITTED = 0xFF, USUAL_TABLE = 0x3B, PC_RELATIVE = 0x10, DATA_RELATIVE = 0x30 };

struct reader {
    const u8 *data;
    u64 size, at;
    bool failed; /* a number was not there, or no number; everything read since is 0 */
};

static u64 number(struct reader *reader, u32 size) {
    u64 value = 0;
    if (reader->failed || reader->at > reader->size || reader->size - reader->at < size) {
        reader->failed = true;
        return 0;
    }
    memcpy(&value, reader->data + reader->at, size);
    reader->at += size;
    return value;
}

static u64 uleb(struct reader *reader) {
    u64 value = 0;
    for (u32 shift = 0; shift < 70; shift += 7) {
        u64 byte = number(reader, 1);
        value |= shift < 64 ? (byte & 127) << shift : 0;
        if (byte < 128)
            return reader->failed ? 0 : value;
    }
    reader->failed = true;
    return 0;
}

static s64 sleb(struct reader *reader) {
    u64 value = 0;
    for (u32 shift = 0; shift < 70; shift += 7) {
        u64 byte = number(reader, 1);
        value |= shift < 64 ? (byte & 127) << shift : 0;
        if (byte < 128) {
            if (byte & 64 && shift + 7 < 64)
                value |= ~0ULL << (shift + 7);
            return reader->failed ? 0 : (s64)value;
        }
    }
    reader->failed = true;
    return 0;
}

static struct expression block(struct reader *reader) {
    struct expression expression = {};
    u64 bytes = uleb(reader);
    if (reader->failed || bytes > LONGEST_BLOCK || reader->size - reader->at < bytes) {
        reader->failed = true;
        return expression;
    }
    expression.code = reader->data + reader->at;
    expression.bytes = bytes;
    reader->at += bytes;
    return expression;
}

static u64 signed_number(struct reader *reader, u32 size) {
    u64 value = number(reader, size);
    u32 unused = 64 - 8 * size;
    return (u64)((s64)(value << unused) >> unused);
}

/* Reads a pointer with an encoding DW_EH_PE_*. `bias` turns offsets into addresses here. */
static u64 pointer(struct reader *reader, u8 encoding, u64 bias, u64 data_base) {
    u64 base = 0, value = 0;
    if ((encoding & 0x70) == PC_RELATIVE)
        base = reader->at + bias;
    if ((encoding & 0x70) == DATA_RELATIVE)
        base = data_base;
    switch (encoding & 0x0F) {
    case 0x00:
    case 0x04:
    case 0x0C:
        value = number(reader, 8);
        break;
    case 0x01:
        value = uleb(reader);
        break;
    case 0x02:
        value = number(reader, 2);
        break;
    case 0x03:
        value = number(reader, 4);
        break;
    case 0x09:
        value = (u64)sleb(reader);
        break;
    case 0x0A:
        value = signed_number(reader, 2);
        break;
    case 0x0B:
        value = signed_number(reader, 4);
        break;
    default:
        reader->failed = true;
    }
    return value + base;
}

static bool is_inside(const struct image *image, u64 offset, u64 size) {
    return offset <= image->size && size <= image->size - offset;
}

static u64 word_at(const struct image *image, u64 offset, u32 size) {
    u64 value = 0;
    if (is_inside(image, offset, size))
        memcpy(&value, image->data + offset, size);
    return value;
}

bool image_address(const struct image *image, u64 offset, u64 *address) {
    for (u32 i = 0; i < image->segment_count; i++) {
        const struct segment *segment = &image->segments[i];
        /* The kernel maps whole pages: also the bytes before the segment in its first page. */
        if ((segment->offset & -PAGE) <= offset && offset - (segment->offset & -PAGE) < segment->size + (segment->offset & (PAGE - 1))) {
            *address = offset - segment->offset + segment->address;
            return true;
        }
    }
    return false;
}

/* Returns the offset of an address; false if it is not loaded. */
static bool offset_of(const struct image *image, u64 address, u64 *offset) {
    for (u32 i = 0; i < image->segment_count; i++) {
        const struct segment *segment = &image->segments[i];
        if (address - segment->address < segment->size) {
            *offset = address - segment->address + segment->offset;
            return true;
        }
    }
    return false;
}

const u8 *image_before(const struct image *image, u64 address, u64 *count) {
    for (u32 i = 0; i < image->segment_count; i++) {
        const struct segment *segment = &image->segments[i];
        u64 within = address - segment->address;
        if (within && within <= segment->size) {
            *count = within < *count ? within : *count;
            if (!is_inside(image, segment->offset + within - *count, *count))
                return NULL;
            return image->data + segment->offset + within - *count;
        }
    }
    return NULL;
}

/* Reads the header of the sorted table; ignores a table with unusual pointer encodings. Returns false if it is damaged. */
static bool read_table(struct image *image, u64 offset, u64 address) {
    struct reader reader = {image->data, image->size, offset, false};
    u64 version = number(&reader, 1), frames = number(&reader, 1), counts = number(&reader, 1), table = number(&reader, 1);
    if (reader.failed)
        return false;
    if (version != 1 || counts == OMITTED || table != USUAL_TABLE)
        return true;
    pointer(&reader, frames, address - offset, address);
    u64 count = pointer(&reader, counts, address - offset, address);
    if (reader.failed || count > (image->size - reader.at) / 8)
        return false;
    image->table = reader.at;
    image->table_address = address;
    image->table_count = count;
    return true;
}

static void read_sections(struct image *image, u64 at, u64 entry_bytes, u64 count, u64 names) {
    if (count > MOST_SECTIONS || entry_bytes != 64 || names >= count || !is_inside(image, at, 64 * count))
        return;
    u64 texts = word_at(image, at + 64 * names + 24, 8), texts_bytes = word_at(image, at + 64 * names + 32, 8);
    if (!is_inside(image, texts, texts_bytes))
        return;
    for (u64 i = 0; i < count; i++) {
        u64 header = at + 64 * i, name = word_at(image, header, 4), type = word_at(image, header + 4, 4);
        struct section section = {word_at(image, header + 24, 8), word_at(image, header + 32, 8),
                                  word_at(image, header + 16, 8), false};
        if (name >= texts_bytes || type == SHT_NOBITS || word_at(image, header + 8, 8) & SHF_COMPRESSED)
            continue;
        const char *text = (const char *)image->data + texts + name;
        u64 room = texts_bytes - name;
        if (room > 14 && !memcmp(text, ".go.buildinfo", 14))
            image->is_go = true;
        if (!is_inside(image, section.offset, section.size))
            continue;
        if (room > 9 && !memcmp(text, ".eh_frame", 10))
            image->eh_frame = section;
        if (room > 12 && !memcmp(text, ".debug_frame", 13)) {
            image->debug_frame = section;
            image->debug_frame.is_debug = true;
        }
        if (type == SHT_SYMTAB)
            image->symbols[0] = section;
        if (type == SHT_DYNSYM) {
            u64 linked = at + 64 * word_at(image, header + 40, 4);
            image->symbols[1] = section;
            image->exported_names = word_at(image, linked + 24, 8);
            image->exported_names_size = word_at(image, linked + 32, 8);
        }
    }
}

struct image *image_open(const u8 *data, u64 size) {
    struct image *image = calloc(1, sizeof(*image));
    if (!image) {
        frames_no_memory = true;
        return NULL;
    }
    image->data = data;
    image->size = size;
    u64 at = word_at(image, 32, 8), count = word_at(image, 56, 2);
    if (size < 64 || memcmp(data, "\x7f"
                                  "ELF\2\1",
                            6) ||
        word_at(image, 18, 2) != EM_X86_64 || (count && word_at(image, 54, 2) != 56) || !is_inside(image, at, 56 * count))
        goto damaged;
    image->entry_point = word_at(image, 24, 8);
    image->segments = calloc(count + 1, sizeof(*image->segments));
    if (!image->segments) {
        frames_no_memory = true;
        goto damaged;
    }
    u64 table = 0, table_address = 0;
    bool has_table = false;
    for (u64 i = 0; i < count; i++) {
        u64 header = at + 56 * i, type = word_at(image, header, 4);
        struct segment segment = {word_at(image, header + 8, 8), word_at(image, header + 16, 8),
                                  word_at(image, header + 32, 8), word_at(image, header + 4, 4) & PF_EXECUTE};
        if (type == PT_LOAD && image->segment_count < MOST_SEGMENTS && segment.offset < 1ULL << 62 && segment.size < 1ULL << 62)
            image->segments[image->segment_count++] = segment;
        if (type == PT_GNU_EH_FRAME) {
            has_table = true;
            table = segment.offset;
            table_address = segment.address;
        }
    }
    if (has_table && !read_table(image, table, table_address))
        goto damaged;
    read_sections(image, word_at(image, 40, 8), word_at(image, 58, 2), word_at(image, 60, 2), word_at(image, 62, 2));
    return image;
damaged:
    free(image->segments);
    free(image);
    return NULL;
}

bool image_read_ahead(struct image *image) {
    u64 first = image->table && image->table < image->eh_frame.offset ? image->table : image->eh_frame.offset;
    u64 end = image->eh_frame.offset + image->eh_frame.size, at = image->read_ahead ? image->read_ahead : first;
    if (end - first > MOST_AHEAD) /* the table is elsewhere */
        return false;
    if (image->read_ahead)
        (void)*(const volatile u8 *)(image->data + at - 1);
    u64 bytes = end - at < AHEAD_BYTES ? end - at : AHEAD_BYTES;
    uintptr_t page = (uintptr_t)(image->data + at) & -PAGE;
    if (bytes)
        madvise((void *)page, (uintptr_t)(image->data + at + bytes) - page, MADV_WILLNEED);
    image->read_ahead = at + bytes;
    return bytes && end - first > AHEAD_BYTES;
}

/* Reads the common information entry at an offset; false if it is damaged. */
static bool read_cie(struct image *image, const struct section *section, u64 at, struct cie *cie) {
    if (at >= image->size)
        return false;
    struct cie *cached = &image->cies[(at / 4) % CACHED_CIES];
    if (cached->at == at + 1 && cached->is_debug == section->is_debug) {
        *cie = *cached;
        return true;
    }
    struct reader reader = {image->data, image->size, at, false};
    u64 length = number(&reader, 4), end = reader.at + length;
    u64 id = number(&reader, 4);
    if (reader.failed || !length || length >= 0xFFFFFFF0 || id != (section->is_debug ? 0xFFFFFFFF : 0))
        return false;
    u64 version = number(&reader, 1);
    if (version != 1 && version != 3 && version != 4) /* 4 also in .eh_frame: GNU as with --gdwarf-cie-version=4 */
        return false;
    u8 text[16] = {};
    u32 letters = 0;
    while (letters < sizeof(text) && (text[letters] = number(&reader, 1)))
        letters++;
    if (letters == sizeof(text) || (letters && text[0] != 'z'))
        return false;
    if (version == 4 && (number(&reader, 1) != 8 || number(&reader, 1))) /* sizes of addresses and segment selectors */
        return false;
    *cie = (struct cie){.at = at + 1, .is_debug = section->is_debug, .has_size = letters > 0};
    cie->code_unit = uleb(&reader);
    cie->data_unit = sleb(&reader);
    u64 returns = version == 1 ? number(&reader, 1) : uleb(&reader);
    if (reader.failed || returns != RETURN_ADDRESS)
        return false;
    if (letters) {
        u64 bytes = uleb(&reader), start = reader.at + bytes;
        for (u32 i = 1; i < letters; i++) {
            if (text[i] == 'R')
                cie->encoding = number(&reader, 1);
            else if (text[i] == 'P') /* the personality routine */
                pointer(&reader, number(&reader, 1), 0, 0);
            else if (text[i] == 'L')
                number(&reader, 1);
            else if (text[i] == 'S')
                cie->is_signal_frame = true;
            else
                break; /* the length of an unknown letter's data is unknown */
        }
        reader.at = start;
    }
    if (reader.failed || reader.at > image->size || end < at)
        return false;
    cie->start = reader.at;
    cie->end = end < image->size ? end : image->size;
    *cached = *cie;
    return true;
}

/* Returns what has to be added to an offset of the file to get its address. Numbers in .debug_frame are absolute. */
static bool bias_at(const struct image *image, const struct section *section, u64 offset, u64 *bias) {
    u64 address;
    if (section->is_debug) {
        *bias = 0;
        return true;
    }
    if (!image_address(image, offset, &address))
        return false;
    *bias = address - offset;
    return true;
}

/* Reads the function whose entry is at an offset. */
static bool read_function(struct image *image, const struct section *section, u64 at, struct function *function) {
    struct reader reader = {image->data, image->size, at, false};
    u64 length = number(&reader, 4), end = reader.at + length, cie_at = reader.at;
    u64 to_cie = number(&reader, 4);
    cie_at = section->is_debug ? section->offset + to_cie : cie_at - to_cie;
    if (reader.failed || end < at || !read_cie(image, section, cie_at, &function->cie) ||
        !bias_at(image, section, reader.at, &function->bias))
        return false;
    function->start = pointer(&reader, function->cie.encoding, function->bias, 0);
    function->size = pointer(&reader, function->cie.encoding & 0x0F, 0, 0);
    if (function->cie.has_size) {
        u64 bytes = uleb(&reader);
        reader.at = bytes < image->size ? reader.at + bytes : image->size;
    }
    function->instructions = reader.at;
    function->end = end < image->size ? end : image->size;
    return !reader.failed;
}

static int by_start(const void *one, const void *other) {
    u64 first = ((const struct entry *)one)->start, second = ((const struct entry *)other)->start;
    return (first > second) - (first < second);
}

/* Whether a function lies in executable memory. Free Pascal's entries have numbers of another size: they lie elsewhere. */
static bool is_code(const struct image *image, u64 start, u64 size) {
    for (u32 i = 0; i < image->segment_count; i++) {
        const struct segment *segment = &image->segments[i];
        u64 within = start - segment->address;
        if (size && segment->is_code && within < segment->size && size <= segment->size - within)
            return true;
    }
    return false;
}

/* Finds the entries of a section without a sorted table, up to the first damaged one. */
static struct entry *scanned(struct image *image, const struct section *section, u32 *count) {
    struct entry *entries = NULL;
    u32 room = 0;
    *count = 0;
    for (u64 at = section->offset, end = at + section->size, n = 0; at + 8 <= end && n < MOST_SCANNED; n++) {
        u64 length = word_at(image, at, 4), to_cie = word_at(image, at + 4, 4);
        if (!length || length >= 0xFFFFFFF0) {
            if (!section->is_debug || length)
                break;
            at += 4; /* padding between the entries of two object files */
            continue;
        }
        if (to_cie != (section->is_debug ? 0xFFFFFFFF : 0)) {
            struct function function;
            if (!read_function(image, section, at, &function))
                break;
            if (*count == room) {
                room = room ? 2 * room : 256;
                struct entry *larger = realloc(entries, room * sizeof(*entries));
                if (!larger) {
                    frames_no_memory = true;
                    break;
                }
                entries = larger;
            }
            /* Those of functions that the linker left out have no address, or no size. */
            if (is_code(image, function.start, function.size))
                entries[(*count)++] = (struct entry){function.start, at};
        }
        at += 4 + length;
    }
    if (entries)
        qsort(entries, *count, sizeof(*entries), by_start);
    return entries;
}

/* Finds the last of sorted entries up to an address: its index plus 1. */
static u32 last_entry(const struct entry *entries, u32 count, u64 address) {
    u32 low = 0, high = count;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (entries[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static s64 table_start(const struct image *image, u64 index) {
    int32_t start;
    memcpy(&start, image->data + image->table + 8 * index, sizeof(start));
    return start;
}

/* Finds the entry in .eh_frame of the last function up to an address, and where the next function begins. */
static enum result eh_entry(struct image *image, u64 address, u64 *at, u64 *end) {
    *end = ~0ULL;
    if (!image->table_count) {
        if (!image->has_scanned_eh) {
            image->has_scanned_eh = true;
            image->scanned_eh = scanned(image, &image->eh_frame, &image->scanned_eh_count);
        }
        u32 index = last_entry(image->scanned_eh, image->scanned_eh_count, address);
        if (index < image->scanned_eh_count)
            *end = image->scanned_eh[index].start;
        if (!index)
            return ABSENT;
        *at = image->scanned_eh[index - 1].at;
        return FOUND;
    }
    u64 low = 0, high = image->table_count;
    s64 relative = (s64)(address - image->table_address);
    while (low < high) {
        u64 middle = low + (high - low) / 2;
        if (table_start(image, middle) <= relative)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < image->table_count)
        *end = (u64)table_start(image, low) + image->table_address;
    if (!low)
        return ABSENT;
    int32_t entry;
    memcpy(&entry, image->data + image->table + 8 * (low - 1) + 4, sizeof(entry));
    return offset_of(image, (u64)(s64)entry + image->table_address, at) ? FOUND : DAMAGED_CFI;
}

static bool has_address(const struct function *function, u64 address) {
    return address >= function->start && address - function->start < function->size;
}

/* Finds the function that has an address, in .eh_frame or else in .debug_frame. */
static enum result find_function(struct image *image, u64 address, struct function *function) {
    u64 at, end;
    enum result result = eh_entry(image, address, &at, &end);
    if (result == FOUND) {
        if (!read_function(image, &image->eh_frame, at, function))
            return DAMAGED_CFI;
        if (has_address(function, address))
            return FOUND;
    } else if (result == DAMAGED_CFI) {
        return result;
    }
    if (!image->debug_frame.size)
        return ABSENT;
    if (!image->has_scanned_debug) {
        image->has_scanned_debug = true;
        image->scanned_debug = scanned(image, &image->debug_frame, &image->scanned_debug_count);
    }
    u32 index = last_entry(image->scanned_debug, image->scanned_debug_count, address);
    if (!index)
        return ABSENT;
    if (!read_function(image, &image->debug_frame, image->scanned_debug[index - 1].at, function))
        return DAMAGED_CFI;
    return has_address(function, address) ? FOUND : ABSENT;
}

bool image_gap(struct image *image, u64 address, u64 *start, u64 *end) {
    u64 at;
    struct function function;
    *start = 0;
    switch (eh_entry(image, address, &at, end)) {
    case ABSENT:
        return true;
    case FOUND:
        if (!read_function(image, &image->eh_frame, at, &function))
            return false;
        *start = function.start + function.size;
        return true;
    default:
        return false;
    }
}

struct state {
    bool has_cfa;
    struct register_rule cfa;
    s64 cfa_offset;
    struct register_rule registers[REGISTERS];
};

static void set_register(struct row *row, u64 number, enum rule_kind kind, s64 operand, struct expression expression) {
    if (number < REGISTERS)
        row->registers[number] = (struct register_rule){kind, operand, expression};
}

/* Executes CFA instructions from `location` on until they pass an address; false if they are damaged. */
static bool execute(const struct image *image, struct row *row, u64 at, u64 end, u64 location, u64 address,
                    const struct function *function, const struct register_rule *initial, u32 *left) {
    const struct cie *cie = &function->cie;
    struct reader reader = {image->data, image->size, at, false};
    struct state *remembered = NULL;
    u32 depth = 0;
    bool is_sound = false;
    while (reader.at < end) {
        if (!(*left)-- || !frames_work)
            goto out;
        frames_work--;
        u64 code = number(&reader, 1), high = code & 0xC0, low = code & 0x3F, target;
        if (high == 0x40 || (code >= 0x01 && code <= 0x04)) { /* advance */
            if (high)
                location += low * cie->code_unit;
            else if (code == 0x01)
                location = pointer(&reader, cie->encoding, function->bias, 0);
            else
                location += number(&reader, 1 << (code - 2)) * cie->code_unit;
            if (reader.failed)
                goto out;
            if (location > address) {
                row->behind = location - address;
                break;
            }
            row->before = address - location;
        } else if (high == 0x80) {
            set_register(row, low, OFFSET, (s64)(uleb(&reader) * (u64)cie->data_unit), (struct expression){});
        } else if (high == 0xC0) {
            if (low < REGISTERS)
                row->registers[low] = initial ? initial[low] : (struct register_rule){};
        } else {
            switch (code) {
            case 0x00: /* nop */
                break;
            case 0x0E: /* def_cfa_offset */
            case 0x13: /* def_cfa_offset_sf */
                if (!row->has_cfa || row->cfa.kind != REGISTER)
                    goto out;
                row->cfa_offset = code == 0x0E ? (s64)uleb(&reader) : (s64)((u64)sleb(&reader) * (u64)cie->data_unit);
                break;
            case 0x0C: /* def_cfa */
            case 0x12: /* def_cfa_sf */
                row->has_cfa = true;
                row->cfa = (struct register_rule){REGISTER, (s64)uleb(&reader), {}};
                row->cfa_offset = code == 0x0C ? (s64)uleb(&reader) : (s64)((u64)sleb(&reader) * (u64)cie->data_unit);
                break;
            case 0x0D: /* def_cfa_register */
                if (!row->has_cfa || row->cfa.kind != REGISTER)
                    goto out;
                row->cfa.operand = (s64)uleb(&reader);
                break;
            case 0x0F: /* def_cfa_expression */
                row->has_cfa = true;
                row->cfa = (struct register_rule){VALUE_EXPRESSION, 0, block(&reader)};
                break;
            case 0x0A: /* remember_state */
                if (!remembered)
                    remembered = malloc(MOST_REMEMBERED * sizeof(*remembered));
                if (!remembered || depth == MOST_REMEMBERED)
                    goto out;
                remembered[depth].has_cfa = row->has_cfa;
                remembered[depth].cfa = row->cfa;
                remembered[depth].cfa_offset = row->cfa_offset;
                memcpy(remembered[depth++].registers, row->registers, sizeof(row->registers));
                break;
            case 0x0B: /* restore_state */
                if (!depth)
                    goto out;
                row->has_cfa = remembered[--depth].has_cfa;
                row->cfa = remembered[depth].cfa;
                row->cfa_offset = remembered[depth].cfa_offset;
                memcpy(row->registers, remembered[depth].registers, sizeof(row->registers));
                break;
            case 0x2E: /* GNU_args_size */
                uleb(&reader);
                break;
            case 0x05: /* offset_extended */
            case 0x06: /* restore_extended */
            case 0x07: /* undefined */
            case 0x08: /* same_value */
            case 0x09: /* register */
            case 0x10: /* expression */
            case 0x11: /* offset_extended_sf */
            case 0x14: /* val_offset */
            case 0x15: /* val_offset_sf */
            case 0x16: /* val_expression */
            case 0x2F: /* GNU_negative_offset_extended */
                target = uleb(&reader);
                if (target >= MOST_DWARF_REGISTERS)
                    goto out;
                if (code == 0x05)
                    set_register(row, target, OFFSET, (s64)(uleb(&reader) * (u64)cie->data_unit), (struct expression){});
                else if (code == 0x06 && target < REGISTERS)
                    row->registers[target] = initial ? initial[target] : (struct register_rule){};
                else if (code == 0x07)
                    set_register(row, target, UNDEFINED, 0, (struct expression){});
                else if (code == 0x08)
                    set_register(row, target, SAME, 0, (struct expression){});
                else if (code == 0x09)
                    set_register(row, target, REGISTER, (s64)uleb(&reader), (struct expression){});
                else if (code == 0x10)
                    set_register(row, target, EXPRESSION, 0, block(&reader));
                else if (code == 0x11)
                    set_register(row, target, OFFSET, (s64)((u64)sleb(&reader) * (u64)cie->data_unit), (struct expression){});
                else if (code == 0x14)
                    set_register(row, target, VALUE_OFFSET, (s64)(uleb(&reader) * (u64)cie->data_unit),
                                 (struct expression){});
                else if (code == 0x15)
                    set_register(row, target, VALUE_OFFSET, (s64)((u64)sleb(&reader) * (u64)cie->data_unit),
                                 (struct expression){});
                else if (code == 0x16)
                    set_register(row, target, VALUE_EXPRESSION, 0, block(&reader));
                else if (code == 0x2F)
                    set_register(row, target, OFFSET, (s64)(-uleb(&reader) * (u64)cie->data_unit), (struct expression){});
                break;
            default:
                goto out;
            }
        }
        if (reader.failed)
            goto out;
    }
    is_sound = true;
out:
    free(remembered);
    return is_sound;
}

static enum result read_row(struct image *image, u64 address, struct row *row) {
    struct function function;
    memset(row, 0, sizeof(*row));
    enum result result = find_function(image, address, &function);
    if (result == ABSENT) {
        /* The dynamic linker's start may have no entry. The Linux kernel jumps there, so it has no caller. */
        if (!image->entry_point || address - image->entry_point >= ENTRY_BYTES ||
            !image_is_in_function(image, image->entry_point, address))
            return ABSENT;
        row->has_cfa = true;
        row->cfa = (struct register_rule){REGISTER, RSP, {}};
        row->registers[RETURN_ADDRESS].kind = UNDEFINED;
        return FOUND;
    }
    if (result != FOUND)
        return result;
    u32 left = MOST_INSTRUCTIONS;
    if (!execute(image, row, function.cie.start, function.cie.end, function.start, ~0ULL, &function, NULL, &left))
        return DAMAGED_CFI;
    struct register_rule initial[REGISTERS];
    memcpy(initial, row->registers, sizeof(initial));
    row->is_signal_frame = function.cie.is_signal_frame;
    row->before = address - function.start;
    row->behind = function.start + function.size - address;
    return execute(image, row, function.instructions, function.end, function.start, address, &function, initial, &left)
               ? FOUND
               : DAMAGED_CFI;
}

enum result image_row(struct image *image, u64 address, bool is_exact, const struct row **row) {
    /* The call before a return address counts: a call that never returns may end its function. */
    u64 looked_up = is_exact ? address : address - 1, key = looked_up << 1 | is_exact;
    u64 hash = (key ^ (uintptr_t)image) * 0x9E3779B97F4A7C15ULL;
    struct cached_row *cached = &cached_rows[hash >> (64 - CACHED_ROWS_LOG)];
    if (cached->image != image || cached->key != key) {
        cached->result = read_row(image, looked_up, &cached->row);
        cached->image = frames_work ? image : NULL; /* without work left, it is not known to be damaged */
        cached->key = key;
    }
    *row = &cached->row;
    return cached->result;
}

/* ---- where functions begin ---- */

static int by_value(const void *one, const void *other) {
    u64 first = *(const u64 *)one, second = *(const u64 *)other;
    return (first > second) - (first < second);
}

/* Adds the start of a function; false if there is no room. */
static bool add_start(struct image *image, u32 *room, u64 address) {
    if (image->start_count == *room) {
        u32 larger = *room ? 2 * *room : 1024;
        u64 *starts = larger <= MOST_STARTS ? realloc(image->starts, larger * sizeof(u64)) : NULL;
        frames_no_memory |= !starts && larger <= MOST_STARTS;
        if (!starts)
            return false;
        image->starts = starts;
        *room = larger;
    }
    image->starts[image->start_count++] = address;
    return true;
}

static bool add_symbols(struct image *image, const struct section *section, u32 *room) {
    u64 count = section->size / SYMBOL_BYTES;
    for (u64 i = 0; i < count && i < MOST_SYMBOLS; i++) {
        u64 at = section->offset + SYMBOL_BYTES * i, type = word_at(image, at + 4, 1) & 15, in = word_at(image, at + 6, 2);
        if (in && in < 0xFF00 && (type == STT_FUNC || type == STT_GNU_IFUNC) &&
            !add_start(image, room, word_at(image, at + 8, 8)))
            return false;
    }
    return true;
}

/* Whether a function can begin in code: behind a return, a jump or padding. */
static bool can_begin(const u8 *code, u64 at) {
    if (at < 5)
        return true;
    const u8 *before = code + at - 5;
    return before[4] == 0xC3 || before[4] == 0xCC || before[4] == 0x90 || !before[4] || before[0] == 0xE9 || before[3] == 0xEB;
}

/* Adds the targets of direct calls in code, up to `size` bytes of it, where functions can begin. */
static bool add_targets(struct image *image, const struct segment *segment, u64 size, u32 *room) {
    const u8 *code = image->data + segment->offset, *end = code + size, *at = code;
    u64 unaligned = segment->address % ALIGNED_BYTES;
    u8 *is_target = calloc(size / ALIGNED_BYTES / 8 + 1, 1); /* a bit for each aligned address */
    frames_no_memory |= !is_target;
    while (is_target && end - at >= 5 && (at = memchr(at, 0xE8, end - at - 4))) {
        int32_t relative;
        memcpy(&relative, ++at, sizeof(relative));
        u64 target = (u64)(at + 4 - code) + (u64)(s64)relative;
        if (target < size && !((target + unaligned) % ALIGNED_BYTES) && can_begin(code, target))
            is_target[target / ALIGNED_BYTES / 8] |= 1 << target / ALIGNED_BYTES % 8;
    }
    bool has_room = is_target;
    u64 first = -unaligned % ALIGNED_BYTES;
    for (u64 i = 0; has_room && i * ALIGNED_BYTES + first < size; i++)
        if (is_target[i / 8] >> i % 8 & 1)
            has_room = add_start(image, room, segment->address + i * ALIGNED_BYTES + first);
    free(is_target);
    return has_room;
}

/* Collects the starts of functions: from symbols, and in code without them from the targets of direct calls. */
static void find_starts(struct image *image) {
    u32 room = 0;
    u64 left = image->symbols[0].size ? 0 : MOST_SCANNED_CODE;
    image->has_starts = true;
    bool has_room = add_symbols(image, &image->symbols[0], &room) && add_symbols(image, &image->symbols[1], &room);
    for (u32 i = 0; i < image->segment_count && has_room && left; i++) {
        const struct segment *segment = &image->segments[i];
        u64 size = segment->size < left ? segment->size : left;
        if (!segment->is_code || !is_inside(image, segment->offset, segment->size))
            continue;
        has_room = add_targets(image, segment, size, &room);
        left -= size;
    }
    if (image->starts)
        qsort(image->starts, image->start_count, sizeof(u64), by_value);
}

/* How many starts of functions are at or before an address. */
static u32 starts_up_to(struct image *image, u64 address) {
    if (!image->has_starts)
        find_starts(image);
    u32 low = 0, high = image->start_count;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (image->starts[middle] <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The last start of a function up to an address; 0 if none is known. */
static u64 last_start(struct image *image, u64 address) {
    u32 count = starts_up_to(image, address);
    return count ? image->starts[count - 1] : 0;
}

u64 image_next_start(struct image *image, u64 address) {
    u32 count = starts_up_to(image, address);
    return count < image->start_count ? image->starts[count] : 0;
}

bool image_is_in_function(struct image *image, u64 start, u64 address) {
    u64 at, end;
    struct function function;
    if (start > address)
        return false;
    if (eh_entry(image, address, &at, &end) == FOUND && read_function(image, &image->eh_frame, at, &function) &&
        function.start > start)
        return false;
    return last_start(image, address) <= start;
}

/* ---- where stacks begin ---- */

/* greenlet (since 2.0) runs this function in a new greenlet. It has a caller, but further out the stack is the one that all
 * greenlets share, and has whatever another one has put there. */
#define BEGINS_GREENLET "_ZN8greenlet12UserGreenlet15inner_bootstrap"
#define MOST_NAMES (1 << 17) /* bytes of names that are searched; greenlet has 16 KiB */

static void find_beginning(struct image *image) {
    const struct section *symbols = &image->symbols[1];
    image->has_beginning = true;
    if (image->exported_names_size > MOST_NAMES || !is_inside(image, image->exported_names, image->exported_names_size))
        return;
    const u8 *names = image->data + image->exported_names;
    const u8 *name = memmem(names, image->exported_names_size, BEGINS_GREENLET, sizeof(BEGINS_GREENLET) - 1);
    for (u64 i = 0; name && i < symbols->size / SYMBOL_BYTES && i < MOST_NAMES; i++) {
        u64 at = symbols->offset + SYMBOL_BYTES * i;
        if (word_at(image, at, 4) == (u64)(name - names) && word_at(image, at + 6, 2)) {
            image->beginning = word_at(image, at + 8, 8);
            image->beginning_size = word_at(image, at + 16, 8);
        }
    }
}

bool image_begins_stack(struct image *image, u64 address, bool follows_call) {
    if (!image->has_beginning)
        find_beginning(image);
    if (follows_call)
        return address - 1 - image->beginning < image->beginning_size;
    /* Who made the stack put the address there: the first function returns to it, as if it had called that function. */
    struct function function;
    enum result result = find_function(image, address, &function);
    return result == ABSENT || (result == FOUND && function.start == address);
}

/* ---- expressions (DWARF 5, sections 2.5 and 6.4.2) ---- */

#define MOST_OPERATIONS 256 /* real ones have fewer than 20 */
#define MOST_VALUES 64

static bool constant_of(u64 code, u32 *size, bool *is_signed) {
    if (code < 0x08 || code > 0x0F)
        return false;
    *size = 1 << (code - 0x08) / 2;
    *is_signed = (code - 0x08) & 1;
    return true;
}

bool evaluate(struct expression expression, const struct machine *machine, const u64 *first, u64 *value) {
    u64 values[MOST_VALUES + 1], count = 0;
    struct reader reader = {expression.code, expression.bytes, 0, false};
    if (first)
        values[count++] = *first;
    for (u32 i = 0; i < MOST_OPERATIONS && frames_work; i++, frames_work--) {
        if (reader.at >= reader.size) {
            if (!count)
                return false;
            *value = values[count - 1];
            return true;
        }
        u64 code = number(&reader, 1), pushed = 0, operand;
        u32 size;
        bool pushes = true, is_signed;
        if (code >= 0x70 && code <= 0x8F) { /* a register plus an offset */
            if (!machine->value_of(machine->context, code - 0x70, &pushed))
                return false;
            pushed += (u64)sleb(&reader);
        } else if (code >= 0x30 && code <= 0x4F) {
            pushed = code - 0x30;
        } else if (constant_of(code, &size, &is_signed)) {
            pushed = is_signed ? signed_number(&reader, size) : number(&reader, size);
        } else if (code == 0x1A || (code >= 0x1C && code <= 0x1E) || code == 0x22 || (code >= 0x24 && code <= 0x27) ||
                   (code >= 0x29 && code <= 0x2E)) {
            if (count < 2)
                return false;
            u64 second = values[--count], one = values[--count];
            switch (code) {
            case 0x1A:
                pushed = one & second;
                break;
            case 0x1C:
                pushed = one - second;
                break;
            case 0x1E:
                pushed = one * second;
                break;
            case 0x22:
                pushed = one + second;
                break;
            case 0x24:
                pushed = second < 64 ? one << second : 0;
                break;
            case 0x25:
                pushed = second < 64 ? one >> second : 0;
                break;
            case 0x26:
                pushed = (u64)((s64)one >> (second < 64 ? second : 63));
                break;
            case 0x27:
                pushed = one ^ second;
                break;
            case 0x29:
                pushed = one == second;
                break;
            case 0x2A:
                pushed = (s64)one >= (s64)second;
                break;
            case 0x2B:
                pushed = (s64)one > (s64)second;
                break;
            case 0x2C:
                pushed = (s64)one <= (s64)second;
                break;
            case 0x2D:
                pushed = (s64)one < (s64)second;
                break;
            case 0x2E:
                pushed = one != second;
                break;
            default: /* 0x1D, mod */
                return false;
            }
        } else {
            switch (code) {
            case 0x06: /* deref */
            case 0x94: /* deref_size */
                size = code == 0x06 ? 8 : number(&reader, 1);
                if (!count || (size != 1 && size != 2 && size != 4 && size != 8) ||
                    !machine->read(machine->context, values[--count], size, &pushed))
                    return false;
                break;
            case 0x10:
                pushed = uleb(&reader);
                break;
            case 0x11:
                pushed = (u64)sleb(&reader);
                break;
            case 0x12: /* dup */
                if (!count)
                    return false;
                pushed = values[count - 1];
                break;
            case 0x13: /* drop */
                if (!count)
                    return false;
                count--;
                pushes = false;
                break;
            case 0x14: /* over */
            case 0x15: /* pick */
                operand = code == 0x14 ? 1 : number(&reader, 1);
                if (operand >= count)
                    return false;
                pushed = values[count - 1 - operand];
                break;
            case 0x16: /* swap */
                if (count < 2)
                    return false;
                operand = values[count - 1];
                values[count - 1] = values[count - 2];
                values[count - 2] = operand;
                pushes = false;
                break;
            case 0x1F: /* neg */
            case 0x20: /* not */
            case 0x23: /* plus_uconst */
                if (!count)
                    return false;
                operand = values[--count];
                pushed = code == 0x1F ? -operand : code == 0x20 ? ~operand : operand + uleb(&reader);
                break;
            case 0x21: /* or */
                if (count < 2)
                    return false;
                operand = values[--count];
                pushed = values[--count] | operand;
                break;
            case 0x28: /* bra */
            case 0x2F: /* skip */
                operand = signed_number(&reader, 2);
                if (code == 0x28 && !count)
                    return false;
                if (code == 0x2F || values[--count])
                    reader.at += operand;
                if (reader.at > reader.size && (s64)reader.at < 0)
                    return false;
                pushes = false;
                break;
            case 0x92: /* bregx */
                operand = uleb(&reader);
                if (operand >= REGISTERS || !machine->value_of(machine->context, operand, &pushed))
                    return false;
                pushed += (u64)sleb(&reader);
                break;
            case 0x96: /* nop */
                pushes = false;
                break;
            default:
                return false;
            }
        }
        if (reader.failed)
            return false;
        if (pushes)
            values[count++] = pushed;
        if (count > MOST_VALUES)
            return false;
    }
    return false;
}
