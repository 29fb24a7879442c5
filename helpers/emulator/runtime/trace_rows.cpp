// The rows of a trace: see trace_rows.h. At the end of a launch they go where Python reads them.
#include "trace_rows.h"

#include <cstring>

#include "memory.h"

namespace emu {

Row& Rows::of(const RowKey& key) {
  uint64_t h = key.pc * 0x9e3779b97f4a7c15u ^ uint64_t(key.target) << 32 ^ uint64_t(key.op) << 8 ^ key.width ^
               reinterpret_cast<uintptr_t>(key.array);
  h *= 0x9e3779b97f4a7c15u;
  if (2 * (rows_.size() + 1) > slots_.size()) {
    slots_.assign(slots_.empty() ? 256 : 2 * slots_.size(), 0);
    std::vector<Row> rows = std::move(rows_);
    rows_.clear();
    for (const Row& r : rows) of(r.key) = r;
  }
  for (size_t i = h >> 32;; ++i) {
    uint32_t& slot = slots_[i % slots_.size()];
    if (slot == 0) {
      rows_.push_back({key, 0, 0, 0, 0, 0, 0, 0, 0, {}});
      slot = uint32_t(rows_.size());
    }
    if (rows_[slot - 1].key == key) return rows_[slot - 1];
  }
}

// ---- of the session

static std::vector<TraceRow> all_rows;
static std::map<std::string, uint64_t> all_counts;
static std::vector<TraceCount> all_instructions;

void add_rows(const Rows& rows, const std::map<uint32_t, Site>& sites, const Run& run) {
  const auto keep = [](const char* text) { return session.keep(text == nullptr ? "" : text); };
  const auto variable = [](const char* name) {
    return session.keep(name == nullptr ? "__device__" : "__device__ " + demangled(name));
  };
  for (const Row& r : rows) {
    TraceRow row = {};
    row.kernel = keep(run.launch->name);
    row.target = r.key.target == kVariable ? variable(r.key.array)
                                           : keep(r.key.target == kShared      ? r.key.array
                                                  : r.key.target == kAllocated ? "cudaMalloc"
                                                                               : session.regions[r.key.target].name);
    const auto site = sites.find(r.key.pc);
    row.file = keep(site == sites.end() ? "" : site->second.file);
    row.line = site == sites.end() ? 0 : site->second.line;
    row.shared = r.key.target == kShared;
    row.pc = r.key.pc;
    row.op = r.key.op;
    row.width = r.key.width;
    row.requests = r.requests;
    row.bytes = r.bytes;
    row.cost = r.cost;
    row.ideal = r.ideal;
    row.worst = r.worst;
    row.worst_ideal = r.worst_ideal;
    row.warp = r.warp;
    row.launch = run.number;
    row.block = r.block;
    memcpy(row.address, r.address, sizeof row.address);
    all_rows.push_back(row);
  }
}

void add_instructions(const std::map<const char*, uint64_t>& counts) {
  for (const auto& [what, count] : counts) all_counts[what] += count;
}

void clear_rows() {
  all_rows.clear();
  all_counts.clear();
}

// ---- what Python calls; the arrays are valid until the next emu_begin

extern "C" int emu_trace_rows(const TraceRow** rows) {
  *rows = all_rows.data();
  return int(all_rows.size());
}

extern "C" int emu_instructions(const TraceCount** counts) {
  all_instructions.clear();
  for (const auto& [what, count] : all_counts) all_instructions.push_back({what.c_str(), count});
  *counts = all_instructions.data();
  return int(all_instructions.size());
}

}  // namespace emu
