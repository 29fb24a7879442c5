// Barriers and warp instructions, with the reader's line as an invisible last argument.
#pragma once
#include <cstring>

#define EMU_HERE const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_SITE(name) (::emu::Site{name, emu_file, emu_line})

inline void __syncthreads(EMU_HERE) { emu::sync_block(emu::BarrierVote::None, 0, EMU_SITE("__syncthreads")); }
inline int __syncthreads_and(int p, EMU_HERE) {
  return emu::sync_block(emu::BarrierVote::And, p, EMU_SITE("__syncthreads_and"));
}
inline int __syncthreads_or(int p, EMU_HERE) {
  return emu::sync_block(emu::BarrierVote::Or, p, EMU_SITE("__syncthreads_or"));
}
inline int __syncthreads_count(int p, EMU_HERE) {
  return emu::sync_block(emu::BarrierVote::Count, p, EMU_SITE("__syncthreads_count"));
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) { emu::sync_warp(mask, EMU_SITE("__syncwarp")); }
inline unsigned __activemask(EMU_HERE) { return emu::active_mask(EMU_SITE("__activemask")); }

namespace emu {
template <class T>
inline uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emu

template <class T>
inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, EMU_HERE) {
  return emu::from_bits<T>(emu::shuffle(emu::Shuffle::Index, mask, emu::to_bits(v), source, width, EMU_SITE("__shfl_sync")));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_HERE) {
  return emu::from_bits<T>(emu::shuffle(emu::Shuffle::Up, mask, emu::to_bits(v), int(delta), width, EMU_SITE("__shfl_up_sync")));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_HERE) {
  return emu::from_bits<T>(
      emu::shuffle(emu::Shuffle::Down, mask, emu::to_bits(v), int(delta), width, EMU_SITE("__shfl_down_sync")));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, EMU_HERE) {
  return emu::from_bits<T>(emu::shuffle(emu::Shuffle::Xor, mask, emu::to_bits(v), lane_mask, width, EMU_SITE("__shfl_xor_sync")));
}

inline int __all_sync(unsigned mask, int p, EMU_HERE) { return int(emu::vote(emu::Vote::All, mask, p, EMU_SITE("__all_sync"))); }
inline int __any_sync(unsigned mask, int p, EMU_HERE) { return int(emu::vote(emu::Vote::Any, mask, p, EMU_SITE("__any_sync"))); }
inline int __uni_sync(unsigned mask, int p, EMU_HERE) {
  return int(emu::vote(emu::Vote::Uniform, mask, p, EMU_SITE("__uni_sync")));
}
inline unsigned __ballot_sync(unsigned mask, int p, EMU_HERE) {
  return emu::vote(emu::Vote::Ballot, mask, p, EMU_SITE("__ballot_sync"));
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T v, EMU_HERE) {
  return emu::match(mask, emu::to_bits(v), false, EMU_SITE("__match_any_sync"));
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T v, int* all, EMU_HERE) {
  const unsigned lanes = emu::match(mask, emu::to_bits(v), true, EMU_SITE("__match_all_sync"));
  *all = lanes != 0;
  return lanes;
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned v, EMU_HERE) {
  return emu::reduce(emu::Reduce::AddU, mask, v, EMU_SITE("__reduce_add_sync"));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, EMU_HERE) {
  return emu::reduce(emu::Reduce::MinU, mask, v, EMU_SITE("__reduce_min_sync"));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, EMU_HERE) {
  return emu::reduce(emu::Reduce::MaxU, mask, v, EMU_SITE("__reduce_max_sync"));
}
inline int __reduce_add_sync(unsigned mask, int v, EMU_HERE) {
  return int(emu::reduce(emu::Reduce::AddS, mask, unsigned(v), EMU_SITE("__reduce_add_sync")));
}
inline int __reduce_min_sync(unsigned mask, int v, EMU_HERE) {
  return int(emu::reduce(emu::Reduce::MinS, mask, unsigned(v), EMU_SITE("__reduce_min_sync")));
}
inline int __reduce_max_sync(unsigned mask, int v, EMU_HERE) {
  return int(emu::reduce(emu::Reduce::MaxS, mask, unsigned(v), EMU_SITE("__reduce_max_sync")));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v, EMU_HERE) {
  return emu::reduce(emu::Reduce::And, mask, v, EMU_SITE("__reduce_and_sync"));
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v, EMU_HERE) {
  return emu::reduce(emu::Reduce::Or, mask, v, EMU_SITE("__reduce_or_sync"));
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, EMU_HERE) {
  return emu::reduce(emu::Reduce::Xor, mask, v, EMU_SITE("__reduce_xor_sync"));
}
