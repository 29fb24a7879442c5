// See race_flags.h.
#include "race_flags.h"

#include <algorithm>
#include <cstring>

#include "report.h"

namespace emu {

static bool known_to(const Races& r, unsigned thread, unsigned other, uint32_t stamp) {
  if (thread == other || stamp <= r.everybody.known[other] || stamp <= r.clock[thread].known[other]) return true;
  return other < kThreads && thread / kWarp == other / kWarp && stamp <= r.all[thread / kWarp];
}

static Known merged(const Known& a, const Known& b) {
  if (a == nullptr || a == b) return b;
  if (b == nullptr) return a;
  const auto both = std::make_shared<Knowledge>(*a);
  for (const auto& [who, what] : *b) {
    auto& mine = (*both)[who];
    if (mine == nullptr || mine->number < what->number) mine = what;
  }
  return both;
}

static uint64_t key(uint32_t block, unsigned thread) { return uint64_t(block) << 16 | thread; }

// The first release known here of a thread of the trail's block that knew of it; null: there is none.
static const Released* covers(const Knowledge& known, const Trail& t) {
  const Released* first = nullptr;
  for (auto at = known.lower_bound(key(t.block, 0)); at != known.end() && at->first >> 16 == t.block; ++at) {
    const Released& r = *at->second;
    if (t.actor < r.known.size() && t.stamp <= r.known[t.actor] && (first == nullptr || r.number < first->number)) first = &r;
  }
  return first;
}

// ---- a block

void BlockFlags::begin_block(uint64_t number) {
  block = uint32_t(number) + 1;
  acquired.clear(), pending.clear(), at_fence.clear(), of_system.clear(), far_reads.clear();
}

void BlockFlags::acquire(unsigned thread, const Known& known) {
  if (known == nullptr) return;
  std::vector<Acquired>& mine = acquired[thread];
  if (!mine.empty() && mine.back().known == known) return;
  const Known all = mine.empty() ? known : merged(mine.back().known, known);
  if (!mine.empty() && mine.back().stamp == r.tick[thread] && !mine.back().fenced) mine.back().known = all;
  else mine.push_back({r.tick[thread], false, all});
}

void BlockFlags::memory_fence(unsigned thread) {
  if (const auto seen = pending.find(thread); seen != pending.end()) {
    acquire(thread, seen->second);
    pending.erase(seen);
  }
  at_fence[thread] = known_now(thread);
}

// Of its own block as of others.
Known BlockFlags::known_now(unsigned thread) {
  const Clock& mine = *r.flags.fenced[thread];
  const auto now = std::make_shared<Released>();
  now->number = ++launch.releases;
  now->known.resize(kThreads + r.agents.size());
  for (unsigned i = 0; i < now->known.size(); ++i) now->known[i] = std::max(mine.known[i], r.everybody.known[i]);
  Known all;
  for (const auto& [who, list] : acquired)  // what reached this thread by way of others of the block, too
    for (auto a = list.rbegin(); a != list.rend(); ++a)
      if (known_to(r, thread, who, a->stamp)) {
        all = merged(all, a->known);
        break;
      }
  return merged(all, std::make_shared<Knowledge>(Knowledge{{key(block, thread), now}}));
}

void BlockFlags::proxy_fence(unsigned thread) {
  for (auto& [who, list] : acquired)
    for (auto a = list.rbegin(); a != list.rend() && !a->fenced; ++a) a->fenced = known_to(r, thread, who, a->stamp);
  for (auto& [who, read] : of_system) read.fenced = read.fenced || known_to(r, thread, who, read.stamp);
}

// A release speaks for its own flag, a fence for all flags that its thread sets after it.
void BlockFlags::sets(unsigned thread, uintptr_t flag, bool releases) {
  if (releases) launch.used = true;
  const auto fenced = at_fence.find(thread);
  const Known known = releases ? known_now(thread) : fenced != at_fence.end() ? fenced->second : nullptr;
  if (known == nullptr) return;
  std::lock_guard<std::mutex> hold(launch.lock);
  Known& told = launch.told[flag];
  told = merged(told, known);
}

int BlockFlags::may_read_far(unsigned thread) const {
  int found = 0;
  for (const auto& [who, read] : of_system)
    if (known_to(r, thread, who, read.stamp)) found = std::max(found, read.fenced ? 2 : 1);
  return found;
}

const BlockFlags::FarRead* BlockFlags::still_reads_far(unsigned thread) const {
  for (const FarRead& read : far_reads)
    if (!known_to(r, thread, read.agent, read.stamp)) return &read;
  return nullptr;
}

void BlockFlags::has_read(unsigned thread, uintptr_t flag, bool acquires, bool of_all_GPUs) {
  if (acquires) launch.used = true;
  if (acquires && of_all_GPUs) of_system.insert({thread, {r.tick[thread], false}});
  Known known;
  {
    std::lock_guard<std::mutex> hold(launch.lock);
    if (const auto told = launch.told.find(flag); told != launch.told.end()) known = told->second;
  }
  if (known == nullptr) return;
  if (acquires) acquire(thread, known);
  else pending[thread] = merged(pending[thread], known);
}

int BlockFlags::ordered_before(unsigned thread, const Trail& t) const {
  int found = 0;
  for (const auto& [who, list] : acquired)
    for (auto a = list.rbegin(); a != list.rend(); ++a) {
      if (!known_to(r, thread, who, a->stamp)) continue;
      if (!covers(*a->known, t)) break;  // earlier ones say less
      if (a->fenced) return 2;
      found = 1;
    }
  return found;
}

static bool same(const Trail& a, const Trail& b) { return a.block == b.block && a.actor == b.actor && a.stamp == b.stamp; }

void BlockFlags::reads(size_t first, size_t end, const Trail& trail, unsigned me, bool by_TMA, size_t region, size_t region_first,
                       unsigned shift) {
  std::lock_guard<std::mutex> hold(launch.lock);
  Trail looked_at = {};
  int ordered = 0;
  for (size_t i = first; i < end; ++i) {
    Element& e = launch.elements[i];
    const Trail& w = e.written;
    if (w.block != 0 && w.block != block && !(trail.strong && w.strong)) {
      if (!same(w, looked_at)) looked_at = w, ordered = ordered_before(me, w);
      const size_t offset = (i - region_first) << shift;
      if (ordered == 0) launch.clash("race", trail, w, false, false, region, offset);
      else if (by_TMA && ordered == 1) launch.clash("proxy fence", trail, w, false, true, region, offset);
    }
    if (e.read[0].block == 0 || e.read[0].block == block) e.read[0] = trail;
    else e.read[1] = trail;
  }
}

void BlockFlags::writes(size_t first, size_t end, const Trail& trail, unsigned me, size_t region, size_t region_first, unsigned shift) {
  std::lock_guard<std::mutex> hold(launch.lock);
  const Region& r = session.regions[region];
  for (size_t i = first; i < end; ++i) {
    Element& e = launch.elements[i];
    const size_t offset = (i - region_first) << shift;
    Trail now = trail;
    if (!now.any_value) memcpy(&now.value, r.base + offset, size_t(1) << shift);
    const Trail& w = e.written;
    if (w.block != 0 && w.block != block && !(now.strong && w.strong) && (w.any_value || now.any_value || w.value != now.value) &&
        ordered_before(me, w) == 0)
      launch.clash("race", now, w, true, false, region, offset);
    const bool changes = now.any_value || w.block == 0 || w.any_value || w.value != now.value;
    for (const Trail& read : e.read)
      if (changes && read.block != 0 && read.block != block && !(now.strong && read.strong) && ordered_before(me, read) == 0)
        launch.clash("race", read, now, false, false, region, offset);
    e.written = now;
  }
}

// ---- a launch

void FlagOrder::begin_launch(size_t elements_followed) {
  told.clear(), clashes.clear();
  releases = 0, used = false;
  count = elements_followed;
  if (count > 0) elements = static_cast<Element*>(lazily(count * sizeof(Element)));
}

void FlagOrder::clash(const char* kind, const Trail& one, const Trail& other, bool one_writes, bool unfenced, size_t region,
                      size_t offset) {
  Clash& c = clashes[{kind, one.pc, other.pc}];
  if (c.times++ == 0) c.one = one, c.other = other, c.one_writes = one_writes, c.unfenced = unfenced, c.region = region, c.offset = offset;
}

static std::string in_words(const Trail& t, const Run& run) {
  const uint32_t *g = run.launch->grid, *b = run.launch->block;
  const uint64_t block = t.block - 1;
  return "thread " + coordinates(t.thread % b[0], t.thread / b[0] % b[1], t.thread / b[0] / b[1], b) + " of block " +
         coordinates(unsigned(block % g[0]), unsigned(block / g[0] % g[1]), unsigned(block / g[0] / g[1]), g);
}

std::string flag_name(uintptr_t address) {
  for (const Region& r : session.regions) {
    const size_t offset = address - reinterpret_cast<uintptr_t>(r.base);
    if (offset >= r.bytes) continue;
    return std::string(r.name) + "[" + std::to_string(offset / size_t(r.item)) + "]";
  }
  return "a flag";
}

// Which flag was the first to be set after the write: whoever reads what it speaks of has to look at it first.
void FlagOrder::end_launch(const Run& run) {
  Notes notes;
  if (!used) clashes.clear();
  for (const auto& [kinds, c] : clashes) {
    Noted& n = notes[kinds];
    n.count = c.times, n.block = c.one.block - 1, n.apart = 3;
    const bool agent = c.other.actor >= kThreads;
    n.text = in_words(c.one, run) + (c.one_writes ? " writes " : " reads ") + session.regions[c.region].name + " + " +
             std::to_string(c.offset) + " B, which " + (agent ? "a bulk copy of " : "") + in_words(c.other, run) + " writes on {other}";
    if (c.unfenced) {
      n.text += ": a flag orders the two, but TMA reads through the async proxy, and no fence.proxy.async stands between the flag and it";
      continue;
    }
    uintptr_t flag = 0;
    uint64_t number = UINT64_MAX;
    for (const auto& [address, known] : told)
      if (const Released* r = covers(*known, c.other); r != nullptr && r->number < number) flag = address, number = r->number;
    n.text += ", and nothing orders the two: ";
    n.text += flag == 0 ? "no flag is set by a release once that is complete"
                        : "the first flag set by a release once that is complete is " + flag_name(flag) + ", which block " +
                              std::to_string(c.one.block - 1) + " has not read with an acquire before";
  }
  add_notes(notes, run.number);
  if (elements != nullptr) give_back(elements, count * sizeof(Element));
  elements = nullptr;
}

}  // namespace emu
