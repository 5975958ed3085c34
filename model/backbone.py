"""The model as one object: load, forward, logits."""

from collections.abc import Callable
from pathlib import Path

import torch
from epdserve.kernels.norm import rms_norm
from epdserve.kernels.rope import YarnScaling, rope_frequencies
from epdserve.model.batch import BatchShape, ForwardBatch
from epdserve.model.causal_decoder import CausalDecoder
from epdserve.model.causal_encoder import CausalEncoder
from epdserve.model.compressed_tokens import load_or_derive_token_map
from epdserve.model.config import ModelConfig
from epdserve.model.kv_layout import KVLayout
from epdserve.model.layer_plan import LayerPlan
from epdserve.model.layers.arithmetic import Caches
from epdserve.model.layers.block import Block
from epdserve.model.layers.context import ForwardContext
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.ways import arithmetic_of, weight_form
from epdserve.model.weights import WeightForm, Weights, load_weights


class Backbone:
    """DeepSeek-V4.1-Flash text model: causal encoder, causal decoder, head.

    A row's result depends on its own request only, to the bit: not on the other rows of the batch, nor on how a prompt
    is cut into chunks (kernels/README.md says what this rests on). Holds no request state; not thread-safe.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        token_map_V: torch.Tensor,
        precision: Precision,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.precision, self.device = config, precision, torch.device(device)
        self.plan = LayerPlan.of(config)
        self.weights_fingerprint = weights.fingerprint
        self.form = weights.form
        self._math = math = arithmetic_of(config, weights.tensors, weights.form, precision)
        blocks = [Block(config, spec, math, token_map_V) for spec in self.plan.layers]
        cut = self.plan.cut
        embed_VD = math.tensor("embed.weight").to(precision.activation_dtype)
        self.encoder = CausalEncoder(embed_VD, config.text.hc_mult, blocks[:cut], blocks[cut])
        self.decoder = CausalDecoder(blocks[cut], blocks[cut + 1 :])
        self._norm = math.tensor("norm.weight")
        self._head = math.projection("head.weight", quantized=False, out_dtype=torch.float32)

    @staticmethod
    def load(
        model_dir: Path | str,
        *,
        precision: Precision,
        device: torch.device | str = "cpu",
        form: WeightForm | None = None,
    ) -> "Backbone":
        """Read a model directory in the official format.

        Args:
            form: Of the weights; what suits the device if None (ways.py).

        Raises:
            ConfigError: config.json does not describe a model of this architecture.
            WeightMapError: Tensors are missing, extra or misshapen; all of them are named.
        """
        directory = Path(model_dir)
        config = ModelConfig.from_directory(directory)
        token_map = torch.from_numpy(load_or_derive_token_map(directory, config)).to(device)
        form = form or weight_form(config, precision, torch.device(device))
        return Backbone(config, load_weights(directory, config, device, form), token_map, precision, device)

    def layout(self, block_tokens: int) -> KVLayout:
        """Block layout that this model's precision writes."""
        return KVLayout.of(self.config, block_tokens=block_tokens, entry_format=self.precision.entry_format)

    def batch_shape(self, layout: KVLayout) -> BatchShape:
        """The numbers that ``ForwardBatch.build`` needs."""
        text, scaling = self.config.text, self.config.text.rope_scaling
        yarn = YarnScaling(
            scaling.factor, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow
        )
        return BatchShape(
            window=text.sliding_window,
            block_tokens=layout.block_tokens,
            ratios=tuple(sorted({plane.ratio for plane in layout.planes})),
            image_token_id=self.config.image_token_id,
            window_inv_freq=rope_frequencies(text.qk_rope_head_dim, text.rope_theta, None).to(self.device),
            compressed_inv_freq=rope_frequencies(text.qk_rope_head_dim, text.compress_rope_theta, yarn).to(
                self.device
            ),
        )

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pools: KVPools, *, unwanted: Callable[[], bool] | None = None
    ) -> torch.Tensor:
        """Run one step: write KV of all rows into ``pools``.

        Args:
            unwanted: Asked before each layer whether nobody wants the result any more.

        Returns:
            (R, hidden) float32: exit vectors of the output rows, in batch order, before the final norm.

        Raises:
            ForwardStopped: ``unwanted`` said so; pages and slots of the batch hold anything.
        """
        context = ForwardContext(batch, pools, self.caches(batch, pools), unwanted)
        return self.decoder.forward(*self.encoder.forward(context), context)

    def caches(self, batch: ForwardBatch, pools: KVPools) -> Caches:
        """Caches of one forward."""
        return self._math.caches(batch, pools)

    @torch.inference_mode()
    def logits(self, exit_RD: torch.Tensor) -> torch.Tensor:
        """(R, hidden) exit vectors -> (R, vocabulary) float32."""
        dtype = self.precision.activation_dtype
        h_RD = rms_norm(exit_RD.to(dtype), self._norm, self.config.text.rms_norm_eps)
        return self._head(h_RD)
