"""Chat templates that requests bring: compiled in the sandbox, the last few of them kept."""

import threading
from collections import OrderedDict

import jinja2

from octavo.errors import RequestError
from octavo.renderers.bounds import TemplateLimitError
from octavo.renderers.sandbox import TemplateSandbox, run_bounded

__all__ = ["TemplateCache"]

_LONGEST_TEMPLATE = 1 << 16  # characters; the longest that models come with have about a third of it
_MOST_TEMPLATES = 32


class TemplateCache:
    """Source → compiled template. Thread-safe."""

    def __init__(self) -> None:
        self._templates: OrderedDict[str, jinja2.Template] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._templates)

    def get(self, source: str) -> jinja2.Template:
        """The template of a request.

        Raises:
            RequestError: (param ``chat_template``) it is too long, or not valid Jinja.
        """
        if len(source) > _LONGEST_TEMPLATE:
            message = f"chat_template must have at most {_LONGEST_TEMPLATE} characters, got {len(source)}"
            raise RequestError(message, param="chat_template")
        with self._lock:
            template = self._templates.get(source)
            if template is not None:
                self._templates.move_to_end(source)
                return template
        template = _compiled(source)
        with self._lock:
            self._templates[source] = template
            while len(self._templates) > _MOST_TEMPLATES:
                self._templates.popitem(last=False)
        return template


def _compiled(source: str) -> jinja2.Template:
    try:
        return run_bounded(lambda: TemplateSandbox().from_string(source))
    except TemplateLimitError as error:
        message = str(error) or "chat_template takes too long to compile"
    except Exception as error:  # also what Python says of the code that Jinja makes
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        message = f"chat_template is not valid{line}: {' '.join(str(error).split())[:300]}"
    raise RequestError(message, param="chat_template")
