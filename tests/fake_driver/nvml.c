/* A stand-in for libnvidia-ml.so.1: NVML's C interface as far as autotune, torch and nvidia-ml-py's bindings call it, answered
 * from the text file that the environment variable FAKE_NVML names. The file is read again at every call, so that a test
 * changes the machine while something looks at it. Without the variable there is no driver. `tests/fake_driver/__init__.py`
 * writes the file and says what its words mean.
 *
 * Names, structures and error codes are those of the bindings, nvidia-ml-py's pynvml.py; what is not here they report as
 * NVML_ERROR_FUNCTION_NOT_FOUND, as they do with an old driver.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { MOST_DEVICES = 64, MOST_PROCESSES = 32, MOST_FAILURES = 32, TEXT = 96 };
#define MIB (1024ull * 1024ull)
#define NOT_AVAILABLE (~0ull) /* of a process whose bytes the driver does not tell */

typedef struct {
    unsigned pid;
    long long mib; /* negative: not told */
    int graphics;
} Process;

typedef struct {
    int parent; /* -1: a card of its own, else the index of the card that this MIG slice is of */
    char uuid[TEXT], name[TEXT], bus[32], nvlink[TEXT];
    unsigned long long total_mib, reserved_mib, hidden_mib, affinity;
    unsigned utilization, mig;
    int major, minor, error, processes;
    Process process[MOST_PROCESSES];
} Device;

typedef struct {
    char driver[TEXT];
    int cuda, devices, failures;
    long delay_ms;
    char failing[MOST_FAILURES][TEXT];
    int code[MOST_FAILURES];
    Device device[MOST_DEVICES];
} Machine;

static int begins(const char *line, const char *word, const char **rest) {
    size_t length = strlen(word);
    if (strncmp(line, word, length) || (line[length] != ' ' && line[length])) return 0;
    *rest = line + length + (line[length] == ' ');
    return 1;
}

static void read_line(Machine *m, const char *line) {
    const char *rest;
    Device *d = m->devices ? &m->device[m->devices - 1] : NULL;
    if (begins(line, "driver", &rest)) snprintf(m->driver, TEXT, "%s", rest);
    else if (begins(line, "cuda", &rest)) m->cuda = atoi(rest);
    else if (begins(line, "delay_ms", &rest)) m->delay_ms = atol(rest);
    else if (begins(line, "fail", &rest) && m->failures < MOST_FAILURES)
        m->failures += sscanf(rest, "%95s %d", m->failing[m->failures], &m->code[m->failures]) == 2;
    else if ((begins(line, "gpu", &rest) || begins(line, "slice", &rest)) && m->devices < MOST_DEVICES) {
        int parent = -1;
        if (line[0] == 's')
            for (parent = m->devices - 1; m->device[parent].parent >= 0; parent--) {}
        d = &m->device[m->devices++];
        memset(d, 0, sizeof *d);
        d->parent = parent;
    } else if (!d) return;
    else if (begins(line, "uuid", &rest)) snprintf(d->uuid, TEXT, "%s", rest);
    else if (begins(line, "name", &rest)) snprintf(d->name, TEXT, "%s", rest);
    else if (begins(line, "nvlink", &rest)) snprintf(d->nvlink, TEXT, "%s", rest);
    else if (begins(line, "bus", &rest)) snprintf(d->bus, sizeof d->bus, "%s", rest);
    else if (begins(line, "total_mib", &rest)) d->total_mib = strtoull(rest, NULL, 10);
    else if (begins(line, "reserved_mib", &rest)) d->reserved_mib = strtoull(rest, NULL, 10);
    else if (begins(line, "hidden_mib", &rest)) d->hidden_mib = strtoull(rest, NULL, 10);
    else if (begins(line, "affinity", &rest)) d->affinity = strtoull(rest, NULL, 16);
    else if (begins(line, "utilization", &rest)) d->utilization = atoi(rest);
    else if (begins(line, "mig", &rest)) d->mig = atoi(rest);
    else if (begins(line, "capability", &rest)) sscanf(rest, "%d %d", &d->major, &d->minor);
    else if (begins(line, "error", &rest)) d->error = atoi(rest);
    else if ((begins(line, "process", &rest) || begins(line, "graphics", &rest)) && d->processes < MOST_PROCESSES) {
        Process *p = &d->process[d->processes++];
        p->graphics = line[0] == 'g';
        sscanf(rest, "%u %lld", &p->pid, &p->mib);
    }
}

/* The machine as the file describes it now; what this call is to answer, SUCCESS where it is to do its work. */
static int look(Machine *m, const char *call) {
    char line[512];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    memset(m, 0, sizeof *m);
    if (!file) return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        read_line(m, line);
    }
    fclose(file);
    if (m->delay_ms) {
        struct timespec pause = {m->delay_ms / 1000, m->delay_ms % 1000 * 1000000};
        nanosleep(&pause, NULL);
    }
    for (int i = 0; i < m->failures; i++)
        if (!strcmp(m->failing[i], call)) return m->code[i];
    return SUCCESS;
}

/* A handle is 1 + the device's place in the file: it outlives a change of the file, as a real one outlives the device. */
static int open_handle(Machine *m, void *handle, const char *call, Device **found) {
    long place = (long)handle - 1;
    int code = look(m, call);
    if (code) return code;
    if (place < 0 || place >= m->devices) return INVALID_ARGUMENT;
    *found = &m->device[place];
    Device *card = (*found)->parent < 0 ? *found : &m->device[(*found)->parent];
    return card->error ? card->error : (*found)->error;
}

#define LOOK Machine m; int code_ = look(&m, __func__); if (code_) return code_
#define OPEN Machine m; Device *d; int code_ = open_handle(&m, handle, __func__, &d); if (code_) return code_

static int give(const char *text, char *buffer, unsigned length) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

static unsigned long long used_mib(const Device *d) {
    unsigned long long sum = d->hidden_mib;
    for (int i = 0; i < d->processes; i++) sum += d->process[i].mib > 0 ? d->process[i].mib : 0;
    return sum;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; LOOK; return SUCCESS; }
int nvmlInit_v2(void) { LOOK; return SUCCESS; }
int nvmlInit(void) { LOOK; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case 1: return "Uninitialized";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) { LOOK; return give(m.driver, text, length); }
int nvmlSystemGetNVMLVersion(char *text, unsigned length) { LOOK; return give(m.driver, text, length); }
int nvmlSystemGetCudaDriverVersion(int *version) { LOOK; *version = m.cuda; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { LOOK; *version = m.cuda; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    LOOK;
    *count = 0;
    for (int i = 0; i < m.devices; i++) *count += m.device[i].parent < 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    LOOK;
    for (int i = 0; i < m.devices; i++)
        if (m.device[i].parent < 0 && !index--) {
            *handle = (void *)(long)(i + 1);
            return m.device[i].error;
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    LOOK;
    for (int i = 0; i < m.devices; i++)
        if (!strcmp(m.device[i].uuid, uuid)) {
            *handle = (void *)(long)(i + 1);
            return m.device[i].error;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    OPEN;
    *index = 0;
    for (Device *other = m.device; other < d; other++) *index += other->parent < 0;
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned length) { OPEN; return give(d->name, text, length); }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) { OPEN; return give(d->uuid, text, length); }

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(void *handle, PciInfo *info) {
    OPEN;
    memset(info, 0, sizeof *info);
    snprintf(info->busId, sizeof info->busId, "%s", d->bus);
    sscanf(d->bus, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

/* Whoever is no administrator may not ask for the memory of a card in MIG mode as a whole. */
#define OPEN_MEMORY OPEN; if (d->mig) return NO_PERMISSION

/* Version 1 counts what the driver keeps for itself as used, version 2 apart; both give the same `free`. */
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    OPEN_MEMORY;
    memory->total = d->total_mib * MIB;
    memory->used = (d->reserved_mib + used_mib(d)) * MIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    OPEN_MEMORY;
    if (memory->version != (sizeof *memory | 2u << 24)) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    memory->total = d->total_mib * MIB;
    memory->reserved = d->reserved_mib * MIB;
    memory->used = used_mib(d) * MIB;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } ProcessInfo;

static int list_processes(const Device *d, int graphics, unsigned *count, ProcessInfo *infos) {
    unsigned room = *count, many = 0;
    for (int i = 0; i < d->processes; i++) {
        const Process *p = &d->process[i];
        if (p->graphics != graphics) continue;
        if (many < room)
            infos[many] = (ProcessInfo){p->pid, p->mib < 0 ? NOT_AVAILABLE : p->mib * MIB, ~0u, ~0u};
        many++;
    }
    *count = many;
    return many > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos) {
    OPEN;
    return list_processes(d, 0, count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos) {
    OPEN;
    return list_processes(d, 1, count, infos);
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned rates[2]) {
    OPEN;
    if (d->parent >= 0) return NOT_SUPPORTED;
    rates[0] = d->utilization;
    rates[1] = d->utilization / 2;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    OPEN;
    *major = d->major;
    *minor = d->minor;
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinityWithinScope(void *handle, unsigned words, unsigned long *set, unsigned scope) {
    (void)scope;
    OPEN;
    memset(set, 0, words * sizeof *set);
    set[0] = d->affinity;
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *set) {
    OPEN;
    memset(set, 0, words * sizeof *set);
    set[0] = d->affinity;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    OPEN;
    if (d->major < 8) return NOT_SUPPORTED; /* MIG came with Ampere */
    *now = *pending = d->mig;
    return SUCCESS;
}

/* Two cards of one bridge or switch are joined by NVLink. */
int nvmlDeviceGetP2PStatus(void *handle, void *other, unsigned index, unsigned *status) {
    OPEN;
    const char *theirs = m.device[(long)other - 1].nvlink;
    *status = index == 2 && *theirs && !strcmp(d->nvlink, theirs) ? 0 : 5; /* NVML_P2P_STATUS_NOT_SUPPORTED */
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { OPEN; *count = d->major < 8 ? 0 : 7; return SUCCESS; }
int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is) { OPEN; *is = d->parent >= 0; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
    OPEN;
    for (int i = 0; i < m.devices; i++)
        if (m.device[i].parent == d - m.device && !index--) {
            *slice = (void *)(long)(i + 1);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **card) {
    OPEN;
    if (d->parent < 0) return INVALID_ARGUMENT;
    *card = (void *)(long)(d->parent + 1);
    return SUCCESS;
}
