// What tools have found, as Python reads it: see notes.h.
#include "notes.h"

#include <vector>

namespace emu {

static std::vector<FoundRow> found_rows;

void add_notes(const Notes& notes, unsigned launch) {
  for (const auto& [key, n] : notes) {
    const auto& [kind, pc, other_pc] = key;
    found_rows.push_back({session.keep(kind), session.keep(n.text), pc, other_pc, n.count, n.block, int32_t(launch), n.apart});
  }
}

void clear_notes() { found_rows.clear(); }

// Valid until the next emu_begin.
extern "C" int emu_found(const FoundRow** found) {
  *found = found_rows.data();
  return int(found_rows.size());
}

}  // namespace emu
