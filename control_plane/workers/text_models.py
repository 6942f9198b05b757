"""Keeps the text side of models, so that replicas do not each parse the tokenizer that they share.

Parsing is `control_plane/text/model.py`.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

from control_plane.text.model import TextModel
from control_plane.workers.handle import WorkerHandle
from plugins.errors import WorkerLost
from plugins.types import TokenizerBundle, WorkerInfo

ReadTokenizer = Callable[[TokenizerBundle], Awaitable[TextModel]]

_MAX_KEPT: Final = 8  # models that are served stay in use wherever they are kept; this is for those that come back


async def read_in_thread(bundle: TokenizerBundle) -> TextModel:
    """Parse a tokenizer, which takes 0.1 s to seconds, without holding up the loop."""
    return await asyncio.to_thread(TextModel.from_bundle, bundle)


class TextModels:
    """Text models by what workers say of them: fetched once, from whichever worker asks first. Used from one loop.

    The template comes with the weights' version and the vocabulary with a checksum, so both are the key.
    """

    def __init__(self, read: ReadTokenizer) -> None:
        self._read = read
        self._kept: dict[tuple[str, str], TextModel] = {}  # the one used last is the last
        self._fetching: dict[tuple[str, str], asyncio.Lock] = {}

    async def of(self, info: WorkerInfo, handle: WorkerHandle) -> TextModel:
        """Return the text model of a worker, which is asked for its tokenizer if no other was.

        Raises: WorkerLost: it does not answer, or hands over another tokenizer than it says; ModelFileBroken.
        """
        key = (info.tokenizer_sha256, info.weights_version)
        lock = self._fetching.setdefault(key, asyncio.Lock())
        async with lock:  # replicas that appear together wait for the first one
            text = self._kept.pop(key, None)
            if text is None:
                bundle = await handle.tokenizer()
                sha256 = hashlib.sha256(bundle.tokenizer_json).hexdigest()
                if sha256 != info.tokenizer_sha256:
                    raise WorkerLost(f"its tokenizer has sha256 {sha256}, it says {info.tokenizer_sha256 or 'none'}")
                text = await self._read(bundle)
            self._kept[key] = text
            while len(self._kept) > _MAX_KEPT:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                self._fetching.pop(oldest, None)
            return text
