// Races between blocks of a launch, which nothing but atomics and flags orders. Blocks that write the same value to one place
// are not reported, and atomics don't race with atomics.
#include "race_blocks.h"

#include <cstring>

#include "notes.h"
#include "race_order.h"
#include "report.h"

namespace emu {

// Who did it, so that the lower block is the lower number. A pc has 22 bits, a thread 10.
static uint64_t packed(uint64_t block, uint32_t pc, unsigned thread) { return (block + 1) << 32 | (pc & 0x3fffff) << 10 | thread; }
static uint64_t block_in(uint64_t who) { return (who >> 32) - 1; }
static uint32_t pc_in(uint64_t who) { return uint32_t(who >> 10 & 0x3fffff); }

static void raise_to(std::atomic<uint64_t>& most, uint64_t value) {
  for (uint64_t now = most.load(std::memory_order_relaxed); now < value && !most.compare_exchange_weak(now, value);) {
  }
}

void Across::Blocks::add(uint64_t block, uint32_t pc, unsigned thread) {
  const uint64_t me = packed(block, pc, thread);
  raise_to(not_first, ~me);
  raise_to(last, me);
}

void AcrossBlocks::write(size_t region, size_t offset, size_t bytes, uint64_t block, uint32_t pc, unsigned thread) {
  const Region& r = session.regions[region];
  const unsigned shift = cell_shift(r);
  for (size_t at = offset >> shift; at <= (offset + bytes - 1) >> shift; ++at) {
    Across& a = all[begin[region] + at];
    a.writes.add(block, pc, thread);
    if (offset > at << shift || offset + bytes < (at + 1) << shift) a.parts = true;
    uint64_t value = uint64_t(1) << 32, none = 0;
    memcpy(&value, r.base + (at << shift), size_t(1) << shift);
    if (!a.value.compare_exchange_strong(none, value) && none != value) a.differ = true;
  }
}

constexpr size_t kFollowed = 4 << 20;  // elements in all: a trace is for small inputs

void AcrossBlocks::begin_launch() {
  count = 0;
  begin.assign(session.regions.size(), SIZE_MAX);
  for (size_t i = 0; i < session.regions.size(); ++i) {
    const Region& r = session.regions[i];
    const size_t cells = (r.bytes >> cell_shift(r)) + 1;
    if (r.given == 1 || r.given == 3 || r.bytes == 0 || count + cells > kFollowed) continue;
    begin[i] = count;
    count += cells;
  }
  if (count > 0) all = static_cast<Across*>(lazily(count * sizeof(Across)));
}

static std::string in_words(uint64_t who, const Run& run) {
  const uint64_t block = block_in(who), thread = who & 1023;
  const uint32_t *g = run.launch->grid, *b = run.launch->block;
  return "thread " + coordinates(unsigned(thread % b[0]), unsigned(thread / b[0] % b[1]), unsigned(thread / b[0] / b[1]), b) +
         " of block " + coordinates(unsigned(block % g[0]), unsigned(block / g[0] % g[1]), unsigned(block / g[0] / g[1]), g);
}

// What another block than that of `who` has done; 0: nothing.
static uint64_t elsewhere(const Across::Blocks& blocks, uint64_t who) {
  const auto apart = [&](uint64_t other) { return other >> 32 != who >> 32; };
  return blocks.last == 0 ? 0 : apart(~blocks.not_first) ? ~blocks.not_first : apart(blocks.last) ? blocks.last.load() : 0;
}

// Looks at all elements when the launch has ended: so the order in which blocks ran says nothing.
void AcrossBlocks::end_launch(const Run& run, bool noted) {
  Notes notes;
  for (size_t i = 0; i < begin.size(); ++i) {
    if (!noted || !follows(i)) continue;
    const Region& r = session.regions[i];
    for (size_t at = 0; at <= (r.bytes - 1) >> cell_shift(r); ++at) {
      const Across& e = all[begin[i] + at];
      if (e.writes.last == 0 || e.parts) continue;
      const uint64_t other = ~e.writes.not_first;
      uint64_t one = e.differ ? elsewhere(e.writes, other) : 0;
      const char *verb = "writes ", *how = "";
      if (one == 0) one = elsewhere(e.reads, other), verb = "reads ";
      if (one == 0) one = elsewhere(e.atomics, other), verb = "changes ", how = " by an atomic";
      if (one == 0) continue;
      Noted& n = notes[{"race", pc_in(one), pc_in(other)}];
      if (n.count++ > 0) continue;
      n.apart = 2;
      n.block = block_in(one);
      n.text = in_words(one, run) + " " + verb + r.name + " + " + std::to_string(at << cell_shift(r)) + " B" + how + ", which " +
               in_words(other, run) + " writes on {other}, and nothing orders the two";
    }
  }
  add_notes(notes, run.number);
  if (all != nullptr) give_back(all, count * sizeof(Across));
  all = nullptr;
}

}  // namespace emu
