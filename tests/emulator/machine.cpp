// Runs one launch of one kernel: MACHINE PROBLEM RESULT.
//
// PROBLEM  a line `kernel blocks threads shared_bytes seed late skip`; a line for each argument: `in BYTES`,
//          `out BYTES` or `int VALUE`; a line `data`; then the bytes of all inputs. Buffers are of exactly these
//          sizes, and the first argument begins `skip` bytes into its own.
// RESULT   the bytes of all outputs. Counters go to stdout as JSON. A fault ends the run with status 3 and a message.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <new>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cuda.h"

extern "C" void emu_entry();  // the kernel, by a name that the linker gives it

// AddressSanitizer, which wants to know about stacks; not there in other programs.
extern "C" [[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake, const void* to, std::size_t size);
extern "C" [[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake, const void** from, std::size_t* size);

Index threadIdx, blockIdx, gridDim;
constexpr unsigned kMaxShared = 228 * 1024;
alignas(1024) thread_local unsigned char shared[kMaxShared];

namespace emu {

Counters counters;

constexpr unsigned kMaxThreads = 1024, kMaxArguments = 32, kBarriers = 16, kStack = 256 * 1024;
constexpr std::uint32_t kNever = 0, kAsynchronously = ~0u;

using Effect = std::function<void()>;

std::string kernel_name;
unsigned shared_size, seed, block_phase;  // the phase ends when a block begins
bool late;
std::mt19937 generator;
std::uint64_t slots[kMaxArguments];

using Access = std::pair<std::uintptr_t, unsigned>;  // address and bytes
using Request = std::span<const Access>;             // by the lanes of a warp, together

struct Fiber {
  void* registers[5];  // as __builtin_setjmp has them: frame pointer, where to go on, stack pointer
  const void* stack = nullptr;
  std::size_t stack_size = 0;
  void* fake_stack = nullptr;
};

// A thread waits until a phase is no longer the one that it has seen; between blocks for the next one.
struct Thread : Fiber {
  unsigned index = 0, seen = 0;
  const unsigned* phase = &block_phase;
  Effect complain;                  // that the phase never ends
  std::vector<Access> accesses[2];  // by unit, since the last rendezvous

  bool waits() const { return *phase == seen; }
  bool ended() const { return phase == &block_phase; }
};

struct Barrier {
  unsigned arrived = 0, phase = 0;
  void end_phase() { arrived = 0, ++phase; }
};

struct Meeting : Barrier {
  const char* operation;
  alignas(16) unsigned char operands[2][128 * kMaxOperand];  // of this phase, and of the one that some still read
};

struct Mbarrier : Barrier {
  unsigned arrivals = 0;
  std::int64_t bytes = 0;  // expected and not yet there; below 0 if they came first
};

struct Pending {
  std::deque<Effect> effects;
  std::deque<std::size_t> groups;  // how many had been started when each was committed
  std::size_t started = 0;

  void start(Effect effect) {
    ++started;
    effects.push_back(std::move(effect));
    if (!late) finish(started);
  }

  // The first `count` that were ever started.
  void finish(std::size_t count) {
    while (started - effects.size() < count) {
      effects.front()();
      effects.pop_front();
    }
  }
};

// Who has last written or read a word of shared memory, and when: `syncs` of the warp.
struct Touch {
  unsigned thread, syncs;
  bool others;  // of the warp have as well
};

struct Block {
  std::uint32_t fences = 1;
  unsigned syncs = 1, warp_syncs[kMaxThreads / 32] = {};  // barriers, and each warp's __syncwarp
  Barrier barriers[kBarriers];
  std::map<unsigned, Mbarrier> mbarriers;                       // by address
  std::map<unsigned, Pending> copies, matmuls;                  // by thread, by warp
  std::multimap<unsigned, std::pair<Thread*, Effect>> flights;  // what lands by itself, in the order of draws
};

Block block;
std::vector<Thread> threads;
Thread* running;
Fiber scheduler;
Meeting meetings[2][kMaxThreads / 32];  // of each warp, of each warpgroup
std::uint32_t written[kMaxShared];      // the block's fences when each byte was written, or one of the constants
Touch writers[kMaxShared / 4 + 1], readers[kMaxShared / 4 + 1];  // of each word
bool copied_to[kMaxShared / 16 + 1];                             // by a copy under way
alignas(16) unsigned char stacks[kMaxThreads][kStack];

std::span<Thread> threads_of(unsigned warp) {
  return std::span(threads).subspan(32 * warp, std::min<std::size_t>(32, threads.size() - 32 * warp));
}

// ---- fibers ----

// Not swapcontext, which asks the operating system each time. A function of its own, as GCC wants it.
[[gnu::noinline]] void go_to(Fiber& fiber) { __builtin_longjmp(fiber.registers, 1); }

// Goes on with `to` until somebody goes on with `from`.
[[gnu::noinline]] void switch_fibers(Fiber& from, Fiber& to) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_size);
  if (!__builtin_setjmp(from.registers)) go_to(to);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from.fake_stack, &to.stack, &to.stack_size);
}

void wait(const unsigned& phase, unsigned seen, Effect complain) {
  running->phase = &phase, running->seen = seen, running->complain = std::move(complain);
  switch_fibers(*running, scheduler);
}

// Every argument goes in a 64-bit slot, which the ABIs of 64-bit machines allow.
template <std::size_t... kSlots>
void call_kernel(std::index_sequence<kSlots...>) {
  reinterpret_cast<void (*)(decltype(kSlots)...)>(emu_entry)(slots[kSlots]...);
}

[[gnu::force_align_arg_pointer]] void thread_main() {
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_size);
  while (true) {
    call_kernel(std::make_index_sequence<kMaxArguments>());
    wait(block_phase, block_phase, nullptr);
  }
}

void make_threads(unsigned count) {
  if (count > kMaxThreads) fail("more than %u threads", kMaxThreads);
  for (unsigned i = 0; i < count; ++i) {
    Thread& t = threads.emplace_back();
    t.index = i, t.stack = stacks[i], t.stack_size = kStack;
    t.registers[1] = reinterpret_cast<void*>(thread_main), t.registers[2] = stacks[i] + kStack - 16;
  }
}

void run_as(Thread& thread) {
  running = &thread;
  threadIdx = {thread.index};
}

// ---- counting ----

// The aligned blocks of `unit` bytes that accesses of `bytes` touch.
std::vector<std::uintptr_t> touched(Request request, unsigned bytes, unsigned unit) {
  std::vector<std::uintptr_t> blocks;
  for (const auto& [address, _] : request) {
    for (std::uintptr_t b = address / unit; b <= (address + bytes - 1) / unit; ++b) blocks.push_back(b);
  }
  std::ranges::sort(blocks);
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  return blocks;
}

// 16-byte accesses go a quarter warp at a time, 8-byte ones a half. In each, a bank serves one of its 4-byte words.
void count_shared(Request request, unsigned bytes) {
  const Request first = request.first(std::min<std::size_t>({32, 128 / bytes, request.size()}));
  unsigned most = 0, of_bank[32] = {};
  for (const std::uintptr_t word : touched(first, bytes, 4)) most = std::max(most, ++of_bank[word % 32]);
  counters.shared_wavefronts += most;
  counters.shared_least += 1;
  if (first.size() < request.size()) count_shared(request.subspan(first.size()), bytes);
}

// Lanes that want the same bytes ask for them once.
void count_global(Request request, unsigned bytes) {
  const std::uint64_t wanted = touched(request, 1, 1).size() * bytes;
  counters.global_bytes += wanted;
  counters.global_sectors += touched(request, bytes, 32).size();
  counters.global_least += (wanted + 31) / 32;
}

// What the lanes did first since the last rendezvous is one request, what they did second another.
void count_requests(unsigned warp) {
  for (const Unit unit : {kShared, kGlobal}) {
    std::vector<Access> request;
    for (std::size_t i = 0; i == 0 || !request.empty(); ++i) {
      request.clear();
      for (const Thread& t : threads_of(warp)) {
        if (i < t.accesses[unit].size()) request.push_back(t.accesses[unit][i]);
      }
      if (!request.empty()) (unit == kShared ? count_shared : count_global)(request, request.back().second);
    }
    for (Thread& t : threads_of(warp)) t.accesses[unit].clear();
  }
}

// ---- blocks ----

// Arrives at a barrier of `count` threads. With a complaint, waits for the others too: even the last one, since another
// warp may go first.
void arrive(Barrier& barrier, unsigned count, Effect complain) {
  const unsigned phase = barrier.phase;
  if (++barrier.arrived == count) barrier.end_phase();
  if (!complain) return;
  wait(barrier.phase, phase, std::move(complain));
  if (lane() == 0) count_requests(running->index / 32);  // before the other lanes go on
}

// All threads wait, for the next block if it returns false. Else lands something, or opens the barrier that all have
// reached; or they wait for ever.
bool unblock() {
  const std::size_t alive = threads.size() - std::ranges::count_if(threads, &Thread::ended);
  if (alive == 0) return false;
  if (!block.flights.empty()) {
    const auto [thread, land] = block.flights.extract(block.flights.begin()).mapped();
    run_as(*thread);
    land();
  } else if (block.barriers[0].arrived == alive) {
    block.barriers[0].end_phase();
    ++block.syncs;
  } else {
    run_as(*std::ranges::find_if_not(threads, &Thread::ended));
    running->complain();
  }
  return true;
}

std::vector<unsigned> ready_warps() {
  std::vector<unsigned> ready;
  for (unsigned warp = 0; 32 * warp < threads.size(); ++warp) {
    if (!std::ranges::all_of(threads_of(warp), &Thread::waits)) ready.push_back(warp);
  }
  return ready;
}

void run_block(unsigned index) {
  blockIdx = {index};
  block = {};
  std::memset(shared, 0xFF, shared_size);
  std::fill_n(written, shared_size, kNever);
  std::fill_n(writers, shared_size / 4 + 1, Touch{});
  std::fill_n(readers, shared_size / 4 + 1, Touch{});
  std::fill_n(copied_to, shared_size / 16 + 1, false);
  ++block_phase;
  // With an odd seed a warp runs on while it can, so that it gets far ahead of the others: a draw for every step keeps
  // them close, and a race that takes a lead of many steps would not show.
  const bool eager = seed % 2;
  unsigned warp = 0;
  do {
    for (auto ready = ready_warps(); !ready.empty(); ready = ready_warps()) {
      const bool stay = eager && std::ranges::count(ready, warp) && generator() % 256;
      if (!stay) warp = ready[generator() % ready.size()];
      for (Thread& t : threads_of(warp)) {
        if (t.waits()) continue;
        run_as(t);
        switch_fibers(scheduler, t);
      }
    }
  } while (unblock());
  for (warp = 0; 32 * warp < threads.size(); ++warp) count_requests(warp);
  for (const auto& [address, m] : block.mbarriers) {
    if (m.bytes) fail("the block ends, and the mbarrier at %u expects %ld bytes", address, m.bytes);
  }
}

// ---- faults ----

void say_where() { std::fprintf(stderr, "%s: block %u, thread %u: ", kernel_name.c_str(), blockIdx.x, threadIdx.x); }

// The sanitizers call these. A launch frees nothing before its end, and a search for leaks would go through all stacks.
extern "C" void __asan_on_error() { say_where(); }
extern "C" void __ubsan_on_report() { say_where(); }
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

void fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  say_where();
  std::vfprintf(stderr, format, arguments);
  std::fputs("\n", stderr);
  std::_Exit(3);
}

// ---- what cuda.h declares, and its parts ----

Pending& own(Queue q) { return q == kCopies ? block.copies[running->index] : block.matmuls[running->index / 32]; }

void fly(Effect land) {
  if (!late) return land();
  block.flights.emplace(generator(), std::pair(running, std::move(land)));
}

Mbarrier& mbarrier(unsigned address) {
  shared_bytes(address, 8, kRead);
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("no mbarrier was made at %u", address);
  return found->second;
}

const void* rendezvous(const char* name, unsigned size, const void* operand, std::size_t bytes) {
  Meeting& meeting = meetings[size > 32][running->index / size];
  if (meeting.arrived && meeting.operation != name && std::strcmp(meeting.operation, name) != 0)
    fail("%s, while other lanes are at %s", name, meeting.operation);
  meeting.operation = name;
  unsigned char* operands = meeting.operands[meeting.phase % 2];
  std::memcpy(operands + running->index % size * bytes, operand, bytes);
  if (meeting.arrived + 1 == size && !std::strcmp(name, "syncwarp")) ++block.warp_syncs[running->index / 32];
  arrive(meeting, size, [=] { fail("waits in %s for lanes that never come", name); });
  return operands;
}

void barrier(unsigned id, unsigned count, bool wait) {
  if (id >= kBarriers || count % 32) fail("there is no barrier %u of %u threads", id, count);
  const Effect complain = [=] { fail("waits at barrier %u for threads that never come", id); };
  if (count) ++block.syncs;
  arrive(block.barriers[id], count, wait ? complain : nullptr);
}

void mbarrier_init(unsigned address, unsigned arrivals) {
  shared_bytes(address, 8, kWrite);
  block.mbarriers[address] = {{}, arrivals};
}

void mbarrier_arrive(unsigned address, unsigned arrivals, std::int64_t bytes) {
  Mbarrier& m = mbarrier(address);
  m.arrived += arrivals, m.bytes += bytes;
  if (m.arrived > m.arrivals) fail("more than %u arrivals at the mbarrier at %u", m.arrivals, address);
  if (m.arrived == m.arrivals && !m.bytes) m.end_phase();
}

void mbarrier_wait(unsigned address, unsigned parity) {
  const Mbarrier& m = mbarrier(address);
  const auto complain = [=] {
    fail("waits for the phase of parity %u of the mbarrier at %u, which never ends", parity, address);
  };
  while (m.phase % 2 == parity) wait(m.phase, m.phase, complain);
  ++block.syncs;
}

void proxy_fence() { ++block.fences; }

void check_place(unsigned address, unsigned bytes) {
  if (address % std::min(bytes, 16u)) fail("%u bytes of shared memory at %u are misaligned", bytes, address);
  if (address + std::uint64_t{bytes} > shared_size)
    fail("shared memory ends at %u, touched are %u bytes at %u", shared_size, bytes, address);
}

// Two lanes of a warp that touch a word, one of them to write, have to meet at a barrier in between. Other operations
// bring lanes together too, but order no memory. That warps have not met shows in the results.
void touch(unsigned address, unsigned bytes, bool write) {
  const unsigned me = running->index, now = block.syncs + block.warp_syncs[me / 32];
  const auto here = [=](const Touch& t) { return t.syncs == now && t.thread / 32 == me / 32; };
  const auto races = [=](const Touch& t) { return here(t) && (t.others || t.thread != me); };
  for (unsigned word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    for (const Touch& t : {writers[word], write ? readers[word] : Touch{}}) {
      if (races(t))
        fail("%u bytes of shared memory at %u are touched, and no __syncwarp since thread %u did", bytes, address,
             t.thread);
    }
    Touch& own = (write ? writers : readers)[word];
    own = {me, now, races(own)};
  }
}

unsigned char* shared_bytes(unsigned address, unsigned bytes, Purpose purpose) {
  const bool write = purpose == kWrite || purpose == kAsyncWrite, async = purpose >= kAsyncRead;
  check_place(address, bytes);
  std::uint32_t *first = written + address, *last = first + bytes;
  if (!write && std::find(first, last, kNever) != last)
    fail("%u bytes of shared memory at %u are read and were never written", bytes, address);
  if (async && std::find(first, last, block.fences) != last)
    fail("no proxy fence between a write and an asynchronous access to %u bytes at %u", bytes, address);
  if (write) std::fill(first, last, async ? kAsynchronously : block.fences);
  if (!async) touch(address, bytes, write);
  return shared + address;
}

void copy_async(unsigned destination, const void* source, unsigned bytes, bool valid) {
  note(kShared, destination, bytes);
  if (valid) note(kGlobal, aligned(source, bytes), bytes);
  check_place(destination, bytes);
  touch(destination, bytes, true);
  bool& under_way = copied_to[destination / 16];
  if (under_way) fail("%u bytes are copied to %u, where another copy is under way", bytes, destination);
  under_way = true;
  own(kCopies).start([=, &under_way] {
    under_way = false;
    unsigned char* to = shared_bytes(destination, bytes, kWrite);
    valid ? std::memcpy(to, source, bytes) : std::memset(to, 0, bytes);
  });
}

void copy_arrive(unsigned barrier) {
  Pending& copies = own(kCopies);
  copies.start([=] { mbarrier_arrive(barrier, 1, 0); });
  fly([&copies, count = copies.started] { copies.finish(count); });
}

void copy_bulk(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  if (bytes % 16) fail("a bulk copy of %u bytes is misaligned", bytes);
  note(kGlobal, aligned(source, 16), bytes);
  mbarrier(barrier);
  shared_bytes(barrier, 8, kAsyncRead);
  fly([=] {
    std::memcpy(shared_bytes(destination, bytes, kAsyncWrite), source, bytes);
    mbarrier_arrive(barrier, 0, -std::int64_t{bytes});
  });
}

void start_matmul(Effect effect) { own(kMatmuls).start(std::move(effect)); }
void commit(Queue queue) { own(queue).groups.push_back(own(queue).started); }

void wait(Queue queue, std::size_t pending) {
  Pending& work = own(queue);
  for (; work.groups.size() > pending; work.groups.pop_front()) work.finish(work.groups.front());
}

void multiply_add(const Fragments* lanes, int lane) {
  counters.mma += lane == 0;
  float* d = lanes[lane].d;
  double sums[4] = {d[0], d[1], d[2], d[3]};
  for (int k = 0; k < 16; ++k) {
    // Four lanes have a row of A, or a column of B: each two neighbours of K, and those 8 further on.
    const Fragments *row = lanes + lane / 4 * 4 + k % 8 / 2, *column = lanes + lane % 4 * 8 + k % 8 / 2;
    for (int i = 0; i < 4; ++i)
      sums[i] += double{row->a[k / 8 * 4 + i / 2 * 2 + k % 2]} * column[i % 2 * 4].b[k / 8 * 2 + k % 2];
  }
  std::copy_n(sums, 4, d);
}

void note(Unit unit, std::uintptr_t address, unsigned bytes) { running->accesses[unit].emplace_back(address, bytes); }

}  // namespace emu

int main(int argc, char** argv) {
  using namespace emu;
  if (argc != 3) return std::fprintf(stderr, "usage: %s PROBLEM RESULT\n", argv[0]), 2;
  std::ifstream in(argv[1], std::ios::binary);
  unsigned blocks = 0, block_size = 0, skip = 0;
  in >> kernel_name >> blocks >> block_size >> shared_size >> seed >> late >> skip;
  std::vector<std::span<char>> inputs, outputs;
  std::uint64_t* slot = slots;
  for (std::string kind; in >> kind && kind != "data"; ++slot) {
    if (slot == std::end(slots)) fail("more than %u arguments", kMaxArguments);
    std::int64_t value = 0;
    in >> value;
    *slot = static_cast<std::uint64_t>(value);
    if (kind == "int") continue;
    char* buffer = new (std::align_val_t{256}) char[value];  // as the GPU's allocator aligns; freed with the process
    (kind == "in" ? inputs : outputs).emplace_back(buffer, value);
    std::memset(buffer, 0xFF, value);
    *slot = reinterpret_cast<std::uint64_t>(buffer + (slot == slots ? skip : 0));
  }
  in.get();  // the end of the line
  for (const auto bytes : inputs) in.read(bytes.data(), std::ssize(bytes));
  if (!in || shared_size > kMaxShared) fail("the problem file is damaged");

  generator.seed(seed);
  make_threads(block_size), gridDim = {blocks};
  std::vector<unsigned> order;
  for (unsigned b = 0; b < blocks; ++b) order.push_back(b);
  std::shuffle(order.begin(), order.end(), generator);
  for (const unsigned b : order) run_block(b);

  std::ofstream out(argv[2], std::ios::binary);
  for (const auto bytes : outputs) out.write(bytes.data(), std::ssize(bytes));
  constexpr const char* kNames[] = {"mma",          "fma2",           "shared_wavefronts", "shared_least",
                                    "global_bytes", "global_sectors", "global_least"};
  const auto values = std::bit_cast<std::array<std::uint64_t, std::size(kNames)>>(counters);
  for (std::size_t i = 0; i < values.size(); ++i) std::printf("%s\"%s\": %lu", i ? ", " : "{", kNames[i], values[i]);
  std::puts("}");
}
