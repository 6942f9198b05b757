"""A logits processor that is right but for one thing: admission cannot import it."""

import torch
from torch import Tensor

from plugins.logits import LogitsContext
from tests.contract.broken_processors import Fee


class TorchAtTop(Fee):
    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        with torch.inference_mode():
            return super().apply(logits, ctx)
