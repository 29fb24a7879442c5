// Barriers, shuffles and votes. PTX ISA, "Data Movement and Conversion Instructions" (shfl.sync) and "Parallel
// Synchronization and Communication Instructions".
#include "../include/emulator/runtime.h"
#include "device.h"
#include "ptx_families.h"
#include "report.h"

namespace emu::ptx {

namespace {

// ---- shfl.sync d|p, a, b, c, mask

enum class Direction : uint8_t { Up, Down, Butterfly, Index };

struct Shuffled {
  Direction direction;
  uint32_t value, b, c, result;
  bool inside;  // the predicate p
  int missing;
};

// The manual's pseudocode: c's bits 0-4 clamp the lane, bits 8-12 part the warp in segments.
void combine_shfl(void* const operand[32]) {
  for (unsigned l = 0; l < kWarp; ++l) {
    if (operand[l] == nullptr) continue;
    Shuffled& me = *static_cast<Shuffled*>(operand[l]);
    const int lane = int(l), b = int(me.b & 31), clamp = int(me.c & 31), segment = int(me.c >> 8 & 31);
    const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
    int source = lane;
    switch (me.direction) {
      case Direction::Up: source = lane - b; break;
      case Direction::Down: source = lane + b; break;
      case Direction::Butterfly: source = lane ^ b; break;
      case Direction::Index: source = first | (b & ~segment); break;
    }
    me.inside = me.direction == Direction::Up ? source >= last : source <= last;
    if (!me.inside) source = lane;
    me.missing = operand[source] == nullptr ? source : -1;
    me.result = me.missing < 0 ? static_cast<Shuffled*>(operand[source])->value : 0;
  }
}

void shfl(Frame& f, const Instruction& i) {
  Shuffled me{Direction(i.offset), get<uint32_t>(f, i.s[0]), get<uint32_t>(f, i.s[1]), get<uint32_t>(f, i.s[2]), 0, false, -1};
  const unsigned mask = get<uint32_t>(f, i.s[3]);
  rendezvous(mask, &me, combine_shfl, here(f, i));
  if (me.missing >= 0)
    fail("shuffle", 719, f.pc, i.site, "reads lane %d in %s, and that lane takes no part (mask 0x%08x)", me.missing, i.site.what,
         mask);
  put(f, i.d[0], me.result);
  if (i.d.size() > 1) put(f, i.d[1], me.inside);
}

bool decode_shfl(Decoder& d) {
  if (!d.take("sync")) return false;
  const char* names[] = {"up", "down", "bfly", "idx"};
  d.out.offset = -1;
  for (int k = 0; k < 4; ++k)
    if (d.take(names[k])) d.out.offset = k;
  if (d.out.offset < 0 || !d.take("b32")) return false;
  const size_t first = d.paired ? 2 : 1;
  d.expect(first + 4);
  d.destination(0, Type::b32);
  if (d.paired) d.destination(1, Type::pred);
  for (size_t k = first; k < first + 4; ++k) d.source(k, Type::b32);
  d.out.run = shfl;
  return true;
}

// ---- votes, matches, sums

void vote_lanes(Frame& f, const Instruction& i) {
  put(f, i.d[0], uint32_t(vote(Vote(i.offset), get<uint32_t>(f, i.s[1]), get(f, i.s[0]) != 0, here(f, i))));
}

bool decode_vote(Decoder& d) {
  if (!d.take("sync")) return false;
  const bool ballot = d.take("ballot");
  const Vote kind = ballot ? Vote::Ballot : d.take("all") ? Vote::All : d.take("any") ? Vote::Any : Vote::Uniform;
  if ((kind == Vote::Uniform && !d.take("uni")) || !d.take(ballot ? "b32" : "pred")) return false;
  d.expect(3);
  d.destination(0, ballot ? Type::b32 : Type::pred);
  d.predicate(d.operands[1]);
  d.source(2, Type::b32);
  d.out.offset = int64_t(kind);
  d.out.run = vote_lanes;
  return true;
}

void match_lanes(Frame& f, const Instruction& i) {
  const uint64_t value = i.bytes == 8 ? get(f, i.s[0]) : get<uint32_t>(f, i.s[0]);
  const unsigned lanes = match(get<uint32_t>(f, i.s[1]), value, i.offset != 0, here(f, i));
  put(f, i.d[0], uint32_t(lanes));
  if (i.d.size() > 1) put(f, i.d[1], lanes != 0);
}

bool decode_match(Decoder& d) {
  if (!d.take("sync")) return false;
  const bool all = d.take("all");
  if (!all && !d.take("any")) return false;
  const Type t = d.take_type();
  if (t != Type::b32 && t != Type::b64) return false;
  const size_t first = d.paired ? 2 : 1;
  d.expect(first + 2);
  d.destination(0, Type::b32);
  if (d.paired) d.destination(1, Type::pred);
  d.source(first, t);
  d.source(first + 1, Type::b32);
  d.out.offset = all;
  d.out.bytes = bytes_of(t);
  d.out.run = match_lanes;
  return true;
}

void reduce_lanes(Frame& f, const Instruction& i) {
  put(f, i.d[0], uint32_t(reduce(Reduce(i.offset), get<uint32_t>(f, i.s[1]), get<uint32_t>(f, i.s[0]), here(f, i))));
}

bool decode_redux(Decoder& d) {
  if (!d.take("sync")) return false;
  const bool add = d.take("add"), least = d.take("min"), most = d.take("max"), conjunction = d.take("and"), either = d.take("or");
  if (!add && !least && !most && !conjunction && !either && !d.take("xor")) return false;
  const Type t = d.take_type();
  const bool arithmetic = add || least || most;
  if (arithmetic ? t != Type::u32 && t != Type::s32 : t != Type::b32) return false;
  const bool is_signed = t == Type::s32;
  const Reduce kind = add ? is_signed ? Reduce::AddS : Reduce::AddU
                      : least ? is_signed ? Reduce::MinS : Reduce::MinU
                      : most ? is_signed ? Reduce::MaxS : Reduce::MaxU
                      : conjunction ? Reduce::And
                      : either ? Reduce::Or
                               : Reduce::Xor;
  d.expect(3);
  d.destination(0, t);
  d.source(1, t);
  d.source(2, Type::b32);
  d.out.offset = int64_t(kind);
  d.out.run = reduce_lanes;
  return true;
}

// elect.sync d|p, mask: the lowest lane that takes part
struct Elected {
  uint32_t leader;
};
void combine_elect(void* const operand[32]) {
  unsigned leader = 0;
  while (operand[leader] == nullptr) ++leader;
  for (unsigned l = leader; l < kWarp; ++l)
    if (operand[l] != nullptr) static_cast<Elected*>(operand[l])->leader = leader;
}
void elect(Frame& f, const Instruction& i) {
  Elected me{0};
  rendezvous(get<uint32_t>(f, i.s[0]), &me, combine_elect, here(f, i));
  put(f, i.d[0], me.leader);
  put(f, i.d[1], me.leader == lane());
}

// ---- barriers

void sync_lanes(Frame& f, const Instruction& i) { sync_warp(get<uint32_t>(f, i.s[0]), here(f, i)); }

void end_thread(Frame& f, const Instruction& i) { fail("trap", 719, f.pc, i.site, "executes %s", i.site.what); }
void let_others_run(Frame&, const Instruction&) { yield(); }
void lanes_here(Frame& f, const Instruction& i) { put(f, i.d[0], uint32_t(active_mask(here(f, i)))); }

}  // namespace

bool decode_warp(Decoder& d) {
  const std::string& b = d.base;
  if (b == "shfl") return decode_shfl(d);
  if (b == "vote") return decode_vote(d);
  if (b == "match") return decode_match(d);
  if (b == "redux") return decode_redux(d);
  if (b == "elect") {
    if (!d.take("sync") || !d.paired) return false;
    d.expect(3);
    d.destination(0, Type::b32);
    d.destination(1, Type::pred);
    d.source(2, Type::b32);
    d.out.run = elect;
    return true;
  }
  if (b == "activemask") {
    if (!d.take("b32")) return false;
    d.expect(1);
    d.destination(0, Type::b32);
    d.out.run = lanes_here;
    return true;
  }
  if (b == "bar" || b == "barrier") {  // of a warp
    if (!d.take("warp") || !d.take("sync")) return false;
    d.expect(1);
    d.source(0, Type::b32);
    d.out.run = sync_lanes;
    return true;
  }
  if (b == "trap" || b == "brkpt") {
    d.expect(0);
    d.out.run = end_thread;
    return true;
  }
  if (b == "griddepcontrol") {  // grids run one after the other
    if (!d.take("wait") && !d.take("launch_dependents")) return false;
    d.expect(0);
    d.out.run = let_others_run;
    return true;
  }
  if (b == "nanosleep") {
    d.qualifiers.clear();
    d.out.run = let_others_run;
    return true;
  }
  return false;
}

}  // namespace emu::ptx
