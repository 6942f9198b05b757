"""The operations that models are made of, and the weights that belong to them.

A model says what it computes and under which names a checkpoint keeps the weights; how weights are kept, packed and
multiplied is decided here, once, when the model is built.

Shapes: T = tokens of a step, E = width of an operation's input, F = width of its output, V = vocabulary,
H = query heads, K = KV heads, D = head dimension.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.attention.paged_torch import PagedAttention
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.kv.cache import KVCache
from gpu_worker.runner.inputs import StepInputs
from plugins.errors import ModelFileBroken

Matmul = Callable[[Tensor], Tensor]  # [T, E] -> [T, F]


class Ops:
    """Makes the operations of one model and fills them with weights. Owned by the factory.

    Build the model, `load` every tensor of the checkpoint, `finish_loading`, then run. Each weight has a plain copy
    in DeviceMemory that never moves: loading writes into it, and may do so again.
    """

    def __init__(self, memory: DeviceMemory, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory = memory
        self._storage: dict[str, Tensor] = {}  # by name in the checkpoint; a view of what an operation reads
        self._missing: dict[str, None] = {}  # names not loaded yet, in the order of the model
        self._linears: list[Linear] = []

    @property
    def num_parameters(self) -> int:
        """Weights of the model, shared ones counted once."""
        return sum(tensor.numel() for tensor in self._storage.values())

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies, which are held beside the plain weights; 0 until loading is finished."""
        return sum(linear.packed_bytes for linear in self._linears)

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor of a checkpoint to its place.

        Raises: ModelFileBroken: the model has no such tensor, or wants another shape.
        """
        if name not in self._storage:
            raise ModelFileBroken(f"tensor {name} is no part of this model")
        storage = self._storage[name]
        if tensor.shape != storage.shape:
            raise ModelFileBroken(f"tensor {name} has shape {list(tensor.shape)}; expected {list(storage.shape)}")
        storage.copy_(tensor)
        self._missing.pop(name, None)

    def finish_loading(self) -> None:
        """Pack what is packed. Raises: ModelFileBroken: a tensor never came."""
        if self._missing:
            first, num_missing = next(iter(self._missing)), len(self._missing)
            raise ModelFileBroken(f"tensor {first} is missing ({num_missing} of {len(self._storage)} are)")
        for linear in self._linears:
            linear.pack()

    # -- operations ---------------------------------------------------------------------------------------------

    def embedding(self, name: str, vocab_size: int, width: int) -> "Embedding":
        return Embedding(self._weight(name, vocab_size, width))

    def rms_norm(self, name: str, width: int, eps: float) -> "RMSNorm":
        storage = self._memory.allocate("weights", name, (width,), torch.float32)
        self._place(name, storage)
        return RMSNorm(storage, eps, self.dtype)

    def linear(self, parts: Sequence[tuple[str, int]], width: int) -> "Linear":
        """One product for weights that share an input. `parts` names each and tells its output width."""
        num_outputs = sum(num_rows for _, num_rows in parts)
        fused_FE = self._memory.allocate(
            "weights", "+".join(name for name, _ in parts), (num_outputs, width), self.dtype
        )
        start = 0
        for name, num_rows in parts:
            self._place(name, fused_FE[start : start + num_rows])
            start += num_rows
        return self._linear(fused_FE)

    def head(self, name: str, vocab_size: int, width: int) -> "Head":
        return Head(self.linear([(name, vocab_size)], width))

    def tied_head(self, embedding: "Embedding") -> "Head":
        """A head that multiplies by the embedding's own weight."""
        return Head(self._linear(embedding.weight_VE))

    def rotary(self, theta: float, head_dim: int, max_positions: int) -> "Rotary":
        return Rotary(theta, head_dim, max_positions, self.dtype, self._memory.device)

    def attention(self, shape: AttentionShape) -> "Attention":
        return Attention(shape, self.dtype)

    # -- storage ------------------------------------------------------------------------------------------------

    def _weight(self, name: str, *shape: int) -> Tensor:
        storage = self._memory.allocate("weights", name, shape, self.dtype)
        self._place(name, storage)
        return storage

    def _place(self, name: str, storage: Tensor) -> None:
        self._storage[name] = storage
        self._missing[name] = None

    def _linear(self, weight_FE: Tensor) -> "Linear":
        linear = Linear(weight_FE)
        self._linears.append(linear)
        return linear


class Embedding:
    """Token ids to vectors."""

    def __init__(self, weight_VE: Tensor) -> None:
        self.weight_VE = weight_VE

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """[T] int64 to [T, E] float32: the residual stream keeps float32 whatever the weights are."""
        return self.weight_VE.index_select(0, token_ids_T).float()


class RMSNorm:
    """Root-mean-square norm of the residual stream. Its weight stays float32.

    float32 in and one cast behind it: torch's bfloat16 way decomposes into more passes (9.7 us against 8.7 us for
    one token of width 576, and less exact).
    """

    def __init__(self, weight_E: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight_E = weight_E
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, E] float32 to [T, E] in the model's dtype."""
        return F.rms_norm(x_TE, self._weight_E.shape, self._weight_E, self._eps).to(self._dtype)


class Linear:
    """x @ weight.T, without bias.

    On CPUs with oneDNN the weight is also kept in oneDNN's blocked layout, which saves the reordering of every call
    (half the time of a lone decode). That copy is opaque and cannot live in memory that we allocate, so it belongs to
    this operation; the plain one in DeviceMemory is what loading writes and what `pack` reads.
    """

    def __init__(self, weight_FE: Tensor) -> None:
        self._weight_FE = weight_FE
        self._matmul: Matmul = self._plain
        self.packed_bytes = 0  # of the second copy

    def pack(self) -> None:
        """Take up what was loaded."""
        if _can_pack(self._weight_FE):
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(self._weight_FE, None)
            multiply = _multiply_by(packed)
            self._matmul = _alike_in_any_batch(multiply) if packed.dtype is torch.float32 else multiply
            self.packed_bytes = int(torch.ops.mkldnn._nbytes.default(packed))  # with the padding of its blocks

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, E] to [T, F]."""
        return self._matmul(x_TE)

    def _plain(self, x_TE: Tensor) -> Tensor:
        return F.linear(x_TE, self._weight_FE)


def _can_pack(weight: Tensor) -> bool:
    """True where oneDNN multiplies such weights: bfloat16 needs a CPU with instructions for it, AVX-512 at least."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if weight.device.type != "cpu" or not has_onednn:
        return False
    return weight.dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _multiply_by(packed: Tensor) -> Matmul:
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def matmul(x_TE: Tensor) -> Tensor:
        product: Tensor = multiply(x_TE, packed, None, "none", [], "")
        return product

    return matmul


def _alike_in_any_batch(multiply: Matmul) -> Matmul:
    """float32's way: a row gets the same bits whatever rows come with it.

    With AVX-512 oneDNN cuts the sum of a lone row that is longer than 1,024 terms, and those of two rows and more at
    other places; so no row is alone (52 us against 55 us for 1,536 terms and 576 outputs).
    """

    def matmul(x_TE: Tensor) -> Tensor:
        return multiply(F.pad(x_TE, (0, 0, 0, 1)))[:1] if len(x_TE) == 1 else multiply(x_TE)

    return matmul


class Head:
    """Scores of every token of the vocabulary."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x_RE: Tensor) -> Tensor:
        """[R, E] to [R, V] float32. R may be 0."""
        return self._linear(x_RE).float()


class Rotary:
    """Rotary position embedding, half-split: dimension i turns together with i + D / 2."""

    def __init__(
        self, theta: float, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        angles = torch.outer(torch.arange(max_positions).float(), frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos_PD = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin_PD = torch.cat((-sin, sin), dim=-1).to(device, dtype)  # signed, so that the halves only swap
        self._half = head_dim // 2

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, each [T, 1, D]: once a step, for all layers."""
        return self._cos_PD[positions_T].unsqueeze(1), self._sin_PD[positions_T].unsqueeze(1)

    def turn(self, x_THD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Turn every head by its token's position."""
        cos_T1D, sin_T1D = rotation
        return torch.addcmul(x_THD * cos_T1D, x_THD.roll(self._half, -1), sin_T1D)


class Attention:
    """Self-attention over the cache: the new tokens' keys and values are written, then everything is read."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._num_kv_heads, self._head_dim = shape.num_kv_heads, shape.head_dim
        self._num_heads = shape.num_kv_heads * shape.group_size
        self._paged = PagedAttention(shape, dtype)

    def rotary_and_cache_write(
        self,
        layer: int,
        qkv_TF: Tensor,
        rotary: Rotary,
        rotation: tuple[Tensor, Tensor],
        inputs: StepInputs,
        cache: KVCache,
    ) -> Tensor:
        """Turn queries and keys, and store keys and values. qkv_TF: [T, (H + 2 K) * D]; returns q [T, H * D]."""
        qkv_TND = qkv_TF.view(len(qkv_TF), -1, self._head_dim)
        num_turned = self._num_heads + self._num_kv_heads
        turned_TND = rotary.turn(qkv_TND[:, :num_turned], rotation)
        keys_ND = turned_TND[:, self._num_heads :].reshape(-1, self._head_dim)
        values_ND = qkv_TND[:, num_turned:].reshape(-1, self._head_dim)
        cache.write(layer, inputs.write_slots, keys_ND, values_ND)
        return turned_TND[:, : self._num_heads].reshape(len(qkv_TF), -1)

    def attend(self, layer: int, q_TF: Tensor, inputs: StepInputs, cache: KVCache) -> Tensor:
        """[T, H * D] to [T, H * D]: every token sees its sequence up to itself."""
        return self._paged.run(layer, q_TF, inputs.groups, cache)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 F], gate first; returns [T, F].

    float32 is divided by hand: torch's silu gives other bits at the ends of what a thread takes, and where those are
    depends on the batch (17 us against 7 us for 8 tokens and 1,536 gates).
    """
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    if gate_TF.dtype is torch.float32:
        return torch.div(gate_TF, gate_TF.neg().exp_().add_(1.0)).mul_(up_TF)
    return F.silu(gate_TF).mul_(up_TF)
