"""How requests are read and answers are formed."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["AnswerConfig"]


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    chat_template: str | None = option("Jinja template to use instead of the model's own", metavar="FILE")
    reasoning_parser: str = option(
        "what tells reasoning from the answer; auto: as the chat template shows; none: all is answer", default="auto"
    )
    trust_request_chat_template: bool = option("requests may bring a chat template of their own", default=False)
    strict_requests: bool = option(
        "refuse fields of requests that octavo does not know, instead of naming them in the header x-octavo-ignored",
        default=False,
    )
