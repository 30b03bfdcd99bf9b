// Runs one launch of one kernel: MACHINE PROBLEM RESULT.
//
// PROBLEM  a line `kernel blocks threads shared_bytes seed late`, a line for each argument: `in BYTES`, `out BYTES`,
//          `int VALUE` or (of the one before) `skip BYTES`, a line `data`, then the bytes of all inputs. Buffers are of exactly these sizes.
// RESULT   the bytes of all outputs. Counters go to stdout as JSON. A fault ends the run with status 3 and a message.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cuda.h"

#if EMU_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#else
static void __sanitizer_start_switch_fiber(void**, const void*, std::size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*) {}
static void __sanitizer_set_death_callback(void (*)()) {}
#endif

// The kernel, by a name that the linker gives it. It is called with every argument in a 64-bit slot, which the ABIs of
// 64-bit machines allow.
extern "C" void emu_entry();

uint3 threadIdx, blockIdx;
constexpr unsigned kMaxShared = 228 * 1024;
alignas(1024) thread_local unsigned char shared[kMaxShared];

namespace emu {

Counters counters;

namespace {

constexpr std::size_t kStack = 256 * 1024;
constexpr int kMaxArguments = 32;

constexpr int kUnits = 3, kBarriers = 16;

enum class State { kReady, kOperation, kBarrier, kMbarrier, kDone };

struct Thread {
  unsigned index;
  State state;
  const char* operation;  // kOperation: what it waits in
  unsigned where;         // kBarrier: which; kMbarrier: its address
  unsigned parity;        // kMbarrier: of the phase it waits for
  unsigned char* stack;
  void* stack_pointer;
  void* fake_stack = nullptr;
  Queue copies;
  std::size_t requests[kUnits];  // since the last rendezvous
};

struct Request {
  std::vector<std::uintptr_t> addresses;
  unsigned bytes;
};

struct Meeting {
  const char* operation = nullptr;
  void* operands[128];
  unsigned arrived = 0;
};

struct Warp {
  std::vector<Request> requests[kUnits];
  Queue matmuls;
};

struct Mbarrier {
  unsigned arrivals, missing, phase = 0;
  std::int64_t bytes = 0;  // expected and not yet there; below 0 if they came first
};

std::string kernel_name;
unsigned shared_size;
bool late;
// Proxy fences until each byte was written, from 1 on; 0: never, kAsync: by the asynchronous proxy.
std::uint32_t written[kMaxShared], fences;
constexpr std::uint32_t kAsync = ~0u;
std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<Meeting> meetings[2];  // of each warp, of each warpgroup
unsigned arrived[kBarriers];
std::map<unsigned, Mbarrier> mbarriers;
std::vector<std::pair<Thread*, std::function<void()>>> flights;  // what lands by itself, and whose it is
std::mt19937 generator;
unsigned seed;
std::uint64_t slots[kMaxArguments];
Thread* running;
void* scheduler_stack_pointer;
const void* scheduler_stack;
std::size_t scheduler_stack_size;

// Saves what a call must preserve on the running stack, whose pointer goes to *save, and goes on where `load` was saved.
extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
constexpr int kSavedWords = 8, kReturnWord = 6;  // the last one keeps the stack as aligned as a call would
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr int kSavedWords = 20, kReturnWord = 11;
#else
#error "emu_switch needs this machine's callee-saved registers"
#endif

void yield() {
  Thread& self = *running;
  __sanitizer_start_switch_fiber(&self.fake_stack, scheduler_stack, scheduler_stack_size);
  emu_switch(&self.stack_pointer, scheduler_stack_pointer);
  __sanitizer_finish_switch_fiber(self.fake_stack, &scheduler_stack, &scheduler_stack_size);
}

void thread_main() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
  using Slot = std::uint64_t;
  using Entry =
      void (*)(Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot,
               Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot);
  const Slot* s = slots;
  reinterpret_cast<Entry>(emu_entry)(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12],
                                     s[13], s[14], s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23], s[24],
                                     s[25], s[26], s[27], s[28], s[29], s[30], s[31]);
  running->state = State::kDone;
  yield();
}

void run_as(Thread& thread) {
  running = &thread;
  threadIdx = {thread.index, 0, 0};
}

void resume(Thread& thread) {
  run_as(thread);
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, thread.stack, kStack);
  emu_switch(&scheduler_stack_pointer, thread.stack_pointer);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

// Wavefronts of one shared-memory request: 16-byte accesses go a quarter warp at a time, 8-byte ones a half. In each, a
// bank serves one of its 4-byte words.
void count_shared(const Request& request) {
  const std::size_t lanes = request.bytes == 16 ? 8 : request.bytes == 8 ? 16 : 32;
  for (std::size_t first = 0; first < request.addresses.size(); first += lanes) {
    std::map<std::uintptr_t, std::set<std::uintptr_t>> words;
    for (std::size_t l = first; l < std::min(first + lanes, request.addresses.size()); ++l) {
      for (unsigned b = 0; b < request.bytes; b += 4) {
        const std::uintptr_t word = (request.addresses[l] + b) / 4;
        words[word % 32].insert(word);
      }
    }
    std::size_t most = 0;
    for (const auto& [bank, distinct] : words) most = std::max(most, distinct.size());
    counters.shared_wavefronts += most;
    ++counters.shared_least;
  }
}

// Lanes that want the same bytes ask for them once.
void count_global(const Request& request, Counters::Global& count) {
  const std::set<std::uintptr_t> distinct(request.addresses.begin(), request.addresses.end());
  std::set<std::uintptr_t> sectors;
  for (std::uintptr_t a : distinct) {
    for (std::uintptr_t sector = a / 32; sector <= (a + request.bytes - 1) / 32; ++sector) sectors.insert(sector);
  }
  count.bytes += distinct.size() * request.bytes;
  count.sectors += sectors.size();
  count.least += (distinct.size() * request.bytes + 31) / 32;
}

void count_requests(unsigned warp) {
  Warp& w = warps[warp];
  for (const Request& r : w.requests[0]) count_shared(r);
  for (const Request& r : w.requests[1]) count_global(r, counters.read);
  for (const Request& r : w.requests[2]) count_global(r, counters.written);
  for (auto& requests : w.requests) requests.clear();
  for (unsigned l = 32 * warp; l < std::min<std::size_t>(32 * warp + 32, threads.size()); ++l) {
    for (std::size_t& requests : threads[l].requests) requests = 0;
  }
}

void open_barrier(unsigned id) {
  arrived[id] = 0;
  for (Thread& t : threads) {
    if (t.state != State::kBarrier || t.where != id) continue;
    t.state = State::kReady;
    if (t.index % 32 == 0) count_requests(t.index / 32);
  }
}

// Everybody waits. Lands something, or opens the barrier that all have reached; else they wait for ever.
void unblock() {
  if (!flights.empty()) {
    const auto chosen = flights.begin() + static_cast<std::ptrdiff_t>(generator() % flights.size());
    const auto [thread, land] = std::move(*chosen);
    flights.erase(chosen);
    run_as(*thread);
    return land();
  }
  unsigned alive = 0;
  for (const Thread& t : threads) alive += t.state != State::kDone;
  if (arrived[0] == alive) return open_barrier(0);
  for (Thread& t : threads) {
    if (t.state == State::kDone) continue;
    run_as(t);
    if (t.state == State::kOperation) fail("waits in %s for lanes that never come", t.operation);
    if (t.state == State::kBarrier) fail("waits at barrier %u for threads that never come", t.where);
    fail("waits for the phase of parity %u of the mbarrier at %u, which never ends", t.parity, t.where);
  }
}

void run_block() {
  std::memset(shared, 0xFF, shared_size);
  std::fill_n(written, shared_size, 0);
  fences = 1;
  std::fill_n(arrived, kBarriers, 0);
  mbarriers.clear();
  flights.clear();
  for (Warp& w : warps) w.matmuls = {};
  for (Thread& t : threads) {
    t.state = State::kReady;
    t.copies = {};
    auto* frame = reinterpret_cast<void**>(t.stack + kStack) - kSavedWords;
    std::fill(frame, frame + kSavedWords, nullptr);
    frame[kReturnWord] = reinterpret_cast<void*>(thread_main);
    t.stack_pointer = frame;
  }
  std::vector<unsigned> ready;
  // With an odd seed a warp runs on while it can, so that it gets far ahead of the others: a draw for every step keeps
  // them close, and a race that takes a lead of many steps would not show.
  const bool eager = seed % 2;
  unsigned warp = 0;
  while (true) {
    ready.clear();
    bool waiting = false;
    for (const Thread& t : threads) {
      if (t.state == State::kReady && (ready.empty() || ready.back() != t.index / 32)) ready.push_back(t.index / 32);
      waiting |= t.state != State::kReady && t.state != State::kDone;
    }
    if (ready.empty() && !waiting) break;
    if (ready.empty()) {
      unblock();
      continue;
    }
    const bool stay = eager && std::find(ready.begin(), ready.end(), warp) != ready.end() && generator() % 256;
    if (!stay) warp = ready[generator() % ready.size()];
    for (unsigned l = 32 * warp; l < std::min<std::size_t>(32 * warp + 32, threads.size()); ++l) {
      if (threads[l].state == State::kReady) resume(threads[l]);
    }
  }
  for (unsigned w = 0; w < warps.size(); ++w) count_requests(w);
  for (const auto& [address, m] : mbarriers) {
    if (m.bytes)
      fail("the block ends, and the mbarrier at %u expects %lld bytes", address, static_cast<long long>(m.bytes));
  }
}

Mbarrier& mbarrier(unsigned address) {
  shared_bytes(address, 8, Access::kRead);
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("no mbarrier was made at %u", address);
  return found->second;
}

void advance(unsigned address, unsigned arrivals, std::int64_t bytes) {
  Mbarrier& m = mbarrier(address);
  if (arrivals > m.missing) fail("more than %u arrivals at the mbarrier at %u", m.arrivals, address);
  m.missing -= arrivals;
  m.bytes += bytes;
  if (m.missing || m.bytes) return;
  m.missing = m.arrivals;
  ++m.phase;
  for (Thread& t : threads) {
    if (t.state == State::kMbarrier && t.where == address) t.state = State::kReady;
  }
}

void fly(std::function<void()> land) {
  if (!late) return land();
  flights.emplace_back(running, std::move(land));
}

void say_where() { std::fprintf(stderr, "%s: block %u, thread %u", kernel_name.c_str(), blockIdx.x, threadIdx.x); }

}  // namespace

// UndefinedBehaviorSanitizer calls this for each finding; it has no part in the other's death callback.
extern "C" void __ubsan_on_report() { say_where(); }

void fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  char what[512];
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  say_where();
  std::fprintf(stderr, ": %s\n", what);
  std::_Exit(3);
}

void rendezvous(const char* name, unsigned size, void* operand, void (*execute)(void* const* operands)) {
  Thread& self = *running;
  const unsigned first = self.index / size * size;
  Meeting& meeting = meetings[size > 32][self.index / size];
  if (meeting.arrived && std::strcmp(meeting.operation, name) != 0)
    fail("%s, while other lanes are at %s", name, meeting.operation);
  meeting.operation = self.operation = name;
  meeting.operands[self.index - first] = operand;
  if (++meeting.arrived < size) {
    self.state = State::kOperation;
    return yield();
  }
  for (unsigned w = first / 32; w < (first + size) / 32; ++w) count_requests(w);
  execute(meeting.operands);
  meeting.arrived = 0;
  for (unsigned l = first; l < first + size; ++l) threads[l].state = State::kReady;
  yield();  // let another warp go first, if it is its turn
}

void barrier(unsigned id, unsigned count, bool wait) {
  if (id >= kBarriers || count % 32) fail("there is no barrier %u of %u threads", id, count);
  if (wait) running->state = State::kBarrier, running->where = id;
  if (++arrived[id] == count) open_barrier(id);
  if (wait) yield();
}

void mbarrier_init(unsigned address, unsigned arrivals) {
  shared_bytes(address, 8, Access::kWrite);
  mbarriers[address] = {arrivals, arrivals};
}

void mbarrier_arrive(unsigned address, unsigned expected_bytes) { advance(address, 1, expected_bytes); }

void mbarrier_wait(unsigned address, unsigned parity) {
  const Mbarrier& m = mbarrier(address);
  while (m.phase % 2 == parity) {
    running->state = State::kMbarrier, running->where = address, running->parity = parity;
    yield();
  }
}

void proxy_fence() { ++fences; }

Queue& copies() { return running->copies; }
Queue& matmuls() { return warps[running->index / 32].matmuls; }

void Queue::start(std::function<void()> effect) {
  ++started;
  effects.push_back(std::move(effect));
  if (!late) finish(started);
}

void Queue::wait(std::size_t pending) {
  for (; groups.size() > pending; groups.pop_front()) finish(groups.front());
}

void Queue::finish(std::size_t count) {
  while (started - effects.size() < count) {
    const std::function<void()> effect = std::move(effects.front());
    effects.pop_front();
    effect();
  }
}

unsigned char* shared_bytes(unsigned address, unsigned bytes, Access access) {
  const bool write = access == Access::kWrite || access == Access::kAsyncWrite;
  const bool async = access == Access::kAsyncRead || access == Access::kAsyncWrite;
  if (address % std::min(bytes, 16u)) fail("%u bytes of shared memory at %u are misaligned", bytes, address);
  if (address + std::uint64_t{bytes} > shared_size)
    fail("shared memory ends at %u, touched are %u bytes at %u", shared_size, bytes, address);
  std::uint32_t *first = written + address, *last = first + bytes;
  if (!write && std::find(first, last, 0) != last)
    fail("%u bytes of shared memory at %u are read and were never written", bytes, address);
  if (async && std::find(first, last, fences) != last)
    fail("no proxy fence between a write and an asynchronous access to %u bytes at %u", bytes, address);
  if (write) std::fill(first, last, async ? kAsync : fences);
  return shared + address;
}

void copy_async(unsigned destination, const void* source, unsigned bytes, bool valid) {
  note(Unit::kShared, destination, bytes);
  if (valid) note_global(Unit::kGlobalRead, source, bytes);
  copies().start([=] {
    unsigned char* to = shared_bytes(destination, bytes, Access::kWrite);
    valid ? std::memcpy(to, source, bytes) : std::memset(to, 0, bytes);
  });
}

void copy_arrive(unsigned barrier) {
  Queue& queue = copies();
  queue.start([=] { advance(barrier, 1, 0); });
  fly([&queue, count = queue.started] { queue.finish(count); });
}

void copy_bulk(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  if (bytes % 16 || reinterpret_cast<std::uintptr_t>(source) % 16)
    fail("a bulk copy of %u bytes is misaligned, or its source is", bytes);
  note(Unit::kGlobalRead, reinterpret_cast<std::uintptr_t>(source), bytes);
  mbarrier(barrier);
  shared_bytes(barrier, 8, Access::kAsyncRead);
  fly([=] {
    std::memcpy(shared_bytes(destination, bytes, Access::kAsyncWrite), source, bytes);
    advance(barrier, 0, -static_cast<std::int64_t>(bytes));
  });
}

void note(Unit unit, std::uintptr_t address, unsigned bytes) {
  auto& requests = warps[running->index / 32].requests[static_cast<int>(unit)];
  const std::size_t i = running->requests[static_cast<int>(unit)]++;
  if (i >= requests.size()) requests.resize(i + 1);
  requests[i].addresses.push_back(address);
  requests[i].bytes = bytes;
}

void note_global(Unit unit, const void* pointer, unsigned bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % bytes) fail("%u bytes of global memory at a misaligned address", bytes);
  note(unit, address, bytes);
}

int run(const char* problem, const char* result) {
  std::ifstream in(problem, std::ios::binary);
  unsigned blocks = 0, block_size = 0;
  in >> kernel_name >> blocks >> block_size >> shared_size >> seed >> late;
  struct Aligned {  // as the GPU's allocator aligns
    void operator()(unsigned char* p) const { ::operator delete[](p, std::align_val_t{256}); }
  };
  std::vector<std::pair<std::unique_ptr<unsigned char[], Aligned>, std::size_t>> inputs, outputs;
  int count = 0;
  for (std::string kind; in >> kind && kind != "data"; ++count) {
    long long value = 0;
    in >> value;
    if (count == kMaxArguments) fail("more than %d arguments", kMaxArguments);
    if (kind == "skip") {  // the argument before begins so many bytes into its buffer
      slots[--count] += static_cast<std::uint64_t>(value);
      continue;
    }
    slots[count] = static_cast<std::uint64_t>(value);
    if (kind == "int") continue;
    auto& buffers = kind == "in" ? inputs : outputs;
    buffers.emplace_back(new (std::align_val_t{256}) unsigned char[value], value);
    std::memset(buffers.back().first.get(), 0xFF, value);
    slots[count] = reinterpret_cast<std::uint64_t>(buffers.back().first.get());
  }
  in.get();  // the end of the line
  for (auto& [bytes, size] : inputs) in.read(reinterpret_cast<char*>(bytes.get()), static_cast<std::streamsize>(size));
  if (!in || shared_size > kMaxShared) fail("the problem file is damaged");

  __sanitizer_set_death_callback(say_where);
  generator.seed(seed);
  warps.resize((block_size + 31) / 32);
  meetings[0].resize(warps.size());
  meetings[1].resize((block_size + 127) / 128);
  threads.resize(block_size);
  for (unsigned i = 0; i < block_size; ++i) {
    threads[i].index = i;
    threads[i].stack = static_cast<unsigned char*>(
        mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  std::vector<unsigned> order(blocks);
  for (unsigned b = 0; b < blocks; ++b) order[b] = b;
  std::shuffle(order.begin(), order.end(), generator);
  for (unsigned b : order) {
    blockIdx = {b, 0, 0};
    run_block();
  }

  std::ofstream out(result, std::ios::binary);
  for (auto& [bytes, size] : outputs)
    out.write(reinterpret_cast<char*>(bytes.get()), static_cast<std::streamsize>(size));
  const std::pair<const char*, std::uint64_t> named[] = {
      {"mma", counters.mma},
      {"fma2", counters.fma2},
      {"shared_wavefronts", counters.shared_wavefronts},
      {"shared_least", counters.shared_least},
      {"global_bytes", counters.read.bytes},
      {"global_sectors", counters.read.sectors},
      {"global_least", counters.read.least},
      {"written_bytes", counters.written.bytes},
      {"written_sectors", counters.written.sectors},
      {"written_least", counters.written.least},
  };
  const char* separator = "{";
  for (const auto& [name, value] : named) {
    std::cout << separator << '"' << name << "\": " << value;
    separator = ", ";
  }
  std::cout << "}\n";
  return 0;
}

}  // namespace emu

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: " << argv[0] << " PROBLEM RESULT\n";
    return 2;
  }
  return emu::run(argv[1], argv[2]);
}
