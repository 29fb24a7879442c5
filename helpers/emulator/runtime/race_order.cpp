// What orders the accesses of two threads. By the CUDA C++ Programming Guide: __syncthreads() those of a block, __syncwarp()
// those of the lanes it names. By the PTX ISA: named barriers, mbarriers (whoever waits comes after those who arrived), and
// flags with the fences around them. Shuffles, votes and other warp instructions order no memory.
#include "race_order.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace emu {

void* lazily(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return p;
}
void give_back(void* p, size_t bytes) { munmap(p, bytes); }

static void join(uint32_t* __restrict to, const uint32_t* __restrict from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = from[i] > to[i] ? from[i] : to[i];
}

void Races::join(Clock& to, const Clock& from) const {
  emu::join(to.known, from.known, threads);
  emu::join(to.known + kThreads, from.known + kThreads, agents.size());
  emu::join(to.visible, from.visible, threads);
}

Races::Races() {
  clock = static_cast<Clock*>(lazily(kThreads * sizeof(Clock)));
  for (uint32_t& t : tick) t = 1;
}
Races::~Races() { give_back(clock, kThreads * sizeof(Clock)); }

// Stamps only grow, so that all those of earlier blocks lie below `start`, in clocks too.
void Races::begin_block(unsigned threads_of_block) {
  threads = threads_of_block;
  for (uint32_t t : tick) start = std::max(start, t);
  for (const Agent& a : agents) start = std::max(start, a.tick);
  for (uint32_t& t : tick) t = start + 1;
  for (uint32_t& a : all) a = start;
  memset(apart, 0, sizeof apart);
  fenced = false;
  agents.clear();
  groups.clear();
  flags = {};
  mbarrier.clear();
  for (BarrierClocks& b : named)
    if (b.arrived != nullptr) clear(*b.arrived);
}

unsigned Races::number(const Actor& actor) {
  if (actor.kind == ActorKind::Thread) return actor.owner;
  for (unsigned i = 0; i < agents.size(); ++i)
    if (agents[i].kind == actor.kind && agents[i].owner == actor.owner) return kThreads + i;
  if (agents.size() == kAgents) return kThreads + kAgents - 1;  // more than any kernel has: the last ones are not told apart
  agents.push_back({actor.kind, uint16_t(actor.thread), actor.owner, start + 1});
  return kThreads + unsigned(agents.size()) - 1;
}

// ---- threads

void Races::clear(Clock& c) const {
  memset(c.known, 0, threads * sizeof c.known[0]);
  memset(c.known + kThreads, 0, kAgents * sizeof c.known[0]);
  memset(c.visible, 0, threads * sizeof c.visible[0]);
}

Clock& Races::made(std::unique_ptr<Clock>& c) const {
  if (c == nullptr) c = std::make_unique<Clock>();
  return *c;
}

void Races::release(unsigned thread, Clock& into) {
  join(into, clock[thread]);
  const unsigned first = thread / kWarp * kWarp, end = std::min(first + kWarp, threads);
  for (unsigned i = first; i < end; ++i) into.known[i] = std::max(into.known[i], all[thread / kWarp]);
  into.known[thread] = tick[thread]++;
}

void Races::acquire(unsigned thread, const Clock& from) {
  join(clock[thread], from);
  apart[thread / kWarp] = true;
}

void Races::one_clock(unsigned first, unsigned end, uint32_t* most) {
  *most = *std::max_element(tick + first, tick + end);
  for (unsigned i = first; i < end; ++i) tick[i] = *most + 1;
}

// whole: they are all the lanes of the warp.
void Races::order_lanes(unsigned warp, unsigned lanes, bool whole) {
  const unsigned first = warp * kWarp;
  if (!whole || apart[warp]) {
    clear(together);
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      const unsigned i = first + unsigned(__builtin_ctz(rest));
      join(together, clock[i]);
      together.known[i] = tick[i]++;
    }
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) clock[first + unsigned(__builtin_ctz(rest))] = together;
    apart[warp] = !whole;
  }
  if (whole) one_clock(first, std::min(first + kWarp, threads), &all[warp]);
}

void Races::order_block() {
  for (unsigned i = 0; i < threads; ++i) {
    emu::join(everybody.known + kThreads, clock[i].known + kThreads, agents.size());
    if (fenced) emu::join(everybody.visible, clock[i].visible, threads);
  }
  fenced = false;
  for (unsigned first = 0; first < threads; first += kWarp) {
    const unsigned end = std::min(first + kWarp, threads);
    one_clock(first, end, &all[first / kWarp]);
    for (unsigned i = first; i < end; ++i) everybody.known[i] = all[first / kWarp];
  }
}

// ---- barriers

void Races::complete(BarrierClocks& b) {
  made(b.arrived);
  std::swap(b.arrived, b.completed);
  clear(made(b.arrived));
}

// What the agent of its copies has done until now has been waited for, too.
void Races::complete_mbarrier(uint32_t at) {
  BarrierClocks& b = mbarrier[at];
  for (unsigned i = 0; i < agents.size(); ++i)
    if (agents[i].kind == ActorKind::Mbarrier && agents[i].owner == at) made(b.arrived).known[kThreads + i] = agents[i].tick++;
  complete(b);
}

// ---- flags

void Races::memory_fence(unsigned thread) {
  std::unique_ptr<Clock>& seen = flags.seen[thread];
  if (seen != nullptr) acquire(thread, *seen);
  seen.reset();
  Clock& now = made(flags.fenced[thread]);
  clear(now);
  release(thread, now);
}

void Races::strong_access(unsigned thread, uintptr_t flag, unsigned order) {
  if (flags.fenced.empty()) return;
  auto told = flags.told.find(flag);
  if (told == flags.told.end() && flags.told.size() >= kFlags) told = flags.told.find(0);
  if ((order & kReads) != 0 && told != flags.told.end()) {
    if ((order & kAcquires) != 0) acquire(thread, *told->second);
    else join(made(flags.seen[thread]), *told->second);
  }
  const auto mine = flags.fenced.find(thread);
  if ((order & kWrites) != 0 && mine != flags.fenced.end()) {
    if (told == flags.told.end()) told = flags.told.emplace(flags.told.size() + 1 < kFlags ? flag : 0, nullptr).first;
    join(made(told->second), *mine->second);
  }
}

// ---- the async proxy

void Races::proxy_fence(unsigned thread) {
  const unsigned warp = thread / kWarp;
  Clock& mine = clock[thread];
  emu::join(mine.visible, mine.known, threads);
  emu::join(mine.visible, everybody.known, threads);
  for (unsigned i = warp * kWarp; i < std::min((warp + 1) * kWarp, threads); ++i) mine.visible[i] = std::max(mine.visible[i], all[warp]);
  mine.visible[thread] = tick[thread]++;
  fenced = apart[warp] = true;
}

void Races::commit(const Actor& actor) {
  const unsigned who = number(actor);
  groups[{actor.kind, actor.owner}].push_back(agent(who).tick++);
}

void Races::waited(unsigned thread, const Actor& actor, uint64_t group) {
  uint32_t& known = clock[thread].known[number(actor)];
  known = std::max(known, groups[{actor.kind, actor.owner}].at(size_t(group)));
  apart[thread / kWarp] = true;
}

}  // namespace emu
