// Launches, and what blocks of one launch have to do with each other.
#pragma once
#include <cstdint>
#include <string>

#include "worker.h"

namespace emu {

void fail_launcher(const char* kind, const std::string& text, uintptr_t pc);  // "fa_launch " and the text: it ends here, if it runs
void wait_for_turn(Worker*);                   // until every lower block has finished

}  // namespace emu
