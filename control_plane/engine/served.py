"""Which models are served now, with the text side of each.

A directory; the worker fleet fills it, admission and the API read it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from control_plane.text.model import TextModel
from plugins.errors import NotServing, UnknownModel
from plugins.types import GenerationId, WorkerId, WorkerInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as one generation of workers computes it."""

    worker: WorkerInfo  # of one of them; they agree in all that admission looks at
    text: TextModel
    generation: GenerationId
    ordinal: int = 1  # higher for a generation that was opened later


class ServedModels:
    """The models by name, as the live workers serve them. Changed by the fleet, read by others of the same loop.

    Requests get the newest generation that has a live worker; an older one shows up again if the newer one is gone.
    """

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, ServedModel] = {}
        self._known: dict[WorkerId, str] = {}  # the model of every worker that ever served one and was not forgotten
        self._newest: dict[str, ServedModel] = {}  # made anew with each change, for those who look up often
        self.absence = "no worker was connected yet"  # why there is no model, for those who ask for one

    def add(self, worker_id: WorkerId, model: ServedModel) -> None:
        """A worker serves a model from now on, in place of what it served before."""
        self._by_worker[worker_id] = model
        self._known[worker_id] = model.worker.model.name
        self._newest = dict(self._find_newest())

    def remove(self, worker_id: WorkerId) -> None:
        """A worker serves no longer, but may again; one that does not serve is ignored."""
        if self._by_worker.pop(worker_id, None) is not None:
            self._newest = dict(self._find_newest())

    def forget(self, worker_id: WorkerId) -> None:
        """A worker will not come back: a model that was its alone is unknown from now on."""
        self._known.pop(worker_id, None)
        self.remove(worker_id)

    def all(self) -> tuple[ServedModel, ...]:
        """Return the newest live generation of every model, sorted by name."""
        return tuple(self._newest.values())

    def get(self, name: str) -> ServedModel:
        """Look a model up; "" is the only one.

        Raises: NotServing: no worker of it is connected now; UnknownModel: another name, or "" while there are several.
        """
        if not self._newest:
            raise NotServing(f"no model is served now: {self.absence}")
        if not name and len(self._newest) == 1:
            return next(iter(self._newest.values()))
        try:
            return self._newest[name]
        except KeyError:
            if name in self._known.values():
                raise NotServing(f"model {name!r} is not served now: {self.absence}") from None
            raise UnknownModel(name, sorted(self._newest)) from None

    def _find_newest(self) -> Iterator[tuple[str, ServedModel]]:
        newest: dict[str, ServedModel] = {}
        for _, model in sorted(self._by_worker.items(), key=lambda item: item[0]):
            name = model.worker.model.name
            if name not in newest or model.ordinal > newest[name].ordinal:
                newest[name] = model
        yield from sorted(newest.items())
