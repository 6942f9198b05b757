"""The one table from names of element types to torch's.

Names are what configuration, checkpoints and KV-cache dtypes say; nothing else translates them.
"""

import torch

from plugins.errors import InvalidConfig

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's element type of that name.

    Raises: InvalidConfig: no element type has that name; the message lists what there is.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise InvalidConfig(f"unknown element type {name!r}; known: {', '.join(sorted(_DTYPES))}") from None
