// Matrix instructions of a warp. PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions"; which lane holds what is in the tables that
// are made from helpers/emulator/fragments.py. The last lane to come computes for all 32.
//
// mma.sync: products are exact in fp32, and a sum starts with C and takes the products in the order of k, each sum rounded
// to fp32 (an fp16 D is rounded once more, at the end). Tensor cores add several products at a time, in an order
// and with a precision that NVIDIA doesn't document: their last bits differ.
#include "ptx_matrix.h"

#include <cstring>

#include "../include/emulator/rounding.h"
#include "memory.h"
#include "ptx_families.h"

namespace emu::ptx {

namespace {

// ---- ldmatrix, stmatrix, movmatrix. Instruction::count: matrices; offset: transposed

void combine_ldmatrix(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  const Instruction& i = *lane_of(operand, 0).instruction;
  const auto& place = i.offset ? kLdmatrixTrans : kLdmatrix;
  for (unsigned m = 0; m < i.count; ++m) {
    uint16_t matrix[64];
    for (unsigned l = 0; l < kWarp; ++l)
      if (kLdmatrixRow[l][0] / 8u == m) memcpy(matrix + kLdmatrixRow[l][0] % 8 * 8, lane_of(operand, l).row, 16);
    for (unsigned l = 0; l < kWarp; ++l)
      put(*lane_of(operand, l).frame, i.d[m], uint32_t(matrix[place[l][0]] | uint32_t(matrix[place[l][1]]) << 16));
  }
}

void combine_stmatrix(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  const Instruction& i = *lane_of(operand, 0).instruction;
  const auto& place = i.offset ? kLdmatrixTrans : kLdmatrix;
  for (unsigned m = 0; m < i.count; ++m) {
    uint16_t matrix[64];
    for (unsigned l = 0; l < kWarp; ++l) {
      const uint32_t v = get<uint32_t>(*lane_of(operand, l).frame, i.s[1 + m]);
      matrix[place[l][0]] = uint16_t(v);
      matrix[place[l][1]] = uint16_t(v >> 16);
    }
    for (unsigned l = 0; l < kWarp; ++l)
      if (kLdmatrixRow[l][0] / 8u == m)
        memcpy(const_cast<char*>(lane_of(operand, l).row), matrix + kLdmatrixRow[l][0] % 8 * 8, 16);
  }
}

void combine_movmatrix(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  const Instruction& i = *lane_of(operand, 0).instruction;
  uint16_t matrix[64];
  for (unsigned l = 0; l < kWarp; ++l) {
    const uint32_t v = get<uint32_t>(*lane_of(operand, l).frame, i.s[0]);
    matrix[kLdmatrix[l][0]] = uint16_t(v);
    matrix[kLdmatrix[l][1]] = uint16_t(v >> 16);
  }
  for (unsigned l = 0; l < kWarp; ++l)
    put(*lane_of(operand, l).frame, i.d[0],
        uint32_t(matrix[kLdmatrixTrans[l][0]] | uint32_t(matrix[kLdmatrixTrans[l][1]]) << 16));
}

// The rows' addresses are looked at before the warp meets, each lane its own.
template <bool storing>
void matrix_access(Frame& f, const Instruction& i) {
  MatrixLane me{&f, &i, nullptr};
  const Op op = storing ? Op::StoreMatrix : Op::LoadMatrix;
  if (lane() < 8 * i.count) {
    const uint32_t offset = get<uint32_t>(f, i.s[0]);
    if (offset >= kArena)
      fail("out of bounds", 700, f.pc, i.site, "gives %s the row address 0x%x, which lies outside of shared memory", i.site.what,
           offset);
    me.row = worker->arena + offset;
    check_access(op, me.row, 16, f.pc, i.site);
  } else {
    check_access(Op::NoAddress, nullptr, 0, f.pc, i.site);
  }
  meet(me, storing ? combine_stmatrix : combine_ldmatrix);
}

void move_matrix(Frame& f, const Instruction& i) {
  MatrixLane me{&f, &i, nullptr};
  meet(me, combine_movmatrix);
}

bool decode_matrix_access(Decoder& d, bool storing) {
  if (!d.take("sync") || !d.take("aligned") || !d.take("m8n8")) return false;
  const unsigned matrices = d.take("x1") ? 1 : d.take("x2") ? 2 : d.take("x4") ? 4 : 0;
  d.out.offset = d.take("trans");
  if (matrices == 0 || !d.take("shared") || !d.take("b16")) return false;
  d.expect(2);
  d.address(storing ? 0 : 1, true);
  d.elements(storing ? 1 : 0, Type::b32, !storing);
  if (d.out.count != matrices)
    d.refuse(d.out.opcode + " takes a vector of " + std::to_string(matrices));
  d.out.run = storing ? matrix_access<true> : matrix_access<false>;
  return true;
}

// ---- mma

enum class Factor : uint8_t { Half, Brain, Tf32 };

// Every lane's registers of an operand, spread over the matrix: `elements` of them, two to a register if halves.
template <Factor factor, size_t elements>
void spread(float* matrix, const unsigned char (&place)[32][elements], void* const operand[32], size_t first) {
  for (unsigned l = 0; l < kWarp; ++l) {
    const MatrixLane& lane = lane_of(operand, l);
    const Ref* s = lane.instruction->s.data() + first;
    for (size_t e = 0; e < elements; ++e) {
      if (factor == Factor::Tf32) {  // tensor cores look at 19 bits of the 32
        matrix[place[l][e]] = as<float>(uint64_t(get<uint32_t>(*lane.frame, s[e]) & 0xffffe000));
        continue;
      }
      const uint32_t both = get<uint32_t>(*lane.frame, s[e / 2]), bits = e % 2 ? both >> 16 : both & 0xffff;
      matrix[place[l][e]] = factor == Factor::Half ? half_to_float(bits) : brain_to_float(bits);
    }
  }
}

// D (16, 8) = A (16, k) B (k, 8) + C. Sources: A's registers, B's, C's. halves: C and D are fp16, two to a register.
template <Factor factor, int k, bool halves, size_t na, size_t nb>
void multiply(void* const operand[32], const unsigned char (&place_a)[32][na], const unsigned char (&place_b)[32][nb]) {
  if (!complete_warp(operand)) return;
  constexpr size_t packed = factor == Factor::Tf32 ? 1 : 2;
  float a[16 * k], b[k * 8], c[16 * 8];
  spread<factor>(a, place_a, operand, 0);
  spread<factor>(b, place_b, operand, na / packed);
  const size_t first_c = na / packed + nb / packed;
  for (unsigned l = 0; l < kWarp; ++l) {
    const MatrixLane& lane = lane_of(operand, l);
    const Ref* s = lane.instruction->s.data() + first_c;
    for (unsigned e = 0; e < 4; ++e) {
      if (halves) c[kC[l][e]] = half_to_float(get<uint32_t>(*lane.frame, s[e / 2]) >> 16 * (e % 2) & 0xffff);
      else c[kC[l][e]] = get<float>(*lane.frame, s[e]);
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int step = 0; step < k; ++step) {
      const float x = a[row * k + step];
      for (int column = 0; column < 8; ++column) c[row * 8 + column] += x * b[step * 8 + column];
    }
  for (unsigned l = 0; l < kWarp; ++l) {
    const MatrixLane& lane = lane_of(operand, l);
    const Ref* d = lane.instruction->d.data();
    if (halves)
      for (unsigned r = 0; r < 2; ++r)
        put(*lane.frame, d[r], uint32_t(half_bits(c[kC[l][2 * r]]) | uint32_t(half_bits(c[kC[l][2 * r + 1]])) << 16));
    else
      for (unsigned e = 0; e < 4; ++e) put(*lane.frame, d[e], c[kC[l][e]]);
  }
}

template <Factor factor, int k, bool halves>
void combine_mma(void* const operand[32]) {
  if constexpr (factor == Factor::Tf32) multiply<factor, 8, halves>(operand, kA8tf32, kB8tf32);
  else if constexpr (k == 16) multiply<factor, 16, halves>(operand, kA16, kB16);
  else multiply<factor, 8, halves>(operand, kA8, kB8);
}

template <Factor factor, int k, bool halves>
void mma(Frame& f, const Instruction& i) {
  MatrixLane me{&f, &i, nullptr};
  meet(me, combine_mma<factor, k, halves>);
}

bool decode_mma(Decoder& d) {
  if (!d.take("sync") || !d.take("aligned")) return false;
  const int k = d.take("m16n8k16") ? 16 : d.take("m16n8k8") ? 8 : 0;
  if (k == 0 || !d.take("row") || !d.take("col")) return false;
  const Type to = d.take_type(), a = d.take_type(), b = d.take_type(), c = d.take_type();
  const bool halves = to == Type::f16;
  if (a != b || to != c) return false;
  if (a == Type::f16 && (halves || to == Type::f32))
    d.out.run = k == 16 ? halves ? mma<Factor::Half, 16, true> : mma<Factor::Half, 16, false>
                        : halves ? mma<Factor::Half, 8, true> : mma<Factor::Half, 8, false>;
  else if (a == Type::bf16 && to == Type::f32)
    d.out.run = k == 16 ? mma<Factor::Brain, 16, false> : mma<Factor::Brain, 8, false>;
  else if (a == Type::tf32 && to == Type::f32 && k == 8)
    d.out.run = mma<Factor::Tf32, 8, false>;
  else
    return false;
  d.expect(4);
  const unsigned of_a = a == Type::tf32 ? 4 : unsigned(k) / 4, of_b = of_a / 2, of_c = halves ? 2 : 4;
  const auto part = [&](size_t i, Type t, bool destination, unsigned registers) {
    d.elements(i, t, destination);
    if (d.out.count != registers)
      d.refuse(d.operands[i].text + " has " + std::to_string(d.out.count) + " registers where " + d.out.opcode + " takes " + std::to_string(registers));
  };
  part(0, halves ? Type::b32 : Type::f32, true, of_c);
  part(1, Type::b32, false, of_a);
  part(2, Type::b32, false, of_b);
  part(3, halves ? Type::b32 : Type::f32, false, of_c);
  return true;
}

}  // namespace

bool decode_matrix(Decoder& d) {
  if (d.base == "ldmatrix") return decode_matrix_access(d, false);
  if (d.base == "stmatrix") return decode_matrix_access(d, true);
  if (d.base == "mma") return decode_mma(d);
  if (d.base == "movmatrix") {
    if (!d.take("sync") || !d.take("aligned") || !d.take("m8n8") || !d.take("trans") || !d.take("b16")) return false;
    d.expect(2);
    d.destination(0, Type::b32);
    d.source(1, Type::b32);
    d.out.run = move_matrix;
    return true;
  }
  return false;
}

}  // namespace emu::ptx
