"""ChatRenderer: messages → the prompt's text and its token ids.

The names of special tokens in a message are text: only what the template itself writes becomes a special token. While
the template runs, each such name in the messages is one private-use character that no message holds; afterwards the
names come back, and the template's own special tokens are known by their places.
"""

import re
from typing import Any, NamedTuple

import jinja2

from octavo.errors import CheckpointError, ConfigError, RequestError
from octavo.renderers.messages import plain_data, plain_messages
from octavo.renderers.sandbox import MAX_CHARS, TemplateLimitError, TemplateRefusalError, TemplateSandbox, run_bounded
from octavo.tokenizers import Tokenizer

__all__ = ["ChatRenderer", "RenderedPrompt"]

_PRIVATE_USE = range(0xF0000, 0xFFFFD)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class RenderedPrompt(NamedTuple):
    """A prompt as the model gets it."""

    text: str
    token_ids: list[int]


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
        self._names = _SpecialNames(tokenizer)
        self._template: jinja2.Template | None = None
        if self.chat_template is not None:
            try:
                self._template = TemplateSandbox().from_string(self.chat_template)
            except Exception as error:  # also what Python says of the code that Jinja makes
                line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                message = f"the chat template is not valid{line}: {' '.join(str(error).split())[:300]}"
                if chat_template is not None:
                    raise ConfigError(f"--chat-template: {message}") from error
                raise CheckpointError(message, file=tokenizer.file) from error

    def render(
        self, messages: Any, *, add_generation_prompt: bool = True, template_kwargs: dict[str, Any] | None = None
    ) -> RenderedPrompt:
        """The prompt for ``messages`` ({role, content, …} each).

        Args:
            add_generation_prompt: end with the beginning of the assistant's message.
            template_kwargs: further variables of the template.

        Raises:
            RequestError: (param ``messages``) they are malformed, or the template refuses them; or there is none.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, or send a text to "
                "/v1/completions",
                param="messages",
            )
        settings = template_kwargs or {}
        hidden = _HiddenNames(self._names, messages, settings)
        variables = {
            **self._tokenizer.named_tokens,
            **{name: plain_data(value, name, hidden.hide) for name, value in settings.items()},
            "messages": plain_messages(messages, hidden.hide),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        if not text.isascii():
            plain_data(text, "what the chat template wrote", str)
        if not hidden.names:
            return RenderedPrompt(text, self._tokenizer.encode_rendered(text))
        text, written = hidden.restore(text)
        return RenderedPrompt(text, self._tokenizer.encode_rendered(text, written))

    def _run(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        template = self._template
        variables.setdefault("tools", None)
        variables.setdefault("documents", None)
        try:
            return run_bounded(lambda: TemplateSandbox.concat(template.generate(variables)))
        except TemplateRefusalError as error:
            message = f"the model's chat template refuses the messages: {error}"
        except TemplateLimitError as error:
            message = str(error) or "the chat template takes too long"
        except Exception as error:  # whatever a template does wrong, the server goes on
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            message = f"the model's chat template failed on these messages: {detail}"
        raise RequestError(_ADDRESS.sub("0x…", message), param="messages")


class _SpecialNames:
    """Finds what is, or could become, the name of a special token: whole names, and pieces of names at the ends of a
    string, which what is printed beside it could complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.whole = tokenizer.find_special
        self._beginnings = {name[:size] for name in tokenizer.special_tokens for size in range(1, len(name))}
        self._endings = {name[-size:] for name in tokenizer.special_tokens for size in range(1, len(name))}
        self._longest = max(map(len, self._beginnings), default=0)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """In order, apart."""
        spans = self.whole(text)
        first = spans[0][0] if spans else len(text)
        last = spans[-1][1] if spans else 0
        head = next((n for n in range(min(self._longest, first), 0, -1) if text[:n] in self._endings), 0)
        last = max(last, head)
        tail = next((n for n in range(min(self._longest, len(text) - last), 0, -1) if text[-n:] in self._beginnings), 0)
        return [(0, head)] * bool(head) + spans + [(len(text) - tail, len(text))] * bool(tail)


class _HiddenNames:
    """What in some messages is to stay text, and the characters that stand for it while the template runs."""

    def __init__(self, special: _SpecialNames, messages: Any, settings: dict[str, Any]) -> None:
        self._special = special
        found: set[str] = set()
        used: set[str] = set()
        num_chars = 0

        def look(text: str) -> str:
            nonlocal num_chars
            num_chars += len(text)
            if num_chars > MAX_CHARS:
                raise RequestError(f"the messages have more than {MAX_CHARS} characters", param="messages")
            found.update(text[start:stop] for start, stop in special.spans(text))
            if not text.isascii():
                used.update(text)
            return text

        plain_messages(messages, look)
        plain_data(settings, "template_kwargs", look)
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in used] if found else []
        if len(free) < len(found):
            raise RequestError("the messages use up all private-use characters", param="messages")
        self.names = dict(zip(free, sorted(found), strict=False))
        self._characters = {name: character for character, name in self.names.items()}

    def hide(self, text: str) -> str:
        """``text`` with a character in place of each name and piece."""
        if not self.names:
            return text
        parts, end = [], 0
        for start, stop in self._special.spans(text):
            parts += [text[end:start], self._characters[text[start:stop]]]
            end = stop
        return "".join([*parts, text[end:]])

    def restore(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text with the names back in their places, and the spans of the template's special tokens."""
        parts: list[str] = []
        written: list[tuple[int, int]] = []
        end = length = 0
        for start, stop in [*self._special.whole(text), (len(text), len(text))]:
            between = "".join(self.names.get(character, character) for character in text[end:start])
            parts += [between, text[start:stop]]
            length += len(between)
            if stop > start:
                written.append((length, length + stop - start))
            length += stop - start
            end = stop
        return "".join(parts), written
