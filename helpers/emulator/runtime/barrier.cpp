// Barriers of part of a block: named barriers, which count the threads of whole warps, and mbarriers, which count arrivals and bytes. PTX ISA,
// "Parallel Synchronization and Communication Instructions": "bar" and "mbarrier".
//
// A copy that reports to an mbarrier lands when nobody can go on without it: when all other threads wait too. A thread
// that looks at an mbarrier whose phase is not complete therefore waits, also in test_wait, which needn't: it is only slow
// to answer. It is told "not yet" when the block can't go on otherwise; if that changes nothing, it is a deadlock.
#include "barrier.h"

#include <cstring>

#include "async_copy.h"
#include "block.h"
#include "memory.h"
#include "report.h"
#include "tool.h"

namespace emu {

BarrierState* new_barrier_state() { return new BarrierState; }
void delete_barrier_state(BarrierState* s) { delete s; }

void begin_barriers(BarrierState* s) {
  s->mbarrier.clear();
  s->name.clear();
  for (NamedBarrier& b : s->named) b = {};
  s->stalls = 0;
}

// ---- waiting

// The current thread waits at a barrier, until someone makes it ready.
static void wait_at(At at, unsigned place, uint64_t phase, uintptr_t pc, Site site) {
  Worker* w = worker;
  Thread* t = w->current;
  t->state = State::Waiting;
  t->site = site;
  t->site.pc = pc;
  t->mask = 0;
  t->at = at;
  t->place = place;
  t->phase = phase;
  t->answer = 0;
  stop(w);
  wait();
  t->at = At::Instruction;
}

static bool waits_at(const Thread& t, At at, unsigned place) {
  return t.state == State::Waiting && t.at == at && t.place == place;
}

// ---- bar: threads of whole warps

// All have come, and the current thread is no longer to wait: the others go on. Gives the votes' answer.
static int complete_named(Worker* w, unsigned id) {
  NamedBarrier& b = w->barriers->named[id];
  const BarrierPoint point{BarrierPoint::Named, id, false, ""};
  const int answer = b.vote == BarrierVote::And ? b.no == 0 : b.vote == BarrierVote::Or ? b.yes > 0 : int(b.yes);
  for (Watcher* watcher : w->on_execution) watcher->completed(point);
  for (unsigned i = 0; i < w->threads; ++i) {
    if (!waits_at(w->thread[i], At::NamedBarrier, id)) continue;
    w->thread[i].answer = answer;
    for (Watcher* watcher : w->on_execution) watcher->passes(point, i);
    w->ready(&w->thread[i]);
  }
  b.arrived = 0;
  return answer;
}

int named_barrier(unsigned id, unsigned threads, bool waits, BarrierVote vote, bool predicate, bool aligned, uintptr_t pc, Site site) {
  Worker* w = worker;
  if (id >= std::size(w->barriers->named))
    fail("barrier", 719, pc, site, "comes to barrier %u; a block has 0 to 15", id);
  if (threads == 0 || threads % kWarp != 0 || threads > w->whole_warps())
    fail("barrier", 719, pc, site, "comes to barrier %u for %u threads; there must be a multiple of 32, of the block's %u at most", id,
         threads, w->threads);
  NamedBarrier& b = w->barriers->named[id];
  const bool in_syncthreads = id == 0 && w->barrier.arrived > 0;
  if (b.arrived == 0) b = {}, b.count = in_syncthreads ? w->whole_warps() : threads, b.vote = vote;
  if (b.count != threads)
    fail("barrier", 719, pc, site, "comes to barrier %u for %u threads, and others have come to it for %u", id, threads, b.count);
  if (in_syncthreads) leave_sync_block(w);
  ++(predicate ? b.yes : b.no);
  unsigned& come = b.come[w->current->number / kWarp];
  if (come == 0) b.arrived += kWarp - unsigned(__builtin_popcount(w->warp[w->current->number / kWarp].alive));
  come |= 1u << w->current->number % kWarp;
  w->barriers->stalls = 0;
  const BarrierPoint point{BarrierPoint::Named, id, aligned && waits, site.what};
  for (Watcher* watcher : w->on_execution) watcher->arrives(point);
  if (++b.arrived < b.count) {
    if (!waits) return 0;
    wait_at(At::NamedBarrier, id, 0, pc, site);
    return w->current->answer;
  }
  const int answer = complete_named(w, id);
  if (waits)
    for (Watcher* watcher : w->on_execution) watcher->passes(point, w->current->number);
  return answer;
}

void returns_from_named_barriers(Worker* w) {
  const unsigned warp = w->current->number / kWarp, bit = 1u << w->current->number % kWarp;
  for (unsigned id = 0; id < std::size(w->barriers->named); ++id) {
    NamedBarrier& b = w->barriers->named[id];
    if (b.arrived > 0 && b.come[warp] != 0 && (b.come[warp] & bit) == 0 && ++b.arrived == b.count) complete_named(w, id);
  }
}

// ---- mbarrier

// Stands in the mbarrier's 8 bytes, by which it is seen when something else has been written there.
static uint64_t cookie(uint32_t at, uint64_t phase) { return 0x6d62617272696572 ^ (uint64_t(at) << 32) ^ phase; }

void name_mbarrier(const char* name, uint64_t address) {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr) return;
  const uint64_t offset = address < kArena ? address : address - reinterpret_cast<uintptr_t>(w->arena);
  if (offset < w->dynamic_base || offset >= w->dynamic_base + w->dynamic_bytes) return;  // an array of its own has a name
  ++w->critical;
  w->barriers->name[uint32_t(offset)] = name;
  --w->critical;
}

// Those that the source calls alike are counted by their places.
std::string mbarrier_name(const Worker* w, uint32_t at) {
  const auto& names = w->barriers->name;
  const auto found = names.find(at);
  if (found == names.end()) return shared_place(w, w->current == nullptr ? 0 : w->current->number / kWarp, at);
  unsigned before = 0, all = 0;
  for (const auto& [place, name] : names) {
    if (strcmp(name, found->second) != 0) continue;
    before += place < at;
    ++all;
  }
  return all == 1 ? found->second : found->second + ("[" + std::to_string(before) + "]");
}

std::string shared_or_mbarrier(const Worker* w, unsigned warp, size_t offset) {
  if (w->barriers->mbarrier.count(uint32_t(offset)) != 0) return "the mbarrier " + mbarrier_name(w, uint32_t(offset));
  return shared_place(w, warp, offset);
}

static void write_cookie(Worker* w, uint32_t at, const Mbarrier& b) {
  const uint64_t bits = cookie(at, b.phase);
  memcpy(w->arena + at, &bits, sizeof bits);
}

static Mbarrier& mbarrier_at(uint32_t at, uintptr_t pc, Site site) {
  Worker* w = worker;
  const auto found = w->barriers->mbarrier.find(at);
  if (found == w->barriers->mbarrier.end())
    fail("mbarrier", 719, pc, site, "comes with %s to %s, where no mbarrier has been initialised", site.what,
         at + 8 <= kArena ? mbarrier_name(w, at).c_str() : "an address outside of shared memory");
  uint64_t bits;
  memcpy(&bits, w->arena + at, sizeof bits);
  if (bits != cookie(at, found->second.phase))
    fail("mbarrier", 719, pc, site, "comes with %s to the mbarrier %s, whose 8 bytes have been overwritten by something else", site.what,
         mbarrier_name(w, at).c_str());
  for (Watcher* t : w->on_execution) t->mbarrier_used(at, pc);
  return found->second;
}

void mbarrier_init(uint32_t at, uint32_t count, uintptr_t pc, Site site) {
  Worker* w = worker;
  if (count == 0 || count >= 1u << 20)
    fail("mbarrier", 719, pc, site, "initialises an mbarrier for %u arrivals; 1 to %u are allowed", count, (1u << 20) - 1);
  check_bounds(at, 8, true, pc, site);
  for (Watcher* t : w->on_memory) t->mbarrier_init(at, pc);
  const auto found = w->barriers->mbarrier.find(at);
  if (found != w->barriers->mbarrier.end() && !found->second.landing.empty())
    fail("mbarrier", 719, pc, site, "initialises the mbarrier %s while copies that report to it are under way", mbarrier_name(w, at).c_str());
  ++w->critical;
  Mbarrier& b = w->barriers->mbarrier[at];
  b = {};
  --w->critical;
  b.count = b.pending = count;
  write_cookie(w, at, b);
}

void mbarrier_inval(uint32_t at, uintptr_t pc, Site site) {
  const Mbarrier& b = mbarrier_at(at, pc, site);
  if (!b.landing.empty())
    fail("mbarrier", 719, pc, site, "invalidates the mbarrier %s while copies that report to it are under way",
         mbarrier_name(worker, at).c_str());
  ++worker->critical;
  worker->barriers->mbarrier.erase(at);
  --worker->critical;
}

static BarrierPoint point_of(uint32_t at) { return {BarrierPoint::Mbarrier, at, false, "mbarrier"}; }

// A phase is over: whoever waits for it goes on, and the next begins.
static void complete_phase(Worker* w, uint32_t at, Mbarrier& b) {
  for (Watcher* watcher : w->on_execution) watcher->completed(point_of(at));
  for (unsigned i = 0; i < w->threads; ++i) {
    Thread& t = w->thread[i];
    if (!waits_at(t, At::Mbarrier, at) || t.phase != b.phase) continue;
    t.answer = 1;
    if (t.acquires)
      for (Watcher* watcher : w->on_execution) watcher->passes(point_of(at), i);
    w->ready(&t);
  }
  ++b.phase;
  b.pending = b.count;
  w->barriers->stalls = 0;
  write_cookie(w, at, b);
}

// How many of the landings, oldest first, it takes to complete the phase; SIZE_MAX: all don't.
static size_t landings_to_complete(const Mbarrier& b) {
  int64_t bytes = b.bytes, pending = b.pending;
  for (size_t i = 0;; ++i) {
    if (bytes == 0 && pending == 0) return i;
    if (i == b.landing.size()) return SIZE_MAX;
    b.landing[i].arrival ? pending -= 1 : bytes -= b.landing[i].box.bytes;
  }
}

static bool land_and_complete(Worker* w, uint32_t at, Mbarrier& b) {
  const size_t count = landings_to_complete(b);
  if (count == SIZE_MAX) return false;
  ++w->critical;
  for (size_t i = 0; i < count; ++i) {
    const Landing l = b.landing.front();
    b.landing.pop_front();
    const Actor agent{ActorKind::Mbarrier, at, l.thread};
    if (l.arrival) {
      land_copies(w, l.thread, l.copies, agent);
      --b.pending;
    } else {
      b.bytes -= l.box.bytes;
      load_box(w, l.box);
      for (Watcher* t : w->on_memory) t->copy_landed(l.box.shared, l.box.bytes, agent);
    }
  }
  complete_phase(w, at, b);
  --w->critical;
  return true;
}

static std::string times(uint32_t count) { return count == 1 ? "once" : std::to_string(count) + " times"; }

uint64_t mbarrier_arrive(uint32_t at, uint32_t count, int64_t expect, bool drop, bool releases, uintptr_t pc, Site site) {
  Worker* w = worker;
  Mbarrier& b = mbarrier_at(at, pc, site);
  if (b.pending == 0) land_and_complete(w, at, b);  // everything that this phase waits for must have come
  if (count == 0 || count > b.pending)
    fail("mbarrier", 719, pc, site, "arrives %s at the mbarrier %s, and of the %u arrival%s of phase %llu %s", times(count).c_str(),
         mbarrier_name(w, at).c_str(), b.count, b.count == 1 ? "" : "s", static_cast<unsigned long long>(b.phase),
         b.pending == 0 ? "none is missing" : (std::to_string(b.pending) + (b.pending == 1 ? " is missing" : " are missing")).c_str());
  const uint64_t state = b.phase << 32 | b.pending;
  b.bytes += expect;
  b.pending -= count;
  if (drop) b.count -= count;
  w->barriers->stalls = 0;
  if (releases)
    for (Watcher* t : w->on_execution) t->arrives(point_of(at));
  if (b.pending == 0 && b.bytes == 0) complete_phase(w, at, b);
  return state;
}

void mbarrier_expect(uint32_t at, int64_t bytes, uintptr_t pc, Site site) {
  Mbarrier& b = mbarrier_at(at, pc, site);
  b.bytes += bytes;
  worker->barriers->stalls = 0;
  if (b.pending == 0 && b.bytes == 0) complete_phase(worker, at, b);
}

bool mbarrier_wait(uint32_t at, Awaited how, uint64_t awaited, bool acquires, uintptr_t pc, Site site) {
  Worker* w = worker;
  Mbarrier& b = mbarrier_at(at, pc, site);
  // The parity is that of the phase under way, or of the one before, which is complete.
  const uint64_t phase = how == Awaited::State ? awaited >> 32 : (b.phase & 1) == awaited ? b.phase : b.phase - 1;
  if (phase != b.phase) {
    if (acquires)
      for (Watcher* t : w->on_execution) t->passes(point_of(at), w->current->number);
    return true;
  }
  w->current->acquires = acquires;
  wait_at(At::Mbarrier, at, phase, pc, site);
  return w->current->answer != 0;
}

void mbarrier_land(uint32_t at, Landing l, uintptr_t pc, Site site) {
  Worker* w = worker;
  Mbarrier& b = mbarrier_at(at, pc, site);
  ++w->critical;
  b.landing.push_back(std::move(l));
  --w->critical;
}

void fence_mbarrier_init() {
  for (Watcher* t : worker->on_execution) t->fence(Fence::MbarrierInit);
}

void fence_proxy_async_global() {
  for (Watcher* t : worker->on_execution) t->fence(Fence::ProxyGlobal);
}

void fence_proxy_async() {
  for (Watcher* t : worker->on_execution) t->fence(Fence::Proxy);
}

// Nobody can run, or only those who look again and again: lets copies land that complete a phase for which somebody waits.
// False: nothing can be done.
bool barrier_progress(Worker* w, bool stalled) {
  BarrierState& s = *w->barriers;
  bool anybody = false;
  for (unsigned i = 0; i < w->threads; ++i) {
    const Thread& t = w->thread[i];
    if (t.state != State::Waiting || t.at != At::Mbarrier) continue;
    anybody = true;
    Mbarrier& b = s.mbarrier[t.place];
    if (b.phase == t.phase && land_and_complete(w, t.place, b)) return true;
  }
  constexpr unsigned kStalls = 64;  // rounds through loops that do nothing but wait
  if (!stalled || !anybody || ++s.stalls > kStalls) return false;
  for (unsigned i = 0; i < w->threads; ++i)
    if (w->thread[i].state == State::Waiting && w->thread[i].at == At::Mbarrier) w->ready(&w->thread[i]);
  return true;
}

std::string mbarrier_state(const Worker* w, uint32_t at, uint64_t phase) {
  const Mbarrier& b = w->barriers->mbarrier.at(at);
  std::string s = "for phase " + std::to_string(phase) + " (parity " + std::to_string(phase & 1) + ") of the mbarrier " + mbarrier_name(w, at) + ": ";
  if (phase != b.phase) return s + "phase " + std::to_string(b.phase) + " is under way";
  int64_t bytes = b.bytes, pending = b.pending;
  for (const Landing& l : b.landing) l.arrival ? pending -= 1 : bytes -= l.box.bytes;
  if (pending > 0) s += std::to_string(pending) + " of " + std::to_string(b.count) + (b.count == 1 ? " arrival" : " arrivals");
  if (bytes > 0) s += std::string(pending > 0 ? " and " : "") + std::to_string(bytes) + " bytes";
  if (pending > 0 || bytes > 0) s += " missing";
  if (bytes < 0) s += std::string(pending > 0 ? ", " : "") + std::to_string(-bytes) + " bytes more than expected have come";
  return s;
}

}  // namespace emu
