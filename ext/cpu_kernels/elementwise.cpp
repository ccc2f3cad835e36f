// Divides rows and elements among threads.
#include "llmserve/elementwise.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "llmserve/instruction_set.h"
#include "llmserve/parallel.h"

namespace llmserve {
namespace {

constexpr int64_t kValuesPerTask = 1 << 14;
constexpr int64_t kMathValuesPerTask = 1 << 12;  // where each value takes an exp

const ElementwiseKernels& elementwise_kernels() {
#if defined(__x86_64__)
  if (get_instruction_set() >= InstructionSet::kAvx2) return elementwise_kernels_avx2();
#endif
  return elementwise_kernels_portable();
}

int64_t rows_per_task(int64_t row_size) {
  return 1 + kValuesPerTask / std::max<int64_t>(1, row_size);
}

int64_t position_of(const RotaryArgs& args, int64_t token) {
  if (args.is_position_int64) return static_cast<const int64_t*>(args.positions)[token];
  return static_cast<const int32_t*>(args.positions)[token];
}

}  // namespace

void rms_norm(const RMSNormArgs& args) {
  const ElementwiseKernels& kernels = elementwise_kernels();
  const int64_t grain = rows_per_task(args.num_heads * args.size);
  parallel_for(args.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < args.num_heads; ++head) {
        float* residual = args.residual.data ? args.residual.row(token, head) : nullptr;
        kernels.rms_norm_row(args, args.x.row(token, head), residual, args.out.row(token, head));
      }
    }
  });
}

void rotary(const RotaryArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t position = position_of(args, token);
    if (position >= 0 && position < args.max_positions) continue;
    throw std::out_of_range("position " + std::to_string(position) + " of token " +
                            std::to_string(token) + " is outside the tables of " +
                            std::to_string(args.max_positions));
  }
  const ElementwiseKernels& kernels = elementwise_kernels();
  const auto rotate_heads = [&](const RowsView& x, int64_t num_heads, int64_t token) {
    const int64_t row = position_of(args, token) * args.half_dim;
    for (int64_t head = 0; head < num_heads; ++head) {
      kernels.rotate(x.row(token, head), args.cos + row, args.sin + row, args.half_dim,
                     args.is_interleaved);
    }
  };
  const int64_t grain = rows_per_task((args.num_q_heads + args.num_k_heads) * 2 * args.half_dim);
  parallel_for(args.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      rotate_heads(args.q, args.num_q_heads, token);
      rotate_heads(args.k, args.num_k_heads, token);
    }
  });
}

void act_mul(const float* gate_up, int64_t token_stride, Activation activation, float* out,
             int64_t num_tokens, int64_t size) {
  const ElementwiseKernels& kernels = elementwise_kernels();
  const int64_t tasks_per_token = (size + kMathValuesPerTask - 1) / kMathValuesPerTask;
  const int64_t grain = 1 + kMathValuesPerTask / std::max<int64_t>(1, size);
  parallel_for(num_tokens * tasks_per_token, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / tasks_per_token;
      const int64_t first = i % tasks_per_token * kMathValuesPerTask;
      const float* gate = gate_up + token * token_stride + first;
      kernels.act_mul(gate, gate + size, activation, out + token * size + first,
                      std::min(kMathValuesPerTask, size - first));
    }
  });
}

void softcap(float* x, int64_t count, float cap) {
  const ElementwiseKernels& kernels = elementwise_kernels();
  parallel_for(count, kMathValuesPerTask, [&](int64_t begin, int64_t end) {
    kernels.softcap(x + begin, end - begin, cap);
  });
}

}  // namespace llmserve
