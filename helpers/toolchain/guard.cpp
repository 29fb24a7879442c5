// Calls fa_launch of a kernel that nvcc has compiled, and comes back whatever its host code does to end the process.
#include "guard.h"

#include <dlfcn.h>

#include <csetjmp>
#include <cstdint>

namespace {

struct End {         // how a launch ended (mirrored with ctypes in guard.py)
  int32_t code;      // what fa_launch returned, a cudaError_t
  int32_t line;      // with `file`: where, if known without an offset
  uint64_t offset;   // in the kernel's library, of the return address of the call that ended it; 0: unknown
  char kind[16];     // empty if fa_launch returned
  char text[1024];   // the rest of a sentence that begins with "fa_launch"
  char file[1024];
};

thread_local jmp_buf* back = nullptr;  // out of the launcher that runs on this thread
thread_local End ended;

void note(const char* kind, const char* text, const void* pc, const char* file, int line) {
  Dl_info in;
  ended.code = 0;
  ended.line = line;
  ended.offset = pc != nullptr && dladdr(pc, &in) != 0 ? uintptr_t(pc) - reinterpret_cast<uintptr_t>(in.dli_fbase) : 0;
  snprintf(ended.kind, sizeof ended.kind, "%s", kind);
  snprintf(ended.text, sizeof ended.text, "%s", text);
  snprintf(ended.file, sizeof ended.file, "%s", file);
}

// Handlers that are left by a jump don't end: their exceptions are ended here, back to the `handled` one of before the launch.
struct Exceptions {  // Itanium C++ ABI, 2.2.2: __cxa_eh_globals
  void* handled;
  unsigned uncaught;
};

}  // namespace

void guard::end(const char* kind, const char* text, const void* pc, const char* file, int line) {
  if (back == nullptr) return;
  note(kind, text, pc, file, line);
  longjmp(*back, 1);
}

// fa_launch(arguments, stream). Null if it returned cudaSuccess; else how it ended, valid until the thread's next launch.
extern "C" const End* fa_guarded(int (*fa_launch)(const void*, void*), const void* arguments, void* stream) {
  jmp_buf here;
  Exceptions* const exceptions = reinterpret_cast<Exceptions*>(abi::__cxa_get_globals());
  const Exceptions before = *exceptions;
  guard::begin();
  ended.code = 0;
  ended.kind[0] = 0;
  back = &here;
  if (setjmp(here) == 0) {
    try {
      ended.code = fa_launch(arguments, stream);
    } catch (...) {
      char text[1024];
      const void* thrown = guard::describe_exception(text, sizeof text);
      const void* begin = reinterpret_cast<const char*>(fa_launch) + 1;
      note("exception", text, thrown != nullptr ? thrown : begin, "", 0);
    }
  }
  back = nullptr;
  if (ended.kind[0] != 0) {
    while (exceptions->handled != before.handled) abi::__cxa_end_catch();
    exceptions->uncaught = before.uncaught;
    guard::clean_up();
  }
  return ended.kind[0] != 0 || ended.code != 0 ? &ended : nullptr;
}
