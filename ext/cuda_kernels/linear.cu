// Chooses the kernels of each format. Parts of one format share a launch.
#include "llmserve/cuda/linear.h"

#include <stdexcept>
#include <string>

#include "llmserve/cuda/linear_rows.h"

namespace llmserve::cuda {
namespace {

[[noreturn]] void refuse(Format format) {
  throw std::invalid_argument("unknown storage format " +
                              std::to_string(static_cast<int64_t>(format)));
}

void check_float(Format type) {
  if (type != Format::F32 && type != Format::F16 && type != Format::BF16) refuse(type);
}

// Calls `use` with a value of the struct of a quantised format.
template <class Use>
void with_format(Format format, Use use) {
  switch (format) {
    case Format::Q4_0:
      return use(Q4_0());
    case Format::Q4_1:
      return use(Q4_1());
    case Format::Q5_0:
      return use(Q5_0());
    case Format::Q5_1:
      return use(Q5_1());
    case Format::Q8_0:
      return use(Q8_0());
    case Format::Q2_K:
      return use(Q2_K());
    case Format::Q3_K:
      return use(Q3_K());
    case Format::Q4_K:
      return use(Q4_K());
    case Format::Q5_K:
      return use(Q5_K());
    case Format::Q6_K:
      return use(Q6_K());
    case Format::INT4_ROW:
      return use(INT4_ROW());
    case Format::INT4_32:
      return use(INT4_32());
    case Format::INT8_ROW:
      return use(INT8_ROW());
    case Format::FP8_ROW:
      return use(FP8_ROW());
    default:
      refuse(format);
  }
}

void launch_format(Format format, const LinearArgs& args, Format x_type, Stream stream) {
  switch (format) {
    case Format::F32:
      return launch_float_linear<float>(args, x_type, stream);
    case Format::F16:
      return launch_float_linear<half>(args, x_type, stream);
    case Format::BF16:
      return launch_float_linear<bfloat16>(args, x_type, stream);
    default:
      with_format(format, [&](auto f) { launch_linear<decltype(f)>(args, x_type, stream); });
  }
}

KernelPart kernel_part(const LinearPart& part, int64_t first_tile, int64_t out_column) {
  return {part.low,      part.high,  part.scales, part.super_scales,         part.bias,
          part.num_rows, first_tile, out_column,  static_cast<int>(part.scales_per_chunk)};
}

}  // namespace

void linear(const LinearPart* parts, int64_t num_parts, const void* x, Format x_type, void* out,
            Format out_type, int64_t num_tokens, int64_t num_cols, Stream stream) {
  check_float(x_type);
  check_float(out_type);
  LinearArgs args = {{}, 0, x, out, out_type, num_tokens, num_cols, 0};
  for (int64_t i = 0; i < num_parts; ++i) args.out_stride += parts[i].num_rows;
  if (num_tokens == 0 || args.out_stride == 0) return;
  uint64_t is_done = 0;
  for (int64_t first = 0; first < num_parts; ++first) {
    if (is_done >> first & 1) continue;
    args.num_parts = 0;
    int64_t out_column = 0;
    for (int64_t i = 0; i < num_parts; out_column += parts[i].num_rows, ++i) {
      const bool fits = parts[i].format == parts[first].format && args.num_parts < kMaxParts;
      if (!fits || (is_done >> i & 1)) continue;
      is_done |= uint64_t{1} << i;
      if (parts[i].num_rows == 0) continue;
      const int64_t first_tile = args.num_parts == 0 ? 0 : num_tiles(args);
      args.parts[args.num_parts++] = kernel_part(parts[i], first_tile, out_column);
    }
    if (args.num_parts > 0) launch_format(parts[first].format, args, x_type, stream);
  }
}

void dequantize(const LinearPart& weight, const int64_t* row_ids, int64_t first_row, void* out,
                Format out_type, int64_t num_rows, int64_t num_cols, Stream stream) {
  check_float(out_type);
  const DecodeArgs args = {kernel_part(weight, 0, 0), row_ids, first_row, out, out_type,
                           num_rows, num_cols};
  with_format(weight.format, [&](auto f) { launch_decode<decltype(f)>(args, stream); });
}

}  // namespace llmserve::cuda
