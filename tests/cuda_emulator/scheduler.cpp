// Runs a launch: blocks one after the other, the threads of a block as fibers that change over where
// they meet. A warp runs until all its lanes wait, then the next one.
#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <new>

#include "state.h"

// Saves the registers that a call preserves on the running stack, and continues on another stack. A
// jump, as the processor predicts a return to go where the last call came from.
extern "C" void llmserve_switch_stack(void** from, void* to);
asm(R"(
.text
.hidden llmserve_switch_stack
.globl llmserve_switch_stack
.type llmserve_switch_stack, @function
llmserve_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size llmserve_switch_stack, . - llmserve_switch_stack
)");

namespace llmserve::cuda::emulated {

Block block;
thread_local Thread* current __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr int kSavedRegisters = 6;
constexpr size_t kPageBytes = 4096;

struct Launch {
  void (*body)(void*);
  void* context;
  const void* kernel;
  void* host_stack_pointer;
  std::string finding;
};

std::mutex one_launch_at_a_time;
Launch running;
uint32_t the_time = 0;

void continue_with(Thread* next) {
  Thread* const self = current;
  current = next;
  note_progress();
  llmserve_switch_stack(&self->stack_pointer, next->stack_pointer);
}

[[noreturn]] void return_to_host() {
  Thread* const self = current;
  current = nullptr;
  llmserve_switch_stack(&self->stack_pointer, running.host_stack_pointer);
  __builtin_unreachable();
}

const char* meeting_name(Meeting meeting) {
  switch (meeting) {
    case Meeting::kBlockSync:
      return "block_sync";
    case Meeting::kWarpSync:
      return "warp_sync";
    case Meeting::kShuffle:
      return "a shuffle";
    case Meeting::kVote:
      return "a vote";
    case Meeting::kLoadMatrix:
      return "load_matrix";
    case Meeting::kMma:
      return "mma";
  }
  return "";
}

std::string whereabouts(const Thread& thread) {
  const std::string name = "thread " + index_text(thread.index);
  if (thread.is_done) return name + " has ended";
  return name + " waits at " + meeting_name(thread.meeting) + " in " + source_place(thread.place);
}

[[noreturn]] void fail_divergence(const Thread& waiting, const Thread& other) {
  fail(waiting.place, std::string("divergence at ") + meeting_name(waiting.meeting) + ": " +
                          whereabouts(waiting) + ", but " + whereabouts(other));
}

bool is_same_place(const Thread& thread, const char* file, int line) {
  return thread.line == line && (thread.file == file || std::strcmp(thread.file, file) == 0);
}

// The thread to continue with when the running one cannot.
Thread* next_thread() {
  Warp& own = *current->warp;
  for (int i = 0, id = own.id; i < block.num_warps; ++i, ++id) {
    if (id == block.num_warps) id = 0;
    Warp& warp = block.warps[id];
    if (warp.runnable != 0) return &warp.threads[__builtin_ctz(warp.runnable)];
    if (warp.arrived != 0) {  // the lanes that are missing wait elsewhere or have ended
      fail_divergence(warp.threads[__builtin_ctz(warp.arrived)],
                      warp.threads[__builtin_ctz(warp.lanes & ~warp.arrived)]);
    }
  }
  if (block.num_done == block.num_threads) return nullptr;
  const Thread *waiting = nullptr, *done = nullptr;
  for (int i = block.num_threads - 1; i >= 0; --i) {
    (block.threads[i].is_done ? done : waiting) = &block.threads[i];
  }
  fail_divergence(*waiting, *done);
}

void run_thread() {
  running.body(running.context);
  Thread& self = *current;
  self.is_done = true;
  self.warp->runnable &= ~(1u << self.lane);
  ++block.num_done;
  Thread* const next = next_thread();
  if (next == nullptr) return_to_host();
  continue_with(next);
}

// Stacks with an unmapped page below each, made once.
uintptr_t stack_of(int thread) {
  static uintptr_t stacks = 0;
  static int num_guarded = 0;
  constexpr size_t kStride = kStackBytes + kPageBytes;
  if (stacks == 0) {
    void* const memory = mmap(nullptr, kStride * kMaxThreads, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stacks = reinterpret_cast<uintptr_t>(memory);
  }
  for (; num_guarded <= thread; ++num_guarded) {
    mprotect(reinterpret_cast<void*>(stacks + kStride * num_guarded), kPageBytes, PROT_NONE);
  }
  return stacks + kStride * thread + kPageBytes;
}

void prepare_thread(int id, Dim3 size) {
  Thread& thread = block.threads[id];
  const auto x = static_cast<unsigned>(id);
  thread.index = {x % size.x, x / size.x % size.y, x / size.x / size.y};
  thread.id = id;
  thread.lane = id % kWarpSize;
  thread.warp = &block.warps[id / kWarpSize];
  thread.is_done = false;
  thread.copies.clear();
  thread.copy_group = 0;
  thread.stack = stack_of(id);
  // Tops a few cache lines apart, as equal ones would share their cache sets.
  const uintptr_t top = thread.stack + kStackBytes - 16 - id % 16 * 256;
  auto* const frame = reinterpret_cast<void**>(top) - kSavedRegisters;
  for (int i = 0; i < kSavedRegisters; ++i) frame[i] = nullptr;
  frame[kSavedRegisters] = reinterpret_cast<void*>(&run_thread);
  frame[kSavedRegisters + 1] = nullptr;  // where run_thread would return to
  thread.stack_pointer = frame;
}

void run_block(Index index) {
  block.index = index;
  block.num_waiting = block.num_done = 0;
  block.start = block.time = next_time();
  block.has_atomic = false;
  block.static_bytes = 0;
  for (int i = 0; i < block.num_warps; ++i) {
    const int num_lanes = min(kWarpSize, block.num_threads - i * kWarpSize);
    const uint32_t lanes = num_lanes == kWarpSize ? ~0u : (1u << num_lanes) - 1;
    block.warps[i] = {&block.threads[i * kWarpSize], i, lanes, lanes, 0, block.time};
  }
  for (int i = 0; i < block.num_threads; ++i) prepare_thread(i, block.size);
  current = &block.threads[0];
  llmserve_switch_stack(&running.host_stack_pointer, current->stack_pointer);
  if (!running.finding.empty()) throw std::runtime_error(running.finding);
  note_block_end();
}

void check_sizes(Dim3 grid, Dim3 size, size_t dynamic_bytes) {
  const uint64_t num_threads = uint64_t{size.x} * size.y * size.z;
  if (num_threads < 1 || num_threads > kMaxThreads || size.z > 64) {
    throw std::runtime_error("a block has " + std::to_string(num_threads) + " threads");
  }
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    throw std::runtime_error("a grid has " + index_text({grid.x, grid.y, grid.z}) + " blocks");
  }
  if (dynamic_bytes > max_shared_bytes()) {
    throw std::runtime_error(std::to_string(dynamic_bytes) + " bytes of shared memory per block");
  }
}

}  // namespace

uint32_t next_time() { return ++the_time; }

void fail(const void* place, const std::string& finding) {
  running.finding = function_name(running.kernel) + ", block " + index_text(block.index) +
                    ", thread " + index_text(current->index) + ", " + source_place(place) + ": " +
                    finding;
  return_to_host();
}

void meet_warp(Meeting meeting, const char* file, int line, const void* place,
               void (*complete)(Warp&)) {
  Thread& self = *current;
  Warp& warp = *self.warp;
  self.meeting = meeting;
  self.file = file;
  self.line = line;
  self.place = place;
  warp.arrived |= 1u << self.lane;
  if (warp.arrived != warp.lanes) {
    warp.runnable &= ~(1u << self.lane);
    continue_with(next_thread());
    return;
  }
  for (uint32_t left = warp.lanes; left != 0; left &= left - 1) {
    const Thread& other = warp.threads[__builtin_ctz(left)];
    if (other.meeting != meeting || !is_same_place(other, file, line)) {
      fail_divergence(self, other);
    }
  }
  warp.arrived = 0;
  warp.runnable = warp.lanes;
  complete(warp);
}

void block_sync(const char* file, int line) {
  Thread& self = *current;
  self.meeting = Meeting::kBlockSync;
  self.file = file;
  self.line = line;
  self.place = __builtin_return_address(0);
  if (++block.num_waiting < block.num_threads) {
    self.warp->runnable &= ~(1u << self.lane);
    continue_with(next_thread());
    return;
  }
  for (int i = 0; i < block.num_threads; ++i) {
    const Thread& other = block.threads[i];
    if (!is_same_place(other, file, line)) fail_divergence(self, other);
  }
  block.num_waiting = 0;
  block.time = next_time();
  for (int i = 0; i < block.num_warps; ++i) {
    block.warps[i].runnable = block.warps[i].lanes;
    block.warps[i].time = block.time;
  }
}

Index thread_index() { return current->index; }
Index block_index() { return block.index; }
Index block_size() { return {block.size.x, block.size.y, block.size.z}; }
Index grid_size() { return {block.grid.x, block.grid.y, block.grid.z}; }

void run(const void* kernel, Dim3 grid, Dim3 size, size_t dynamic_bytes, void (*body)(void*),
         void* context, size_t context_bytes) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  check_sizes(grid, size, dynamic_bytes);
  running = {body, context, kernel, nullptr, {}};
  set_context(context, context_bytes);
  block.grid = grid;
  block.size = size;
  block.num_threads = static_cast<int>(size.x * size.y * size.z);
  block.num_warps = ceil_div(block.num_threads, kWarpSize);
  block.dynamic_bytes = dynamic_bytes;
  block.launch_start = next_time();
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) run_block({x, y, z});
    }
  }
}

}  // namespace llmserve::cuda::emulated
