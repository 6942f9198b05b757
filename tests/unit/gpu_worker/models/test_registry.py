"""Which architectures there are."""

from dataclasses import replace

import pytest
import torch

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.models.registry import build_model
from gpu_worker.ops import Ops
from plugins.errors import InvalidConfig
from tests.unit.gpu_worker.tiny import TINY


def test_an_unknown_architecture_is_refused_with_those_there_are() -> None:
    ops = Ops(DeviceMemory(torch.device("cpu")), torch.float32)
    config = replace(TINY, architecture="MambaForCausalLM")

    with pytest.raises(InvalidConfig, match="'MambaForCausalLM' cannot be computed here; known: LlamaForCausalLM"):
        build_model(config, ops, AttentionShape.of(config, 16))
