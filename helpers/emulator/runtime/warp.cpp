// Warp instructions: what the last lane to arrive computes for all of them.
// Semantics: CUDA C++ Programming Guide, "Warp Shuffle", "Warp Vote", "Warp Match" and "Warp Reduce Functions".
#include "../include/emulator/runtime.h"
#include "report.h"
#include "tool.h"
#include "worker.h"

namespace emu {

namespace {

template <class Operand>
struct Lanes {
  void* const* operand;
  bool has(unsigned l) const { return operand[l] != nullptr; }
  Operand& operator[](unsigned l) const { return *static_cast<Operand*>(operand[l]); }
};

struct ShuffleLane {
  Shuffle kind;
  int argument, width;  // delta, source lane or lane mask; lanes of a segment
  uint64_t value, result;
  int missing;          // the lane it wanted to read, if that takes no part
};

// The PTX ISA's pseudocode of shfl.sync, in the terms of the intrinsics: a source outside of the segment means
// one's own value, except for Index, which wraps around within the segment.
void combine_shuffle(void* const operand[32]) {
  const Lanes<ShuffleLane> lanes{operand};
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!lanes.has(l)) continue;
    ShuffleLane& me = lanes[l];
    const int first = int(l) & ~(me.width - 1), last = first + me.width - 1, lane = int(l), by = me.argument & int(kWarp - 1);
    int source = lane;
    switch (me.kind) {
      case Shuffle::Index: source = first + (me.argument & (me.width - 1)); break;
      case Shuffle::Up: source = lane - by < first ? lane : lane - by; break;
      case Shuffle::Down: source = lane + by > last ? lane : lane + by; break;
      case Shuffle::Xor: source = (lane ^ by) > last ? lane : lane ^ by; break;
    }
    me.missing = lanes.has(source) ? -1 : source;
    me.result = lanes.has(source) ? lanes[source].value : 0;
  }
}

struct VoteLane {
  Vote kind;
  int predicate;
  unsigned result;
};

void combine_vote(void* const operand[32]) {
  const Lanes<VoteLane> lanes{operand};
  unsigned here = 0, yes = 0;
  for (unsigned l = 0; l < kWarp; ++l)
    if (lanes.has(l)) here |= 1u << l, yes |= unsigned(lanes[l].predicate != 0) << l;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!lanes.has(l)) continue;
    switch (lanes[l].kind) {
      case Vote::All: lanes[l].result = yes == here; break;
      case Vote::Any: lanes[l].result = yes != 0; break;
      case Vote::Uniform: lanes[l].result = yes == here || yes == 0; break;
      case Vote::Ballot: lanes[l].result = yes; break;
    }
  }
}

struct MatchLane {
  uint64_t value;
  bool all;
  unsigned result;
};

void combine_match(void* const operand[32]) {
  const Lanes<MatchLane> lanes{operand};
  unsigned here = 0;
  for (unsigned l = 0; l < kWarp; ++l) here |= unsigned(lanes.has(l)) << l;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!lanes.has(l)) continue;
    unsigned equal = 0;
    for (unsigned k = 0; k < kWarp; ++k) equal |= unsigned(lanes.has(k) && lanes[k].value == lanes[l].value) << k;
    lanes[l].result = !lanes[l].all ? equal : equal == here ? here : 0;
  }
}

struct ReduceLane {
  Reduce kind;
  unsigned value, result;
};

unsigned reduce_two(Reduce kind, unsigned a, unsigned b) {
  const bool signed_less = int(a) < int(b);
  switch (kind) {
    case Reduce::AddU:
    case Reduce::AddS: return a + b;
    case Reduce::MinU: return a < b ? a : b;
    case Reduce::MaxU: return a < b ? b : a;
    case Reduce::MinS: return signed_less ? a : b;
    case Reduce::MaxS: return signed_less ? b : a;
    case Reduce::And: return a & b;
    case Reduce::Or: return a | b;
    case Reduce::Xor: return a ^ b;
  }
  __builtin_unreachable();
}

void combine_reduce(void* const operand[32]) {
  const Lanes<ReduceLane> lanes{operand};
  bool first = true;
  unsigned sum = 0;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!lanes.has(l)) continue;
    sum = first ? lanes[l].value : reduce_two(lanes[l].kind, sum, lanes[l].value);
    first = false;
  }
  for (unsigned l = 0; l < kWarp; ++l)
    if (lanes.has(l)) lanes[l].result = sum;
}

void combine_order(void* const operand[32]) {
  unsigned lanes = 0;
  for (unsigned l = 0; l < kWarp; ++l) lanes |= unsigned(operand[l] != nullptr) << l;
  for (Watcher* t : worker->on_execution) t->lanes_ordered(worker->current->number / kWarp, lanes);
}

}  // namespace

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int argument, int width, Site site) {
  if (width < 1 || width > int(kWarp) || (width & (width - 1)) != 0)
    fail("shuffle", 719, 0, site, "calls %s with width %d; 1, 2, 4, 8, 16 and 32 are allowed",
         site.what, width);
  ShuffleLane me{kind, argument, width, value, 0, -1};
  rendezvous(mask, &me, combine_shuffle, site);
  if (me.missing >= 0)
    fail("shuffle", 719, 0, site, "reads lane %d in %s, and that lane takes no part (mask 0x%08x)",
         me.missing, site.what, mask);
  return me.result;
}

unsigned vote(Vote kind, unsigned mask, int predicate, Site site) {
  VoteLane me{kind, predicate, 0};
  rendezvous(mask, &me, combine_vote, site);
  return me.result;
}

unsigned match(unsigned mask, uint64_t value, bool all, Site site) {
  MatchLane me{value, all, 0};
  rendezvous(mask, &me, combine_match, site);
  return me.result;
}

unsigned reduce(Reduce kind, unsigned mask, unsigned value, Site site) {
  ReduceLane me{kind, value, 0};
  rendezvous(mask, &me, combine_reduce, site);
  return me.result;
}

void sync_warp(unsigned mask, Site site) {
  int nothing;
  rendezvous(mask, &nothing, combine_order, site);
}

}  // namespace emu
