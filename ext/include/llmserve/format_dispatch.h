// From the number of a storage type to its struct.
#pragma once

#include "llmserve/float_formats.h"
#include "llmserve/ggml_formats.h"

namespace llmserve {
namespace {

// Calls f.quantized<Format>() or f.floating<Format>() for the number of a ggml type, with or
// without the flags of linear.h.
template <typename F>
LLMSERVE_INLINE void dispatch(int type, F f) {
  switch (type & kTypeMask) {
    case 0:
      return f.template floating<Float32>();
    case 1:
      return f.template floating<Float16>();
    case 30:
      return f.template floating<BFloat16>();
    case 2:
      return f.template quantized<Q4_0>();
    case 3:
      return f.template quantized<Q4_1>();
    case 6:
      return f.template quantized<Q5_0>();
    case 7:
      return f.template quantized<Q5_1>();
    case 8:
      return f.template quantized<Q8_0>();
    case 10:
      return f.template quantized<Q2_K>();
    case 11:
      return f.template quantized<Q3_K>();
    case 12:
      return f.template quantized<Q4_K>();
    case 13:
      return f.template quantized<Q5_K>();
    case 14:
      return f.template quantized<Q6_K>();
  }
}

}  // namespace
}  // namespace llmserve
