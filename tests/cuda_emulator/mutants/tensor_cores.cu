// Mutants of asynchronous copies and matrix instructions.
#include "llmserve/cuda/device.h"
#include "mutants.h"

namespace llmserve::mutants {

using namespace llmserve::cuda;

namespace {

constexpr int kThreads = 64;
constexpr int kTile = 8 * kThreads;

enum class Fault { kNone, kNoWait, kNoCommit, kOlder, kNoBarrier, kReaders, kAlignment };

// Copies two tiles of 512 elements through shared memory; each thread stores what its neighbour
// loaded.
template <Fault kFault>
__global__ void copy_kernel(const half* x, half* out, int) {
  LLMSERVE_SHARED(half, tiles, 2 * kTile + 8);
  const int i = 8 * static_cast<int>(threadIdx.x);
  const int shift = kFault == Fault::kAlignment ? 1 : 0;
  for (int t = 0; t < 2; ++t) {
    copy_async16(tiles + t * kTile + i + shift, x + t * kTile + i, true);
    if (kFault != Fault::kNoCommit || t == 0) copy_commit();
  }
  for (int t = 0; t < 2; ++t) {
    if (kFault != Fault::kNoWait) {
      if (t == 0 || kFault == Fault::kOlder) {
        copy_wait<1>();
      } else {
        copy_wait<0>();
      }
    }
    if (kFault != Fault::kNoBarrier) block_sync();
    store16(out + t * kTile + (i ^ 8), tiles.load16(t * kTile + (i ^ 8)));
    if (t == 0 && kFault == Fault::kReaders) {
      copy_async16(tiles + i, x + i, true);
      copy_commit();
    }
  }
}

// out[16 x 8] (float) = a[16 x 16] * b[16 x 8]; x holds a, then b by rows of 16 (padded).
template <bool kNoSync, bool kSwapped>
__global__ void matrix_kernel(const half* x, float* out, int) {
  LLMSERVE_SHARED(half, tiles, 512);
  const int lane = lane_id();
  tiles.store16(8 * lane, load16(x + 8 * lane));
  tiles.store16(256 + 8 * lane, load16(x + 256 + 8 * lane));
  if (!kNoSync) warp_sync();
  uint32_t a[4], b[4];
  load_matrix_x4(a, tiles + (lane % 16 * 16 + lane / 16 * 8));
  load_matrix_x4_trans(b, tiles + (256 + lane % 16 * 16 + lane / 16 * 8));
  if (kSwapped) {
    const uint32_t kept = a[1];
    a[1] = a[2];
    a[2] = kept;
  }
  float d[4] = {};
  mma_16816<half>(d, a, {b[0], b[1]});
  const int row = lane / 4, column = lane % 4 * 2;
  out[row * 8 + column] = d[0];
  out[row * 8 + column + 1] = d[1];
  out[(row + 8) * 8 + column] = d[2];
  out[(row + 8) * 8 + column + 1] = d[3];
}

template <Fault kFault>
void run_copy(bool broken, void* out, const void* x, int n) {
  launch(broken ? copy_kernel<kFault> : copy_kernel<Fault::kNone>, 1, kThreads, 0, nullptr,
         static_cast<const half*>(x), static_cast<half*>(out), n);
}

template <bool kNoSync, bool kSwapped>
void run_matrix(bool broken, void* out, const void* x, int n) {
  launch(broken ? matrix_kernel<kNoSync, kSwapped> : matrix_kernel<false, false>, 1, kWarpSize, 0,
         nullptr, static_cast<const half*>(x), static_cast<float*>(out), n);
}

}  // namespace

void copy_without_wait(bool broken, void* out, const void* x, int n) {
  run_copy<Fault::kNoWait>(broken, out, x, n);
}

void copy_without_commit(bool broken, void* out, const void* x, int n) {
  run_copy<Fault::kNoCommit>(broken, out, x, n);
}

void copy_wait_for_older(bool broken, void* out, const void* x, int n) {
  run_copy<Fault::kOlder>(broken, out, x, n);
}

void copy_without_barrier(bool broken, void* out, const void* x, int n) {
  run_copy<Fault::kNoBarrier>(broken, out, x, n);
}

void copy_over_readers(bool broken, void* out, const void* x, int n) {
  run_copy<Fault::kReaders>(broken, out, x, n);
}

void copy_misaligned(bool broken, void* out, const void* x, int n) {
  run_copy<Fault::kAlignment>(broken, out, x, n);
}

void matrix_without_sync(bool broken, void* out, const void* x, int n) {
  run_matrix<true, false>(broken, out, x, n);
}

void swapped_fragments(bool broken, void* out, const void* x, int n) {
  run_matrix<false, true>(broken, out, x, n);
}

}  // namespace llmserve::mutants
