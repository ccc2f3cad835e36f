"""Plain data that travels between layers. Imports the standard library only."""

from llmserve.core.generation import BeamParams, GenerationRequest
from llmserve.core.grammar import Grammar, GrammarState
from llmserve.core.kv import KVCacheGroup, KVCacheSpec, group_layers
from llmserve.core.outputs import (
    FinishReason,
    OutputDelta,
    PromptLogprobs,
    SeqResult,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from llmserve.core.pending import FinishedStep, PendingStep
from llmserve.core.plan import NewSequence, StepPlan
from llmserve.core.request import Request, RequestStatus
from llmserve.core.sampling import SamplingParams
from llmserve.core.thinking import ThinkingBudget

__all__ = [
    "BeamParams",
    "FinishReason",
    "FinishedStep",
    "GenerationRequest",
    "Grammar",
    "GrammarState",
    "KVCacheGroup",
    "KVCacheSpec",
    "NewSequence",
    "OutputDelta",
    "PendingStep",
    "PromptLogprobs",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "SeqResult",
    "StepPlan",
    "StepResult",
    "ThinkingBudget",
    "TokenEvent",
    "TokenLogprobs",
    "group_layers",
]
