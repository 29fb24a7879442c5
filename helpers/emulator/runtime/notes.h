// What tools have found without stopping the kernel: one sentence and a count for each kind and pair of instructions.
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "worker.h"

namespace emu {

struct Noted {
  uint64_t count = 0, block = 0;    // `block`: of the first time
  std::string text;                 // "{other}" stands for the line of the other instruction
  int32_t apart = 0;                // at most: 0 in one warp, 1 in one block, 2 in two blocks, 3 where flags order these
};

using NoteKey = std::tuple<std::string, uint32_t, uint32_t>;  // kind, pc, the other pc or 0, from the start of the kernel's library
struct Notes : std::map<NoteKey, Noted> {};

// From inside a fiber. words(): the sentence, asked for the first time only.
template <class Words>
void note(Worker* w, const char* kind, uint32_t pc, uint32_t other_pc, int apart, Words words) {
  ++w->critical;
  Noted& n = (*w->notes)[{kind, pc, other_pc}];
  if (n.count++ == 0) {
    n.block = w->block;
    n.text = words();
  }
  n.apart = std::max(n.apart, apart);
  --w->critical;
}

void add_notes(const Notes&, unsigned launch);  // to those of the session
void clear_notes();                             // of the session

}  // namespace emu
