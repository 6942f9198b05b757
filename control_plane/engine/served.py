"""Which models are served now, with the text side of each.

A directory; the worker fleet fills it, admission and the API read it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from control_plane.engine.facts import Intake
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

    Requests get the newest generation that has a live worker which does not drain; an older one shows up again if the
    newer one is gone. If all drain it is the newest, where they are refused.
    """

    def __init__(
        self,
        intake_of: Callable[[WorkerId], Intake] = lambda worker_id: Intake.OPEN,
        as_served: Callable[[WorkerInfo], WorkerInfo] = lambda worker: worker,
    ) -> None:
        """`intake_of` is asked about workers that serve; `note_intake` tells that its answers have changed.

        `as_served` puts the operator's defaults in place of those that a worker tells.
        """
        self._intake_of = intake_of
        self._as_served = as_served
        self._by_worker: dict[WorkerId, ServedModel] = {}
        self._known: dict[WorkerId, str] = {}  # the model of every worker that ever served one and was not forgotten
        self._newest: dict[str, ServedModel] = {}  # made anew with each change, for those who look up often
        self._open: tuple[str, ...] = ()  # likewise
        self.absence = "no worker was connected yet"  # why there is no model, for those who ask for one

    def add(self, worker_id: WorkerId, model: ServedModel) -> None:
        """A worker serves a model from now on, in place of what it served before."""
        worker = self._as_served(model.worker)
        self._by_worker[worker_id] = model if worker is model.worker else replace(model, worker=worker)
        self._known[worker_id] = model.worker.model.name
        self.note_intake()

    def remove(self, worker_id: WorkerId) -> None:
        """A worker serves no longer, but may again; one that does not serve is ignored."""
        if self._by_worker.pop(worker_id, None) is not None:
            self.note_intake()

    def forget(self, worker_id: WorkerId) -> None:
        """A worker will not come back: a model that was its alone is unknown from now on."""
        self._known.pop(worker_id, None)
        self.remove(worker_id)

    def note_intake(self) -> None:
        """A worker was opened, paused or drained."""
        intakes = {worker_id: self._intake_of(worker_id) for worker_id in self._by_worker}

        def rank(worker_id: WorkerId) -> tuple[bool, int]:
            return intakes[worker_id] is not Intake.DRAINING, self._by_worker[worker_id].ordinal

        ranked = [self._by_worker[each] for each in sorted(sorted(self._by_worker, reverse=True), key=rank)]
        self._newest = dict(sorted({model.worker.model.name: model for model in ranked}.items()))  # the last one wins
        open_ones = {self._by_worker[each].generation for each, intake in intakes.items() if intake is Intake.OPEN}
        self._open = tuple(name for name, model in self._newest.items() if model.generation in open_ones)

    def open_names(self) -> tuple[str, ...]:
        """Return the models that a request would be taken for at once, sorted: one of its workers is open."""
        return self._open

    def all(self) -> tuple[ServedModel, ...]:
        """Return the generation of every model that new requests get, sorted by name."""
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
