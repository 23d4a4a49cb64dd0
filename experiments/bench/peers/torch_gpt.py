"""The GPT of `jaxbp.nn` as functions of PyTorch tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

EPS = 1e-5


class TorchGPT:
    """`jaxbp.nn.GPT` in PyTorch. It supports the options of GPT that occur in `jaxbp.nn.GPT_SIZES`.

    Args:
      parameters: the model's parameters by their paths, such as "blocks.0.up.kernel".
      sizes: the arguments of `jaxbp.nn.GPT`, such as an entry of `GPT_SIZES`.
      dtype: the dtype of the computation. Each parameter is cast to it where it is used.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], sizes: Mapping[str, Any], dtype: torch.dtype):
        self.parameters, self.sizes, self.dtype = parameters, sizes, dtype
        self.head_dim = sizes["features"] // sizes["num_heads"]
        self.key_heads = sizes.get("num_key_value_heads", sizes["num_heads"])

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        table = self._cast("embed.embedding")
        x, positions, rotation = F.embedding(tokens, table), torch.arange(tokens.shape[1], device=tokens.device), None
        if self.sizes.get("position_embedding") == "learned":
            x = x + F.embedding(positions, self._cast("position_embed.embedding"))
        else:
            exponents = torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim
            angles = positions[:, None] * 10_000.0**-exponents
            rotation = torch.cos(angles)[:, None], torch.sin(angles)[:, None]
        for i in range(self.sizes["num_layers"]):
            x = x + self._attention(f"blocks.{i}", x, rotation)
            x = x + self._mlp(f"blocks.{i}", x)
        logits = F.linear(self._norm("norm", x), table).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())

    def _attention(self, block: str, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        heads = self._linear(f"{block}.query_key_value", self._norm(f"{block}.attention_norm", x))
        heads = heads.unflatten(-1, (self.key_heads, -1, self.head_dim))
        query, key, value = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
        if rotation is not None:
            query, key = _rotated(query, *rotation), _rotated(key, *rotation)
        query, key, value = (a.transpose(1, 2) for a in (query, key, value))
        options = dict(is_causal=True, enable_gqa=self.key_heads != self.sizes["num_heads"])
        y = F.scaled_dot_product_attention(query, key, value, **options)
        return self._linear(f"{block}.output", y.transpose(1, 2).flatten(2))

    def _mlp(self, block: str, x: torch.Tensor) -> torch.Tensor:
        y = self._norm(f"{block}.mlp_norm", x)
        hidden = self._linear(f"{block}.up", y)
        if self.sizes.get("gate") is None:
            return self._linear(f"{block}.down", F.gelu(hidden, approximate="tanh"))
        return self._linear(f"{block}.down", F.silu(self._linear(f"{block}.gate", y)) * hidden)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = self._cast(f"{name}.scale")
        if self.sizes.get("normalization") == "rms_norm":
            return F.rms_norm(x, scale.shape, scale, EPS)
        return F.layer_norm(x, scale.shape, scale, self._cast(f"{name}.bias"), EPS)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self._cast(f"{name}.bias") if f"{name}.bias" in self.parameters else None
        return F.linear(x, self._cast(f"{name}.kernel").t(), bias)

    def _cast(self, name: str) -> torch.Tensor:
        return self.parameters[name].to(self.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
