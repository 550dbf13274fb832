/* A stand-in for libcuda.so.1, the CUDA driver, that answers cuInit and knows no device. Each cuInit is appended to the file that the
 * environment variable FAKE_CUDA_LOG names: a line `cuInit PID RESULT`, then the C stack and, if the process is Python, its stack, each
 * line after a tab. As in the real driver, a process that was forked from one that has called cuInit cannot use CUDA.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100, NOT_FOUND = 500 };
enum { MOST_FRAMES = 64, TEXT = 1 << 16 };

static pid_t initialised_by; /* inherited by a fork */

/* CPython's own dump, as faulthandler writes it; it needs no GIL, which ctypes gives back during a call. */
static void python_stack(int file) {
    void *(*state)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    void (*dump)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    void *found = state ? state() : NULL;
    if (found && dump) dump(file, found);
}

static void append(const char *text, size_t length) {
    const char *path = getenv("FAKE_CUDA_LOG");
    int log = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (log < 0) return;
    if (write(log, text, length) != (ssize_t)length) abort();
    close(log);
}

int cuInit(unsigned flags) {
    static char said[TEXT], whole[2 * TEXT];
    void *frames[MOST_FRAMES];
    int code = initialised_by && initialised_by != getpid() ? NOT_INITIALIZED : SUCCESS;
    (void)flags;
    if (!initialised_by) initialised_by = getpid();
    int file = memfd_create("stack", 0);
    backtrace_symbols_fd(frames, backtrace(frames, MOST_FRAMES), file);
    python_stack(file);
    ssize_t length = pread(file, said, TEXT - 1, 0);
    close(file);
    said[length > 0 ? length : 0] = 0;
    int at = snprintf(whole, TEXT, "cuInit %d %d\n", (int)getpid(), code);
    for (char *rest = said, *line; (line = strsep(&rest, "\n")) && at < 2 * TEXT - 1024;)
        if (*line) at += snprintf(whole + at, 1024, "\t%.1000s\n", line);
    append(whole, at);
    return code;
}

#define AWAKE if (initialised_by != getpid()) return NOT_INITIALIZED

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { AWAKE; *count = 0; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { AWAKE; (void)device; (void)ordinal; return NO_DEVICE; }

int cuGetErrorString(int code, const char **text) {
    *text = code == NOT_INITIALIZED ? "initialization error" : code ? "error" : "no error";
    return SUCCESS;
}

/* By it the CUDA runtime finds all other functions. */
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    (void)version, (void)flags;
    return (*function = dlsym(RTLD_DEFAULT, name)) ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    if (status) *status = 0;
    return cuGetProcAddress(name, function, version, flags);
}
