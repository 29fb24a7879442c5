// A tool: uninitialised memory, and memory that a copy may still be writing. Every byte of shared memory, and of outputs and
// workspace every element, is known to be written or not. In a plain launch this covers shared memory, and what is wrong stops
// the kernel; while tracing uninitialised reads are noted, and the kernel goes on (copies in flight are then race.cpp's).
#include <algorithm>
#include <cstring>

#include "barrier.h"
#include "memory.h"
#include "notes.h"
#include "report.h"
#include "tool.h"

namespace emu {

namespace {

constexpr unsigned char kUnwritten = 0, kWritten = 1, kInFlight = 2;

bool any(const unsigned char* state, unsigned char value, size_t bytes) { return memchr(state, value, bytes) != nullptr; }

bool all_written(const unsigned char* state, size_t bytes) {
  static_assert(kWritten == 1);
  for (; bytes >= 8; bytes -= 8, state += 8) {
    uint64_t eight;
    memcpy(&eight, state, sizeof eight);
    if (eight != 0x0101010101010101) return false;
  }
  if (bytes >= 4) {
    uint32_t four;
    memcpy(&four, state, sizeof four);
    if (four != 0x01010101) return false;
    bytes -= 4, state += 4;
  }
  for (; bytes > 0; --bytes, ++state)
    if (*state != kWritten) return false;
  return true;
}

// Clang writes a struct's members one by one, and may read its padding so, too: the end of 16 bytes, of which the rest was written.
bool tail([[maybe_unused]] const unsigned char* state, [[maybe_unused]] size_t bytes) {
#ifdef __clang__
  const unsigned char* const end = state + bytes;
  if (bytes > 16 || reinterpret_cast<uintptr_t>(end) % 16 != 0) return false;
  const size_t written = std::find(end - 16, end, kUnwritten) - (end - 16);
  return written >= 8 && std::all_of(end - 16 + written, end, [](unsigned char each) { return each == kUnwritten; });
#else
  return false;
#endif
}

// A struct that was written field by field is copied with its padding. In a load wider than a float, unwritten bytes are taken to be
// that where they are fewer than a float's, or begin within a word.
bool padding(const unsigned char* state, size_t bytes) {
  if (tail(state, bytes)) return true;
  for (size_t at = 0, run = 0; at < bytes; ++at) {
    run = state[at] == kUnwritten ? run + 1 : 0;
    if (run == 4 && at % 4 == 3) return false;
  }
  return bytes > 4;
}

// "which nobody has written", "4 of which nobody has written (if a struct has padding there, give it a member)"
std::string unwritten(const unsigned char* state, size_t bytes) {
  const auto count = size_t(std::count(state, state + bytes, kUnwritten));
  return count < bytes ? std::to_string(count) + " of which nobody has written (if a struct has padding there, give it a member)"
                       : "which nobody has written";
}

struct Unwritten final : Watcher {
  using Elements = std::vector<std::vector<unsigned char>>;
  Elements& elements;                          // of every tensor; empty if it is not followed
  std::unique_ptr<unsigned char[]> state{new unsigned char[kArena]()};  // of every byte of shared memory

  Unwritten(Worker* worker, Elements& of_tensors) : Watcher(worker, kMemory), elements(of_tensors) {}

  void array_begins(size_t offset, size_t bytes) override { memset(&state[offset], kUnwritten, bytes); }
  void mbarrier_init(uint32_t at, uintptr_t) override { memset(&state[at], kWritten, 8); }

  void access(const Access& a) override {
    if (a.target == kShared)
      shared_access(a);
    else if (is_tensor(a.target) && !elements[a.target].empty())
      element_access(a);
  }

  void shared_access(const Access& a) {
    unsigned char* const at = &state[a.offset];
    if (all_written(at, a.bytes)) return;  // as most are, and nothing changes
    const bool write = writes(a.op);
    if (!session.tracing && any(at, kInFlight, a.bytes)) {
      const StaticArray array = shared_array(w, a.offset);
      fail("in flight", 719, a.pc, a.site, "%s %zu bytes at %s + %zu bytes, which a copy may still be writing", verb(write), a.bytes,
           array.name, a.offset - array.offset);
    }
    if (!write && any(at, kUnwritten, a.bytes) && !(a.op == Op::Load && padding(at, a.bytes))) {
      if (session.tracing) return note_shared(a.offset, a.pc);
      const StaticArray array = shared_array(w, a.offset);
      fail("uninitialised shared memory", 719, a.pc, a.site, "reads %zu bytes at %s + %zu bytes, %s", a.bytes, array.name,
           a.offset - array.offset, unwritten(at, a.bytes).c_str());
    }
    if (a.op == Op::Store || a.op == Op::StoreMatrix) memset(at, kWritten, a.bytes);
  }

  // Traced alone: the elements of a plain launch are not followed.
  void element_access(const Access& a) {
    const uint64_t item = session.regions[a.target].item, first = a.offset / item, count = (a.offset + a.bytes - 1) / item - first + 1;
    unsigned char* const at = elements[a.target].data() + first;
    if (!writes(a.op) && any(at, kUnwritten, count))
      note(w, "uninitialised memory", w->offset(a.pc), 0, 0, [&] {
        return describe(w, w->current) + " reads " + std::to_string(a.bytes) + " bytes at " + session.regions[a.target].name + " + " +
               std::to_string(a.offset) + " bytes, which no kernel has written";
      });
    if (writes(a.op) || a.op == Op::Atomic) memset(at, kWritten, count);
  }

  void copy_issued(const IssuedCopy& c) override {
    if (!session.tracing && any(&state[c.offset], kInFlight, c.bytes))
      fail("in flight", 719, c.pc, c.site, "lets %s write %zu bytes at %s, where a copy is under way", c.site.what, c.bytes,
           shared_place(w, w->current->number / kWarp, c.offset).c_str());
    memset(&state[c.offset], kInFlight, c.bytes);
  }
  void copy_landed(size_t offset, size_t bytes, const Actor&) override { memset(&state[offset], kWritten, bytes); }

  void async_read(size_t offset, size_t bytes, const Actor&, uintptr_t pc, const Site& site) override {
    const unsigned char* const at = &state[offset];
    const StaticArray array = shared_array(w, offset);
    if (!session.tracing && any(at, kInFlight, bytes))
      fail("in flight", 719, pc, site, "lets %s read %zu bytes at %s + %zu bytes, which a copy may still be writing", site.what, bytes,
           array.name, offset - array.offset);
    if (!any(at, kUnwritten, bytes)) return;
    if (session.tracing) return note_shared(offset, pc);
    fail("uninitialised shared memory", 719, pc, site, "lets %s read %zu bytes at %s + %zu bytes, %s", site.what, bytes, array.name,
         offset - array.offset, unwritten(at, bytes).c_str());
  }

  void note_shared(size_t offset, uintptr_t pc) {
    note(w, "uninitialised shared memory", w->offset(pc), 0, 0, [&] {
      return describe(w, w->current) + " reads " + shared_or_mbarrier(w, w->current->number / kWarp, offset) + ", which nobody has written";
    });
  }
};

struct UnwrittenTool final : Tool {
  Unwritten::Elements elements;

  bool always() const override { return true; }
  std::unique_ptr<Watcher> watch(Worker* w) override { return std::make_unique<Unwritten>(w, elements); }

  void begin_session() override {
    elements.assign(session.regions.size(), {});
    for (size_t i = 0; session.tracing && i < elements.size(); ++i) {
      const Region& r = session.regions[i];
      if (!r.given) elements[i].assign((r.bytes + r.item - 1) / r.item, kUnwritten);
    }
  }

  void host_wrote(const void* p, size_t bytes) override {
    for (size_t i = 0; i < elements.size(); ++i) {
      const Region& r = session.regions[i];
      const uint64_t at = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(r.base);
      if (elements[i].empty() || at >= r.bytes || at + bytes > r.bytes) continue;
      memset(elements[i].data() + at / r.item, kWritten, (at + bytes - 1) / r.item - at / r.item + 1);
    }
  }
};

UnwrittenTool unwritten_tool;
const Listed unwritten_listed(&unwritten_tool);

}  // namespace

}  // namespace emu
