/* A disk that fails on purpose: preloaded into a process, it counts what the process does to the files of one folder.

   CHAOS_FOLDER  the folder; calls on what lies below it are counted, all others pass by
   CHAOS_DISK    action:pattern:number:phase, see below; "" counts only
   CHAOS_RANK    the rank that is meant, by what its launcher says; "" for all; a process without a launcher is rank 0
   CHAOS_MARK    a file to which the call that was hit is written
   CHAOS_LOG     a file to which each call is appended, "" for none; ".<rank>" is added to its name
   CHAOS_FULL    a file: while it exists, every call fails that needs room

   The call is hit that is the number-th (from 1) on a path with `pattern` in it, once `chaos_phase(phase)` was called
   ("" from the start). Action `kill` kills the process, in a write when half of the bytes are written; `stop` suspends
   it there; `fail` lets this one call fail, `full` this one and all later ones that need room.

   Counted are open for writing of a file that is new or emptied, write, truncate, fsync and rename, by whatever library:
   HDF5's own calls come by here as well as Python's. cc -shared -fPIC -o disk.so disk.c -ldl */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX], action[16], pattern[256], phase[64], mark[PATH_MAX], logged[PATH_MAX], full[PATH_MAX];
static const char *rank_name;
static long number;
static int meant;
static atomic_int in_phase, is_full;
static atomic_long calls, matches;

static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off64_t);
static int (*real_fsync)(int), (*real_fdatasync)(int), (*real_truncate)(int, off64_t);
static int (*real_rename)(const char *, const char *), (*real_open)(const char *, int, ...);

static void setting(const char *name, char *to, size_t size) {
    const char *value = getenv(name);
    snprintf(to, size, "%s", value ? value : "");
}

/* Read the settings; to be called again where they have changed, as after a fork. */
__attribute__((constructor)) void chaos_begin(void) {
    char what[512], *field, *rest = what;
    real_write = dlsym(RTLD_NEXT, "write");
    real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_truncate = dlsym(RTLD_NEXT, "ftruncate64");
    real_rename = dlsym(RTLD_NEXT, "rename");
    real_open = dlsym(RTLD_NEXT, "open64");
    rank_name = getenv("OMPI_COMM_WORLD_RANK");
    rank_name = rank_name ? rank_name : getenv("PMI_RANK");
    rank_name = rank_name ? rank_name : "0";
    setting("CHAOS_FOLDER", folder, sizeof folder);
    setting("CHAOS_MARK", mark, sizeof mark);
    setting("CHAOS_LOG", logged, sizeof logged);
    setting("CHAOS_FULL", full, sizeof full);
    setting("CHAOS_RANK", what, sizeof what);
    meant = !what[0] || !strcmp(what, rank_name);
    setting("CHAOS_DISK", what, sizeof what);
    action[0] = pattern[0] = phase[0] = 0;
    if ((field = strsep(&rest, ":")))
        snprintf(action, sizeof action, "%s", field);
    if ((field = strsep(&rest, ":")))
        snprintf(pattern, sizeof pattern, "%s", field);
    if ((field = strsep(&rest, ":")))
        number = atol(field);
    if ((field = strsep(&rest, ":")))
        snprintf(phase, sizeof phase, "%s", field);
    in_phase = !phase[0];
    is_full = calls = matches = 0;
}

static void append(const char *path, const char *line) {
    int file = real_open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (file < 0 || real_write(file, line, strlen(line)) < 0)
        abort(); /* nothing would be known of this run */
    close(file);
}

static void log_line(const char *line) {
    char name[PATH_MAX + 32];
    if (logged[0]) {
        snprintf(name, sizeof name, "%s.%s", logged, rank_name);
        append(name, line);
    }
}

/* Python tells where the run is. */
void chaos_phase(const char *name) {
    char line[128];
    snprintf(line, sizeof line, "0 phase %s\n", name);
    log_line(line);
    if (!strcmp(name, phase))
        in_phase = 1;
}

static int below(const char *path) {
    size_t size = strlen(folder);
    return size && !strncmp(path, folder, size) && path[size] == '/';
}

/* Count a call; return 1 where it is the one that was meant, and 2 where the disk is full. */
static int seen(const char *call, const char *path, int needs_room) {
    char line[PATH_MAX + 200];
    struct timespec now;
    long count, match = 0;
    if (!below(path) || !meant)
        return 0;
    count = ++calls;
    if (in_phase && strstr(path + strlen(folder), pattern))
        match = ++matches;
    snprintf(line, sizeof line, "%ld %s %s\n", count, call, path + strlen(folder));
    log_line(line);
    if (action[0] && match == number) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        snprintf(line, sizeof line, "%ld.%09ld %s %d %s %s\n", (long)now.tv_sec, now.tv_nsec, rank_name, getpid(), call,
                 path + strlen(folder));
        append(mark, line);
        if (!strcmp(action, "full"))
            is_full = 1;
        return 1;
    }
    return needs_room && (is_full || (full[0] && !access(full, F_OK))) ? 2 : 0;
}

/* Return 1 where the call is to fail; a process that is killed does not come back. */
static int strike(int hit) {
    if (hit && !strcmp(action, "kill"))
        kill(getpid(), SIGKILL);
    else if (hit && !strcmp(action, "stop"))
        raise(SIGSTOP);
    else
        return hit;
    return 0;
}

static int torn(int hit) {
    return hit == 1 && (!strcmp(action, "kill") || !strcmp(action, "stop"));
}

static int of(int file, const char *call, int needs_room) {
    char link[64], path[PATH_MAX];
    ssize_t size;
    if (!real_open) /* a library that writes while it is loaded */
        chaos_begin();
    if (!folder[0])
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return seen(call, path, needs_room);
}

ssize_t write(int file, const void *data, size_t size) {
    int hit = of(file, "write", 1);
    size_t half = torn(hit) ? size / 2 : 0;
    if (half && real_write(file, data, half) != (ssize_t)half)
        half = 0;
    if (strike(hit)) {
        errno = ENOSPC;
        return -1;
    }
    return real_write(file, (const char *)data + half, size - half) + half;
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t place) {
    int hit = of(file, "write", 1);
    if (torn(hit))
        (void)!real_pwrite(file, data, size / 2, place);
    if (strike(hit)) {
        errno = ENOSPC;
        return -1;
    }
    return real_pwrite(file, data, size, place);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t place) { return pwrite64(file, data, size, place); }

int ftruncate64(int file, off64_t size) {
    if (strike(of(file, "truncate", 1))) {
        errno = ENOSPC;
        return -1;
    }
    return real_truncate(file, size);
}

int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int fsync(int file) {
    if (strike(of(file, "fsync", 0))) {
        errno = EIO;
        return -1;
    }
    return real_fsync(file);
}

int fdatasync(int file) {
    if (strike(of(file, "fsync", 0))) {
        errno = EIO;
        return -1;
    }
    return real_fdatasync(file);
}

int rename(const char *from, const char *to) {
    if (strike(seen("rename", to, 0))) {
        errno = EIO;
        return -1;
    }
    return real_rename(from, to);
}

static int opened(const char *path, int flags, mode_t mode) {
    struct stat found;
    int creates;
    if (!real_open)
        chaos_begin();
    creates = folder[0] && (flags & O_CREAT) && ((flags & O_TRUNC) || stat(path, &found));
    if (creates && strike(seen("open", path, 1))) {
        errno = ENOSPC;
        return -1;
    }
    return real_open(path, flags, mode);
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        mode_t mode = 0;                                                                                               \
        va_list rest;                                                                                                  \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                           \
            va_start(rest, flags);                                                                                     \
            mode = va_arg(rest, mode_t);                                                                               \
            va_end(rest);                                                                                              \
        }                                                                                                              \
        return opened(path, flags, mode);                                                                              \
    }

OPEN(open)
OPEN(open64)
