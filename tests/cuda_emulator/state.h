// What the files of the emulator share: the running block, its warps and threads.
//
// One launch runs at a time, one block after the other, on the operating system thread that launches.
// Time is one counter for the whole process: it moves at the start of a launch and of a block, at each
// block_sync() and at each warp_sync(), and never backwards. So the time of an access also says which
// launch and which block did it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "llmserve/cuda/device.h"

namespace llmserve::cuda::emulated {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;

enum class Meeting { kBlockSync, kWarpSync, kShuffle, kVote, kLoadMatrix, kMma };

// A copy_async16() that is under way: its bytes reach shared memory at copy_wait().
struct AsyncCopy {
  uint8_t* dst;
  uint8_t bytes[16];
  uint32_t group;
};

struct Warp;

struct Thread {
  void* stack_pointer;  // while another fiber runs
  uintptr_t stack;      // lowest address of kStackBytes
  Index index;
  int id;  // in the block
  int lane;
  Warp* warp;
  bool is_done;
  // The meeting that the thread waits at or has just left.
  Meeting meeting;
  const char* file;
  int line;
  const void* place;  // the return address, for reports
  // What it brings to the meeting and takes home.
  uint64_t value;
  int argument;
  uint32_t* r;
  const void* row;
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  // Asynchronous copies, and the group that the next one joins.
  std::vector<AsyncCopy> copies;
  uint32_t copy_group;
};

struct Warp {
  Thread* threads;
  int id;
  uint32_t lanes;     // bit i: lane i exists
  uint32_t runnable;  // neither waiting nor done
  uint32_t arrived;   // waiting at a meeting of the warp
  uint32_t time;      // of the last warp_sync() or block_sync()
};

struct Block {
  Index index;
  Dim3 grid, size;
  int num_threads, num_warps;
  int num_waiting;  // at block_sync()
  int num_done;
  uint32_t launch_start, start;
  uint32_t time;  // of the last block_sync()
  bool has_atomic;
  size_t static_bytes, dynamic_bytes;  // of shared memory
  Warp warps[kMaxWarps];
  Thread threads[kMaxThreads];
};

constexpr size_t kStackBytes = 64 * 1024;

extern Block block;
// The running thread; null on the host.
extern thread_local Thread* current __attribute__((tls_model("initial-exec")));

uint32_t next_time();

// Ends the launch with this finding of the running thread.
[[noreturn]] void fail(const void* place, const std::string& finding);

// Meets the other lanes. The last to arrive calls complete(warp); every thread then goes on.
void meet_warp(Meeting meeting, const char* file, int line, const void* place,
               void (*complete)(Warp&));

// memory.cpp

enum class Access { kRead, kWarpRead, kWrite, kAtomic };  // kWarpRead: for all lanes of the warp

// Checks bounds, alignment and order of one access of the running thread and remembers it.
void check_access(const void* address, size_t bytes, size_t alignment, Access access,
                  const void* place);
// An access of the host's part of a .cu file.
void check_host_access(const void* address, size_t bytes);
// 16 bytes of shared memory that a copy will fill, and that it has filled.
void begin_copy(const void* dst, const void* place);
void end_copy(const void* dst);
// Makes what the block has fenced visible to blocks that also use an atomic.
void note_atomic();
void note_block_end();
// Another thread runs now.
void note_progress();
// A launch begins, whose kernel parameters lie in these bytes of the host.
void set_context(const void* context, size_t bytes);

// report.cpp

// "file.cu:12", of the innermost place that is in no header of the emulator.
std::string source_place(const void* address);
std::string function_name(const void* address);
std::string index_text(const Index& index);
uint32_t module_offset(const void* address);
const void* module_address(uint32_t offset);
bool is_in_module(uintptr_t address);

}  // namespace llmserve::cuda::emulated
