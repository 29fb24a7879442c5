// Warp requests, added up by instruction and target: the rows of a trace.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ops.h"
#include "session.h"
#include "tool.h"

namespace emu {

struct RowKey {
  uint32_t pc;
  uint16_t target;            // index of the region; kShared, kAllocated, kVariable
  uint8_t op, width;
  const char* array;          // of shared memory; or the variable's name, mangled
  bool operator==(const RowKey& k) const {
    return pc == k.pc && target == k.target && op == k.op && width == k.width && array == k.array;
  }
};

struct Row {
  RowKey key;
  uint64_t requests, bytes, cost, ideal;
  unsigned worst, worst_ideal, warp;
  uint64_t block;
  int64_t address[32];        // from the start of the target; -1: the lane takes no part
};

class Rows {
 public:
  Row& of(const RowKey&);     // made if there is none yet
  std::vector<Row>::const_iterator begin() const { return rows_.begin(); }
  std::vector<Row>::const_iterator end() const { return rows_.end(); }
  void clear() { rows_.clear(), slots_.clear(); }

 private:
  std::vector<Row> rows_;
  std::vector<uint32_t> slots_;  // a hash table of indices into rows, + 1
};

void add_rows(const Rows&, const std::map<uint32_t, Site>& sites, const Run&);  // to those of the session
void add_instructions(const std::map<const char*, uint64_t>&);
void clear_rows();                                                                // of the session

}  // namespace emu
