// Checks every access to shared and global memory. See memory.h for what counts as a race.
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

namespace llmserve::cuda::emulated {

namespace {

constexpr size_t kStaticBytes = 48 * 1024;
constexpr size_t kSharedBytes = kStaticBytes + 228 * 1024;
constexpr size_t kStaticGap = 16;  // between static arrays, for pointers that leave theirs
// A thread that makes more accesses without meeting another waits for what another block will write.
constexpr uint64_t kMaxAccesses = 20'000'000;

// What a block wrote for others to read: all bytes written before time `before`, and those that its
// thread i wrote up to time own[i].
struct Publication {
  uint32_t start = 0, end = 0;
  uint32_t before = 0;
  std::vector<uint32_t> own;
};

struct StaticArray {
  const void* place;
  size_t offset, bytes;
};

alignas(64) uint8_t the_shared_memory[kSharedBytes];
Cell shared_cells[kSharedBytes];
std::vector<StaticArray> static_arrays;
uint32_t static_arrays_of = 0;  // the start of that block

std::vector<Buffer> buffers;  // by address
size_t last_buffer = 0;
std::map<std::pair<uintptr_t, uintptr_t>, std::unique_ptr<Cell[], decltype(&std::free)>> cells_of;
uintptr_t context_begin = 0, context_end = 0;
std::string host_finding;

Publication fenced, published;
std::vector<Publication> publications;
uint64_t num_accesses = 0;

bool is_published(uint32_t time, int thread) {
  if (!block.has_atomic) return false;
  for (const Publication& other : publications) {
    if (time < other.start || time > other.end) continue;
    return time < other.before || (!other.own.empty() && time <= other.own[thread]);
  }
  return false;
}

std::string thread_text(int id) { return "thread " + index_text(block.threads[id].index); }

const char* verb(Access access) {
  switch (access) {
    case Access::kRead:
    case Access::kWarpRead:
      return "reads ";
    case Access::kWrite:
      return "writes ";
    case Access::kAtomic:
      return "atomically updates ";
  }
  return "";
}

struct Attempt {
  Access access;
  size_t bytes;
  const void* place;
  bool is_shared;
  const Buffer* buffer;

  std::string text() const {
    return verb(access) + std::to_string(bytes) + " bytes of " +
           (is_shared ? "shared memory" : buffer->name);
  }
};

[[noreturn]] void fail_race(const Attempt& attempt, const std::string& who, const char* did,
                            uint32_t place) {
  fail(attempt.place, "race: " + attempt.text() + " that " + who + " " + did + " in " +
                          source_place(module_address(place)) +
                          ", and nothing orders the two");
}

// Whether the earlier access at `time` by `thread` of this block comes before what the running
// thread does now.
bool is_before(uint32_t time, int thread, bool by_any_lane) {
  if (time < block.time) return true;
  if (thread == current->id && !by_any_lane) return true;
  return thread / kWarpSize == current->warp->id && time < current->warp->time;
}

void check_last_write(const Cell& cell, const Attempt& attempt) {
  const int writer = cell.writer & kThreadBits;
  if (cell.write_time < block.start) {
    if (attempt.is_shared || cell.write_time < block.launch_start) return;
    if (attempt.access == Access::kAtomic && (cell.writer & kAtomicWrite)) return;
    if (!is_published(cell.write_time, writer)) {
      fail_race(attempt, "another block", "writes", cell.write_place);
    }
    return;
  }
  if (cell.writer & kUnderWay) {
    fail(attempt.place, attempt.text() + " that the copy of " + thread_text(writer) + " in " +
                            source_place(module_address(cell.write_place)) +
                            " has not filled yet: no copy_wait() in between");
  }
  if (attempt.access == Access::kAtomic && (cell.writer & kAtomicWrite)) return;
  if (!is_before(cell.write_time, writer, attempt.access == Access::kWarpRead)) {
    fail_race(attempt, thread_text(writer), "writes", cell.write_place);
  }
}

void check_last_read(const Cell& cell, const Attempt& attempt) {
  if (cell.read_time < block.start) {
    if (attempt.is_shared || cell.read_time < block.launch_start) return;
    if (cell.reader == kGridReaders ||
        !is_published(cell.read_time, cell.reader & kThreadBits)) {
      fail_race(attempt, "another block", "reads", cell.read_place);
    }
    return;
  }
  if (cell.reader == kGridReaders) fail_race(attempt, "another block", "reads", cell.read_place);
  if (cell.read_time < block.time) return;
  if (cell.reader == kBlockReaders) fail_race(attempt, "other warps", "read", cell.read_place);
  if (cell.reader & kWarpReaders) {
    const int lane = (cell.reader & kThreadBits) * kWarpSize;
    if (!is_before(cell.read_time, lane, true)) {
      fail_race(attempt, "other lanes of the warp", "read", cell.read_place);
    }
  } else if (!is_before(cell.read_time, cell.reader, false)) {
    fail_race(attempt, thread_text(cell.reader), "reads", cell.read_place);
  }
}

void note_read(Cell& cell, const Attempt& attempt, uint32_t place) {
  const uint32_t time = current->warp->time;
  const auto self = static_cast<uint16_t>(current->id);
  const auto warp = static_cast<uint16_t>(kWarpReaders | current->warp->id);
  if (!attempt.is_shared && cell.read_time >= block.launch_start) {
    if (cell.reader == kGridReaders) return;
    if (cell.read_time < block.start) {  // an earlier block has read it as well
      cell.reader = kGridReaders;
      return;
    }
  }
  const uint16_t alone = attempt.access == Access::kWarpRead ? warp : self;
  uint16_t reader = alone;
  if (cell.read_time >= block.time && cell.reader != self) {
    const int other = cell.reader & kWarpReaders ? cell.reader & kThreadBits
                                                 : (cell.reader & kThreadBits) / kWarpSize;
    if (cell.reader == kBlockReaders || other != current->warp->id) {
      reader = kBlockReaders;
    } else if (cell.read_time >= time) {
      reader = warp;
    }
  }
  cell.reader = reader;
  cell.read_time = time;
  cell.read_place = place;
}

// One byte after the other, as the bytes of an access can have different histories.
void visit(Cell* cells, const Attempt& attempt) {
  const uint32_t place = module_offset(attempt.place);
  for (size_t i = 0; i < attempt.bytes; ++i) {
    Cell& cell = cells[i];
    check_last_write(cell, attempt);
    if (attempt.access == Access::kRead || attempt.access == Access::kWarpRead) {
      if (attempt.is_shared && cell.write_time < block.start) {
        fail(attempt.place, attempt.text() + " that nothing has written in this block");
      }
      note_read(cell, attempt, place);
      continue;
    }
    check_last_read(cell, attempt);
    if (attempt.is_shared && attempt.access == Access::kAtomic && cell.write_time < block.start) {
      fail(attempt.place, attempt.text() + " that nothing has written in this block");
    }
    cell.writer = static_cast<uint16_t>(current->id |
                                        (attempt.access == Access::kAtomic ? kAtomicWrite : 0));
    cell.write_time = current->warp->time;
    cell.write_place = place;
  }
}

bool is_shared_range(size_t offset, size_t bytes) {
  if (offset >= kStaticBytes) return offset - kStaticBytes + bytes <= block.dynamic_bytes;
  return std::any_of(static_arrays.begin(), static_arrays.end(), [&](const StaticArray& array) {
    return offset >= array.offset && offset + bytes <= array.offset + array.bytes;
  });
}

const Buffer* find_buffer(uintptr_t address) {
  if (last_buffer < buffers.size() && address >= buffers[last_buffer].begin &&
      address < buffers[last_buffer].end) {
    return &buffers[last_buffer];
  }
  const auto next = std::upper_bound(
      buffers.begin(), buffers.end(), address,
      [](uintptr_t value, const Buffer& buffer) { return value < buffer.begin; });
  if (next == buffers.begin() || address >= (next - 1)->end) return nullptr;
  last_buffer = static_cast<size_t>(next - 1 - buffers.begin());
  return &buffers[last_buffer];
}

std::string nearest_buffer(uintptr_t address) {
  const Buffer* nearest = nullptr;
  uintptr_t least = 1 << 20;
  for (const Buffer& buffer : buffers) {
    const uintptr_t distance =
        address < buffer.begin ? buffer.begin - address : address + 1 - buffer.end;
    if (distance < least) {
      least = distance;
      nearest = &buffer;
    }
  }
  if (nearest == nullptr) return "at an address far from all tensors of the call";
  if (address < nearest->begin) return std::to_string(least) + " bytes before " + nearest->name;
  if (least == 1) return "right after the end of " + nearest->name;
  return std::to_string(least - 1) + " bytes after the end of " + nearest->name;
}

void check_global(uintptr_t address, size_t bytes, Access access, const void* place) {
  const Buffer* const buffer = find_buffer(address);
  if (buffer == nullptr) {
    if (access == Access::kRead) {
      if (address >= context_begin && address + bytes <= context_end) return;
      if (is_in_module(address)) return;  // constants
    }
    fail(place, std::string("out of bounds: ") + verb(access) + std::to_string(bytes) +
                    " bytes " + nearest_buffer(address));
  }
  if (address + bytes > buffer->end) {
    fail(place, std::string("out of bounds: ") + verb(access) + std::to_string(bytes) +
                    " bytes, of which " + std::to_string(address + bytes - buffer->end) +
                    " are after the end of " + buffer->name);
  }
  const size_t offset = address - buffer->begin;
  if (buffer->mask != nullptr) {
    for (size_t i = 0; i < bytes; ++i) {
      if (buffer->mask[offset + i] == 0) {
        fail(place, std::string("out of bounds: ") + verb(access) + std::to_string(bytes) +
                        " bytes between the elements of " + buffer->name);
      }
    }
  }
  visit(buffer->cells + offset, {access, bytes, place, false, buffer});
}

void begin_launch() {
  num_accesses = 0;
  publications.clear();
  fenced = published = Publication();
}

}  // namespace

void check_access(const void* address, size_t bytes, size_t alignment, Access access,
                  const void* place) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (at - current->stack < kStackBytes) return;
  if (at % alignment != 0) {
    fail(place, std::string("misaligned: ") + verb(access) + std::to_string(bytes) +
                    " bytes at an address that is no multiple of " + std::to_string(alignment));
  }
  if (++num_accesses > kMaxAccesses) fail(place, "the thread does not end");
  const size_t offset = at - reinterpret_cast<uintptr_t>(the_shared_memory);
  if (offset >= kSharedBytes) {
    check_global(at, bytes, access, place);
    return;
  }
  const Attempt attempt{access, bytes, place, true, nullptr};
  if (!is_shared_range(offset, bytes)) {
    fail(place, "out of bounds: " + attempt.text() + " outside of its arrays");
  }
  visit(shared_cells + offset, attempt);
}

void check_host_access(const void* address, size_t bytes) {
  if (buffers.empty() || !host_finding.empty()) return;
  const Buffer* const buffer = find_buffer(reinterpret_cast<uintptr_t>(address));
  if (buffer == nullptr) return;
  host_finding = "host code of a launcher touches " + std::to_string(bytes) + " bytes of " +
                 buffer->name + ", which is device memory";
}

void begin_copy(const void* dst, const void* place) {
  check_access(dst, 16, 16, Access::kWrite, place);
  Cell* const cells = shared_cells + (static_cast<const uint8_t*>(dst) - the_shared_memory);
  for (int i = 0; i < 16; ++i) cells[i].writer |= kUnderWay;
}

void end_copy(const void* dst) {
  Cell* const cells = shared_cells + (static_cast<const uint8_t*>(dst) - the_shared_memory);
  for (int i = 0; i < 16; ++i) {
    cells[i].writer = static_cast<uint16_t>(current->id);
    cells[i].write_time = current->warp->time;
  }
}

void thread_fence() {
  fenced.before = max(fenced.before, current->warp->time);
  fenced.own.resize(static_cast<size_t>(kMaxThreads));
  fenced.own[current->id] = current->warp->time;
}

void note_atomic() {
  block.has_atomic = true;
  published = fenced;
}

void note_block_end() {
  if (published.before != 0) {
    published.start = block.start;
    published.end = next_time();
    publications.push_back(published);
  }
  fenced = published = Publication();
  num_accesses = 0;
}

void note_progress() { num_accesses = 0; }

void set_context(const void* context, size_t bytes) {
  context_begin = reinterpret_cast<uintptr_t>(context);
  context_end = context_begin + bytes;
  begin_launch();
}

void* static_shared_bytes(size_t bytes, const void* place) {
  if (static_arrays_of != block.start) {
    static_arrays_of = block.start;
    static_arrays.clear();
  }
  for (const StaticArray& array : static_arrays) {
    if (array.place == place) return the_shared_memory + array.offset;
  }
  const size_t offset = block.static_bytes;
  block.static_bytes += (bytes + 15) / 16 * 16 + kStaticGap;
  if (block.static_bytes > kStaticBytes) {
    fail(__builtin_return_address(0), "more than 48 KB of static shared memory");
  }
  static_arrays.push_back({place, offset, bytes});
  return the_shared_memory + offset;
}

void* dynamic_shared_bytes(size_t offset, size_t bytes) {
  if (offset + bytes > block.dynamic_bytes) {
    fail(__builtin_return_address(0),
         "takes " + std::to_string(offset + bytes) + " bytes of dynamic shared memory, but the " +
             "launch gave " + std::to_string(block.dynamic_bytes));
  }
  return the_shared_memory + kStaticBytes + offset;
}

void outside_shared(int64_t index, int64_t count) {
  fail(__builtin_return_address(0), "out of bounds: element " + std::to_string(index) +
                                        " of an array of " + std::to_string(count) +
                                        " in shared memory");
}

void set_buffers(std::vector<Buffer> next) {
  std::sort(next.begin(), next.end(),
            [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
  decltype(cells_of) kept;
  for (Buffer& buffer : next) {
    const std::pair<uintptr_t, uintptr_t> range(buffer.begin, buffer.end);
    auto found = cells_of.find(range);
    if (found == cells_of.end()) {
      auto* const cells =
          static_cast<Cell*>(std::calloc(buffer.end - buffer.begin, sizeof(Cell)));
      found = cells_of.emplace(range, decltype(kept)::mapped_type(cells, &std::free)).first;
    }
    buffer.cells = found->second.get();
    kept.insert(cells_of.extract(found));
  }
  cells_of = std::move(kept);
  buffers = std::move(next);
  last_buffer = 0;
}

std::string take_host_finding() { return std::exchange(host_finding, {}); }

}  // namespace llmserve::cuda::emulated
