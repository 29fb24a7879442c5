// Special registers: %tid.x, %laneid, %clock and their kin.
#pragma once
#include <string>

#include "ptx_decoder.h"

namespace emu::ptx {

Ref special_register(Assembly&, const std::string& name);  // read by an instruction that this adds; Refusal if there is none

}  // namespace emu::ptx
