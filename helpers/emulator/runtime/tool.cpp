// The list of tools: see tool.h.
#include "tool.h"

namespace emu {

std::vector<Tool*>& tools() {
  static std::vector<Tool*> all;
  return all;
}

}  // namespace emu
