// A tool of the emulator that is loaded when it is asked for: what one block moves, from one __syncthreads() to the next. It
// follows rows of the inputs from global memory into shared memory: a store there is of what the thread has loaded last and not
// stored yet, a copy is of its source.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "device.h"
#include "session.h"
#include "tool.h"
#include "worker.h"

namespace emu {

namespace {

enum Kind : int32_t { kRead = 0, kWritten = 1, kResident = 2, kUsed = 3 };  // from and to global memory; in shared memory

struct Row {
  int32_t step, tensor, kind, spare;
  int64_t first, last;   // rows of the tensor
  uint64_t bytes;
};

struct Config {
  uint64_t block = 0;
  std::vector<uint64_t> row_bytes;  // of each tensor
  std::vector<Row> rows;
  int32_t step = 0;
} config;

struct Tag {
  int32_t tensor = -1;
  int32_t row = 0;
};

struct Walk final : Watcher {
  struct Loaded {
    Tag tag;
    size_t bytes;
  };
  std::vector<Tag> shared = std::vector<Tag>(kArena / 4);  // what every 4 bytes hold
  std::map<unsigned, std::deque<Loaded>> loaded;           // by thread, not stored yet
  std::map<std::pair<int32_t, int32_t>, Row> now;          // of the step: by tensor and kind

  explicit Walk(Worker* worker) : Watcher(worker, kMemory | kExecution) {}

  bool mine() const { return w->run != nullptr && w->run->number == 0 && w->block == config.block; }

  void add(Tag tag, Kind kind, size_t bytes) {
    const auto [at, fresh] = now.try_emplace({tag.tensor, kind}, Row{config.step, tag.tensor, kind, 0, tag.row, tag.row, 0});
    Row& row = at->second;
    row.first = std::min<int64_t>(row.first, tag.row), row.last = std::max<int64_t>(row.last, tag.row);
    row.bytes += bytes;
  }

  void begin_block() override {
    if (!mine()) return;
    ++w->critical;
    std::fill(shared.begin(), shared.end(), Tag{});
    loaded.clear(), now.clear();
    --w->critical;
  }

  void access(const Access& a) override {
    if (!mine() || a.target == kAllocated) return;
    ++w->critical;
    if (a.target == kShared)
      in_shared(a);
    else
      in_global(a);
    --w->critical;
  }

  void in_global(const Access& a) {
    const Tag tag{a.target, int32_t(a.offset / config.row_bytes[a.target])};
    const bool write = writes(a.op) || a.op == Op::Atomic;
    add(tag, write ? kWritten : kRead, a.bytes);
    if (!write && session.regions[a.target].given) loaded[w->current->number].push_back({tag, a.bytes});
  }

  void in_shared(const Access& a) {
    auto& waiting = loaded[w->current->number];
    for (size_t at = a.offset / 4; at < (a.offset + a.bytes + 3) / 4; ++at) {
      const size_t part = std::min<size_t>(4, a.bytes);
      if (!writes(a.op)) {
        if (shared[at].tensor >= 0) add(shared[at], kUsed, part);
        continue;
      }
      shared[at] = waiting.empty() ? Tag{} : waiting.front().tag;  // else it was computed
      if (waiting.empty()) continue;
      if (waiting.front().bytes <= part) waiting.pop_front();
      else waiting.front().bytes -= part;
    }
  }

  void completed(const BarrierPoint& point) override {
    if (point.kind == BarrierPoint::Block && mine()) next();
  }
  void end_block() override {
    if (mine()) next();
  }

  void next() {
    ++w->critical;
    for (const Tag& tag : shared)
      if (tag.tensor >= 0) add(tag, kResident, 4);
    for (const auto& [key, row] : now) config.rows.push_back(row);
    now.clear();
    ++config.step;
    --w->critical;
  }
};

struct WalkTool final : Tool {
  std::unique_ptr<Watcher> watch(Worker* w) override { return std::make_unique<Walk>(w); }
} walk_tool;

}  // namespace

extern "C" {

// From now on a traced launch is followed. row_bytes: of each tensor, in the order in which they are handed to emu_begin.
void walk_begin(uint64_t block, int tensors, const uint64_t* row_bytes) {
  config = {block, {row_bytes, row_bytes + tensors}, {}, 0};
  tools().push_back(&walk_tool);
}

int walk_end(const Row** rows) {
  std::vector<Tool*>& all = tools();
  all.erase(std::remove(all.begin(), all.end(), &walk_tool), all.end());
  *rows = config.rows.data();
  return int(config.rows.size());
}

}  // extern "C"

}  // namespace emu
