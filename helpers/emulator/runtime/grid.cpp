// Launches: checks them as CUDA does, and runs the grid's blocks on a few OS threads.
#include "grid.h"

#include <dlfcn.h>
#if defined(__APPLE__)
#include <mach-o/loader.h>
#include <mach/vm_prot.h>
#else
#include <link.h>
#endif
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "../../toolchain/guard.h"
#include "block.h"
#include "memory.h"
#include "notes.h"
#include "report.h"
#include "tool.h"

namespace emu {

Session session;

// ---- signals: a fault in a kernel, or the wish to stop it, throws its OS thread back into run_block

namespace {

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGURG};
struct sigaction previous[std::size(kSignals)];

thread_local Host* host __attribute__((tls_model("initial-exec"))) = nullptr;  // of the OS thread that executes fa_launch

Stop stop_of(int signal, const siginfo_t* info, const void* context) {
  const ucontext_t* c = static_cast<const ucontext_t*>(context);
  Stop s;
  s.signal = signal;
  s.address = info->si_addr;
#if defined(__linux__) && defined(__x86_64__)
  s.pc = uintptr_t(c->uc_mcontext.gregs[REG_RIP]), s.stack = uintptr_t(c->uc_mcontext.gregs[REG_RSP]);
#elif defined(__linux__) && defined(__aarch64__)
  s.pc = uintptr_t(c->uc_mcontext.pc), s.stack = uintptr_t(c->uc_mcontext.sp);
  s.link = uintptr_t(c->uc_mcontext.regs[30]);
#elif defined(__APPLE__) && defined(__aarch64__)
  s.pc = uintptr_t(c->uc_mcontext->__ss.__pc), s.stack = uintptr_t(c->uc_mcontext->__ss.__sp);
  s.link = uintptr_t(c->uc_mcontext->__ss.__lr);
#endif
  return s;
}

void on_signal(int signal, siginfo_t* info, void* context) {
  Worker* w = worker;
  if (w != nullptr && w->current != nullptr && !(signal == SIGURG && w->critical != 0)) {
    w->fault = stop_of(signal, info, context);
    w->faulted = w->current;
    siglongjmp(w->escape, 1);
  }
  if (Host* h = host) {
    h->stop = stop_of(signal, info, context);
    // Asked to stop elsewhere than in the reader's own code it may hold a lock; another signal comes soon.
    if (signal == SIGURG ? h->module.executes(h->stop.pc) : session.run == nullptr) {
      keep_calls(*h);
      siglongjmp(h->escape, 1);
    }
    h->stop = {};
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

void fail_launcher(const char* kind, const std::string& text, uintptr_t pc) {
  Host* h = host;
  if (h == nullptr) return;
  h->kind = kind, h->text = text;
  h->stop.signal = SIGABRT, h->stop.pc = pc, h->stop.stack = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  keep_calls(*h);
  siglongjmp(h->escape, 1);
}

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
static std::set<pthread_t> running;                   // OS threads that a stop signals; guarded by session.lock

static void finish(Worker* w) {
  Run& run = *w->run;
  std::lock_guard<std::mutex> hold(run.lock);
  if (!w->output.empty()) {
    run.printed += w->output.size();
    run.output[w->block] = std::move(w->output);
  }
  w->output.clear();
  for (; run.printed > kPrinted && run.output.size() > 1; run.output.erase(--run.output.end()))  // the same, whatever the timing
    run.printed -= run.output.rbegin()->second.size();
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

#if defined(__APPLE__)
static Module find_module(const void* code) {
  Dl_info where;
  if (dladdr(code, &where) == 0) return {};
  const auto* header = static_cast<const mach_header_64*>(where.dli_fbase);
  Module m{UINTPTR_MAX, 0, 0, 0};
  const char* command = reinterpret_cast<const char*>(header + 1);
  for (uint32_t i = 0; i < header->ncmds; ++i, command += reinterpret_cast<const load_command*>(command)->cmdsize) {
    const auto* part = reinterpret_cast<const segment_command_64*>(command);
    if (part->cmd != LC_SEGMENT_64 || strcmp(part->segname, SEG_LINKEDIT) == 0) continue;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(header) + part->vmaddr, end = begin + part->vmsize;  // a library is made for 0
    m.begin = std::min(m.begin, begin);
    m.end = std::max(m.end, end);
    if (part->initprot & VM_PROT_EXECUTE) m.code_begin = begin, m.code_end = end;
    if (strcmp(part->segname, SEG_DATA) == 0) m.data_begin = begin, m.data_end = end;
  }
  return m;
}
#else
static Module find_module(const void* code) {
  struct Search {
    uintptr_t inside;
    Module found;
  } search{reinterpret_cast<uintptr_t>(code), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Search& s = *static_cast<Search*>(data);
        Module m{UINTPTR_MAX, 0, 0, 0};
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          if (part.p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + part.p_vaddr, end = begin + part.p_memsz;
          m.begin = std::min(m.begin, begin);
          m.end = std::max(m.end, end);
          if (part.p_flags & PF_X) m.code_begin = begin, m.code_end = end;
          if (part.p_flags & PF_W) m.data_begin = begin, m.data_end = end;
        }
        if (m.begin > m.end || !m.holds(s.inside)) return 0;
        s.found = m;
        return 1;
      },
      &search);
  return search.found;
}
#endif

static int check_launch(const Launch& l, const SharedLimit& shared) {
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
  if (l.dynamic_shared > shared.dynamic) {
    if (l.dynamic_shared > kSharedOptIn)
      snprintf(hint, sizeof hint, "%zu bytes of dynamic shared memory asked for; at most %zu can be had", l.dynamic_shared,
               kSharedOptIn);
    else
      snprintf(hint, sizeof hint,
               "%zu bytes of dynamic shared memory asked for; %zu are allowed without "
               "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)",
               l.dynamic_shared, shared.dynamic);
    return set_error(1, hint);  // cudaErrorInvalidValue
  }
  return 0;
}

// The tools that watch this launch. A worker keeps its watchers from launch to launch; what only a trace needs is given back
// by the next plain launch.
static void attach_tools(Worker* w) {
  w->watchers.resize(tools().size());
  w->on_memory.clear(), w->on_execution.clear(), w->on_basic_blocks.clear();
  for (size_t i = 0; i < tools().size(); ++i) {
    std::unique_ptr<Watcher>& watcher = w->watchers[i];
    if (!session.tracing && !tools()[i]->always()) {
      watcher.reset();
      continue;
    }
    if (watcher == nullptr) watcher = tools()[i]->watch(w);
    if (watcher->hears & kMemory) w->on_memory.push_back(watcher.get());
    if (!session.tracing) continue;
    if (watcher->hears & kExecution) w->on_execution.push_back(watcher.get());
    if (watcher->hears & kBasicBlocks) w->on_basic_blocks.push_back(watcher.get());
  }
}

// What the workers have counted and noted goes to the session.
static void collect(const Run& run, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Worker* w = workers[i].get();
    add_counters(w);
    for (Watcher* t : w->on_execution) t->end_launch();
    add_notes(*w->notes, run.number);
    w->notes->clear();
  }
  if (session.tracing)
    for (Tool* t : tools()) t->end_launch(run);
}

void launch(const Launch& l) {
  if (session.sticky != 0) return;
  Run run;
  run.launch = &l;
  run.module = find_module(reinterpret_cast<const void*>(l.call));
  run.shared = shared_limit(l.kernel, run.module);
  if (check_launch(l, run.shared) != 0) return;
  run.number = session.launches;
  run.blocks = uint64_t(l.grid[0]) * l.grid[1] * l.grid[2];
  run.threads = l.block[0] * l.block[1] * l.block[2];
  run.limit = run.blocks;

  const size_t count = size_t(std::min<uint64_t>(session.os_threads, run.blocks));
  try {
    while (workers.size() < count) workers.push_back(std::make_unique<Worker>());
    if (session.tracing)
      for (Tool* t : tools()) t->begin_launch(run);
    for (size_t i = 0; i < count; ++i) {
      Worker* w = workers[i].get();
      w->stacks.reserve(run.threads);
      w->run = &run;
      attach_tools(w);
      for (Watcher* t : w->on_execution) t->begin_launch();
    }
  } catch (const std::bad_alloc&) {
    set_error(2, "no memory for the stacks of the emulated threads; FA_EMULATOR_THREADS=1 takes the least");
    return;
  }
  session.run = &run;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    Worker* w = workers[i].get();
    w->extent_packed = l.block[0] | uint64_t(l.block[1]) << 16 | uint64_t(l.block[2]) << 32;
    w->grid_packed = l.grid[0] | uint64_t(l.grid[1]) << 32 | uint64_t(l.grid[2]) << 48;
    w->counter.assign(session.regions.size(), {});
    threads.emplace_back(work, w);
  }
  for (std::thread& t : threads) t.join();
  for (const auto& [block, writes] : run.late)
    for (const auto& write : writes) write();
  {
    std::lock_guard<std::mutex> hold(session.lock);
    session.run = nullptr;
  }
  collect(run, count);
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

void emu_begin(const Region* regions, int count, int os_threads, int tracing, uint64_t schedule, int follows_flags, int sms) {
  session.regions.assign(regions, regions + count);
  session.counter.assign(size_t(count), {});
  session.findings.clear();
  session.output.clear();
  session.hint.clear();
  session.stop = false;
  session.sticky = session.last_error = 0;
  session.tracing = tracing != 0;
  session.follows_flags = follows_flags != 0;
  session.schedule = schedule;
  session.sms = sms;
  session.texts.clear();
  session.launches = 0;
  session.os_threads = os_threads > 0 ? unsigned(os_threads) : 1;
  clear_notes();
  for (Tool* t : tools()) t->begin_session();
  install_signals();
}

void emu_end() { restore_signals(); }

// Calls fa_launch. Whatever its own code does, as that of a kernel, becomes a finding.
int emu_call(int (*launcher)(const void*, void*), const void* arguments, void* stream) {
  Host h;
  h.module = find_module(reinterpret_cast<const void*>(launcher));
  h.stack_top = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  const std::unique_ptr<char[]> stack(new char[kSignalStack]);
  stack_t alternate = {}, before;
  alternate.ss_sp = stack.get();
  alternate.ss_size = kSignalStack;
  sigaltstack(&alternate, &before);
  {
    std::lock_guard<std::mutex> hold(session.lock);
    running.insert(pthread_self());
  }
  volatile int code = 0;
  guard::begin();
  host = &h;
  if (sigsetjmp(h.escape, 1) == 0) {
    try {
      code = launcher(arguments, stream);
    } catch (...) {
      char text[1024];
      const void* thrown = guard::describe_exception(text, sizeof text);
      h.kind = "exception", h.text = text;
      h.stop.signal = SIGABRT;
      h.stop.pc = thrown != nullptr ? reinterpret_cast<uintptr_t>(thrown) - 1 : reinterpret_cast<uintptr_t>(launcher);
      h.stop.stack = h.stack_top;
      keep_calls(h);
    }
  }
  host = nullptr;
  {
    std::lock_guard<std::mutex> hold(session.lock);
    running.erase(pthread_self());
  }
  sigaltstack(&before, nullptr);
  if (h.stop.signal != 0) {
    record_host_fault(h);
    guard::clean_up();
  }
  // A launch then says nothing, as on a GPU; an X-ray mustn't show a kernel that never ran without a fault.
  if (code == 0 && session.tracing && session.sticky == 0 && session.last_error != 0) {
    session.hint += std::string(session.hint.empty() ? "" : "; ") + "fa_launch said cudaSuccess: after a launch it has to return cudaGetLastError()";
    code = session.last_error;
  }
  return code;
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

const char* emu_output() { return session.output.c_str(); }
const char* emu_hint() { return session.hint.c_str(); }
const char* emu_error_text(int error) { return error_text(error); }
const char* emu_error_name(int error) { return error_name(error); }

}  // extern "C"

}  // namespace emu
