"""ChatRenderer: messages → the prompt's text and its token ids.

The names of special tokens in a message are text: only what the template itself writes becomes a special token.
"""

import re
from typing import Any, NamedTuple

import jinja2

from octavo.errors import CheckpointError, ConfigError, RequestError
from octavo.renderers.bounds import TemplateLimitError
from octavo.renderers.hidden_names import HiddenNames, SpecialNames
from octavo.renderers.messages import check_text, plain_messages, plain_settings
from octavo.renderers.sandbox import TemplateRefusalError, TemplateSandbox, run_bounded
from octavo.renderers.template_cache import TemplateCache
from octavo.renderers.template_reads import TemplateReads
from octavo.tokenizers import Tokenizer

__all__ = ["ChatRenderer", "RenderedPrompt"]

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class RenderedPrompt(NamedTuple):
    """A prompt as the model gets it.

    Attributes:
        unread: names of the variables that were given for the template, and that the model's template never reads.
        unread_fields: of the messages, likewise: each once, with the index of the first message that has it.
    """

    text: str
    token_ids: list[int]
    unread: list[str]
    unread_fields: list[tuple[int, str]]


class ChatRenderer:
    """Thread-safe.

    Args:
        tokenizer: of the model.
        chat_template: Jinja source to use instead of the tokenizer's own.

    Raises:
        CheckpointError: the tokenizer's template is not valid Jinja.
        ConfigError: the given one is not.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template if chat_template is None else chat_template
        self._names = SpecialNames(tokenizer)
        self._sent_templates = TemplateCache()
        self._template: jinja2.Template | None = None
        self._reads: TemplateReads | None = None
        if self.chat_template is not None:
            try:
                sandbox = TemplateSandbox()
                self._template = sandbox.from_string(self.chat_template)
                self._reads = TemplateReads(sandbox.parse(self.chat_template))
            except Exception as error:  # also what Python says of the code that Jinja makes
                line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                message = f"the chat template is not valid{line}: {' '.join(str(error).split())[:300]}"
                if chat_template is not None:
                    raise ConfigError(f"--chat-template: {message}") from error
                raise CheckpointError(message, file=tokenizer.file) from error

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> RenderedPrompt:
        """The prompt for ``messages`` ({role, content, …} each).

        Args:
            add_generation_prompt: end with the beginning of the assistant's message.
            continue_final_message: end with the last character of the last message, whatever the template writes after
                it, so that the model goes on with that message. Goes before ``add_generation_prompt``.
            template_kwargs: further variables of the template; ``documents`` among them.
            chat_template: Jinja source for this prompt alone.

        Raises:
            RequestError: something is malformed, or the template refuses it; or there is none. ``param`` is the
                argument at fault, by its name in the HTTP API.
        """
        template = self._template if chat_template is None else self._sent_templates.get(chat_template)
        if template is None:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, or send a text to "
                "/v1/completions",
                param="messages",
            )
        settings = template_kwargs or {}
        hidden = HiddenNames(self._names, messages, settings, with_end_mark=continue_final_message)
        plain = plain_messages(messages, hidden.hide)
        if continue_final_message:
            _mark_end(plain, hidden.end_mark)
        variables = {
            **self._tokenizer.named_tokens,
            **plain_settings(settings, hidden.hide),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _run(template, variables, "messages" if chat_template is None else "chat_template")
        check_text(text, "what the chat template wrote")
        if continue_final_message:
            text = _up_to_mark(text, hidden.end_mark)
        unread: list[str] = []
        unread_fields: list[tuple[int, str]] = []
        if chat_template is None and self._reads is not None:  # who sends a template knows what it reads
            unread = [name for name in settings if name not in self._reads.variables]
            unread_fields = self._reads.unread_fields(messages)
        written = None
        if hidden.names:
            text, written = hidden.restore(text)
        return RenderedPrompt(text, self._tokenizer.encode_rendered(text, written), unread, unread_fields)


def _mark_end(messages: list[dict[str, Any]], mark: str) -> None:
    """Puts ``mark`` behind the last message's text. It is no white space: what stands before it is not stripped."""
    content = messages[-1]["content"]
    if content is None:
        message = "continue_final_message needs a last message with content to go on with"
        raise RequestError(message, param="continue_final_message")
    messages[-1]["content"] = content + mark


def _up_to_mark(text: str, mark: str) -> str:
    end = text.rfind(mark)
    if end < 0:
        message = "continue_final_message: the chat template does not write the last message's content"
        raise RequestError(message, param="continue_final_message")
    return text[:end].replace(mark, "")


def _run(template: jinja2.Template, variables: dict[str, Any], param: str) -> str:
    variables.setdefault("tools", None)
    variables.setdefault("documents", None)
    try:
        return run_bounded(lambda: TemplateSandbox.concat(template.generate(variables)))
    except TemplateRefusalError as error:
        message = f"the chat template refuses the messages: {error}"
    except TemplateLimitError as error:
        message = str(error) or "the chat template takes too long"
    except Exception as error:  # whatever a template does wrong, the server goes on
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        message = f"the chat template failed on these messages: {detail}"
    raise RequestError(_ADDRESS.sub("0x…", message), param=param)
