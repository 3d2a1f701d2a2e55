"""Errors as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """One request is answered with an error.

    status:  of HTTP
    param:   the request's parameter that is wrong, if it is one
    code:    for programs
    headers: of the answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's JSON, and Anthropic's, which has a `type` beside the error."""
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default_type)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": error}


class ContextOverflow(ApiError):
    """Prompt and response exceed the model's positions or its cache.

    Clients recognize it by the words of OpenAI's errors, or of Anthropic's (`for_anthropic`), and
    then shorten the conversation or choose another model.
    """

    def __init__(self, message: str, for_anthropic: str, param: str) -> None:
        super().__init__(400, message, code="context_length_exceeded", param=param)
        self.for_anthropic = for_anthropic

    @classmethod
    def of_tokens(
        cls, max_len: int, prompt_len: int, max_tokens: int, prompt: str, param: str
    ) -> ContextOverflow:
        """max_len, prompt_len, max_tokens: in tokens;  prompt: the parameter that contains it"""
        message = f"This model's maximum context length is {max_len} tokens. However, "
        if prompt_len > max_len:
            message += f"your {prompt} resulted in {prompt_len} tokens. Please reduce the length "
            message += f"of the {prompt}."
            reference = f"prompt is too long: {prompt_len} tokens > {max_len} maximum"
        else:
            message += f"you requested {prompt_len + max_tokens} tokens ({prompt_len} in the "
            message += f"{prompt}, {max_tokens} in the completion). Please reduce the length of "
            message += f"the {prompt} or completion."
            reference = f"input length and `max_tokens` exceed context limit: {prompt_len} + "
            reference += f"{max_tokens} > {max_len}, decrease input length or `max_tokens` and try "
            reference += "again"
        return cls(message, reference, param)


class ServerLost(ApiError):
    """The server takes no requests, or is gone; another one may answer this request."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="unavailable", headers={"Retry-After": "1"})


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that cannot be done as it is."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A parameter that this model or this gateway has no way to follow."""
    return bad_request(message, param, "unsupported_parameter")


def busy(message: str) -> ApiError:
    """Too much is asked at once; the same request may be sent again later."""
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})


def unavailable(message: str, seconds: int = 1) -> ApiError:
    """No server takes the request now."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(503, message, code="unavailable", headers=headers)


def aborted() -> ApiError:
    """The gateway ends before the answer does; another one may answer the same request."""
    return unavailable("the gateway has ended before the whole answer was there", 5)


def cancelled() -> ApiError:
    """The client has cancelled the request by another one."""
    return ApiError(409, "the response was cancelled", code="response_cancelled")


def timed_out(seconds: float) -> ApiError:
    """The request's own time is over: clients need not try again by themselves."""
    return ApiError(
        504,
        f"no whole answer came within {seconds:g} s; change the request's timeout or max_tokens",
        code="timeout",
        param="timeout",
        headers={"X-Should-Retry": "false"},
    )
