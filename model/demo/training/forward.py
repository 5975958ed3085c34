"""The backbone over whole sequences, differentiable, on the weights that serving loads.

Same architecture as ``model/layers`` without pages, slots and steps. The tests hold it to the golden vectors and to
``Backbone``, so what is trained is what is served.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from epdserve.kernels.engram import ngram_rows
from epdserve.model.config import ModelConfig
from epdserve.model.demo.training.attention import Attention
from epdserve.model.demo.training.experts import Experts
from epdserve.model.demo.training.hyper import Hyper, Streams
from epdserve.model.demo.training.ops import gate_memory, rms_norm
from epdserve.model.demo.training.scene import Scene
from epdserve.model.engram_plan import EngramPlan
from epdserve.model.layer_plan import LayerPlan, LayerSpec
from torch import Tensor
from torch.nn import functional


class Memory:
    """Engram before one layer."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Mapping[str, Tensor], token_map_V: Tensor
    ) -> None:
        prefix, table = f"layers.{layer}.engram.", EngramPlan.of(config).table_of(layer)
        self.hashes = tuple(torch.tensor(part) for part in (table.multipliers, table.primes, table.offsets))
        self.rows, self.wkv = weights[prefix + "embed.weight"], weights[prefix + "wkv.weight"]
        self.gains = weights[prefix + "q_weight"] * weights[prefix + "k_weight"]
        text = config.text
        self.token_map_V, self.pad = token_map_V, int(token_map_V[text.engram_pad_token_id])
        self.look_back, self.copies, self.eps = text.engram_max_ngram_size, text.hc_mult, text.rms_norm_eps

    def forward(self, copies_nND: Tensor, ids_BT: Tensor) -> Tensor:
        """Streams (n, N, D) with the memory of each token's n-grams added."""
        compressed = self.token_map_V[ids_BT]
        length = ids_BT.shape[1]
        context = [
            functional.pad(compressed, (back, 0), value=-1)[:, :length] for back in range(self.look_back)
        ]
        address = ngram_rows(torch.stack(context, dim=-1).flatten(0, 1), self.pad, *self.hashes)
        found = functional.embedding(address, self.rows).flatten(1)
        kv_nND = functional.linear(found, self.wkv).unflatten(-1, (self.copies + 1, -1)).transpose(0, 1)
        return gate_memory(copies_nND, kv_nND[:-1], kv_nND[-1], self.gains, self.eps)


class Layer:
    """One transformer layer over streams."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        cut: int,
        weights: Mapping[str, Tensor],
        token_map_V: Tensor,
    ) -> None:
        text = config.text
        self.memory = Memory(config, spec.index, weights, token_map_V) if spec.engram else None
        self.attention = Attention(text, spec, weights, above_cut=spec.index > cut)
        self.experts = Experts(text, spec.index, weights)
        self.hypers = tuple(Hyper(text, spec.index, name, weights) for name in ("attn", "ffn"))

    def forward(self, streams: Streams, scene: Scene) -> Streams:
        """The streams after this layer."""
        if self.memory is not None:
            copies = self.memory.forward(streams.copies_nND, scene.ids_BT)
            streams = Streams(copies, streams.carried_nN)
        for hyper, body in zip(self.hypers, (self._attend, self._think), strict=True):
            carried, post, comb = hyper.coefficients(streams.copies_nND)
            out_ND = body(hyper.read(streams), scene)
            streams = Streams(hyper.write(streams.copies_nND, out_ND, post, comb), carried)
        return streams

    def _attend(self, x_ND: Tensor, scene: Scene) -> Tensor:
        shaped = x_ND.view(scene.sequences, scene.length, -1)
        return self.attention.forward(shaped, scene).flatten(0, 1)

    def _think(self, x_ND: Tensor, _: Scene) -> Tensor:
        return self.experts.forward(x_ND)


class TrainableBackbone:
    """All layers, over a mapping of tensors by the names ``load_weights`` gives them (Engram tables as numbers).

    Build one for every step: it holds views of the weights, and slices made here take part in the step's gradients.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], token_map_V: Tensor) -> None:
        plan = LayerPlan.of(config)
        self.config, self.weights = config, weights
        self.layers = [Layer(config, spec, plan.cut, weights, token_map_V) for spec in plan.layers]

    def forward(self, scene: Scene) -> Tensor:
        """(B * T, D) exit vectors, before the final norm."""
        embedding = functional.embedding(scene.ids_BT.flatten(), self.weights["embed.weight"])
        streams = Streams.enter(embedding, self.config.text.hc_mult)
        for layer in self.layers:
            streams = layer.forward(streams, scene)
        return streams.collapse()

    def logits(self, exit_ND: Tensor) -> Tensor:
        """(N, vocabulary)."""
        normed = rms_norm(exit_ND, self.weights["norm.weight"], self.config.text.rms_norm_eps)
        return functional.linear(normed, self.weights["head.weight"])
