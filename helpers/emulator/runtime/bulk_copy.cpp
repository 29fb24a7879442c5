// Bulk copies of TMA. PTX ISA, "Data Movement and Conversion Instructions", "Bulk copy" and "Tensor copy".
//
// A copy to shared memory is made when the mbarrier that it reports to has to know of it (barrier.cpp). A copy from shared
// memory reads when its thread waits for that, and writes when its thread waits for that; if it never does, when the
// kernel ends.
#include "bulk_copy.h"

#include <map>
#include <vector>

#include "barrier.h"
#include "grid.h"
#include "memory.h"
#include "report.h"
#include "tool.h"

namespace emu {

// A bulk copy from shared memory.
struct BulkStore {
  Box box;
  BulkOp op;
  bool read;
  std::vector<char> data;           // what has been read
  uintptr_t pc;
  Site site;
};

struct BulkGroups {                 // of one thread
  std::vector<BulkStore> store;     // oldest first
  std::vector<size_t> group_end;    // of every committed group not waited for: the stores up to here
  uint64_t waited = 0;              // so many groups have been waited for
};

struct BulkState {
  std::map<unsigned, BulkGroups> of_thread;
};
BulkState* new_bulk_state() { return new BulkState; }
void delete_bulk_state(BulkState* s) { delete s; }
void begin_bulk(BulkState* s) { s->of_thread.clear(); }

// Both ends of a copy that is being issued, `writes` to global memory or from it, and what it is for the X-ray.
static void check_ends(const Box& b, Op op, bool writes, uintptr_t pc, Site site) {
  Worker* w = worker;
  const unsigned aligned = op == Op::BulkTensor || op == Op::ReduceTensor ? 128 : 16;
  if (b.shared % aligned != 0)
    fail("misaligned", 716, pc, site, "gives %s the address %s, which is no multiple of %u bytes", site.what,
         shared_place(w, w->current->number / kWarp, b.shared).c_str(), aligned);
  check_bounds(b.shared, b.bytes, !writes, pc, site);
  each_row(b, [&](uint32_t, char* row, unsigned first, unsigned end) {
    if (end > first)
      bulk_access(op, writes, row + first * b.map.item, (end - first) * b.map.item, pc, site);
  });
  for (Watcher* t : w->on_execution) t->bulk_copy(op, b, pc, site);
}

void bulk_load(const Box& b, uint32_t mbarrier, Op op, uintptr_t pc, Site site) {
  Worker* w = worker;
  const unsigned me = w->current->number;
  check_ends(b, op, false, pc, site);
  mbarrier_land(mbarrier, {b, 0, false, me, pc, site}, pc, site);
  const IssuedCopy copy{b.shared, b.bytes, {ActorKind::Mbarrier, mbarrier, me}, false, pc, site};
  for (Watcher* t : w->on_memory) t->copy_issued(copy);
}

// ---- bulk groups

static BulkGroups& my_groups(Worker* w) {
  ++w->critical;
  BulkGroups& groups = w->bulk->of_thread[w->current->number];
  --w->critical;
  return groups;
}
static Actor my_writer(const Worker* w) { return {ActorKind::BulkWrite, w->current->number, w->current->number}; }
static Actor my_agent(const Worker* w) { return {ActorKind::BulkGroup, w->current->number, w->current->number}; }

void bulk_store(const Box& b, BulkOp what, Op op, uintptr_t pc, Site site) {
  Worker* w = worker;
  check_ends(b, op, true, pc, site);
  begin_async_read(b.shared, b.bytes, my_agent(w), pc, site);
  BulkGroups& g = my_groups(w);
  ++w->critical;
  g.store.push_back({b, what, false, {}, pc, site});
  --w->critical;
}

void bulk_commit() {
  Worker* w = worker;
  BulkGroups& g = my_groups(w);
  ++w->critical;
  g.group_end.push_back(g.store.size());
  --w->critical;
  for (Watcher* t : w->on_execution) t->async_committed(my_agent(w));
  if (session.follows_flags)
    for (Watcher* t : w->on_execution) t->async_committed(my_writer(w));
}

static void read_store(Worker* w, BulkStore& s) {
  if (s.read) return;
  s.data = read_box(w, s.box);
  s.read = true;
}

void bulk_wait(uint32_t left, bool reads_only) {
  Worker* w = worker;
  BulkGroups& g = my_groups(w);
  if (g.group_end.size() <= left) return;
  const size_t groups = g.group_end.size() - left, stores = g.group_end[groups - 1];
  ++w->critical;
  bool sums = false;
  for (size_t i = 0; i < stores; ++i) {
    read_store(w, g.store[i]);
    sums = sums || g.store[i].op != BulkOp::Copy;
  }
  --w->critical;
  for (Watcher* t : w->on_execution) t->async_waited(my_agent(w), g.waited + groups - 1);
  if (reads_only) return;
  if (sums && !w->my_turn) wait_for_turn(w);  // sums are made in the order of the blocks, as those of atomics
  for (size_t i = 0; i < stores; ++i) write_box(g.store[i].box, g.store[i].op, g.store[i].data);
  if (session.follows_flags)
    for (Watcher* t : w->on_execution) t->async_waited(my_writer(w), g.waited + groups - 1);
  ++w->critical;
  g.store.erase(g.store.begin(), g.store.begin() + long(stores));
  g.group_end.erase(g.group_end.begin(), g.group_end.begin() + long(groups));
  for (size_t& end : g.group_end) end -= stores;
  g.waited += groups;
  --w->critical;
}

void end_bulk(Worker* w) {
  for (const auto& [at, b] : w->barriers->mbarrier)
    for (const Landing& l : b.landing)
      if (!l.arrival)
        return record(w, "bulk copy", 719, l.pc, l.site, block_name(w) + " ends while the " + l.site.what + " of " +
                      thread_name(w, &w->thread[l.thread]) + " still writes its shared memory: nobody has waited for the mbarrier " +
                      mbarrier_name(w, at));
  for (auto& [thread, g] : w->bulk->of_thread)
    for (BulkStore& s : g.store) {
      if (!s.read)
        return record(w, "bulk copy", 719, s.pc, s.site, block_name(w) + " ends while the " + s.site.what + " of " +
                      thread_name(w, &w->thread[thread]) + " still reads its shared memory: no cp.async.bulk.wait_group has covered it");
      std::lock_guard<std::mutex> hold(w->run->lock);
      w->run->late[w->block].push_back([box = s.box, op = s.op, data = std::move(s.data)] { write_box(box, op, data); });
    }
}

}  // namespace emu
