"""GET /v1/models, and which names the server answers to."""

import time

from octavo.config import OctavoConfig
from octavo.entrypoints.openai.responses import ModelCard, ModelList
from octavo.errors import NotFoundError

__all__ = ["OpenAIServingModels"]

_LONGEST_NAME_SHOWN = 100


class OpenAIServingModels:
    """Args:

    config: final configuration of a loaded engine.
    """

    def __init__(self, config: OctavoConfig) -> None:
        self._names = config.model.served_model_name
        self._root = config.model.model
        self._max_model_len = config.model.max_model_len
        self._created = int(time.time())

    def list(self) -> ModelList:
        return ModelList(data=[self._card(name) for name in self._names])

    def card(self, name: str) -> ModelCard:
        """The card of one model; NotFoundError if it is not served."""
        return self._card(self.served_name(name))

    def served_name(self, asked: str | None) -> str:
        """The name to answer under: the one that was asked for, or the first if none was."""
        if asked is None:
            return self._names[0]
        if asked not in self._names:
            shown = asked if len(asked) <= _LONGEST_NAME_SHOWN else asked[:_LONGEST_NAME_SHOWN] + "..."
            message = f"The model `{shown}` does not exist; GET /v1/models lists what is served"
            raise NotFoundError(message, param="model")
        return asked

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._created, root=self._root, max_model_len=self._max_model_len)
