// Runs one block: its threads as fibers, in a fixed order; barriers and warp instructions as rendezvous.
#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "async_copy.h"
#include "barrier.h"
#include "bulk_copy.h"
#include "memory.h"
#include "notes.h"
#include "report.h"
#include "tool.h"
#include "warpgroup.h"

namespace emu {

thread_local Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;

Worker::Worker() : notes(new Notes) {
  void* p = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  arena = static_cast<char*>(p);  // page aligned, as swizzles that use absolute addresses need
  signal_stack = new char[kSignalStack];
  copies = new_copy_state();
  barriers = new_barrier_state();
  bulk = new_bulk_state();
  warpgroups = new_warpgroups();
}

Worker::~Worker() {
  munmap(arena, kArena);
  delete[] signal_stack;
  delete_copy_state(copies);
  delete_barrier_state(barriers);
  delete_bulk_state(bulk);
  delete_warpgroups(warpgroups);
}

uintptr_t stack_top(const Thread& t) {
  // Staggered: at one address modulo the page, all stacks would fight for a few lines of the L1 cache.
  return t.stack + kStackBytes - t.number % 16 * 256;
}

// All members have come: computes for them, and lets those go on that wait.
static void complete(Worker* w, unsigned warp, Gathering& g, unsigned waiting) {
  g.combine(g.operand);
  for (unsigned rest = waiting; rest != 0; rest &= rest - 1) w->ready(&w->thread[warp * kWarp + __builtin_ctz(rest)]);
  const uint64_t number = g.number;
  const unsigned members = g.arrived;
  const char* what = g.site.what;
  Warp& owner = w->warp[warp];
  if (&g != &owner.gathering[--owner.gatherings]) g = owner.gathering[owner.gatherings];
  for (Watcher* t : w->on_execution) t->met(warp, number, members, what);
}

void stop(Worker* w) {
  const unsigned warp = w->current->number / kWarp;
  --w->warp[warp].running;
  for (Watcher* t : w->on_execution) t->stopped(warp);
}

// The body of every fiber.
static void thread_main() {
  Worker* w = worker;
  Thread* t = w->current;
  w->run->launch->call(w->run->launch->arguments);
  warpgroup_returns(w);
  t->state = State::Done;
  ++w->done;
  Warp& warp = w->warp[t->number / kWarp];
  warp.alive &= ~(1u << t->number % kWarp);
  for (Watcher* watcher : w->on_execution) watcher->returned();
  // Lanes that have returned are no longer waited for (CUDA C++ Programming Guide, "Warp Shuffle Functions").
  for (unsigned i = 0; i < warp.gatherings;) {
    Gathering& g = warp.gathering[i];
    if (g.arrived != (g.mask & warp.alive)) {
      ++i;
      continue;
    }
    complete(w, t->number / kWarp, g, g.arrived);
  }
  returns_from_named_barriers(w);
  stop(w);
  void* never;
  emu_switch(&never, w->scheduler);
}

void leave_block() {
  worker->abandoned = true;
  void* never;
  emu_switch(&never, worker->scheduler);
  __builtin_unreachable();
}

void wait() {
  Worker* w = worker;
  emu_switch(&w->current->resume, w->scheduler);
}

void yield() {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr) return;
  ++w->idle;
  for (Watcher* t : w->on_execution) t->yields();
  w->ready(w->current);
  wait();
}

// Shared memory starts as NaNs of every float format, so that a kernel can't be right by the luck of zeros.
static void poison(Worker* w, size_t offset, size_t bytes) {
  memset(w->arena + offset, 0xff, bytes);
  for (Watcher* t : w->on_memory) t->array_begins(offset, bytes);
}

// Local variables start as NaNs too, as far down the stack as most kernels reach.
__attribute__((noinline)) void poison_stack() {
  char locals[8 << 10];
  memset(locals, 0xff, sizeof locals);
  asm volatile("" ::"r"(locals) : "memory");  // the compiler must not leave the stores out
}

static void prepare(Worker* w, uint64_t block) {
  const Launch& launch = *w->run->launch;
  w->block = block;
  const uint64_t x = block % launch.grid[0], rest = block / launch.grid[0];
  w->block_packed = x | rest % launch.grid[1] << 32 | rest / launch.grid[1] << 48;
  w->threads = w->run->threads;
  w->done = w->head = w->queued = w->arrays = 0;
  w->dynamic_name = nullptr;
  w->random = session.schedule + block;
  w->static_bytes = w->static_top = 0;
  w->my_turn = w->abandoned = false;
  w->order = 0;
  w->hold = false;
  w->variables.clear();
  w->idle = 0;
  w->barrier = {};
  begin_copies(w->copies, w->threads);
  begin_barriers(w->barriers);
  begin_bulk(w->bulk);
  begin_warpgroups(w);
  w->dynamic_bytes = launch.dynamic_shared;
  w->dynamic_base = std::min(kStaticArena, (kDescribed - std::min(kDescribed, w->dynamic_bytes)) & ~size_t(1023));
  poison(w, w->dynamic_base, w->dynamic_bytes);
  for (unsigned i = 0; i < w->threads; ++i) {
    Thread& t = w->thread[i];
    const unsigned tx = i % launch.block[0], ty = i / launch.block[0] % launch.block[1];
    t.stack = reinterpret_cast<uintptr_t>(w->stacks.bottom(i));
    t.index = tx | uint64_t(ty) << 16 | uint64_t(i / launch.block[0] / launch.block[1]) << 32;
    t.number = i;
    t.spins = 0;
    t.flag = nullptr;
    t.undisturbed = false;
    t.at = At::Instruction;
    w->ready(&t);
    t.state = State::Fresh;
  }
  for (unsigned i = 0; i < w->threads; i += kWarp) {
    Warp& warp = w->warp[i / kWarp];
    warp.gatherings = 0;
    warp.alive = w->lanes(i / kWarp);
    warp.running = unsigned(__builtin_popcount(warp.alive));
    w->named[i / kWarp].clear();
  }
  for (Watcher* t : w->on_execution) t->begin_block();
}

// Any of the threads that can run goes next: results and traces must be the same.
static void shuffle_queue(Worker* w) {
  w->random = w->random * 6364136223846793005u + 1442695040888963407u;
  std::swap(w->queue[w->head], w->queue[(w->head + (w->random >> 33) % w->queued) % kMaxThreads]);
}

static bool answer_active_masks(Worker*);

static void end_block(Worker* w) {
  for (Watcher* t : w->on_execution) t->end_block();
}

void run_block(Worker* w, uint64_t block) {
  prepare(w, block);
  if (sigsetjmp(w->escape, 1) != 0) {  // a fault or a stop threw us out of a fiber
    w->current = nullptr;
    w->critical = 0;
    record_fault(w);
    end_block(w);
    return;
  }
  while (!w->abandoned && (w->queued > 0 || answer_active_masks(w) || barrier_progress(w, true))) {
    if (w->idle > 4 * w->threads) {  // all who can run may be waiting for something that a copy brings, or a lane that asks
      w->idle = 0;
      answer_active_masks(w);
      barrier_progress(w, false);
    }
    if (session.stop.load(std::memory_order_relaxed)) {
      record_stop(w);
      break;
    }
    if (session.schedule != 0) shuffle_queue(w);
    Thread* t = &w->thread[w->queue[w->head]];
    w->head = (w->head + 1) % kMaxThreads;
    --w->queued;
    if (t->state == State::Fresh) {
      t->resume = fiber_at(reinterpret_cast<char*>(stack_top(*t)), thread_main);
      t->state = State::Ready;
    }
    w->current = t;
    emu_switch(&w->scheduler, t->resume);
    w->current = nullptr;
  }
  if (!w->abandoned && w->done < w->threads) record_deadlock(w);
  if (!w->abandoned) end_bulk(w);
  end_block(w);
}

// A tool has asked for it; it makes the thread ready again.
__attribute__((noinline)) static void hold(Worker* w) {
  w->hold = false;
  if (w->current->undisturbed) return;
  w->current->state = State::Held;
  stop(w);
  wait();
}

// Where a basic block begins: gcc and clang put the calls in for -fsanitize-coverage=trace-pc.
extern "C" void __sanitizer_cov_trace_pc() {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr) return;
  for (Watcher* t : w->on_basic_blocks)
    t->basic_block(reinterpret_cast<uintptr_t>(__builtin_return_address(0)), EMU_FRAME);
  if (w->hold) hold(w);
}

// ---- who am I

uint64_t thread_index() noexcept { return worker->current->index; }
uint64_t block_index() noexcept { return worker->block_packed; }
uint64_t block_extent() noexcept { return worker->extent_packed; }
uint64_t grid_extent() noexcept { return worker->grid_packed; }
unsigned lane() noexcept { return worker->current->number % kWarp; }

void launch_bounds(unsigned threads, unsigned, unsigned) {
  Worker* w = worker;
  if (w->threads <= threads) return;
  ++w->critical;
  record(w, "launch bounds", 1, reinterpret_cast<uintptr_t>(__builtin_return_address(0)), {},
         "a block has " + std::to_string(w->threads) + " threads, and __launch_bounds__ allows " + std::to_string(threads));
  --w->critical;
  leave_block();
}

// ---- rendezvous

static bool same(const Site& a, const Site& b) {
  return a.line == b.line && strcmp(a.what, b.what) == 0 && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

void rendezvous(unsigned mask, void* operand, Combine combine, Site site) {
  Worker* w = worker;
  Thread* t = w->current;
  const unsigned bit = 1u << t->number % kWarp;
  Warp& warp = w->warp[t->number / kWarp];
  if (!(mask & bit))
    fail("mask", 719, 0, site, "calls %s with the mask 0x%08x, which doesn't name its own lane %u",
         site.what, mask, t->number % kWarp);
  Gathering* g = warp.gathering;
  Gathering* const end = g + warp.gatherings;
  while (g != end && !(g->mask == mask && g->combine == combine && same(g->site, site))) ++g;
  if (g == end) {
    ++warp.gatherings;
    g->mask = mask;
    g->arrived = 0;
    g->number = w->gathered++;
    g->combine = combine;
    g->site = site;
    memset(g->operand, 0, sizeof g->operand);
  }
  g->arrived |= bit;
  g->operand[t->number % kWarp] = operand;
  for (Watcher* watcher : w->on_execution) watcher->comes(g->number);
  if (g->arrived != (mask & warp.alive)) {
    t->state = State::Waiting;
    t->site = site;
    t->mask = mask;
    stop(w);
    wait();
    return;
  }
  complete(w, t->number / kWarp, *g, g->arrived & ~bit);
}

// Which lanes run together is the hardware's choice. Here it is all that come to the same __activemask before the block can't
// go on without an answer: those that a branch or a loop keeps away take no part.
unsigned active_mask(Site site) {
  Worker* w = worker;
  Thread* t = w->current;
  t->state = State::Waiting;
  t->site = site;
  t->mask = 0;
  t->at = At::ActiveMask;
  stop(w);
  wait();
  t->at = At::Instruction;
  return unsigned(t->answer);
}

static bool answer_active_masks(Worker* w) {
  bool any = false;
  for (unsigned first = 0; first < w->threads; ++first) {
    const auto asks = [&](unsigned i) { return w->thread[i].state == State::Waiting && w->thread[i].at == At::ActiveMask; };
    if (!asks(first)) continue;
    unsigned lanes = 0;
    for (unsigned i = first; i < w->threads && i / kWarp == first / kWarp; ++i)
      if (asks(i) && same(w->thread[i].site, w->thread[first].site)) lanes |= 1u << i % kWarp;
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      Thread& t = w->thread[first / kWarp * kWarp + unsigned(__builtin_ctz(rest))];
      t.answer = int(lanes);
      w->ready(&t);
    }
    any = true;
  }
  return any;
}

// __syncthreads() is PTX's barrier 0. Where some threads come to it by the one name and some by the other, all meet at the named
// barrier. aligned: see BarrierPoint; false for a thread that came to __syncthreads() before, of which tools have been told.
static int barrier_0(Worker* w, BarrierVote kind, int predicate, bool aligned, Site site) {
  count_instruction(w, 0, site);
  return named_barrier(0, w->whole_warps(), true, kind, predicate != 0, aligned, 0, site);
}

void leave_sync_block(Worker* w) {
  for (unsigned i = 0; i < w->threads; ++i) {
    Thread& t = w->thread[i];
    if (t.state != State::Waiting || t.at != At::Instruction || t.mask != 0 || !same(t.site, w->barrier.site)) continue;
    t.answer = 1;
    w->ready(&t);
  }
  w->barrier.arrived = 0;
}

int sync_block(BarrierVote kind, int predicate, Site site) {
  Worker* w = worker;
  Barrier& b = w->barrier;
  Thread* t = w->current;
  if (b.arrived == 0) {
    b.kind = kind;
    b.site = site;
    b.count = 0;
  }
  if (w->barriers->named[0].arrived > 0) return barrier_0(w, kind, predicate, true, site);
  t->state = State::Waiting;
  t->site = site;
  t->mask = 0;
  t->answer = 0;
  // A thread that comes to another barrier is left to wait: when nobody can run, the report shows who waits where.
  if (b.kind != kind || !same(b.site, site)) {
    wait();
    return 0;
  }
  b.count += predicate != 0;
  const BarrierPoint point{BarrierPoint::Block, 0, true, site.what};
  for (Watcher* watcher : w->on_execution) watcher->arrives(point);
  if (++b.arrived < w->threads) {
    stop(w);
    wait();
    return t->answer == 0 ? b.result : barrier_0(w, kind, predicate, false, site);
  }
  for (Watcher* watcher : w->on_execution) watcher->completed(point);
  b.result = kind == BarrierVote::And ? b.count == w->threads : kind == BarrierVote::Or ? b.count > 0 : int(b.count);
  b.arrived = 0;
  for (unsigned i = 0; i < w->threads; ++i)
    if (&w->thread[i] != t) w->ready(&w->thread[i]);
  t->state = State::Ready;
  return b.result;
}

// ---- shared memory

void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name, ArrayShape shape) {
  Worker* w = worker;
  for (unsigned i = 0; i < w->arrays; ++i)
    if (w->array[i].key == key) return w->arena + w->array[i].offset;
  const Site site{name, "", 0};
  const uintptr_t pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  w->static_bytes += bytes;
  if (w->static_bytes > kStaticShared || w->arrays == std::size(w->array))
    fail("shared memory", 1, pc, site, "comes to %zu bytes of static shared memory; %zu are allowed",
         w->static_bytes, kStaticShared);
  if (const size_t in_all = w->run->shared.in_all; w->static_bytes + w->dynamic_bytes > in_all)
    fail("shared memory", 1, pc, site, "comes to %zu bytes of static and %zu of dynamic shared memory; %zu are allowed in all%s",
         w->static_bytes, w->dynamic_bytes, in_all, in_all > kSharedPerBlock ? "" :
         " without cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)");
  const size_t offset = (w->static_top + alignment - 1) / alignment * alignment;
  w->static_top = (offset + bytes + 2 * kGap - 1) / kGap * kGap;  // a gap, then the next array, in bank 0
  if (w->static_top > w->dynamic_base)
    fail("shared memory", 1, pc, site, "comes to a shared array, its %uth, that doesn't fit the emulator's arena of %zu bytes",
         w->arrays + 1, w->dynamic_base);
  w->array[w->arrays++] = {key, name, offset, bytes, shape};
  poison(w, offset, bytes);
  return w->arena + offset;
}

void* dynamic_shared(const char* name) {
  if (worker->dynamic_name == nullptr) worker->dynamic_name = name;
  return worker->dynamic();
}

void name_shared(const char* name, uint64_t address) {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr || !session.tracing) return;
  const uint64_t offset = address < kArena ? address : address - reinterpret_cast<uintptr_t>(w->arena);
  if (offset < w->dynamic_base || offset >= w->dynamic_base + w->dynamic_bytes) return;
  ++w->critical;
  add_named_place(w->named[w->current->number / kWarp], name, uint32_t(offset));
  --w->critical;
  for (Watcher* t : w->on_execution) t->named(name, uint32_t(offset));
}

uint32_t shared_address(const void* generic) {
  return static_cast<uint32_t>(static_cast<const char*>(generic) - worker->arena);
}

}  // namespace emu
