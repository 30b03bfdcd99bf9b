// Runs one launch of one kernel: MACHINE PROBLEM RESULT.
//
// PROBLEM  a line `kernel blocks threads shared_bytes seed late`, a line for each argument: `in BYTES`, `out BYTES` or
//          `int VALUE`, a line `data`, then the bytes of all inputs. Buffers are of exactly these sizes.
// RESULT   the bytes of all outputs. Counters go to stdout as JSON. A fault ends the run with status 3 and a message.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
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

enum class State { kReady, kWarp, kBarrier, kDone };

struct Copy {
  unsigned destination;
  const void* source;
  unsigned bytes;
};

struct Thread {
  unsigned index;
  State state;
  unsigned char* stack;
  void* stack_pointer;
  void* fake_stack = nullptr;
  std::vector<std::vector<Copy>> groups;  // committed copies, oldest first; the last one is still open
  std::size_t requests[2];                // since the last rendezvous, by unit
};

struct Request {
  std::vector<std::uintptr_t> addresses;
  unsigned bytes;
};

struct Warp {
  const char* operation = nullptr;
  void* operands[32];
  int arrived = 0;
  std::vector<Request> requests[2];
};

std::string kernel_name;
unsigned shared_size;
bool copies_are_late;
unsigned char written[kMaxShared];
std::vector<Thread> threads;
std::vector<Warp> warps;
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

void resume(Thread& thread) {
  running = &thread;
  threadIdx = {thread.index, 0, 0};
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

void count_global(const Request& request) {
  std::set<std::uintptr_t> sectors;
  for (std::uintptr_t a : request.addresses) sectors.insert(a / 32);
  counters.global_bytes += request.addresses.size() * request.bytes;
  counters.global_sectors += sectors.size();
  const std::set<std::uintptr_t> distinct(request.addresses.begin(), request.addresses.end());
  counters.global_least += (distinct.size() * request.bytes + 31) / 32;
}

void count_requests(unsigned warp) {
  Warp& w = warps[warp];
  for (const Request& r : w.requests[0]) count_shared(r);
  for (const Request& r : w.requests[1]) count_global(r);
  for (auto& requests : w.requests) requests.clear();
  for (unsigned l = 32 * warp; l < std::min<std::size_t>(32 * warp + 32, threads.size()); ++l) {
    threads[l].requests[0] = threads[l].requests[1] = 0;
  }
}

void run_block() {
  std::memset(shared, 0xFF, shared_size);
  std::memset(written, 0, shared_size);
  for (Thread& t : threads) {
    t.state = State::kReady;
    t.groups.assign(1, {});
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
      waiting |= t.state == State::kWarp || t.state == State::kBarrier;
    }
    if (ready.empty() && !waiting) break;
    if (ready.empty()) {  // everybody who is left waits: at the barrier together, or for ever
      for (Thread& t : threads) {
        running = &t;
        threadIdx = {t.index, 0, 0};
        if (t.state == State::kWarp) fail("waits in %s for lanes that never come", warps[t.index / 32].operation);
      }
      for (unsigned w = 0; w < warps.size(); ++w) count_requests(w);
      for (Thread& t : threads) t.state = t.state == State::kBarrier ? State::kReady : t.state;
      continue;
    }
    const bool stay = eager && std::find(ready.begin(), ready.end(), warp) != ready.end() && generator() % 256;
    if (!stay) warp = ready[generator() % ready.size()];
    for (unsigned l = 32 * warp; l < std::min<std::size_t>(32 * warp + 32, threads.size()); ++l) {
      if (threads[l].state == State::kReady) resume(threads[l]);
    }
  }
  for (unsigned w = 0; w < warps.size(); ++w) count_requests(w);
}

void land(const Copy& copy) {
  unsigned char* to = shared_bytes(copy.destination, copy.bytes, Access::kWrite);
  if (copy.source) {
    std::memcpy(to, copy.source, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
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

void warp_operation(const char* name, void* operand, void (*execute)(void* const* operands)) {
  Thread& self = *running;
  Warp& warp = warps[self.index / 32];
  if (warp.arrived && std::strcmp(warp.operation, name) != 0)
    fail("%s, while other lanes are at %s", name, warp.operation);
  warp.operation = name;
  warp.operands[self.index % 32] = operand;
  if (++warp.arrived < 32) {
    self.state = State::kWarp;
    return yield();
  }
  count_requests(self.index / 32);
  execute(warp.operands);
  warp.arrived = 0;
  for (unsigned l = self.index / 32 * 32; l < self.index / 32 * 32 + 32; ++l) threads[l].state = State::kReady;
  yield();  // let another warp go first, if it is its turn
}

void barrier() {
  running->state = State::kBarrier;
  yield();
}

unsigned char* shared_bytes(unsigned address, unsigned bytes, Access access) {
  if (address % bytes) fail("%u bytes of shared memory at %u are misaligned", bytes, address);
  if (address + std::uint64_t{bytes} > shared_size)
    fail("shared memory ends at %u, touched are %u bytes at %u", shared_size, bytes, address);
  if (access == Access::kWrite) {
    std::memset(written + address, 1, bytes);
  } else if (std::memchr(written + address, 0, bytes)) {
    fail("%u bytes of shared memory at %u are read and were never written", bytes, address);
  }
  return shared + address;
}

void copy_async(unsigned destination, const void* source, unsigned bytes, bool valid) {
  note(Unit::kShared, destination, bytes);
  if (valid) {
    const auto address = reinterpret_cast<std::uintptr_t>(source);
    if (address % bytes) fail("an asynchronous copy reads %u bytes at a misaligned address", bytes);
    note(Unit::kGlobal, address, bytes);
  }
  const Copy copy{destination, valid ? source : nullptr, bytes};
  if (copies_are_late) {
    running->groups.back().push_back(copy);
  } else {
    land(copy);
  }
}

void copy_commit() { running->groups.emplace_back(); }

void copy_wait(int pending) {
  auto& groups = running->groups;
  while (groups.size() > static_cast<std::size_t>(pending) + 1) {
    for (const Copy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

void note(Unit unit, std::uintptr_t address, unsigned bytes) {
  auto& requests = warps[running->index / 32].requests[static_cast<int>(unit)];
  const std::size_t i = running->requests[static_cast<int>(unit)]++;
  if (i >= requests.size()) requests.resize(i + 1);
  requests[i].addresses.push_back(address);
  requests[i].bytes = bytes;
}

int run(const char* problem, const char* result) {
  std::ifstream in(problem, std::ios::binary);
  unsigned blocks = 0, block_size = 0;
  in >> kernel_name >> blocks >> block_size >> shared_size >> seed >> copies_are_late;
  struct Aligned {  // as the GPU's allocator aligns
    void operator()(unsigned char* p) const { ::operator delete[](p, std::align_val_t{256}); }
  };
  std::vector<std::pair<std::unique_ptr<unsigned char[], Aligned>, std::size_t>> inputs, outputs;
  int count = 0;
  for (std::string kind; in >> kind && kind != "data"; ++count) {
    long long value = 0;
    in >> value;
    if (count == kMaxArguments) fail("more than %d arguments", kMaxArguments);
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
      {"global_bytes", counters.global_bytes},
      {"global_sectors", counters.global_sectors},
      {"global_least", counters.global_least},
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
