// Findings, in words: one sentence each, naming thread and block. Python adds the source line and a hint.
#include "report.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "barrier.h"
#include "block.h"
#include "race_flags.h"
#include "warpgroup.h"

namespace emu {

static void put(char* to, size_t size, const char* text) { snprintf(to, size, "%s", text == nullptr ? "" : text); }

std::string coordinates(unsigned x, unsigned y, unsigned z, const uint32_t* extent) {
  if (extent[1] == 1 && extent[2] == 1) return std::to_string(x);
  std::string s = "(" + std::to_string(x) + ", " + std::to_string(y);
  return extent[2] == 1 ? s + ")" : s + ", " + std::to_string(z) + ")";
}

std::string block_name(const Worker* w) {
  const uint64_t b = w->block_packed;
  return "block " + coordinates(unsigned(b), unsigned(b >> 32 & 0xffff), unsigned(b >> 48), w->run->launch->grid);
}

std::string thread_name(const Worker* w, const Thread* t) {
  return "thread " + coordinates(unsigned(t->index & 0xffff), unsigned(t->index >> 16 & 0xffff), unsigned(t->index >> 32),
                                 w->run->launch->block);
}

std::string describe(const Worker* w, const Thread* t) { return thread_name(w, t) + " of " + block_name(w); }

// The bits of an address: above these, AArch64 may sign the return addresses that it saves (pointer authentication).
#if defined(__aarch64__)
constexpr uintptr_t kAddress = (uintptr_t(1) << 48) - 1;
#else
constexpr uintptr_t kAddress = ~uintptr_t(0);
#endif

// Does a call end there? Other addresses of code on a stack are pointers to functions, or leftovers that are half overwritten.
static bool follows_call(const Module& module, uintptr_t pc) {
  if (!module.executes(pc - 7)) return false;
#if defined(__x86_64__)
  const uint8_t* end = reinterpret_cast<const uint8_t*>(pc);
  if (end[-5] == 0xe8) return true;         // call rel32
  for (int bytes = 2; bytes <= 7; ++bytes)  // call r/m64
    if (end[-bytes] == 0xff && (end[1 - bytes] >> 3 & 7) == 2) return true;
  return false;
#else
  if (pc % 4 != 0) return false;
  const uint32_t before = reinterpret_cast<const uint32_t*>(pc)[-1];
  return before >> 26 == 0x25 || (before & 0xfffffc1f) == 0xd63f0000;  // bl, blr
#endif
}

static Calls calls_of(const Module& module, uintptr_t pc, uintptr_t link, uintptr_t stack, uintptr_t top) {
  Calls c = {module.executes(pc) ? pc + 1 : 0, {}};  // return addresses point behind their instruction
  unsigned count = 0;
  link &= kAddress;
  if (c.pc != 0 || !module.executes(link)) link = 0;
  if (link != 0) c.pc = link;
  for (stack = (stack + 7) & ~uintptr_t(7); stack + sizeof pc <= top && count < std::size(c.outer); stack += sizeof pc) {
    const uintptr_t found = *reinterpret_cast<const uintptr_t*>(stack) & kAddress;
    if (!module.executes(found) || !follows_call(module, found)) continue;
    if (found != link) (c.pc == 0 ? c.pc : c.outer[count++]) = found;
    link = 0;  // it has been saved too
  }
  return c;
}

static Finding finding(const char* kind, int error, uintptr_t pc, const Site& site, const std::string& text, const Calls* calls) {
  Finding f = {};
  put(f.kind, sizeof f.kind, kind);
  put(f.text, sizeof f.text, text.c_str());
  put(f.file, sizeof f.file, site.file);
  f.line = site.line;
  f.error = error;
  pc = pc != 0 ? pc : site.pc;
  Dl_info where;
  if (pc != 0 && dladdr(reinterpret_cast<void*>(pc), &where) != 0) {
    put(f.module, sizeof f.module, where.dli_fname);
    f.offset = pc - reinterpret_cast<uintptr_t>(where.dli_fbase);
    for (size_t i = 0; calls != nullptr && i < std::size(f.outer); ++i)
      f.outer[i] = calls->outer[i] == 0 ? 0 : calls->outer[i] - reinterpret_cast<uintptr_t>(where.dli_fbase);
  }
  return f;
}

void record(Worker* w, const char* kind, int error, uintptr_t pc, Site site, const std::string& text, const Calls* calls) {
  Finding f = finding(kind, error, pc, site, text, calls);
  Run& run = *w->run;
  f.block = w->block;
  put(f.kernel, sizeof f.kernel, run.launch->name);
  // Lower blocks run on to their end, higher ones are not begun: whatever the timing, the lowest faulty block is found.
  for (uint64_t l = run.limit; l > w->block && !run.limit.compare_exchange_weak(l, w->block);) {
  }
  std::lock_guard<std::mutex> hold(run.lock);
  run.findings.push_back(f);
  w->abandoned = true;
}

void fail(const char* kind, int error, uintptr_t pc, Site site, const char* format, ...) {
  Worker* w = worker;
  ++w->critical;
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  record(w, kind, error, pc, site, describe(w, w->current) + " " + text);
  --w->critical;
  leave_block();
}

// "threads 0-31, 64" of the numbers for which has(i).
template <class Has>
static std::string ranges(unsigned n, Has has) {
  std::string s;
  unsigned count = 0;
  for (unsigned i = 0; i < n; ++i) {
    if (!has(i)) continue;
    unsigned last = i;
    while (last + 1 < n && has(last + 1)) ++last;
    count += last - i + 1;
    s += (s.empty() ? "" : ", ") + std::to_string(i) + (last > i ? "-" + std::to_string(last) : "");
    i = last;
  }
  return (count == 1 ? "thread " : "threads ") + s;
}

// "file:line" of the asm statement; where there is a pc, Python puts the line of the reader in its place.
std::string place_of(const Worker* w, const Site& site) {
  const std::string place = std::string(site.file) + ":" + std::to_string(site.line);
  const uint32_t pc = w->offset(site.pc);
  return pc == 0 ? place : "{" + std::to_string(pc) + "|" + place + "}";
}

// Nobody can run and not everybody has returned: who waits where?
void record_deadlock(Worker* w) {
  if (record_warpgroup_deadlock(w)) return;
  struct Group {
    Site site;
    unsigned mask;
    At at;
    unsigned place;
    uint64_t phase;
  };
  std::vector<Group> groups;
  const auto in_group = [&](unsigned i, const Group& g) {
    const Thread& t = w->thread[i];
    return t.state == State::Waiting && t.mask == g.mask && t.at == g.at &&
           (t.at == At::Instruction || (t.place == g.place && t.phase == g.phase && t.site.pc == g.site.pc)) && t.site.line == g.site.line &&
           strcmp(t.site.what, g.site.what) == 0 && strcmp(t.site.file, g.site.file) == 0;
  };
  bool at_barrier = false, at_warp = false, at_named = false, at_mbarrier = false;
  for (unsigned i = 0; i < w->threads; ++i) {
    const Thread& t = w->thread[i];
    if (t.state != State::Waiting) continue;
    (t.at == At::NamedBarrier ? at_named : t.at == At::Mbarrier ? at_mbarrier : t.mask == 0 ? at_barrier : at_warp) = true;
    bool known = false;
    for (const Group& g : groups) known = known || in_group(i, g);
    if (!known) groups.push_back({t.site, t.mask, t.at, t.place, t.phase});
  }
  std::string who;
  for (const Group& g : groups) {
    const std::string threads = ranges(w->threads, [&](unsigned i) { return in_group(i, g); });
    who += "\n  " + threads + (threads.rfind("threads ", 0) == 0 ? " wait at " : " waits at ") + place_of(w, g.site) +
           " in " + g.site.what;
    if (g.mask != 0) {
      char mask[32];
      snprintf(mask, sizeof mask, " (mask 0x%08x)", g.mask);
      who += mask;
    }
    if (g.at == At::Mbarrier) who += " " + mbarrier_state(w, g.place, g.phase);
    if (g.at == At::NamedBarrier) {
      const NamedBarrier& b = w->barriers->named[g.place];
      who += ": of the " + std::to_string(b.count) + " threads of barrier " + std::to_string(g.place) + " " + std::to_string(b.arrived) + " have come";
    }
  }
  if (w->done > 0)
    who += "\n  " + ranges(w->threads, [&](unsigned i) { return w->thread[i].state == State::Done; }) + " have returned";
  const bool divergent = at_barrier && !at_warp && !at_named && !at_mbarrier;
  const At where = at_mbarrier ? At::Mbarrier : at_named ? At::NamedBarrier : At::Instruction;
  const auto told = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.at == where; });
  record(w, divergent ? "divergent barrier" : at_mbarrier ? "mbarrier deadlock" : at_named ? "barrier deadlock" : "deadlock", 702, 0, told->site,
         std::string(divergent ? "the threads of " : "no thread of ") + block_name(w) +
             (divergent ? " don't all come to the same barrier:" : " can go on:") + who);
}

struct Fault {
  const char* kind;
  int error;
  std::string text;
};

static Fault fault_of(const Stop& stop, const std::string& who, bool overflow) {
  char address[32];
  snprintf(address, sizeof address, "0x%zx", reinterpret_cast<size_t>(stop.address));
  switch (stop.signal) {
    case SIGFPE: return {"division by zero", 719, who + " divides an integer by zero (on a GPU: an arbitrary quotient)"};
    case SIGILL:
    case SIGTRAP: return {"trap", 719, who + " reaches code that can't be reached, such as a division by a constant zero, or a trap"};
    case SIGABRT: return {"abort", 719, who + " comes to an abort() of the C or C++ library"};
    case SIGURG: return {"stopped", 702, "stopped while " + who + " was running"};
    default:
      if (overflow) return {"stack overflow", 719, who + " has used up its stack"};
      return {"illegal address", 700, who + " touches the address " + address + ", where there is nothing"};
  }
}

// Which flags were being looked at when a block was stopped: perhaps nobody sets one.
static std::string flags_in_words(const Worker* w) {
  std::set<std::string> names;
  for (unsigned i = 0; i < w->threads; ++i)
    if (w->thread[i].state != State::Done && w->thread[i].flag != nullptr) names.insert(flag_name(reinterpret_cast<uintptr_t>(w->thread[i].flag)));
  std::string words;
  for (const std::string& name : names) words += (words.empty() ? "; of flags, it last looked at " : ", ") + name;
  return session.follows_flags ? words : "";
}

// A signal threw us out of a fiber; the handler has left what it knew in the worker.
void record_fault(Worker* w) {
  const Stop stop = w->fault;
  w->fault = {};
  const Thread& t = *w->faulted;
  const bool beyond = w->stacks.guards(stop.address), above = reinterpret_cast<uintptr_t>(stop.address) >= stack_top(t);
  Fault f = fault_of(stop, describe(w, &t), beyond && !above);
  if (beyond && above) f = {"local array overrun", 700, describe(w, &t) + " goes past the end of a local array, and of its whole stack"};
  if (!strcmp(f.kind, "stopped")) f.text += flags_in_words(w);
  if (!strcmp(f.kind, "stack overflow")) f.text += " of " + std::to_string(kStackBytes >> 10) + " KB";
  const bool switching = stop.signal == SIGURG && stop.stack - t.stack >= kStackBytes;  // on the stack of the scheduler
  const uintptr_t stack = switching ? reinterpret_cast<uintptr_t>(t.resume) : std::max(stop.stack, t.stack);
  const Calls c = calls_of(w->run->module, stop.pc, stop.link, stack, stack_top(t));
  record(w, f.kind, f.error, c.pc == 0 ? stop.pc + 1 : c.pc, {}, f.text, &c);
}

void record_stop(Worker* w) {
  const Thread& next = w->thread[w->queue[w->head]];
  Calls c = {};
  if (w->queued > 0 && next.state == State::Ready)
    c = calls_of(w->run->module, 0, 0, reinterpret_cast<uintptr_t>(next.resume), stack_top(next));
  record(w, "stopped", 702, c.pc, {}, "stopped while " + block_name(w) + " was running" + flags_in_words(w), &c);
}

// The same of the launcher, which nothing else can go wrong behind.
static bool overflows(const Host& h) {  // a little below the stack
  const uintptr_t address = reinterpret_cast<uintptr_t>(h.stop.address), page = page_bytes();
  return (h.stop.signal == SIGSEGV || h.stop.signal == SIGBUS) && h.stop.stack - address + page < 16 * page;
}

void keep_calls(Host& h) {
  const uintptr_t above_guard = (reinterpret_cast<uintptr_t>(h.stop.address) | (page_bytes() - 1)) + 1;
  h.calls = calls_of(h.module, h.stop.pc, h.stop.link, overflows(h) ? above_guard : h.stop.stack, h.stack_top);
}

void record_host_fault(const Host& h) {
  if (!session.findings.empty()) return;
  Fault f = fault_of(h.stop, "fa_launch", overflows(h));
  if (h.stop.signal == SIGFPE) f.text = "fa_launch divides an integer by zero";
  if (!h.kind.empty()) f.kind = h.kind.c_str(), f.text = "fa_launch " + h.text;
  Finding found = finding(f.kind, f.error, h.calls.pc, {}, f.text, &h.calls);
  put(found.kernel, sizeof found.kernel, "the launcher");
  session.findings.push_back(found);
  session.sticky = f.error;
}

}  // namespace emu
