// Findings that stop a kernel, in words: one sentence each, naming thread and block. Python adds the source line and a hint.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <string>

#include "worker.h"

namespace emu {

// Where in the module a thread is, and the calls that it is in, innermost first: their return addresses, which are what the
// stack holds of addresses of the module's code that follow a call.
struct Calls {
  uintptr_t pc, outer[4];
};

struct Host {                       // fa_launch, on its way
  sigjmp_buf escape;
  Module module;
  Stop stop;
  Calls calls = {};                 // where it was stopped
  std::string kind, text;           // what it did, where no signal says so
  uintptr_t stack_top = 0;
};

// From inside a fiber: "thread 5 of block 0 " and the rest of the sentence; the block ends here.
[[noreturn]] void fail(const char* kind, int error, uintptr_t pc, Site, const char* format, ...)
    __attribute__((format(printf, 5, 6)));
void record(Worker*, const char* kind, int error, uintptr_t pc, Site, const std::string& text, const Calls* = nullptr);
void record_stop(Worker*);                               // it came between two threads
void record_deadlock(Worker*);
void record_fault(Worker*);
void keep_calls(Host&);                                  // while what it was doing is still on its stack
void record_host_fault(const Host&);

std::string coordinates(unsigned x, unsigned y, unsigned z, const uint32_t* extent);  // "(1, 0)"; "1" in one dimension
std::string thread_name(const Worker*, const Thread*);   // "thread 5"
std::string block_name(const Worker*);                   // "block (0, 1)"
std::string describe(const Worker*, const Thread*);      // "thread 5 of block (0, 1)"
std::string place_of(const Worker*, const Site&);        // "file:line", in a form in which Python can put the reader's line

}  // namespace emu
