// Rows, blocks and tokens from one place to another, as they are.
#include "llmserve/cuda/elementwise.h"
#include "llmserve/cuda/row_values.h"

namespace llmserve::cuda {
namespace {

constexpr int kNumThreads = 256;
constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kUnit = sizeof(Vec16);  // bytes

unsigned num_blocks_for(int64_t count) {
  return static_cast<unsigned>(ceil_div<int64_t>(count, kNumThreads));
}

// Copies bytes begin .. begin + kUnit of a run, as far as it goes; zeros without a source.
LLMSERVE_DEVICE void copy_unit(const uint8_t* source, uint8_t* target, int64_t begin, int64_t end,
                               bool is_vectorized) {
  if (is_vectorized) {
    store16(target + begin, source == nullptr ? Vec16{} : load16_streaming(source + begin));
    return;
  }
  const int64_t stop = min(begin + kUnit, end);
  for (int64_t i = begin; i < stop; ++i) target[i] = source == nullptr ? uint8_t{0} : source[i];
}

__global__ void __launch_bounds__(kNumThreads)
    gather_rows_kernel(const uint8_t* x, const int64_t row_stride_bytes, const int64_t row_bytes,
                       const int64_t* row_ids, const int64_t num_rows, uint8_t* out,
                       const bool is_vectorized) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kUnit;
  if (begin >= row_bytes) return;
  for (int64_t i = blockIdx.y; i < num_rows; i += gridDim.y) {
    const int64_t row = row_ids[i];
    copy_unit(row < 0 ? nullptr : x + row * row_stride_bytes, out + i * row_bytes, begin,
              row_bytes, is_vectorized);
  }
}

__global__ void __launch_bounds__(kNumThreads)
    copy_blocks_kernel(const uint64_t* caches, const int64_t num_caches,
                       const int64_t block_stride_bytes, const int64_t block_bytes,
                       const int64_t* pairs, const int64_t num_pairs, const bool is_vectorized) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kUnit;
  if (begin >= block_bytes) return;
  for (int64_t i = blockIdx.y; i < num_caches * num_pairs; i += gridDim.y) {
    uint8_t* const cache = reinterpret_cast<uint8_t*>(caches[i / num_pairs]);
    const int64_t* const pair = pairs + i % num_pairs * 2;
    copy_unit(cache + pair[0] * block_stride_bytes, cache + pair[1] * block_stride_bytes, begin,
              block_bytes, is_vectorized);
  }
}

__global__ void __launch_bounds__(kNumThreads)
    feed_tokens_kernel(int64_t* input_ids, const int32_t* source_rows, const int32_t* last_tokens,
                       const int64_t num_tokens) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_tokens || source_rows[i] < 0) return;
  input_ids[i] = last_tokens[source_rows[i]];
}

}  // namespace

void gather_rows(const void* x, int64_t row_stride_bytes, int64_t row_bytes,
                 const int64_t* row_ids, int64_t num_rows, void* out, Stream stream) {
  const bool is_vectorized = is_aligned(x) && is_aligned(out) && row_bytes % kUnit == 0 &&
                             row_stride_bytes % kUnit == 0;
  launch(gather_rows_kernel,
         Dim3(num_blocks_for(ceil_div(row_bytes, kUnit)),
              static_cast<unsigned>(min(num_rows, kMaxGridY))),
         Dim3(kNumThreads), 0, stream, static_cast<const uint8_t*>(x), row_stride_bytes, row_bytes,
         row_ids, num_rows, static_cast<uint8_t*>(out), is_vectorized);
}

void copy_blocks(const uint64_t* caches, int64_t num_caches, int64_t block_stride_bytes,
                 int64_t block_bytes, const int64_t* pairs, int64_t num_pairs, bool is_vectorized,
                 Stream stream) {
  launch(copy_blocks_kernel,
         Dim3(num_blocks_for(ceil_div(block_bytes, kUnit)),
              static_cast<unsigned>(min(num_caches * num_pairs, kMaxGridY))),
         Dim3(kNumThreads), 0, stream, caches, num_caches, block_stride_bytes, block_bytes, pairs,
         num_pairs, is_vectorized);
}

void feed_tokens(int64_t* input_ids, const int32_t* source_rows, const int32_t* last_tokens,
                 int64_t num_tokens, Stream stream) {
  launch(feed_tokens_kernel, Dim3(num_blocks_for(num_tokens)), Dim3(kNumThreads), 0, stream,
         input_ids, source_rows, last_tokens, num_tokens);
}

}  // namespace llmserve::cuda
