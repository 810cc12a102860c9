/* Lets calls of the system fail in the monitor's agent: loaded before all other libraries, it
 * stands before libc. The environment says what fails:
 *
 *   CHAOS_CALL   file (on paths below CHAOS_PLACE, and what was opened there; unlink never fails:
 *                what cannot be removed stays), socket, memory, thread, or clock (which leaps)
 *   CHAOS_NTH    the call of that kind that fails first, counted from 1; 0: none
 *   CHAOS_TIMES  how many fail from then on
 *   CHAOS_ERROR  with which errno; for the clock, by how many seconds it leaps
 *   CHAOS_MARK   a file that is made when the first one fails
 *   CHAOS_COUNTS where to write how many calls of each kind there were, at the end
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum kind { FILE_CALL, SOCKET_CALL, MEMORY_CALL, THREAD_CALL, CLOCK_CALL, KINDS };
static const char *names[KINDS] = {"file", "socket", "memory", "thread", "clock"};
static atomic_long counts[KINDS];
static atomic_int armed; /* from the first call on the run's files on */
static int agent, chosen = -1;
static long nth, times, value;
static const char *place, *mark;
static char opened[65536];

__attribute__((constructor)) static void begin(void) {
    char line[4096] = {0};
    FILE *file = fopen("/proc/self/cmdline", "r");
    size_t size = file ? fread(line, 1, sizeof line - 1, file) : 0;
    if (file) fclose(file);
    for (size_t i = 0; i < size; i++) /* arguments end in zeros */
        if (!strcmp(line + i, "rankscope.agent")) agent = 1;
    if (!agent) return;
    const char *call = getenv("CHAOS_CALL");
    for (int kind = 0; call && kind < KINDS; kind++)
        if (!strcmp(call, names[kind])) chosen = kind;
    nth = getenv("CHAOS_NTH") ? atol(getenv("CHAOS_NTH")) : 0;
    times = getenv("CHAOS_TIMES") ? atol(getenv("CHAOS_TIMES")) : 1;
    value = getenv("CHAOS_ERROR") ? atol(getenv("CHAOS_ERROR")) : EIO;
    place = getenv("CHAOS_PLACE");
    mark = getenv("CHAOS_MARK");
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("CHAOS_COUNTS");
    FILE *file = agent && path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (int kind = 0; kind < KINDS; kind++)
        fprintf(file, "%s %ld\n", names[kind], (long)counts[kind]);
    fclose(file);
}

static int fails(enum kind kind) {
    if (!agent || (!armed && kind != SOCKET_CALL && kind != THREAD_CALL)) return 0;
    long count = atomic_fetch_add(&counts[kind], 1) + 1;
    if (kind != chosen || !nth || count < nth || count >= nth + times) return 0;
    if (count == nth && mark) syscall(SYS_openat, AT_FDCWD, mark, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    errno = (int)value;
    return 1;
}

static int ours(const char *path) {
    if (!agent || !place || !path || strncmp(path, place, strlen(place))) return 0;
    armed = 1;
    return 1;
}

static int file_fails(int file) {
    return file >= 0 && file < (int)sizeof opened && opened[file] && fails(FILE_CALL);
}

static int note(int file, const char *path) {
    if (file >= 0 && file < (int)sizeof opened) opened[file] = (char)ours(path);
    return file;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name, before, pass)                                                       \
    int name(before const char *path, int flags, ...) {                                \
        va_list rest;                                                                  \
        va_start(rest, flags);                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;        \
        va_end(rest);                                                                  \
        if (ours(path) && fails(FILE_CALL)) return -1;                                 \
        return note(REAL(name)(pass path, flags, mode), path);                         \
    }
#define NONE
#define FOLDER_FIRST int folder,
#define FOLDER folder,
OPEN(open, NONE, NONE)
OPEN(open64, NONE, NONE)
OPEN(openat, FOLDER_FIRST, FOLDER)
OPEN(openat64, FOLDER_FIRST, FOLDER)

#define ON_FILE(result, name, parameters, arguments)                                   \
    result name parameters { return file_fails(file) ? -1 : REAL(name) arguments; }
ON_FILE(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
ON_FILE(ssize_t, read, (int file, void *data, size_t size), (file, data, size))
ON_FILE(int, fsync, (int file), (file))
ON_FILE(int, fdatasync, (int file), (file))
ON_FILE(int, ftruncate64, (int file, off64_t size), (file, size))

#define ON_PATH(name, parameters, path, arguments)                                     \
    int name parameters { return ours(path) && fails(FILE_CALL) ? -1 : REAL(name) arguments; }
ON_PATH(rename, (const char *from, const char *to), to, (from, to))
ON_PATH(link, (const char *from, const char *to), to, (from, to))
ON_PATH(mkdir, (const char *path, mode_t mode), path, (path, mode))

int close(int file) {
    int failed = file_fails(file);
    if (file >= 0 && file < (int)sizeof opened) opened[file] = 0;
    int result = REAL(close)(file); /* as Linux does: closed in any case */
    if (failed) errno = (int)value;
    return failed ? -1 : result;
}

ssize_t recv(int file, void *data, size_t size, int flags) {
    return fails(SOCKET_CALL) ? -1 : REAL(recv)(file, data, size, flags);
}

ssize_t send(int file, const void *data, size_t size, int flags) {
    return fails(SOCKET_CALL) ? -1 : REAL(send)(file, data, size, flags);
}

int accept4(int file, struct sockaddr *address, socklen_t *size, int flags) {
    return fails(SOCKET_CALL) ? -1 : REAL(accept4)(file, address, size, flags);
}

int epoll_wait(int file, struct epoll_event *events, int most, int timeout) {
    return fails(SOCKET_CALL) ? -1 : REAL(epoll_wait)(file, events, most, timeout);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *),
                   void *argument) {
    return fails(THREAD_CALL) ? (int)value
                              : REAL(pthread_create)(thread, attributes, work, argument);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int result = real(clock, now);
    if (!result && clock == CLOCK_REALTIME && fails(CLOCK_CALL)) now->tv_sec += value;
    return result;
}

extern void *__libc_malloc(size_t size);
extern void *__libc_realloc(void *block, size_t size);
void *malloc(size_t size) { return fails(MEMORY_CALL) ? NULL : __libc_malloc(size); }
void *realloc(void *block, size_t size) {
    return fails(MEMORY_CALL) ? NULL : __libc_realloc(block, size);
}
