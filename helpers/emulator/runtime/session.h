// What outlives a block: one launch (Run), and one call of fa_launch with all its launches (Session).
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../include/emulator/runtime.h"
#include "device.h"
#include "exchange.h"

namespace emu {

// A kernel's library: its constants and __device__ variables, and its code.
struct Module {
  uintptr_t begin = 0, end = 0, code_begin = 0, code_end = 0, data_begin = 0, data_end = 0;
  bool holds(uintptr_t address) const { return address - begin < end - begin; }
  bool can_write(uintptr_t address) const { return address - data_begin < data_end - data_begin; }
  bool executes(uintptr_t pc) const { return pc - code_begin < code_end - code_begin; }
  // From the start of the library; 0: the pc is elsewhere.
  uint32_t offset(uintptr_t pc) const { return holds(pc) ? uint32_t(pc - begin) : 0; }
};

// Bytes of shared memory: that a launch of a kernel may ask for, and that a block may have, its static arrays included.
struct SharedLimit {
  size_t dynamic = kSharedPerBlock, in_all = kSharedPerBlock;
};
// By what the launcher has set. Of a kernel that is null: the most that any kernel of the library may.
SharedLimit shared_limit(const void* kernel, const Module&);

// ---- one launch
struct Run {
  const Launch* launch;
  uint64_t blocks;
  unsigned threads;
  unsigned number;                             // of the launch, counted from 0 in its session
  Module module;
  SharedLimit shared;
  std::atomic<uint64_t> next{0}, finished{0}, limit{0};  // blocks at or beyond `limit` are not begun
  std::mutex lock;
  std::condition_variable turned;
  std::atomic<uint64_t> turn{0};               // every block below it has finished
  std::set<uint64_t> early;                    // finished blocks beyond it
  std::map<uint64_t, std::string> output;
  size_t printed = 0;                          // bytes of it
  std::vector<Finding> findings;
  std::map<uint64_t, std::vector<std::function<void()>>> late;  // by block: bulk copies to global memory that nobody waited for
};

// ---- from one call of fa_launch to its end
struct Session {
  std::vector<Region> regions;
  std::vector<Counter> counter;
  std::map<void*, size_t> allocations;         // cudaMalloc inside the reader's own code: kept until cudaFree, as on a GPU
  std::string output;
  std::string hint;
  std::vector<Finding> findings;
  bool tracing = false;
  bool follows_flags = false;                  // the kernel orders blocks by flags: see race_flags.h
  uint64_t schedule = 0;                       // 0: threads take turns in order; else in an order drawn from it
  int sms = 0;                                 // that the device says it has
  std::set<std::string> texts;                 // that rows for Python point at
  unsigned launches = 0;
  std::atomic<bool> stop{false};
  std::atomic<Run*> run{nullptr};
  std::mutex lock;
  unsigned os_threads = 1;
  int sticky = 0, last_error = 0;

  // A copy of the text that lasts until the next session.
  const char* keep(const std::string& text) { return texts.insert(text).first->c_str(); }
};
extern Session session;

}  // namespace emu
