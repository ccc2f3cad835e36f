// What the lanes of a warp do together, atomics, wide accesses and asynchronous copies.
#include "state.h"

namespace llmserve::cuda::emulated {

namespace {

void require_whole_warp(const void* place, const char* name) {
  if (current->warp->lanes != ~0u) fail(place, std::string(name) + " in a warp of fewer lanes");
}

uint32_t shuffled_lane(Shuffle kind, int lane, int argument) {
  switch (kind) {
    case Shuffle::kXor:
      return static_cast<uint32_t>(lane ^ argument);
    case Shuffle::kIndex:
      return static_cast<uint32_t>(argument) % kWarpSize;
    case Shuffle::kDown:
      return static_cast<uint32_t>(lane + argument < kWarpSize ? lane + argument : lane);
    case Shuffle::kUp:
      return static_cast<uint32_t>(lane >= argument ? lane - argument : lane);
  }
  return 0;
}

template <Shuffle kKind>
void complete_shuffle(Warp& warp) {
  uint64_t values[kWarpSize];
  for (uint32_t left = warp.lanes; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    values[lane] = warp.threads[lane].value;
  }
  for (uint32_t left = warp.lanes; left != 0; left &= left - 1) {
    Thread& thread = warp.threads[__builtin_ctz(left)];
    const uint32_t source = shuffled_lane(kKind, thread.lane, thread.argument);
    if (source >= kWarpSize || (warp.lanes >> source & 1) == 0) {
      fail(current->place, "a shuffle reads lane " + std::to_string(source) +
                               ", which does not exist");
    }
    thread.value = values[source];
  }
}

void complete_ballot(Warp& warp) {
  uint32_t votes = 0;
  for (uint32_t left = warp.lanes; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    votes |= static_cast<uint32_t>(warp.threads[lane].value) << lane;
  }
  for (uint32_t left = warp.lanes; left != 0; left &= left - 1) {
    warp.threads[__builtin_ctz(left)].value = votes;
  }
}

// Matrix m has the rows of lanes 8m to 8m + 7. Lane l gets elements 2(l % 4) and the next of row l / 4,
// or of column l / 4 when transposed.
void complete_load_matrix(Warp& warp) {
  uint16_t rows[kWarpSize][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    std::memcpy(rows[lane], warp.threads[lane].row, sizeof rows[lane]);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int major = lane / 4, minor = lane % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const bool transposed = warp.threads[lane].argument != 0;
      const uint16_t(*const matrix)[8] = rows + 8 * m;
      const uint32_t low = transposed ? matrix[minor][major] : matrix[major][minor];
      const uint32_t high = transposed ? matrix[minor + 1][major] : matrix[major][minor + 1];
      warp.threads[lane].r[m] = low | high << 16;
    }
  }
}

// Products of 16-bit floats are exact in double, and their sum is rounded once. The hardware keeps
// fewer bits while it adds, in an order of its own: results agree to about 2^-20 of the largest term.
template <typename T>
void complete_mma(Warp& warp) {
  constexpr int kM = 16, kN = 8, kK = 16;
  double a[kM][kK], b[kK][kN], sums[kM][kN] = {};
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const Thread& thread = warp.threads[lane];
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack_pair<T>(thread.a[i], low, high);
      a[g + i % 2 * 8][t + i / 2 * 8] = low;
      a[g + i % 2 * 8][t + i / 2 * 8 + 1] = high;
    }
    for (int i = 0; i < 2; ++i) {
      float low, high;
      unpack_pair<T>(thread.b[i], low, high);
      b[t + i * 8][g] = low;
      b[t + i * 8 + 1][g] = high;
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < kN; ++n) sums[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const Thread& thread = warp.threads[lane];
    for (int i = 0; i < 4; ++i) {
      const double sum = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
      thread.d[i] = static_cast<float>(thread.d[i] + sum);
    }
  }
}

void complete_warp_sync(Warp& warp) { warp.time = next_time(); }

template <typename T, typename Update>
T update_atomically(T* address, const void* place, Update update) {
  check_access(address, sizeof(T), sizeof(T), Access::kAtomic, place);
  note_atomic();
  const T old = *address;
  *address = update(old);
  return old;
}

}  // namespace

void warp_sync(const char* file, int line) {
  meet_warp(Meeting::kWarpSync, file, line, __builtin_return_address(0), complete_warp_sync);
}

uint64_t shuffle(Shuffle kind, uint64_t value, int argument, const char* file, int line) {
  void (*complete)(Warp&) = nullptr;
  switch (kind) {
    case Shuffle::kXor:
      complete = complete_shuffle<Shuffle::kXor>;
      break;
    case Shuffle::kIndex:
      complete = complete_shuffle<Shuffle::kIndex>;
      break;
    case Shuffle::kDown:
      complete = complete_shuffle<Shuffle::kDown>;
      break;
    case Shuffle::kUp:
      complete = complete_shuffle<Shuffle::kUp>;
      break;
  }
  current->value = value;
  current->argument = argument;
  meet_warp(Meeting::kShuffle, file, line, __builtin_return_address(0), complete);
  return current->value;
}

uint32_t ballot(bool predicate, const char* file, int line) {
  current->value = predicate;
  meet_warp(Meeting::kVote, file, line, __builtin_return_address(0), complete_ballot);
  return static_cast<uint32_t>(current->value);
}

void load_matrix(uint32_t* r, const void* row, bool transposed, const char* file, int line) {
  const void* const place = __builtin_return_address(0);
  require_whole_warp(place, "load_matrix");
  check_access(row, 16, 16, Access::kWarpRead, place);
  current->r = r;
  current->row = row;
  current->argument = transposed;
  meet_warp(Meeting::kLoadMatrix, file, line, place, complete_load_matrix);
}

void mma(bool is_half, float* d, const uint32_t* a, const uint32_t* b, const char* file, int line) {
  const void* const place = __builtin_return_address(0);
  require_whole_warp(place, "mma");
  current->d = d;
  current->a = a;
  current->b = b;
  meet_warp(Meeting::kMma, file, line, place, is_half ? complete_mma<half> : complete_mma<bfloat16>);
}

Vec16 load16(const void* address) {
  check_access(address, 16, 16, Access::kRead, __builtin_return_address(0));
  return *static_cast<const Vec16*>(address);
}

void store16(void* address, const Vec16& v) {
  check_access(address, 16, 16, Access::kWrite, __builtin_return_address(0));
  *static_cast<Vec16*>(address) = v;
}

void copy_async16(void* dst, const void* src, bool valid) {
  const void* const place = __builtin_return_address(0);
  AsyncCopy copy{static_cast<uint8_t*>(dst), {}, current->copy_group};
  if (valid) {
    check_access(src, 16, 16, Access::kRead, place);
    std::memcpy(copy.bytes, src, sizeof copy.bytes);
  }
  begin_copy(dst, place);
  current->copies.push_back(copy);
}

void copy_commit() { ++current->copy_group; }

void copy_wait(int num_pending) {
  std::vector<AsyncCopy>& copies = current->copies;
  size_t num_done = 0;
  for (; num_done < copies.size(); ++num_done) {
    const AsyncCopy& copy = copies[num_done];
    if (copy.group + static_cast<uint32_t>(num_pending) >= current->copy_group) break;
    std::memcpy(copy.dst, copy.bytes, sizeof copy.bytes);
    end_copy(copy.dst);
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(num_done));
}

}  // namespace llmserve::cuda::emulated

namespace llmserve::cuda {

using emulated::update_atomically;

int atomic_add(int* address, int value) {
  return update_atomically(address, __builtin_return_address(0), [&](int old) {
    return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value));
  });
}

unsigned atomic_add(unsigned* address, unsigned value) {
  return update_atomically(address, __builtin_return_address(0),
                           [&](unsigned old) { return old + value; });
}

int64_t atomic_add(int64_t* address, int64_t value) {
  return update_atomically(address, __builtin_return_address(0), [&](int64_t old) {
    return static_cast<int64_t>(static_cast<uint64_t>(old) + static_cast<uint64_t>(value));
  });
}

float atomic_add(float* address, float value) {
  return update_atomically(address, __builtin_return_address(0),
                           [&](float old) { return old + value; });
}

int atomic_max(int* address, int value) {
  return update_atomically(address, __builtin_return_address(0),
                           [&](int old) { return max(old, value); });
}

int atomic_min(int* address, int value) {
  return update_atomically(address, __builtin_return_address(0),
                           [&](int old) { return min(old, value); });
}

}  // namespace llmserve::cuda
