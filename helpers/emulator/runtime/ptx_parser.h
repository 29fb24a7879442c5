// Parses the text of an asm statement.
#pragma once
#include <vector>

#include "../include/emulator/ptx.h"
#include "ptx_decoder.h"

namespace emu::ptx {

// Into a program, of instructions that one of the families knows. Throws Refusal; Program::name is then what it is about.
void parse(const Ptx&, const std::vector<Family>&, Program&);

}  // namespace emu::ptx
