// Functions that end the process, as a kernel's host code calls them. Its library is linked with --wrap=exit and so on
// (guard.py has the list), so that it calls these instead: they end fa_launch, and Python goes on.
//
// fa_launch is left by longjmp, and no destructor of its local variables runs: the memory that they own stays allocated, and
// a mutex that they hold stays locked. An exception that leaves fa_launch is caught, and leaks nothing.
#pragma once
#include <assert.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <typeinfo>

// FA_WRAPPED(function): declares what is called in its place. FA_REAL(function): the C or C++ library's own.
// macOS's linker has no --wrap. But a library there looks for each function in the one that it was linked with, and kernels are
// linked with this one before the system's: it exports functions of these names.
#if defined(__APPLE__)
#define FA_WRAPPED(function) __asm__("_" #function)
#define FA_REAL(function, symbol) reinterpret_cast<decltype(&function)>(dlsym(RTLD_NEXT, #symbol))
#else
#define FA_WRAPPED(function) __asm__("__wrap_" #function)
#define FA_REAL(function, symbol) function
#endif

namespace guard {

#if defined(_LIBCPP_VERSION)
using Guard = uint64_t;  // of a static variable: libc++abi's type for it
#else
using Guard = abi::__guard;
#endif

// Defined by each back end. Ends the launcher that runs on this thread, or returns if there is none. `text` is the rest of a
// sentence that begins with "fa_launch", `pc` the return address of the call; `file` and `line` are for calls that say them.
void end(const char* kind, const char* text, const void* pc, const char* file, int line);

inline pid_t process = 0;  // in which launchers run; a child that one has forked may exit

inline void ended(const char* kind, const char* text, const void* pc, const char* file = "", int line = 0) {
  if (getpid() == process) end(kind, text, pc, file, line);
}

// ---- exceptions

struct Thrown {
  const void *object, *type, *pc;
};
inline thread_local Thrown thrown = {};  // what the reader's code has thrown last

// In a handler: writes "throws std::runtime_error: its text" and gives the return address of the throw; null if it wasn't in the
// reader's code.
inline const void* describe_exception(char* text, size_t size) {
  const std::type_info* type = abi::__cxa_current_exception_type();
  const std::exception_ptr exception = std::current_exception();
  int status;
  char* name = type == nullptr ? nullptr : abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  try {
    throw;
  } catch (const std::exception& e) {
    snprintf(text, size, "throws %s: %s", name, e.what());
  } catch (...) {
    snprintf(text, size, "throws an exception of type %s", name == nullptr ? "unknown" : name);
  }
  free(name);
  const bool here = *reinterpret_cast<void* const*>(&exception) == thrown.object && type == thrown.type;
  return here ? thrown.pc : nullptr;
}

// std::terminate(), called at `pc`; null: by the C++ library, for an exception that nothing catches or a noexcept function throws.
inline void terminated(const void* pc) {
  char text[1024];
  if (std::current_exception() != nullptr) {
    pc = describe_exception(text, sizeof text);
    ended("exception", text, pc);
  } else {
    ended("terminate", "calls std::terminate()", pc);
  }
}

// Before a launch. The C++ library's own calls of std::terminate() come by its handler.
inline void begin() {
  static const std::terminate_handler before = std::get_terminate();
  const std::terminate_handler handler = [] {
    terminated(nullptr);
    before();
    abort();
  };
  if (std::get_terminate() != handler) std::set_terminate(handler);
  process = getpid();
}

// ---- what a launcher that has ended leaves behind

constexpr int kStatics = 16;
inline thread_local void* statics[kStatics];  // static variables of functions that are being initialised
inline thread_local int initialising = 0;

// After the jump out of a launcher. What it printed comes out; a static variable whose initialiser ended it is initialised by the
// next launch, which would wait for it otherwise.
inline void clean_up() {
  std::cout.flush();
  fflush(nullptr);
  for (; initialising > 0; --initialising)
    if (initialising <= kStatics) FA_REAL(abi::__cxa_guard_abort, __cxa_guard_abort)(static_cast<Guard*>(statics[initialising - 1]));
}

}  // namespace guard

// ---- in place of the C and C++ libraries' functions

extern "C" {

#define FA_PC __builtin_return_address(0)
#define FA_EXIT(function)                                              \
  [[noreturn]] void fa_wrap_##function(int) FA_WRAPPED(function);      \
  void fa_wrap_##function(int code) {                                  \
    char text[64];                                                     \
    snprintf(text, sizeof text, "calls " #function "(%d)", code);      \
    guard::ended("exit", text, FA_PC);                                 \
    FA_REAL(::function, function)(code);                               \
    __builtin_unreachable();                                           \
  }
FA_EXIT(exit)
FA_EXIT(_exit)
FA_EXIT(_Exit)
#if !defined(__APPLE__)  // which has no quick_exit
FA_EXIT(quick_exit)
#endif

[[noreturn]] void fa_wrap_abort() FA_WRAPPED(abort);
void fa_wrap_abort() {
  guard::ended("abort", "calls abort()", FA_PC);
  FA_REAL(::abort, abort)();
  __builtin_unreachable();
}

namespace guard {
inline void failed(const char* expression, const char* file, int line, const void* pc) {
  char text[1024];
  snprintf(text, sizeof text, "fails the assertion `%s`", expression);
  ended("assertion", text, pc, file, line);
}
}  // namespace guard

#if defined(__APPLE__)
[[noreturn]] void fa_wrap_assert(const char* function, const char* file, int line, const char* expression) FA_WRAPPED(__assert_rtn);
void fa_wrap_assert(const char* function, const char* file, int line, const char* expression) {
  guard::failed(expression, file, line, FA_PC);
  FA_REAL(::__assert_rtn, __assert_rtn)(function, file, line, expression);
  __builtin_unreachable();
}
#else
[[noreturn]] void fa_wrap_assert(const char* expression, const char* file, unsigned line, const char* function) FA_WRAPPED(__assert_fail);
void fa_wrap_assert(const char* expression, const char* file, unsigned line, const char* function) {
  guard::failed(expression, file, int(line), FA_PC);
  __assert_fail(expression, file, line, function);
}
#endif

[[noreturn]] void fa_wrap_terminate() FA_WRAPPED(_ZSt9terminatev);
void fa_wrap_terminate() {
  guard::terminated(FA_PC);
  FA_REAL(std::terminate, _ZSt9terminatev)();
  __builtin_unreachable();
}

[[noreturn]] void fa_wrap_throw(void* object, std::type_info* type, void (*destroy)(void*)) FA_WRAPPED(__cxa_throw);
void fa_wrap_throw(void* object, std::type_info* type, void (*destroy)(void*)) {
  guard::thrown = {object, type, FA_PC};
  FA_REAL(abi::__cxa_throw, __cxa_throw)(object, type, destroy);
  __builtin_unreachable();
}

int fa_wrap_guard_acquire(guard::Guard* variable) FA_WRAPPED(__cxa_guard_acquire);
int fa_wrap_guard_acquire(guard::Guard* variable) {
  const int ours = FA_REAL(abi::__cxa_guard_acquire, __cxa_guard_acquire)(variable);
  if (ours && guard::initialising++ < guard::kStatics) guard::statics[guard::initialising - 1] = variable;
  return ours;
}

void fa_wrap_guard_release(guard::Guard* variable) FA_WRAPPED(__cxa_guard_release);
void fa_wrap_guard_release(guard::Guard* variable) {
  --guard::initialising;
  FA_REAL(abi::__cxa_guard_release, __cxa_guard_release)(variable);
}

void fa_wrap_guard_abort(guard::Guard* variable) FA_WRAPPED(__cxa_guard_abort);
void fa_wrap_guard_abort(guard::Guard* variable) {
  --guard::initialising;
  FA_REAL(abi::__cxa_guard_abort, __cxa_guard_abort)(variable);
}

#undef FA_EXIT
#undef FA_PC
#undef FA_WRAPPED
#undef FA_REAL

}  // extern "C"
