// Launches: checks them as CUDA does, and runs the grid's blocks on a few OS threads.
#include <link.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "runtime.h"

namespace emu {

Session session;

// ---- signals: a fault in a kernel, or the wish to stop it, throws its OS thread back into run_block

namespace {

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGURG};
struct sigaction previous[std::size(kSignals)];

uintptr_t program_counter(const void* context) {
  const ucontext_t* c = static_cast<const ucontext_t*>(context);
#if defined(__linux__) && defined(__x86_64__)
  return uintptr_t(c->uc_mcontext.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
  return uintptr_t(c->uc_mcontext.pc);
#elif defined(__APPLE__) && defined(__aarch64__)
  return uintptr_t(c->uc_mcontext->__ss.__pc);
#else
  return 0;
#endif
}

void on_signal(int signal, siginfo_t* info, void* context) {
  Worker* w = worker;
  if (w != nullptr && w->current != nullptr && !(signal == SIGURG && w->critical != 0)) {
    w->fault_signal = signal;
    w->fault_address = info->si_addr;
    w->fault_pc = program_counter(context);
    w->faulted = w->current;
    siglongjmp(w->escape, 1);
  }
  if (signal == SIGURG) return;
  // Not ours: whoever was there before us decides.
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    if (kSignals[i] != signal) continue;
    const struct sigaction& p = previous[i];
    if (p.sa_flags & SA_SIGINFO) {
      p.sa_sigaction(signal, info, context);
    } else if (p.sa_handler == SIG_DFL || p.sa_handler == SIG_IGN) {
      sigaction(signal, &p, nullptr);  // on return the fault happens again, and takes its course
      if (signal == SIGABRT) raise(signal);
    } else {
      p.sa_handler(signal);
    }
  }
}

}  // namespace

void install_signals() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    struct sigaction before;
    sigaction(kSignals[i], &action, &before);
    if (before.sa_sigaction != on_signal) previous[i] = before;  // ours, if an interrupted call has not restored them
  }
}

void restore_signals() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

// ---- the grid

static std::vector<std::unique_ptr<Worker>> workers;  // kept from launch to launch with their stacks
static std::set<pthread_t> running;                   // OS threads that a stop may signal; guarded by session.lock

static void finish(Worker* w) {
  Run& run = *w->run;
  std::lock_guard<std::mutex> hold(run.lock);
  if (!w->output.empty()) run.output[w->block] = std::move(w->output);
  w->output.clear();
  run.early.insert(w->block);
  uint64_t turn = run.turn;
  while (run.early.erase(turn) > 0) ++turn;
  run.turn = turn;
  ++run.finished;
  run.turned.notify_all();
}

void wait_for_turn(Worker* w) {
  Run& run = *w->run;
  while (run.turn < w->block) {
    if (session.stop || run.limit <= w->block) leave_block();  // a lower block has failed
    ++w->critical;
    {
      std::unique_lock<std::mutex> hold(run.lock);
      run.turned.wait_for(hold, std::chrono::milliseconds(20), [&] { return run.turn >= w->block; });
    }
    --w->critical;
  }
  if (run.limit <= w->block) leave_block();  // or this one might wait for ever for what the other would have done
  w->my_turn = true;
}

static void work(Worker* w) {
  worker = w;
  stack_t alternate = {}, before;
  alternate.ss_sp = w->signal_stack;
  alternate.ss_size = kSignalStack;
  sigaltstack(&alternate, &before);
  {
    std::lock_guard<std::mutex> hold(session.lock);
    running.insert(pthread_self());
  }
  Run& run = *w->run;
  for (;;) {
    const uint64_t block = run.next++;
    if (block >= run.limit || (session.stop && block > 0)) break;
    run_block(w, block);  // block 0 even if a stop has come before it: it says so
    finish(w);
  }
  {
    std::lock_guard<std::mutex> hold(session.lock);
    running.erase(pthread_self());
  }
  sigaltstack(&before, nullptr);
  worker = nullptr;
}

static void find_module(Run& run, const void* code) {
  struct Search {
    uintptr_t inside;
    Run* run;
  } search{reinterpret_cast<uintptr_t>(code), &run};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Search& s = *static_cast<Search*>(data);
        uintptr_t low = UINTPTR_MAX, high = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
          low = std::min(low, begin);
          high = std::max(high, begin + info->dlpi_phdr[i].p_memsz);
        }
        if (s.inside < low || s.inside >= high) return 0;
        s.run->module_begin = low;
        s.run->module_end = high;
        return 1;
      },
      &search);
}

static int check_launch(const Launch& l) {
  char hint[256];
  const auto dims = [](const uint32_t* d) {
    return "(" + std::to_string(d[0]) + ", " + std::to_string(d[1]) + ", " + std::to_string(d[2]) + ")";
  };
  const uint64_t threads = uint64_t(l.block[0]) * l.block[1] * l.block[2];
  if (l.grid[0] == 0 || l.grid[1] == 0 || l.grid[2] == 0 || threads == 0 || l.grid[0] > 0x7fffffff || l.grid[1] > 65535 ||
      l.grid[2] > 65535 || l.block[0] > 1024 || l.block[1] > 1024 || l.block[2] > 64 || threads > kMaxThreads) {
    snprintf(hint, sizeof hint,
             "grid %s, block %s; allowed are a grid of 1 to (2147483647, 65535, 65535) and a block of 1 to (1024, 1024, 64) with "
             "at most 1024 threads", dims(l.grid).c_str(), dims(l.block).c_str());
    return set_error(9, hint);  // cudaErrorInvalidConfiguration
  }
  const size_t allowed = size_t(dynamic_shared_limit(l.kernel));
  if (l.dynamic_shared > allowed) {
    if (l.dynamic_shared > kSharedOptIn)
      snprintf(hint, sizeof hint, "%zu bytes of dynamic shared memory asked for; at most %zu can be had", l.dynamic_shared,
               kSharedOptIn);
    else
      snprintf(hint, sizeof hint,
               "%zu bytes of dynamic shared memory asked for; %zu are allowed without "
               "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)",
               l.dynamic_shared, allowed);
    return set_error(1, hint);  // cudaErrorInvalidValue
  }
  return 0;
}

void launch(const Launch& l) {
  if (session.sticky != 0 || check_launch(l) != 0) return;
  Run run;
  run.launch = &l;
  run.blocks = uint64_t(l.grid[0]) * l.grid[1] * l.grid[2];
  run.threads = l.block[0] * l.block[1] * l.block[2];
  run.limit = run.blocks;
  find_module(run, reinterpret_cast<const void*>(l.call));

  const size_t count = size_t(std::min<uint64_t>(session.os_threads, run.blocks));
  try {
    while (workers.size() < count) workers.push_back(std::make_unique<Worker>());
    for (size_t i = 0; i < count; ++i) workers[i]->stacks.reserve(run.threads);
  } catch (const std::bad_alloc&) {
    set_error(2, "no memory for the stacks of the emulated threads; FA_EMULATOR_THREADS=1 takes the least");
    return;
  }
  if (session.tracing) across_begin(run.across);
  session.run = &run;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    Worker* w = workers[i].get();
    w->run = &run;
    w->extent_packed = l.block[0] | uint64_t(l.block[1]) << 16 | uint64_t(l.block[2]) << 32;
    w->grid_packed = l.grid[0] | uint64_t(l.grid[1]) << 32 | uint64_t(l.grid[2]) << 48;
    w->counter.assign(session.regions.size(), {});
    if (!session.tracing) {
      w->tracer.reset();
      w->races.reset();
    } else if (w->tracer == nullptr) {
      w->tracer = std::make_unique<Tracer>();
      w->races = std::make_unique<Races>();
    }
    if (session.tracing) races_begin_launch(w, run.across.count);
    threads.emplace_back(work, w);
  }
  for (std::thread& t : threads) t.join();
  for (const auto& [block, writes] : run.late)
    for (const auto& write : writes) write();
  {
    std::lock_guard<std::mutex> hold(session.lock);
    session.run = nullptr;
  }
  for (size_t i = 0; i < count; ++i) {
    add_counters(workers[i].get());
    if (!session.tracing) continue;
    trace_collect(workers[i].get(), session.launches);
    races_collect(workers[i].get(), session.launches);
  }
  if (session.tracing) across_end(run.across, session.launches, run);
  ++session.launches;
  for (const Finding& f : run.findings)
    if (session.findings.empty() || f.block < session.findings[0].block) session.findings.assign(1, f);
  for (const auto& [block, text] : run.output)
    if (session.findings.empty() || block <= session.findings[0].block) session.output += text;
  if (!session.findings.empty()) session.sticky = session.findings[0].error;
  if (session.stop && session.sticky == 0) session.sticky = 702;  // cudaErrorLaunchTimeout
}

// ---- what Python calls

extern "C" {

void emu_begin(const Region* regions, int count, int os_threads, int tracing, uint64_t schedule) {
  session.regions.assign(regions, regions + count);
  session.counter.assign(size_t(count), {});
  session.written.assign(size_t(count), {});
  for (int i = 0; tracing != 0 && i < count; ++i)
    if (!regions[i].given) session.written[size_t(i)].assign((regions[i].bytes + regions[i].item - 1) / regions[i].item, kUnwritten);
  session.findings.clear();
  session.output.clear();
  session.hint.clear();
  session.stop = false;
  session.sticky = session.last_error = 0;
  session.tracing = tracing != 0;
  session.schedule = schedule;
  session.trace = {};
  session.launches = 0;
  session.os_threads = os_threads > 0 ? unsigned(os_threads) : 1;
  install_signals();
}

void emu_end() {
  restore_signals();
  for (const auto& [p, bytes] : session.allocations) free(p);
  session.allocations.clear();
}

void emu_stop() {
  session.stop = true;
  std::lock_guard<std::mutex> hold(session.lock);
  for (pthread_t t : running) pthread_kill(t, SIGURG);
}

// Blocks finished and blocks in all, of the launch that is running.
int emu_progress(uint64_t* finished, uint64_t* blocks, char* kernel, int size) {
  std::lock_guard<std::mutex> hold(session.lock);
  const Run* run = session.run;
  if (run == nullptr) return 0;
  *finished = run->finished;
  *blocks = run->blocks;
  snprintf(kernel, size_t(size), "%s", run->launch->name);
  return 1;
}

int emu_finding(Finding* f) {
  if (session.findings.empty()) return 0;
  *f = session.findings[0];
  return 1;
}

void emu_counters(Counter* c) { memcpy(c, session.counter.data(), session.counter.size() * sizeof(Counter)); }

// What a trace has counted; the arrays are valid until the next emu_begin.
int emu_trace_rows(const TraceRow** rows) {
  *rows = session.trace.rows.data();
  return int(session.trace.rows.size());
}

int emu_found(const FoundRow** found) {
  *found = session.trace.found.data();
  return int(session.trace.found.size());
}

int emu_instructions(const TraceCount** counts) {
  Trace& t = session.trace;
  t.instructions.clear();
  for (const auto& [what, count] : t.counts) t.instructions.push_back({what.c_str(), count});
  *counts = t.instructions.data();
  return int(t.instructions.size());
}

const char* emu_output() { return session.output.c_str(); }
const char* emu_hint() { return session.hint.c_str(); }
const char* emu_error_text(int error) { return error_text(error); }
const char* emu_error_name(int error) { return error_name(error); }

}  // extern "C"

}  // namespace emu
