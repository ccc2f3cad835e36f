// Sampling passes for any machine.
#include "llmserve/sampling_passes_body.h"

const llmserve::SamplingPasses& llmserve::sampling_passes_portable() { return kPasses; }
