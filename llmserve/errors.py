"""The exception tree.

* LLMServeError
  * RequestError            the caller's fault; becomes a 4xx with an OpenAI error object
    * ContextLengthError    prompt (+ max_tokens) over the context
    * ModelNotFoundError    the model name is not served here
    * AuthenticationError   missing or wrong API key
  * EngineError             ours; becomes a 5xx
    * StepFailedError       the forward pass of this request raised; the server lives on
    * StepOutOfMemoryError  the device has no memory for a step; a smaller one may fit
    * OutputImpossibleError the request's demands on its output cannot be met; a 400
    * EngineDeadError       the engine has stopped for good
    * EngineDrainingError   the server is shutting down and takes no new requests
    * GrammarsBusyError     nothing is free to compile the request's grammar
  * StartupError            bad flag, model or file: one sentence, exit code 2
"""

from __future__ import annotations


class LLMServeError(Exception):
    """Root of all errors raised on purpose by this package."""


class RequestError(LLMServeError):
    """A request that cannot be served as sent.

    `param` names the offending field, `code` is OpenAI's machine-readable code.
    """

    status: int = 400
    type: str = "invalid_request_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class ContextLengthError(RequestError):
    """The prompt, or prompt + max_tokens, does not fit into the context."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class EngineError(LLMServeError):
    """The server failed; the request was fine."""

    status: int = 500
    type: str = "internal_server_error"
    code: str | None = None


class StepFailedError(EngineError):
    """The forward pass that this request was part of raised."""


class StepOutOfMemoryError(EngineError):
    """A step needs more memory than the device has left."""


class OutputImpossibleError(EngineError):
    """The request turned out to ask for an output that cannot be made, in the middle of it."""

    status = 400
    type = "invalid_request_error"


class EngineDeadError(EngineError):
    """The engine stopped for good; only a restart helps."""

    status = 503
    type = "service_unavailable"


class EngineDrainingError(EngineError):
    """The server is shutting down and takes no new requests."""

    status = 503
    type = "service_unavailable"


class GrammarsBusyError(EngineError):
    """Nothing is free to compile the request's grammar; later it may be."""

    status = 503
    type = "service_unavailable"


class StartupError(LLMServeError):
    """The server cannot start as asked. The message is one sentence that names the remedy."""
