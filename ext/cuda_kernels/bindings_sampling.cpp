// Python bindings of the sampling kernels. llmserve/kernels/cuda/sampling.py checks. Pointers and
// streams come as addresses, 0 for absent ones.
#include <pybind11/pybind11.h>

#include "llmserve/cuda/sampling.h"

namespace py = pybind11;
namespace cuda = llmserve::cuda;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

cuda::Masks masks(uintptr_t words, int64_t num_words, uintptr_t ids) {
  return {pointer<const uint32_t>(words), num_words, pointer<const int32_t>(ids)};
}

}  // namespace

void bind_sampling(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using py::arg;
  m.attr("max_vocab_size") = cuda::kMaxVocabSize;
  m.attr("max_top_logprobs") = cuda::kMaxTopLogprobs;
  m.attr("draw_stage") = static_cast<int>(cuda::kDrawStage);
  m.attr("top_k_stage") = static_cast<int>(cuda::kTopKStage);
  m.attr("top_p_stage") = static_cast<int>(cuda::kTopPStage);
  m.def("sampling_workspace_bytes", &cuda::sampling_workspace_bytes, arg("num_rows"),
        arg("vocab_size"));
  m.def("logprob_workspace_bytes", &cuda::logprob_workspace_bytes, arg("num_rows"),
        arg("vocab_size"), arg("top_k"));
  m.def(
      "sample_rows",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
         uintptr_t mask_words, int64_t num_mask_words, uintptr_t mask_ids, uintptr_t params,
         int stages, uintptr_t out, uintptr_t workspace, uintptr_t stream) {
        cuda::sample_rows({pointer<float>(logits), row_stride, num_rows, vocab_size},
                          masks(mask_words, num_mask_words, mask_ids),
                          pointer<const llmserve::SamplingRow>(params), stages,
                          pointer<llmserve::SampledRow>(out), pointer<void>(workspace),
                          pointer<void>(stream));
      },
      arg("logits"), arg("row_stride"), arg("num_rows"), arg("vocab_size"), arg("mask_words"),
      arg("num_mask_words"), arg("mask_ids"), arg("params"), arg("stages"), arg("out"),
      arg("workspace"), arg("stream"), NoGil());
  m.def(
      "store_tokens",
      [](uintptr_t sampled, uintptr_t target_rows, uintptr_t last_tokens, int64_t num_rows,
         uintptr_t stream) {
        cuda::store_tokens(pointer<const llmserve::SampledRow>(sampled),
                           pointer<const int32_t>(target_rows), pointer<int32_t>(last_tokens),
                           num_rows, pointer<void>(stream));
      },
      arg("sampled"), arg("target_rows"), arg("last_tokens"), arg("num_rows"), arg("stream"),
      NoGil());
  m.def(
      "logprob_rows",
      [](uintptr_t logits, int64_t row_stride, int64_t num_logit_rows, int64_t vocab_size,
         uintptr_t row_ids, uintptr_t token_ids, uintptr_t token_rows, int64_t token_stride,
         int64_t num_rows, int64_t top_k, uintptr_t logprobs, uintptr_t ranks, uintptr_t top_ids,
         uintptr_t top_logprobs, uintptr_t workspace, uintptr_t stream) {
        cuda::logprob_rows({{pointer<float>(logits), row_stride, num_logit_rows, vocab_size},
                            pointer<const int32_t>(row_ids),
                            pointer<const int32_t>(token_ids),
                            pointer<const int32_t>(token_rows),
                            token_stride,
                            num_rows,
                            top_k,
                            pointer<double>(logprobs),
                            pointer<int32_t>(ranks),
                            pointer<int32_t>(top_ids),
                            pointer<double>(top_logprobs)},
                           pointer<void>(workspace), pointer<void>(stream));
      },
      arg("logits"), arg("row_stride"), arg("num_logit_rows"), arg("vocab_size"), arg("row_ids"),
      arg("token_ids"), arg("token_rows"), arg("token_stride"), arg("num_rows"), arg("top_k"),
      arg("logprobs"), arg("ranks"), arg("top_ids"), arg("top_logprobs"), arg("workspace"),
      arg("stream"), NoGil());
  m.def(
      "edit_logits",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
         uintptr_t mask_words, int64_t num_mask_words, uintptr_t edits, int64_t num_edits,
         uintptr_t ids, uintptr_t values, uintptr_t stream) {
        cuda::edit_logits({pointer<float>(logits), row_stride, num_rows, vocab_size},
                          masks(mask_words, num_mask_words, 0),
                          pointer<const cuda::EditRow>(edits), num_edits,
                          pointer<const int32_t>(ids), pointer<const float>(values),
                          pointer<void>(stream));
      },
      arg("logits"), arg("row_stride"), arg("num_rows"), arg("vocab_size"), arg("mask_words"),
      arg("num_mask_words"), arg("edits"), arg("num_edits"), arg("ids"), arg("values"),
      arg("stream"), NoGil());
}
