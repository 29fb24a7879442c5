// The CUDA runtime API's state: errors, function attributes, allocations. Names and texts are CUDA's own.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <atomic>
#include <chrono>
#include <map>

#include "device.h"
#include "report.h"
#include "session.h"
#include "tool.h"
#include "worker.h"

namespace emu {

namespace {

struct Error {
  int code;
  const char *name, *text;
};
const Error kErrors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {999, "cudaErrorUnknown", "unknown error"},
};

const Error* find_error(int code) {
  for (const Error& e : kErrors)
    if (e.code == code) return &e;
  return nullptr;
}

std::map<const void*, SharedLimit> shared_limits;  // of the kernels that opted in

}  // namespace

const char* error_name(int error) {
  const Error* e = find_error(error);
  return e == nullptr ? "unrecognized error code" : e->name;
}

const char* error_text(int error) {
  const Error* e = find_error(error);
  return e == nullptr ? "unrecognized error code" : e->text;
}

int set_error(int error, const char* hint) {
  if (error != 0) {
    session.last_error = error;
    session.hint = hint == nullptr ? "" : hint;
  }
  return error;
}

int get_last_error(bool clear) {
  if (session.sticky != 0) return session.sticky;  // as on a device whose context is lost
  const int error = session.last_error;
  if (clear) session.last_error = 0;
  return error;
}

int set_dynamic_shared_limit(const void* kernel, int bytes, int most) {
  if (bytes < 0 || bytes > most) {
    char hint[160];
    snprintf(hint, sizeof hint, "%d bytes of dynamic shared memory asked for; at most %d can be had", bytes, most);
    return set_error(1, hint);
  }
  shared_limits[kernel] = {size_t(bytes), size_t(most)};
  return 0;
}

SharedLimit shared_limit(const void* kernel, const Module& module) {
  SharedLimit largest;
  for (const auto& [other, limit] : shared_limits) {
    if (other == kernel) return limit;
    if (kernel != nullptr || !module.holds(reinterpret_cast<uintptr_t>(other))) continue;
    largest.dynamic = std::max(largest.dynamic, limit.dynamic);
    largest.in_all = std::max(largest.in_all, limit.in_all);
  }
  return largest;
}

int multiprocessors() { return session.sms; }

int allocate(void** pointer, size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 256, bytes == 0 ? 256 : bytes) != 0) return set_error(2);
  std::lock_guard<std::mutex> hold(session.lock);
  session.allocations[p] = bytes;
  *pointer = p;
  return 0;
}

int release(void* pointer) {
  if (pointer == nullptr) return 0;
  std::lock_guard<std::mutex> hold(session.lock);
  if (session.allocations.erase(pointer) == 0) return set_error(1, "cudaFree of a pointer that cudaMalloc didn't give");
  free(pointer);
  return 0;
}

// ---- ends and prints

void trap(Site site) { fail("trap", 719, 0, site, "executes __trap()"); }

void assertion_failed(const char* expression, Site site) {
  if (worker != nullptr && worker->current != nullptr) fail("assertion", 710, 0, site, "fails the assertion `%s`", expression);
  fail_launcher("assertion", std::string("fails the assertion `") + expression + "`", uintptr_t(__builtin_return_address(0)) - 1);
  fprintf(stderr, "%s:%d: assertion `%s' failed\n", site.file, site.line, expression);
  abort();
}

void unsupported(Site site) {
  fail("unsupported", 801, 0, site, "executes %s, which the emulator doesn't know", site.what);
}

void memory_fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the block may be telling another OS thread's
  if (worker == nullptr || worker->current == nullptr) return;
  for (Watcher* t : worker->on_execution) t->fence(Fence::Memory);
}

uint64_t clock() {
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
}

int print(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length;
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr) {
    length = vprintf(format, arguments);
  } else {
    ++w->critical;
    char text[4096];
    length = vsnprintf(text, sizeof text, format, arguments);
    if (w->output.size() < kPrinted) w->output += text;
    --w->critical;
  }
  va_end(arguments);
  return length;
}

}  // namespace emu
