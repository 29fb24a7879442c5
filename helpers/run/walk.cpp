// A tool of the emulator that is loaded when it is asked for: what one block moves, from one __syncthreads() to the next. It
// follows rows of the inputs from global memory into shared memory: what a thread stores there, after loads and until the next
// one, is the last that these have loaded, in their order; what they have loaded before that stays in registers. A copy is of its
// source.
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
  struct Stored {
    size_t word, bytes;
  };
  struct Moves {  // of a thread: loads, and the stores to shared memory after them
    std::deque<Loaded> loads;
    std::vector<Stored> stores;
  };
  std::vector<Tag> shared = std::vector<Tag>(kArena / 4);  // what every 4 bytes hold
  std::map<unsigned, Moves> moves;                         // by thread
  std::map<size_t, unsigned> stored;                       // word -> the thread among whose stores it is
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
    moves.clear(), stored.clear(), now.clear();
    --w->critical;
  }

  void access(const Access& a) override {
    if (!mine() || !(a.target == kShared || is_tensor(a.target))) return;
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
    if (write || !session.regions[a.target].given) return;
    Moves& own = moves[w->current->number];
    settle(own);
    own.loads.push_back({tag, a.bytes});
  }

  void in_shared(const Access& a) {
    for (size_t at = a.offset / 4; at < (a.offset + a.bytes + 3) / 4; ++at) {
      const size_t part = std::min<size_t>(4, a.bytes);
      const auto last = stored.find(at);
      if (last != stored.end() && (!writes(a.op) || last->second != w->current->number)) settle(moves[last->second]);
      if (writes(a.op)) {
        moves[w->current->number].stores.push_back({at, part});
        stored[at] = w->current->number;
      } else if (shared[at].tensor >= 0) {
        add(shared[at], kUsed, part);
      }
    }
  }

  // The stores hold what was loaded last; where there are more of them, the others were computed.
  void settle(Moves& of) {
    if (of.stores.empty()) return;
    size_t kept = 0;
    for (const Loaded& load : of.loads) kept += load.bytes;
    for (const Stored& store : of.stores) kept -= std::min(kept, store.bytes);
    take(of.loads, kept);
    for (const Stored& store : of.stores) {
      shared[store.word] = of.loads.empty() ? Tag{} : of.loads.front().tag;
      take(of.loads, store.bytes);
      stored.erase(store.word);
    }
    of = {};
  }

  static void take(std::deque<Loaded>& loads, size_t bytes) {
    while (!loads.empty() && loads.front().bytes <= bytes) bytes -= loads.front().bytes, loads.pop_front();
    if (!loads.empty()) loads.front().bytes -= bytes;
  }

  void completed(const BarrierPoint& point) override {
    if (point.kind == BarrierPoint::Block && mine()) next();
  }
  void end_block() override {
    if (mine()) next();
  }

  void next() {
    ++w->critical;
    for (auto& [thread, of] : moves) settle(of);
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
