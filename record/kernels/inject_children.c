// SPDX-License-Identifier: Apache-2.0
/* The environment of a program that libiaprof_inject.so was preloaded into, and of those that it starts.
 *
 * LD_PRELOAD goes back to what it was before anything of the program runs, and comes back for a program that is started from
 * here, where this half of the library takes it away again: so each sees the environment that it would have had.
 *
 * These functions may run in the child of a vfork, on its parent's memory, or of a fork of many threads: they write to
 * their stack only, and call nothing that takes a lock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "inject.h"

#define EXPORT __attribute__((visibility("default")))
#define PRELOAD "LD_PRELOAD="
enum { PRELOAD_LENGTH = sizeof PRELOAD - 1 };
enum { OPEN_FLAGS = O_RDONLY | O_CLOEXEC | O_NONBLOCK };

char inject_library[INJECT_PATH_BYTES];
int inject_folder_length;
static struct stat library; /* a path can become another file's, this is known by its inode, which we hold */

typedef int execve_t(const char *, char *const *, char *const *);
typedef int spawn_t(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, char *const *,
                    char *const *);
static execve_t *next_execve, *next_execvpe;
static int (*next_fexecve)(int, char *const *, char *const *);
static spawn_t *next_posix_spawn, *next_posix_spawnp;

void inject_begin(void)
{
    if (inject_dlsym)
        return;
    /* The oldest name of it, which every glibc for x86-64 has. */
    void *(*found)(void *, const char *) = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    next_execve = found(RTLD_NEXT, "execve");
    next_execvpe = found(RTLD_NEXT, "execvpe");
    next_fexecve = found(RTLD_NEXT, "fexecve");
    next_posix_spawn = found(RTLD_NEXT, "posix_spawn");
    next_posix_spawnp = found(RTLD_NEXT, "posix_spawnp");
    /* The next one, as this library has its own: another preloaded library may have one, too, that its program relies on.
     * dlvsym passes over such a one, which has no version. */
    inject_dlsym = found(RTLD_NEXT, "dlsym");
}

/* --- of this program */

/* Not getenv and unsetenv, as programs have functions of these names; bash does. */
static char **find_variable(char **environment, const char *name, size_t length)
{
    while (environment && *environment && strncmp(*environment, name, length))
        environment++;
    return environment && *environment ? environment : NULL;
}

__attribute__((constructor)) static void begin(void)
{
    inject_begin();
    Dl_info here;
    if (!dladdr(&inject_library, &here) || !here.dli_fname)
        return;
    size_t length = strlen(here.dli_fname);
    const char *slash = strrchr(here.dli_fname, '/');
    if (length >= sizeof inject_library || !slash || stat(here.dli_fname, &library))
        return;
    memcpy(inject_library, here.dli_fname, length);
    inject_folder_length = slash - here.dli_fname;
    char **variable = find_variable(environ, PRELOAD, PRELOAD_LENGTH);
    if (!variable || strncmp(*variable + PRELOAD_LENGTH, inject_library, length))
        return;
    /* In its place, where nothing is allocated. The rest is wiped, because /proc/PID/environ shows that memory. */
    char *value = *variable + PRELOAD_LENGTH, *end = value + strlen(value);
    if (value[length] == ':') {
        memmove(value, value + length + 1, end - value - length);
        memset(end - length - 1, 0, length + 1);
    } else if (!value[length]) {
        memset(*variable, 0, end - *variable);
        while ((variable[0] = variable[1]))
            variable++;
    }
}

/* --- whether a file is a program that will take the library, and take the variable away */

static bool is_privileged(int fd, const struct stat *file)
{
    uid_t user = file->st_mode & S_ISUID ? file->st_uid : geteuid();
    gid_t group = file->st_mode & S_ISGID ? file->st_gid : getegid();
    return user != getuid() || group != getgid() ||
           (user && fgetxattr(fd, "security.capability", NULL, 0) > 0);
}

static bool is_dynamic(int fd)
{
    Elf64_Ehdr header;
    if (pread(fd, &header, sizeof header, 0) != sizeof header || memcmp(header.e_ident, ELFMAG, SELFMAG) ||
        header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != EM_X86_64 ||
        header.e_phentsize != sizeof(Elf64_Phdr))
        return false;
    for (int i = 0; i < header.e_phnum && i < 64; i++) {
        Elf64_Phdr segment;
        char loader[256];
        if (pread(fd, &segment, sizeof segment, header.e_phoff + i * sizeof segment) != sizeof segment)
            return false;
        if (segment.p_type != PT_INTERP)
            continue;
        const char name[] = "/ld-linux-x86-64.so.2"; /* glibc's; others would read the variable, and fail */
        size_t size = segment.p_filesz;
        return size > sizeof name && size <= sizeof loader &&
               pread(fd, loader, size, segment.p_offset) == (ssize_t)size &&
               !memcmp(loader + size - sizeof name, name, sizeof name);
    }
    return false;
}

static bool takes_library(int fd)
{
    enum { MOST_INTERPRETERS = 4 }; /* Linux follows as many */
    bool takes = false;
    for (int i = 0; fd >= 0; i++) {
        struct stat file;
        char line[256], *end;
        ssize_t size = -1;
        if (!fstat(fd, &file) && S_ISREG(file.st_mode) && !is_privileged(fd, &file))
            size = pread(fd, line, sizeof line - 1, 0);
        bool script = size > 2 && line[0] == '#' && line[1] == '!';
        takes = size > 0 && !script && is_dynamic(fd);
        if (i)
            close(fd);
        if (!script || i == MOST_INTERPRETERS)
            break;
        line[size] = 0;
        char *interpreter = line + 2 + strspn(line + 2, " \t");
        if (!*(end = interpreter + strcspn(interpreter, " \t\n")))
            break; /* longer than we looked */
        *end = 0;
        fd = open(interpreter, OPEN_FLAGS);
    }
    return takes;
}

/* Opens what execvp or posix_spawnp would start. */
static int open_in_path(const char *name)
{
    char **path = find_variable(environ, "PATH=", 5);
    if (strchr(name, '/'))
        return open(name, OPEN_FLAGS);
    for (const char *folder = path ? *path + 5 : "/bin:/usr/bin"; *name;) {
        char file[INJECT_PATH_BYTES];
        size_t length = strcspn(folder, ":");
        if (length + 1 + strlen(name) < sizeof file) {
            stpcpy(stpcpy(mempcpy(file, folder, length), length ? "/" : ""), name);
            if (!access(file, X_OK))
                return open(file, OPEN_FLAGS);
        }
        if (!folder[length])
            break;
        folder += length + 1;
    }
    return -1;
}

/* Whether the library is where the other program will look, which may see other files or have other rights. */
static bool is_in_reach(void)
{
    struct stat there;
    int fd = *inject_library ? open(inject_library, OPEN_FLAGS) : -1;
    bool same = fd >= 0 && !fstat(fd, &there) && there.st_dev == library.st_dev && there.st_ino == library.st_ino;
    if (fd >= 0)
        close(fd);
    return same;
}

/* --- starting it */

struct start {
    enum { EXECVE, EXECVPE, FEXECVE, SPAWN, SPAWNP } how;
    int fd; /* FEXECVE */
    const char *file;
    char *const *argv, *const *environment;
    pid_t *pid; /* SPAWN and SPAWNP */
    const posix_spawn_file_actions_t *actions;
    const posix_spawnattr_t *attributes;
};

static int start(struct start with)
{
    inject_begin();
    int error = errno, fd = -1;
    if (with.how == FEXECVE)
        fd = with.fd;
    else if (with.file)
        fd = with.how == EXECVPE || with.how == SPAWNP ? open_in_path(with.file) : open(with.file, OPEN_FLAGS);
    char **given = (char **)with.environment;
    /* The variable of ldd makes ld.so list the libraries. */
    bool add = is_in_reach() && takes_library(fd) && !find_variable(given, "LD_TRACE_LOADED_OBJECTS=", 24);
    if (fd >= 0 && with.how != FEXECVE)
        close(fd);
    errno = error;

    char **before = add ? find_variable(given, PRELOAD, PRELOAD_LENGTH) : NULL;
    size_t n = 0;
    while (add && given && given[n])
        n++;
    char *environment[n + 2];
    char preload[PRELOAD_LENGTH + sizeof inject_library + (before ? strlen(*before) : 0)];
    if (add) {
        if (n)
            memcpy(environment, given, n * sizeof *given);
        char *end = stpcpy(stpcpy(preload, PRELOAD), inject_library);
        if (before)
            stpcpy(stpcpy(end, ":"), *before + PRELOAD_LENGTH);
        environment[before ? (size_t)(before - given) : n++] = preload;
        environment[n] = NULL;
        with.environment = environment;
    }
    switch (with.how) {
    case EXECVE:
        return next_execve(with.file, with.argv, with.environment);
    case EXECVPE:
        return next_execvpe(with.file, with.argv, with.environment);
    case FEXECVE:
        return next_fexecve(with.fd, with.argv, with.environment);
    case SPAWN:
        return next_posix_spawn(with.pid, with.file, with.actions, with.attributes, with.argv, with.environment);
    default:
        return next_posix_spawnp(with.pid, with.file, with.actions, with.attributes, with.argv, with.environment);
    }
}

EXPORT int execve(const char *file, char *const argv[], char *const environment[])
{
    return start((struct start){.how = EXECVE, .file = file, .argv = argv, .environment = environment});
}

EXPORT int execv(const char *file, char *const argv[])
{
    return execve(file, argv, environ);
}

EXPORT int execvpe(const char *file, char *const argv[], char *const environment[])
{
    return start((struct start){.how = EXECVPE, .file = file, .argv = argv, .environment = environment});
}

EXPORT int execvp(const char *file, char *const argv[])
{
    return execvpe(file, argv, environ);
}

EXPORT int fexecve(int fd, char *const argv[], char *const environment[])
{
    return start((struct start){.how = FEXECVE, .fd = fd, .argv = argv, .environment = environment});
}

/* Counts the arguments up to the NULL, lays them out as an array `argv`, and leaves `arguments` behind the NULL. */
#define COLLECT(first, arguments, argv)                                                                                \
    va_list arguments;                                                                                                 \
    size_t n = 1;                                                                                                      \
    va_start(arguments, first);                                                                                        \
    while (va_arg(arguments, char *))                                                                                  \
        n++;                                                                                                           \
    va_end(arguments);                                                                                                 \
    char *argv[n + 1];                                                                                                 \
    va_start(arguments, first);                                                                                        \
    argv[0] = (char *)first;                                                                                           \
    for (size_t i = 1; i <= n; i++)                                                                                    \
        argv[i] = va_arg(arguments, char *);

EXPORT int execl(const char *file, const char *first, ...)
{
    COLLECT(first, arguments, argv)
    va_end(arguments);
    return execve(file, argv, environ);
}

EXPORT int execlp(const char *file, const char *first, ...)
{
    COLLECT(first, arguments, argv)
    va_end(arguments);
    return execvpe(file, argv, environ);
}

EXPORT int execle(const char *file, const char *first, ...)
{
    COLLECT(first, arguments, argv)
    char *const *environment = va_arg(arguments, char *const *);
    va_end(arguments);
    return execve(file, argv, environment);
}

EXPORT int posix_spawn(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes, char *const argv[], char *const environment[])
{
    return start((struct start){SPAWN, -1, file, argv, environment, pid, actions, attributes});
}

EXPORT int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                        const posix_spawnattr_t *attributes, char *const argv[], char *const environment[])
{
    return start((struct start){SPAWNP, -1, file, argv, environment, pid, actions, attributes});
}
