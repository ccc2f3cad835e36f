// What is known of each byte of memory: who wrote it last and who read it last.
//
// Two accesses of one byte, one of them a write, must be ordered: by their thread's own order, by a
// block_sync(), within a warp by a warp_sync(), by the order of launches, or between blocks by a fence
// and an atomic. Everything else is a race, whether or not this run gave a wrong result.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "state.h"

namespace llmserve::cuda::emulated {

// Fields of 0 are older than any launch. Places are offsets in the module.
struct Cell {
  uint32_t write_time, read_time;
  uint32_t write_place, read_place;
  uint16_t writer;  // thread id | flags
  uint16_t reader;  // thread id, or a group
};

constexpr uint16_t kThreadBits = 0x3ff;
constexpr uint16_t kAtomicWrite = 0x4000;
constexpr uint16_t kUnderWay = 0x8000;     // an asynchronous copy will write
constexpr uint16_t kWarpReaders = 0x4000;  // | warp id: several lanes of it
constexpr uint16_t kBlockReaders = 0x8000;
constexpr uint16_t kGridReaders = 0x8001;  // several blocks

// Memory that a launch may touch: the bytes of a tensor. `mask` has one byte per byte of memory, zero
// where the tensor has none (between its rows, say); null: all bytes are the tensor's.
struct Buffer {
  uintptr_t begin, end;
  const uint8_t* mask;
  std::string name;
  Cell* cells;
};

// Buffers for the launches to come, in any order. They must not overlap.
void set_buffers(std::vector<Buffer> buffers);

// What the host's part of a .cu file did wrong since the last call; empty if nothing.
std::string take_host_finding();

}  // namespace llmserve::cuda::emulated
