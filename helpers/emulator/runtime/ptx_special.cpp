// Special registers. PTX ISA, "Special Registers".
#include "ptx_special.h"

#include "../include/emulator/runtime.h"
#include "worker.h"

namespace emu::ptx {

namespace {

enum class Special : uint8_t {
  LaneId, WarpId, NWarpId, SmId, NSmId, Clock, TidX, TidY, TidZ, NTidX, NTidY, NTidZ, CtaX, CtaY, CtaZ, NCtaX, NCtaY, NCtaZ,
  MaskEq, MaskLe, MaskLt, MaskGe, MaskGt, DynamicShared
};
const struct {
  const char* name;
  Special special;
  unsigned bytes;
} kSpecials[] = {
    {"laneid", Special::LaneId, 4},        {"warpid", Special::WarpId, 4},        {"nwarpid", Special::NWarpId, 4},
    {"smid", Special::SmId, 4},            {"nsmid", Special::NSmId, 4},          {"clock", Special::Clock, 4},
    {"clock64", Special::Clock, 8},        {"globaltimer", Special::Clock, 8},    {"globaltimer_lo", Special::Clock, 4},
    {"tid.x", Special::TidX, 4},           {"tid.y", Special::TidY, 4},           {"tid.z", Special::TidZ, 4},
    {"ntid.x", Special::NTidX, 4},         {"ntid.y", Special::NTidY, 4},         {"ntid.z", Special::NTidZ, 4},
    {"ctaid.x", Special::CtaX, 4},         {"ctaid.y", Special::CtaY, 4},         {"ctaid.z", Special::CtaZ, 4},
    {"nctaid.x", Special::NCtaX, 4},       {"nctaid.y", Special::NCtaY, 4},       {"nctaid.z", Special::NCtaZ, 4},
    {"lanemask_eq", Special::MaskEq, 4},   {"lanemask_le", Special::MaskLe, 4},   {"lanemask_lt", Special::MaskLt, 4},
    {"lanemask_ge", Special::MaskGe, 4},   {"lanemask_gt", Special::MaskGt, 4},
    {"dynamic_smem_size", Special::DynamicShared, 4},
};

void read_special(Frame& f, const Instruction& i) {
  const Worker* w = worker;
  const uint64_t tid = thread_index(), ntid = block_extent(), cta = block_index(), ncta = grid_extent();
  const unsigned lane = emu::lane();
  uint64_t v = 0;
  switch (Special(i.count)) {
    case Special::LaneId: v = lane; break;
    case Special::WarpId: v = w->current->number / kWarp; break;
    case Special::NWarpId: v = 64; break;
    case Special::SmId: v = w->block % 132; break;  // of an H200's 132
    case Special::NSmId: v = 132; break;
    case Special::Clock: v = emu::clock(); break;
    case Special::TidX: v = tid & 0xffff; break;
    case Special::TidY: v = tid >> 16 & 0xffff; break;
    case Special::TidZ: v = tid >> 32; break;
    case Special::NTidX: v = ntid & 0xffff; break;
    case Special::NTidY: v = ntid >> 16 & 0xffff; break;
    case Special::NTidZ: v = ntid >> 32; break;
    case Special::CtaX: v = cta & 0xffffffff; break;
    case Special::CtaY: v = cta >> 32 & 0xffff; break;
    case Special::CtaZ: v = cta >> 48; break;
    case Special::NCtaX: v = ncta & 0xffffffff; break;
    case Special::NCtaY: v = ncta >> 32 & 0xffff; break;
    case Special::NCtaZ: v = ncta >> 48; break;
    case Special::MaskEq: v = 1u << lane; break;
    case Special::MaskLe: v = ~0u >> (31 - lane); break;
    case Special::MaskLt: v = (1u << lane) - 1; break;
    case Special::MaskGe: v = ~0u << lane; break;
    case Special::MaskGt: v = ~1u << lane; break;
    case Special::DynamicShared: v = w->dynamic_bytes; break;
  }
  f.reg[i.d[0]] = i.bytes == 4 ? v & 0xffffffff : v;
}

}  // namespace

Ref special_register(Assembly& assembly, const std::string& name) {
  for (const auto& s : kSpecials) {
    if (name != s.name) continue;
    Instruction i;
    i.run = read_special;
    i.count = unsigned(s.special);
    i.bytes = s.bytes;
    i.d.push_back(assembly.new_register({Holds::Bits, s.bytes}));
    const Ref r = i.d[0];
    assembly.emit(std::move(i));
    return r;
  }
  throw Refusal{"unsupported", ""};
}

}  // namespace emu::ptx
