"""Which models are served now, with the text side of each.

A directory; the worker supervisor fills it, admission and the API read it.
"""

from dataclasses import dataclass

from control_plane.text.model import TextModel
from plugins.errors import NotServing, UnknownModel
from plugins.types import WorkerInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model and the worker that computes it."""

    worker: WorkerInfo
    text: TextModel


class ServedModels:
    """The models by name. Changed by the supervisor's task, read by others of the same loop."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self.absence = "no worker was connected yet"  # why there is no model, for those who ask for one

    def add(self, model: ServedModel) -> None:
        """Serve a model, in place of one of the same name."""
        self._models[model.worker.model.name] = model

    def remove(self, name: str) -> None:
        """Serve it no longer; a name that is not served is ignored."""
        self._models.pop(name, None)

    def all(self) -> tuple[ServedModel, ...]:
        """Return every model, sorted by name."""
        return tuple(model for _, model in sorted(self._models.items()))

    def get(self, name: str) -> ServedModel:
        """Look a model up; "" is the only one.

        Raises: NotServing: none is loaded yet; UnknownModel: another name, or "" while several are served.
        """
        if not self._models:
            raise NotServing(f"no model is served now: {self.absence}")
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        try:
            return self._models[name]
        except KeyError:
            raise UnknownModel(name, sorted(self._models)) from None
