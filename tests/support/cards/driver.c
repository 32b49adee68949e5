/* A stand-in for NVIDIA's driver in tests: the parts of NVML and of the CUDA driver that autods, torch, DeepSpeed and Ray
   ask. It answers from the file AUTODS_TEST_CARDS, whose layout `machine.py` shares, and which a test may change.
   Without that file there is no driver. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999 };
enum { MAGIC = 0x41435244, MOST_CARDS = 16, MOST_HOLDINGS = 64, CUDA_NOT_INITIALIZED = 3 };

typedef struct {
  char name[64], uuid[64];
  uint64_t total_bytes, driver_bytes; /* for programs; beside it, the driver's own */
  int32_t parent;                     /* of a MIG slice: the index of its card; else -1 */
  int32_t mig;                        /* -1: the card knows no MIG; else whether it is in MIG mode */
  int32_t lost, major, minor, unused;
} Card;

typedef struct { int32_t pid, card; uint64_t bytes; } Holding; /* what a process holds on a card */

typedef struct {
  uint32_t magic;
  int32_t problem, cuda, cards, holdings, unused;
  char driver[64];
  Card card[MOST_CARDS];
  Holding holding[MOST_HOLDINGS];
} State;

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } ProcessInfo;

static int users, file = -1;
static State state;

/* Each call reads the file anew, by the descriptor of the first nvmlInit: a process that has closed it gets no answer. */
static int look(void) {
  if (!users) return UNINITIALIZED;
  return pread(file, &state, sizeof state, 0) == sizeof state && state.magic == MAGIC ? SUCCESS : UNKNOWN;
}

static int card_of(void *handle, Card **card) {
  int result = look(), index = (int)(intptr_t)handle - 1;
  if (result) return result;
  if (index < 0 || index >= state.cards) return INVALID_ARGUMENT;
  *card = &state.card[index];
  const Card *whole = (*card)->parent < 0 ? *card : &state.card[(*card)->parent];
  return whole->lost ? GPU_IS_LOST : SUCCESS;
}

/* A process that is gone, or waits to be reaped, holds nothing. */
static int is_alive(int pid) {
  char path[64], text[512] = "";
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int stat = open(path, O_RDONLY | O_CLOEXEC);
  if (stat < 0) return 0;
  ssize_t length = read(stat, text, sizeof text - 1);
  close(stat);
  const char *end = length > 0 ? strrchr(text, ')') : NULL;
  return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

static uint64_t used_bytes(const Card *card) {
  uint64_t used = 0;
  for (int i = 0; i < state.holdings; i++)
    if (&state.card[state.holding[i].card] == card && is_alive(state.holding[i].pid)) used += state.holding[i].bytes;
  return used;
}

static int copy(char *to, unsigned length, const char *from) {
  if (strlen(from) >= length) return INSUFFICIENT_SIZE;
  strcpy(to, from);
  return SUCCESS;
}

static void *wait_for_ever(void *unused) {
  for (;;) pause();
  return unused;
}

/* Driver 580 has a thread of this name from the first nvmlInit on, which nvmlShutdown does not end. */
static void start_thread(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, wait_for_ever, NULL)) return;
  pthread_setname_np(thread, "cuda00001800007");
  pthread_detach(thread);
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  const char *path = getenv("AUTODS_TEST_CARDS");
  if (!users && (!path || (file = open(path, O_RDONLY | O_CLOEXEC)) < 0)) return DRIVER_NOT_LOADED;
  users++;
  int result = look();
  if (!result) result = state.problem;
  if (!result) pthread_once(&once, start_thread);
  if (result && !--users) close(file);
  return result;
}

int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
  if (!users) return UNINITIALIZED;
  if (!--users) close(file);
  return SUCCESS;
}

const char *nvmlErrorString(int result) {
  switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case 18: return "RM has detected an NVML/RM version mismatch.";
    default: return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  int result = look();
  return result ? result : copy(version, length, state.driver);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = look() ? 0 : state.cuda;
  return look();
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  int result = look();
  *count = 0;
  for (int i = 0; !result && i < state.cards; i++) *count += state.card[i].parent < 0;
  return result;
}

/* The card, or the slice of a card, at that place among its like. */
static int find(int parent, unsigned place, void **handle) {
  int result = look();
  for (int i = 0; !result && i < state.cards; i++) {
    if (state.card[i].parent != parent || place--) continue;
    Card *card;
    *handle = (void *)(intptr_t)(i + 1);
    return card_of(*handle, &card);
  }
  return result ? result : parent < 0 ? INVALID_ARGUMENT : NOT_FOUND;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return find(-1, index, handle); }

int nvmlDeviceGetMigDeviceHandleByIndex(void *whole, unsigned place, void **handle) {
  return find((int)(intptr_t)whole - 1, place, handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  int result = look();
  for (int i = 0; !result && i < state.cards; i++) {
    if (strcmp(state.card[i].uuid, uuid)) continue;
    Card *card;
    *handle = (void *)(intptr_t)(i + 1);
    return card_of(*handle, &card);
  }
  return result ? result : NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  Card *card;
  int result = card_of(handle, &card);
  *index = 0;
  for (int i = 0; !result && &state.card[i] != card; i++) *index += state.card[i].parent == card->parent;
  return result;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
  Card *card;
  int result = card_of(handle, &card);
  return result ? result : copy(name, length, card->name);
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
  Card *card;
  int result = card_of(handle, &card);
  return result ? result : copy(uuid, length, card->uuid);
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  Card *card;
  int result = card_of(handle, &card);
  if (result) return result;
  *major = card->major;
  *minor = card->minor;
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long memory[3]) { /* total, free, used */
  Card *card;
  int result = card_of(handle, &card);
  if (result) return result;
  memory[0] = card->total_bytes + card->driver_bytes;
  memory[1] = card->total_bytes - used_bytes(card);
  memory[2] = memory[0] - memory[1];
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, unsigned long long memory[5]) { /* version, total, reserved, free, used */
  Card *card;
  int result = card_of(handle, &card);
  if (result) return result;
  memory[1] = card->total_bytes + card->driver_bytes;
  memory[2] = card->driver_bytes;
  memory[4] = used_bytes(card);
  memory[3] = card->total_bytes - memory[4];
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos) {
  Card *card;
  int result = card_of(handle, &card);
  unsigned room = *count;
  *count = 0;
  for (int i = 0; !result && i < state.holdings; i++) {
    Holding *holding = &state.holding[i];
    if (&state.card[holding->card] != card || !is_alive(holding->pid)) continue;
    if (*count < room) infos[*count] = (ProcessInfo){(unsigned)holding->pid, holding->bytes, 0, 0};
    (*count)++;
  }
  return result ? result : *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos) {
  (void)handle, (void)infos;
  *count = 0;
  return NOT_SUPPORTED;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
  Card *card;
  int result = card_of(handle, &card);
  if (!result && card->mig < 0) return NOT_SUPPORTED;
  if (!result) *now = *pending = (unsigned)card->mig;
  return result;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
  Card *card;
  int result = card_of(handle, &card);
  *count = result || card->mig < 0 ? 0 : 7;
  return result;
}

/* libcuda.so.1, as far as `autods.devices.cuda.is_cuda_initialized` asks it. */
static int cuda_users;

int cuInit(unsigned flags) {
  (void)flags;
  cuda_users++;
  return SUCCESS;
}

int cuDeviceGetCount(int *count) {
  *count = 0;
  return cuda_users ? SUCCESS : CUDA_NOT_INITIALIZED;
}
