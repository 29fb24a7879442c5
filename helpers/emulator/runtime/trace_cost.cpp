// What a warp's request costs: wavefronts of shared memory, sectors of global memory.
//
// Shared memory has 32 banks of 4 bytes; a wavefront serves one word of each bank, to any number of lanes.
// A request of up to 4 bytes a lane is served for the whole warp, of 8 bytes for each half of it, of 16 bytes for each
// quarter; of loads, two halves (or the two quarters of a half) go together when every lane's neighbour l ^ 1, or every
// lane's l ^ 2, has its address or takes no part.
#include "trace_cost.h"

#include <cstdint>
#include <initializer_list>

namespace emu {

namespace {

constexpr unsigned kBanks = 32, kAll = ~0u;

// Wavefronts of one group of lanes: the most different words that any bank has to give.
unsigned group_wavefronts(const uint32_t* offset, unsigned lanes, unsigned width) {
  uint32_t low = UINT32_MAX, high = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t o = offset[__builtin_ctz(rest)];
    if (o < low) low = o;
    if (o > high) high = o;
  }
  if (low / (4 * kBanks) == (high + width - 1) / (4 * kBanks)) return 1;  // all in one row of the banks
  uint32_t words[kBanks][32];  // a group has at most 32 lanes, and gives each bank at most one word a lane
  uint8_t count[kBanks] = {};
  unsigned most = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t first = offset[__builtin_ctz(rest)] / 4;
    for (unsigned i = 0; i < (width + 3) / 4; ++i) {
      const uint32_t word = first + i, bank = word % kBanks;
      unsigned k = 0;
      while (k < count[bank] && words[bank][k] != word) ++k;
      if (k < count[bank]) continue;
      words[bank][count[bank]++] = word;
      if (count[bank] > most) most = count[bank];
    }
  }
  return most;
}

// Do the lanes share addresses two by two, l with l ^ 1, or l with l ^ 2?
bool in_pairs(const uint32_t* offset, unsigned lanes) {
  for (unsigned x = 1; x <= 2; ++x) {
    bool all = true;
    for (unsigned rest = lanes; all && rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      all = !(lanes >> (l ^ x) & 1) || offset[l] == offset[l ^ x];
    }
    if (all) return true;
  }
  return false;
}

Cost add_group(Cost sum, const uint32_t* offset, unsigned lanes, unsigned width) {
  if (lanes == 0) return sum;
  return {sum.cost + group_wavefronts(offset, lanes, width), sum.ideal + 1};
}

// The groups of `size` lanes that a request is served in; with `pairs`, two of them together if their lanes pair up.
Cost in_groups(const uint32_t* offset, unsigned lanes, unsigned width, bool pairs) {
  const unsigned size = width <= 4 ? 32 : width == 8 ? 16 : 8;
  if (size == 32) return add_group({0, 0}, offset, lanes, width);
  const unsigned mask = (1u << size) - 1;
  Cost sum = {0, 0};
  for (unsigned first = 0; first < 32; first += 2 * size) {
    const unsigned low = lanes & mask << first, high = lanes & mask << first << size;
    if (pairs && low != 0 && high != 0 && in_pairs(offset, low | high)) {
      sum = add_group(sum, offset, low | high, width);
    } else {
      sum = add_group(sum, offset, low, width);
      sum = add_group(sum, offset, high, width);
    }
  }
  return sum;
}

// ldmatrix and stmatrix: one phase for each matrix, whose eight rows of 16 bytes have their addresses from eight lanes.
Cost matrix(const uint32_t* offset, unsigned lanes) {
  Cost sum = {0, 0};
  for (unsigned first = 0; first < 32; first += 8) sum = add_group(sum, offset, lanes & 0xffu << first, 16);
  return sum;
}

// The banks that a cp.async wants at an address, as a bit. All lanes move `width` bytes, aligned, so two of them share all of
// their banks or none; even one address is read for each lane. Address 0: zeros, for which nothing is read.
uint32_t banks_at(uint64_t address, unsigned width) { return address == 0 ? 0 : 1u << address % (4 * kBanks) / width; }

// Wavefronts of one group of lanes that queue: each takes, in order, lanes with no one before them that wants a bank of
// theirs, where they read or where they write, from up to four lines of 128 bytes.
unsigned queue(const uint32_t* offset, unsigned lanes, unsigned width, const uint64_t* source) {
  unsigned wavefronts = 0;
  for (unsigned left = lanes, taken; left != 0; left &= ~taken, ++wavefronts) {
    uint32_t read = 0, written = 0;
    uint64_t lines[4];
    unsigned count = 0;
    taken = 0;
    for (unsigned rest = left; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      const uint32_t from = banks_at(source[l], width), to = 1u << offset[l] % (4 * kBanks) / width;
      const bool waits = (read & from) != 0 || (written & to) != 0;
      read |= from;
      written |= to;
      unsigned k = 0;
      while (k < count && lines[k] != source[l] / (4 * kBanks)) ++k;
      if (waits || k == 4) continue;
      if (k == count) lines[count++] = source[l] / (4 * kBanks);
      taken |= 1u << l;
    }
  }
  return wavefronts;
}

// The most lanes of a group that share a bank with one of them, that one included.
unsigned most_neighbours(const uint32_t* offset, unsigned lanes, unsigned width, const uint64_t* source) {
  unsigned most = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned l = __builtin_ctz(rest);
    unsigned count = 0;
    for (unsigned others = lanes; others != 0; others &= others - 1) {
      const unsigned o = __builtin_ctz(others);
      const bool read = (banks_at(source[l], width) & banks_at(source[o], width)) != 0;
      count += read || (offset[l] ^ offset[o]) % (4 * kBanks) / width == 0;
    }
    if (count > most) most = count;
  }
  return most;
}

// What a cp.async (LDGSTS in SASS) costs the data pipe, which moves bytes from lines of the L1 to shared memory. It is
// served like a store, for the warp, each half or each quarter, and of such a group a lane waits for those before it that
// share a bank with it, at either end. In a cp.async.ca, lanes that are filled with zeros have wavefronts of their own.
// Of a cp.async.cg, which goes past the L1, only the counters of its instruction tell, and they don't count a queue but
// neighbours. What comes from the L2 is written in further wavefronts, which are not counted here (agreement.py knows how
// many). Measured on an H200 (data/nvidia-h200/device.patterns.csv, device.async.csv): all wavefronts of 152 patterns of
// cp.async.ca, all conflicts of 163 of cp.async.cg.
Cost async_copy(const uint32_t* offset, unsigned lanes, unsigned width, const uint64_t* source, bool past_L1) {
  const unsigned size = width <= 4 ? 32 : width == 8 ? 16 : 8;
  unsigned zeros = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    if (source[__builtin_ctz(rest)] == 0) zeros |= rest & -rest;
  Cost sum = {0, 0};
  for (unsigned first = 0; first < 32; first += size) {
    const unsigned here = lanes & (size == 32 ? kAll : ((1u << size) - 1) << first);
    if (here == 0) continue;
    ++sum.ideal;
    if (past_L1)
      sum.cost += most_neighbours(offset, here, width, source);
    else
      for (unsigned part : {here & ~zeros, here & zeros}) sum.cost += queue(offset, part, width, source);
  }
  return sum;
}

// Lanes that change the same word take turns, and so do lanes of one bank.
Cost atomic(const uint32_t* offset, unsigned lanes, unsigned width) {
  unsigned count[kBanks] = {}, most = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    unsigned& n = count[offset[__builtin_ctz(rest)] / 4 % kBanks];
    if (++n > most) most = n;
  }
  const unsigned ideal = in_groups(offset, lanes, width, false).ideal;
  return {most > ideal ? most : ideal, ideal};
}

}  // namespace

Cost shared_cost(Op op, const uint32_t* offset, unsigned lanes, unsigned width, const uint64_t* source, bool past_L1) {
  switch (op) {
    case Op::LoadMatrix:
    case Op::StoreMatrix: return matrix(offset, lanes);
    case Op::AsyncCopy: return async_copy(offset, lanes, width, source, past_L1);
    case Op::Atomic: return atomic(offset, lanes, width);
    default: return in_groups(offset, lanes, width, op == Op::Load);
  }
}

// Sectors of 32 bytes that the request touches, and the fewest that as many different bytes could lie in.
Cost global_cost(const uint64_t* address, unsigned lanes, unsigned width) {
  uint64_t sector[64];
  uint32_t bytes[64];  // of each sector: which of its bytes are asked for
  unsigned count = 0, different = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    uint64_t begin = address[__builtin_ctz(rest)];
    for (const uint64_t end = begin + width; begin < end;) {  // twice round at most: width is 16 or less
      const uint64_t s = begin / 32, stop = end < 32 * (s + 1) ? end : 32 * (s + 1);
      const uint32_t asked = uint32_t(((uint64_t(1) << (stop - begin)) - 1) << begin % 32);
      unsigned k = count;  // from the last one back: neighbouring lanes mostly ask for neighbouring bytes
      while (k > 0 && sector[k - 1] != s) --k;
      if (k == 0) {
        sector[count] = s;
        bytes[count] = 0;
        k = ++count;
      }
      bytes[k - 1] |= asked;
      begin = stop;
    }
  }
  for (unsigned k = 0; k < count; ++k) different += unsigned(__builtin_popcount(bytes[k]));
  return {count, (different + 31) / 32};
}

}  // namespace emu
